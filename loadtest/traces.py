"""Readers for public request traces. Formats, not files: any file of the format is read.

Mooncake JSONL (kvcache-ai/Mooncake, FAST 2025): one object a line with `timestamp` (ms), `input_length`,
`output_length` (tokens) and `hash_ids`, one id for each 512-token block of the prompt; equal ids mean equal prefixes.
Azure CSV (Azure/AzurePublicDataset): header TIMESTAMP,ContextTokens,GeneratedTokens.
"""

from __future__ import annotations

import csv
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from loadtest.errors import BenchError

TraceFormat = Literal["mooncake", "azure"]
MOONCAKE_BLOCK_TOKENS: Final = 512
_AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """at_s: seconds since the first request. block_ids: empty where the trace tells nothing about prefixes."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, trace_format: TraceFormat | Literal["auto"] = "auto") -> list[TraceEntry]:
    """All entries, by time, the first at 0 s. Raises BenchError naming the file and line of the first bad one."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            if trace_format == "auto":
                trace_format = "mooncake" if first.lstrip().startswith("{") else "azure"
            file.seek(0)
            entries = list(_mooncake(path, file) if trace_format == "mooncake" else _azure(path, file))
    except OSError as e:
        raise BenchError(f"trace {path}: {e.strerror or e}; check the path") from e
    except UnicodeDecodeError as e:
        raise BenchError(f"trace {path}: not a text file ({e.reason}); Mooncake JSONL or Azure CSV is expected") from e
    if not entries:
        raise BenchError(f"trace {path}: holds no request")
    entries.sort(key=lambda e: e.at_s)
    start = entries[0].at_s
    return [TraceEntry(e.at_s - start, e.input_tokens, e.output_tokens, e.block_ids) for e in entries]


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[TraceEntry]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = decoder.decode(line)
        except msgspec.MsgspecError as e:
            raise _bad(path, number, f"not a Mooncake record: {e}") from e
        _check_lengths(path, number, item.input_length, item.output_length)
        if any(not 0 <= h < 2**64 for h in item.hash_ids):
            raise _bad(path, number, "hash_ids must be 64-bit numbers from 0")
        if len(item.hash_ids) > -(-item.input_length // MOONCAKE_BLOCK_TOKENS):
            raise _bad(
                path,
                number,
                f"{len(item.hash_ids)} hash_ids are too many for {item.input_length} tokens"
                f" in blocks of {MOONCAKE_BLOCK_TOKENS}",
            )
        yield TraceEntry(item.timestamp / 1e3, item.input_length, item.output_length, tuple(item.hash_ids))


def _azure(path: Path, lines: Iterator[str]) -> Iterator[TraceEntry]:
    rows = csv.reader(lines)
    header = tuple(cell.strip() for cell in next(rows, []))
    if header != _AZURE_COLUMNS:
        raise _bad(path, 1, f"header is {','.join(header)!r}, expected {','.join(_AZURE_COLUMNS)!r}")
    for row in rows:
        number = rows.line_num
        if not row:
            continue
        if len(row) != len(_AZURE_COLUMNS):
            raise _bad(path, number, f"{len(row)} columns, expected {len(_AZURE_COLUMNS)}")
        try:
            time = datetime.datetime.fromisoformat(row[0].strip())
            num_input, num_output = int(row[1]), int(row[2])
        except ValueError as e:
            raise _bad(path, number, str(e)) from e
        _check_lengths(path, number, num_input, num_output)
        # The 2023 traces carry no zone, those of 2024 do: only differences matter.
        zoned = time if time.tzinfo else time.replace(tzinfo=datetime.UTC)
        yield TraceEntry(zoned.timestamp(), num_input, num_output)


def _check_lengths(path: Path, number: int, num_input: int, num_output: int) -> None:
    if num_input < 1 or num_output < 0:
        raise _bad(path, number, f"{num_input} input and {num_output} output tokens: at least 1 and 0 are expected")


def _bad(path: Path, line: int, reason: str) -> BenchError:
    return BenchError(f"trace {path}, line {line}: {reason}")
