"""Replay of a trace: its lengths, its times, and (Mooncake) its shared prefixes as real tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from loadtest.errors import BenchError
from loadtest.tokens import TokenSource
from loadtest.traces import MOONCAKE_BLOCK_TOKENS, TraceEntry, read_trace
from loadtest.workloads.session import Session, Turn


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """
    path: the trace file. format: auto looks at its first line. skip: entries left out at the start. divide: lengths are
    divided by this (blocks too, so prefixes stay shared), to bring a trace of long prompts down to a small model.
    """

    is_finite: ClassVar[bool] = True
    path: str = ""
    format: Literal["auto", "mooncake", "azure"] = "auto"
    skip: int = 0
    divide: int = 1

    def __post_init__(self) -> None:
        if not self.path:
            raise BenchError("workload trace: give the file, e.g. --workload trace:path=conversation.jsonl")
        if self.format not in ("auto", "mooncake", "azure"):
            raise BenchError(f"workload trace: format is auto, mooncake or azure, not {self.format!r}")
        if self.skip < 0 or not 1 <= self.divide <= MOONCAKE_BLOCK_TOKENS:
            raise BenchError(f"workload trace: skip must be at least 0 and divide 1 to {MOONCAKE_BLOCK_TOKENS}")

    def sessions(self, source: TokenSource, rng: random.Random) -> Iterator[Session]:
        entries = read_trace(Path(self.path), self.format)[self.skip :]
        if not entries:
            raise BenchError(f"trace {self.path}: nothing is left after skip={self.skip}")
        start = entries[0].at_s
        for index, entry in enumerate(entries):
            turn = Turn(self.prompt(source, index, entry), max(1, entry.output_tokens // self.divide))
            yield Session((turn,), at_s=entry.at_s - start)

    def prompt(self, source: TokenSource, index: int, entry: TraceEntry) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        """uint32 [max(1, input_tokens // divide)]; tokens that no block id covers are this request's own."""
        length = max(1, entry.input_tokens // self.divide)
        named = source.blocks(entry.block_ids, MOONCAKE_BLOCK_TOKENS // self.divide, length)
        own = source.span(source.key("own", index), length - len(named))
        return np.concatenate([named, own])
