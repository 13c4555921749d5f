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
    """Flatten `scheduled` (not empty) into tensors. O(T + S·B)."""
    lengths = torch.tensor([len(s.token_ids) for s in scheduled], dtype=torch.int32)
    query_start = torch.zeros(len(scheduled) + 1, dtype=torch.int32)
    torch.cumsum(lengths, 0, out=query_start[1:])
    starts = torch.tensor([s.start for s in scheduled], dtype=torch.int64)
    widest = max(len(s.block_table) for s in scheduled)
    block_tables = torch.tensor(
        [list(s.block_table) + [0] * (widest - len(s.block_table)) for s in scheduled], dtype=torch.int32
    )
    owner = torch.repeat_interleave(torch.arange(len(scheduled)), lengths)
    offset_in_chunk = torch.arange(owner.numel()) - query_start[:-1].long()[owner]
    positions = starts[owner] + offset_in_chunk
    block_ids = block_tables[owner, positions // block_size].long()
    return Batch(
        token_ids=torch.tensor([t for s in scheduled for t in s.token_ids], dtype=torch.int64).to(device),
        positions=positions.to(device),
        slot_mapping=(block_ids * block_size + positions % block_size).to(device),
        query_start=query_start.to(device),
        seq_lens=(starts.to(torch.int32) + lengths).to(device),
        block_tables=block_tables.to(device),
        logits_rows=_logits_rows(scheduled, query_start).to(device),
    )


def _logits_rows(scheduled: Sequence[ScheduledSequence], query_start: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the last rows of each sequence's chunk, as many as it wants."""
    if all(s.extras is None for s in scheduled):
        sampled = torch.tensor([s.sampling is not None for s in scheduled], dtype=torch.bool)
        return (query_start[1:].long() - 1)[sampled]
    ends = query_start[1:].tolist()
    rows = [row for s, end in zip(scheduled, ends, strict=True) for row in range(end - s.num_logits_rows, end)]
    return torch.tensor(rows, dtype=torch.int64)
