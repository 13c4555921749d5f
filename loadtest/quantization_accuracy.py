"""What int8 and int4 weights cost in accuracy, on a fixed text: `python -m loadtest.quantization_accuracy --model DIR`.

The text (texts/alice.txt: chapters I and II of Alice's Adventures in Wonderland, 1865, in the public domain) is cut
into windows; at every position each mode's distribution over the vocabulary is compared with unquantised bfloat16's.
Prints the table of docs/QUANTIZATION.md: perplexity, KL divergence (mean, 99th percentile, largest, in nats), and how
often the likeliest token is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from common.engine.batch import ScheduledSequence, build_batch
from common.kvcache.kv_cache import TORCH_DTYPES, KvCache
from common.kvcache.layout import KvLayout
from common.model.interface import Model
from common.model.loader import load_model
from common.model.quantization import Quantization
from common.model.tokenizer import Tokenizer

TEXT: Final = Path(__file__).parent / "texts" / "alice.txt"
BLOCK_SIZE: Final = 16
CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Mode:
    title: str
    dtype: str
    quantization: Quantization


BASE: Final = Mode("bfloat16", "bfloat16", "none")
MODES: Final = (
    Mode("float32", "float32", "none"),
    Mode("int8 (activations int8)", "bfloat16", "int8"),
    Mode("int4 (activations int8)", "bfloat16", "int4"),
    Mode("int8, float32 activations", "float32", "int8"),
    Mode("int4, float32 activations", "float32", "int4"),
)


@dataclass(slots=True)
class Tally:
    """Of one mode, over all positions so far: losses of the next token, and divergences from the base."""

    losses: list[torch.Tensor] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)
    same_top: list[torch.Tensor] = field(default_factory=list)

    def add(self, logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> None:
        """logits, base: log-probabilities [T, vocab_size] after each of `tokens` [T]."""
        self.losses.append(-logits[:-1].gather(1, tokens[1:, None])[:, 0])
        self.divergences.append((base.exp() * (base - logits)).sum(-1))
        self.same_top.append((base.argmax(-1) == logits.argmax(-1)).float())

    def row(self, title: str) -> str:
        divergence, perplexity = torch.cat(self.divergences), torch.cat(self.losses).mean().exp()
        cells = [f"{perplexity:.3f}"]
        cells += [f"{x:.5f}" for x in (divergence.mean(), divergence.quantile(0.99), divergence.max())]
        return f"| {title} | {' | '.join(cells)} | {100 * (1 - torch.cat(self.same_top).mean()):.1f} % |"


def log_probabilities(model: Model, tokens: list[int]) -> torch.Tensor:
    """float32 [T, vocab_size]: after each token, given those before it."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    layout = KvLayout(config.num_layers, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype)
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    batch = build_batch([ScheduledSequence(tokens, 0, blocks, None)], BLOCK_SIZE, CPU)
    batch = dataclasses.replace(batch, logits_rows=torch.arange(len(tokens)))
    with torch.inference_mode():
        return model.forward(batch, KvCache(layout, len(blocks), CPU)).log_softmax(-1)


def windows(tokens: list[int], length: int) -> Iterator[list[int]]:
    """Whole ones only."""
    return (tokens[first : first + length] for first in range(0, len(tokens) - length + 1, length))


def main(
    model: Annotated[Path, typer.Option(help="a Hugging Face folder")],
    window: Annotated[int, typer.Option(min=2, help="tokens of context at most")] = 512,
    text: Annotated[Path, typer.Option(help="what to read")] = TEXT,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Compare every mode with bfloat16, position by position."""
    torch.set_num_threads(1)
    loaded = {
        mode: load_model(
            model,
            TORCH_DTYPES[mode.dtype],
            CPU,
            kernels="native",
            num_threads=threads,
            quantization=mode.quantization,
        )
        for mode in (BASE, *MODES)
    }
    tallies = {mode: Tally() for mode in loaded}
    count = 0
    for tokens in windows(Tokenizer(model).encode(text.read_text(encoding="utf-8"), add_special_tokens=False), window):
        base = log_probabilities(loaded[BASE], tokens)
        for mode, tally in tallies.items():
            tally.add(log_probabilities(loaded[mode], tokens), base, torch.tensor(tokens))
        count += len(tokens)
    typer.echo(f"{count} tokens in windows of {window}; KL divergence from bfloat16 in nats\n")
    typer.echo("| weights | perplexity | KL mean | KL 99 % | KL max | other top token |\n|---|---|---|---|---|---|")
    for mode, tally in tallies.items():
        typer.echo(tally.row(mode.title))


if __name__ == "__main__":
    typer.run(main)
