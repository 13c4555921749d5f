"""What Baton runs, and how far that was tried: one table, which docs/SUPPORT.md shows and a worker's start goes by.

No torch. The first row that fits a combination speaks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from common.errors import StartupError

Device = Literal["cpu", "cuda"]


class Support(StrEnum):
    """TESTED: runs in this repository's tests. COMPILED: its kernels are compiled, and compared under an interpreter;
    no test runs them on the device. NOT_YET: refused at start."""

    TESTED = "tested here"
    COMPILED = "compiled only"
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True)
class Row:
    """tensor_parallel: (least, most) ranks. how: what computes, or why nothing does."""

    families: tuple[str, ...]
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    tensor_parallel: tuple[int, int]
    device: Device
    support: Support
    how: str

    def fits(self, family: str, dtype: str, quantization: str, tensor_parallel: int, device: str) -> bool:
        return (
            family in self.families
            and dtype in self.dtypes
            and quantization in self.quantizations
            and self.tensor_parallel[0] <= tensor_parallel <= self.tensor_parallel[1]
            and device == self.device
        )


_NATIVE: Final = ("Llama", "Mistral")
FAMILIES: Final = (*_NATIVE, "Qwen2", "Qwen3", "Mixtral")
DTYPES: Final = ("float32", "bfloat16")
CODED: Final = ("int8", "int4")
QUANTIZATIONS: Final = ("none", *CODED)
MAX_RANKS: Final = 16
_ONE: Final = (1, 1)
_SEVERAL: Final = (2, MAX_RANKS)

TABLE: Final = (
    Row(_NATIVE, DTYPES, QUANTIZATIONS, _ONE, "cpu", Support.TESTED, "native kernels; torch with `kernels=torch`"),
    Row(("Qwen2", "Qwen3", "Mixtral"), DTYPES, QUANTIZATIONS, _ONE, "cpu", Support.TESTED, "torch"),
    Row(FAMILIES, DTYPES, QUANTIZATIONS, _SEVERAL, "cpu", Support.TESTED, "torch, gloo; tests run 2 to 4 ranks"),
    Row(FAMILIES, DTYPES, ("none",), _ONE, "cuda", Support.COMPILED, "Triton kernels (KERNELS.md)"),
    Row(FAMILIES, DTYPES, CODED, _ONE, "cuda", Support.NOT_YET, "no kernels for coded weights on GPUs"),
    Row(
        FAMILIES,
        DTYPES,
        QUANTIZATIONS,
        _SEVERAL,
        "cuda",
        Support.NOT_YET,
        "ranks meet by gloo and host memory",
    ),
)


def family_of(architecture: str) -> str:
    """config.json's name for it, without what all of them end in."""
    return architecture.removesuffix("ForCausalLM")


def check_support(architecture: str, dtype: str, quantization: str, tensor_parallel: int, device: str) -> Row:
    """The row that speaks for it. Raises StartupError, in the table's words, for what is not yet or not there."""
    family = family_of(architecture)
    named = f"{family}, {dtype}, quantization {quantization}, {tensor_parallel} rank(s), {device}"
    found = next((r for r in TABLE if r.fits(family, dtype, quantization, tensor_parallel, device)), None)
    if found is None or found.support is Support.NOT_YET:
        why = "no such row" if found is None else found.how
        raise StartupError(f"{named}: {Support.NOT_YET} ({why}); docs/SUPPORT.md lists what runs")
    return found


def markdown() -> str:
    """docs/SUPPORT.md."""
    lines = [
        "# What runs, and how far it was tried",
        "",
        "Made by `python scripts/support_page.py` from `common/support.py`; do not edit. A worker that is asked for a",
        "combination that is *not yet* refuses to start, in these words. FP8 weights and KV: not yet, anywhere.",
        "",
        "| family | dtype | quantization | ranks | device | state | what computes, or why not |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in TABLE:
        least, most = r.tensor_parallel
        ranks = str(least) if least == most else f"{least} to {most}"
        cells = [
            ", ".join(r.families),
            ", ".join(r.dtypes),
            ", ".join(r.quantizations),
            ranks,
            r.device,
            r.support,
            r.how,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "*tested here*: runs in this repository's tests, on CPUs. *compiled only*: compiled ahead of time, compared",
        "with the reference under an interpreter; no test runs it on the device.",
    ]
    return "\n".join(lines) + "\n"
