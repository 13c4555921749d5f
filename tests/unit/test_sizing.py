"""Sizes are those that are known of published models, and the page says what the code computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.kvcache.layout import KvLayout
from common.sizing import num_gpu_blocks, prefill_s, transfer_s
from common.transfer_cost import TransferCost
from scripts.sizing_page import SHAPES, page

LLAMA, MIXTRAL, DENSE = SHAPES.values()
PAGE = Path(__file__).resolve().parents[2] / "docs/SIZING.md"


def test_weights_are_as_published() -> None:
    """Llama-3-70B: 70,553,706,496 with its norms; Mixtral-8x22B-v0.1: 140,620,634,112, 39.1 G active; GPT-3: 175 G."""
    assert LLAMA.num_weights() == 70_553_706_496 - (2 * 80 + 1) * 8192
    assert MIXTRAL.num_weights() == 140_620_634_112 - (2 * 56 + 1) * 6144
    assert MIXTRAL.num_weights(active=True) == pytest.approx(39.1e9, rel=0.01)
    assert DENSE.num_weights() == pytest.approx(174.6e9, rel=0.001)


def test_kv_of_a_token_is_what_the_pool_takes_for_it() -> None:
    assert [shape.kv_token_bytes(2) for shape in (LLAMA, MIXTRAL, DENSE)] == [327_680, 229_376, 4_718_592]
    for shape in SHAPES.values():
        layout = KvLayout(shape.num_layers, 16, shape.num_kv_heads, shape.head_dim, "bfloat16")
        assert shape.kv_token_bytes(2) == layout.token_bytes


def test_transfer_takes_what_placement_reckons_with() -> None:
    assert transfer_s(1000, 327_680, 400) == TransferCost(0.0, 50e9).seconds(327_680_000) == pytest.approx(6.5536e-3)


def test_prefill_is_two_flops_a_weight() -> None:
    assert prefill_s(LLAMA, 1000, 1e15) == pytest.approx(2 * LLAMA.num_weights(active=True) * 1e-12)


def test_blocks_fill_what_the_weights_leave_and_are_none_where_they_do_not_fit() -> None:
    def blocks(tensor_parallel: int, memory_bytes: float = 80e9) -> int:
        return num_gpu_blocks(
            LLAMA, memory_bytes=memory_bytes, tensor_parallel=tensor_parallel, block_size=16, value_bytes=2
        )

    assert blocks(1) == 0
    assert blocks(8) == int((0.9 * 80e9 - LLAMA.num_weights() * 2 / 8) // (327_680 / 8 * 16))
    # Eight KV heads on sixteen GPUs: each still holds a whole one.
    assert blocks(16) == int((0.9 * 80e9 - LLAMA.num_weights() * 2 / 16) // (327_680 / 8 * 16))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python scripts/sizing_page.py > docs/SIZING.md"
