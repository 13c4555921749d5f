"""The hand-off records of an engine step: what a scheduler asks for, and the tensors that a model computes on.

A step's tokens lie flat, sequence after sequence; a prefill chunk is a sequence with many tokens, a decode is one
with a single token, and both may share a step:

    token_ids     [T]  | s0 s0 s0 s0 | s1 | s2 s2 |          T = all new tokens of the step
    query_start   [S+1]  0             4    5       7
    seq_lens      [S]    context of each sequence after the step (computed before + new)
    logits_rows   [R]    rows of T whose logits are wanted: the last token of each sequence that samples, and all tokens
                         of a chunk whose prompt logprobs are wanted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingExtras:
    """What few sequences ask of a step beside a token.

    token_ids: all of the sequence's tokens, of which num_prompt_tokens are the prompt; a view, for this step only.
    fork_seeds: one more token each is drawn behind the same context. prompt_targets: the tokens that follow this
    chunk's in the prompt, one each from its first on: their logprobs are wanted, with num_prompt_logprobs of the
    likeliest tokens.
    """

    token_ids: Sequence[int]
    num_prompt_tokens: int
    fork_seeds: tuple[int, ...] = ()
    prompt_targets: Sequence[int] = ()
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step.

    token_ids: the tokens whose KV this step computes, first at position `start` (= num_computed_tokens before).
    block_table: ids of the blocks covering positions [0, start + len(token_ids)); shared prefixes are read-only.
    sampling: None where no token is to be sampled (the chunk is not the prompt's last).
    output_index: i of the token to be sampled, in (seed, i); counted from the request's first output token.
    copy: (from, to): a block that is shared until now, and the one of block_table that takes its content before the
    step computes anything. extras: None for most.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    output_index: int = 0
    copy: tuple[int, int] | None = None
    extras: SamplingExtras | None = None

    @property
    def num_logits_rows(self) -> int:
        if self.extras is not None and self.extras.prompt_targets:
            return len(self.token_ids)
        return 0 if self.sampling is None else 1


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one step, on the model's device. T new tokens, S sequences, R sampled rows, B most blocks.

    token_ids, positions, slot_mapping: int64 [T]. query_start: int32 [S + 1]. seq_lens: int32 [S].
    block_tables: int32 [S, B], padded with 0 past a sequence's own blocks. logits_rows: int64 [R].
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_rows: torch.Tensor

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.numel()


def build_batch(scheduled: Sequence[ScheduledSequence], block_size: int, device: torch.device) -> Batch:
    """Flatten `scheduled` (not empty) into tensors. O(T + S·B).

    In numpy: a step has a dozen of these small operations, and each costs torch several times as much.
    """
    num_sequences = len(scheduled)
    lengths = np.fromiter((len(s.token_ids) for s in scheduled), np.int64, num_sequences)
    starts = np.fromiter((s.start for s in scheduled), np.int64, num_sequences)
    query_start = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(lengths, out=query_start[1:])
    block_tables = np.zeros((num_sequences, max(len(s.block_table) for s in scheduled)), np.int32)
    for row, s in zip(block_tables, scheduled, strict=True):
        row[: len(s.block_table)] = s.block_table
    num_tokens = int(query_start[-1])
    owner = np.repeat(np.arange(num_sequences), lengths)
    positions = np.arange(num_tokens) + np.repeat(starts - query_start[:-1], lengths)
    block_ids = block_tables[owner, positions // block_size].astype(np.int64)
    token_ids = np.fromiter(chain.from_iterable(s.token_ids for s in scheduled), np.int64, num_tokens)
    return Batch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size).to(device),
        query_start=torch.from_numpy(query_start).to(device),
        seq_lens=torch.from_numpy((starts + lengths).astype(np.int32)).to(device),
        block_tables=torch.from_numpy(block_tables).to(device),
        logits_rows=torch.from_numpy(_logits_rows(scheduled, query_start)).to(device),
    )


def _logits_rows(scheduled: Sequence[ScheduledSequence], query_start: np.ndarray) -> np.ndarray:
    """int64 [R]: the last rows of each sequence's chunk, as many as it wants."""
    ends = query_start[1:].astype(np.int64)
    if all(s.extras is None for s in scheduled):
        sampled = np.fromiter((s.sampling is not None for s in scheduled), np.bool_, len(scheduled))
        return ends[sampled] - 1
    rows = [np.arange(end - s.num_logits_rows, end) for s, end in zip(scheduled, ends, strict=True)]
    return np.concatenate(rows)
