"""Transfer's copies move exactly the named blocks' bytes, layer-major, and touch nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kvcache.checksum import checksum_of
from common.kvcache.kv_cache import KvCache, num_blocks_for
from common.kvcache.layout import KvLayout

CPU = torch.device("cpu")
LAYOUTS = [
    KvLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32"),
    KvLayout(num_layers=2, block_size=16, num_kv_heads=1, head_dim=4, dtype="bfloat16"),
    # A block of 6 values: 12 bytes, not a multiple of a word.
    KvLayout(num_layers=2, block_size=1, num_kv_heads=1, head_dim=3, dtype="bfloat16"),
]
NUM_BLOCKS = 9


def filled(layout: KvLayout) -> KvCache:
    cache = KvCache(layout, NUM_BLOCKS, CPU)
    raw = cache.data.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return cache


def raw_bytes(cache: KvCache) -> np.ndarray:
    """uint8 [layers, blocks, bytes of a block]; a copy."""
    layout = cache.layout
    return cache.data.view(torch.uint8).numpy().reshape(layout.num_layers, NUM_BLOCKS, layout.block_bytes).copy()


copies = st.tuples(
    st.sampled_from(LAYOUTS),
    st.integers(0, 1),
    st.integers(0, 2),
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True),
)


@given(copies)
def test_gather_gives_layer_major_bytes(copy: tuple[KvLayout, int, int, list[int]]) -> None:
    layout, first, count, block_ids = copy
    count = min(count, layout.num_layers - first)
    cache = filled(layout)
    out = np.zeros(count * len(block_ids) * layout.block_bytes, dtype=np.uint8)
    assert cache.gather(first, count, block_ids, out) == checksum_of(out)
    assert np.array_equal(out, raw_bytes(cache)[first : first + count, block_ids].ravel())


@given(copies)
def test_scatter_writes_the_named_blocks_and_no_others(copy: tuple[KvLayout, int, int, list[int]]) -> None:
    layout, first, count, block_ids = copy
    count = min(count, layout.num_layers - first)
    cache = filled(layout)
    expected = raw_bytes(cache)
    data = np.arange(count * len(block_ids) * layout.block_bytes, dtype=np.uint64).astype(np.uint8)
    expected[first : first + count, block_ids] = data.reshape(count, len(block_ids), layout.block_bytes)
    assert cache.scatter(first, count, block_ids, data) == checksum_of(data)
    assert np.array_equal(raw_bytes(cache), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_gathered_here_reads_the_same_there(layout: KvLayout) -> None:
    here, there = filled(layout), KvCache(layout, NUM_BLOCKS, CPU)
    data = np.empty(layout.num_layers * 2 * layout.block_bytes, dtype=np.uint8)
    here.gather(0, layout.num_layers, [7, 2], data)
    there.scatter(0, layout.num_layers, [0, 8], data)
    there_values = there.data[:, [0, 8]].view(torch.uint8)
    assert torch.equal(there_values, here.data[:, [7, 2]].view(torch.uint8))


def test_scatter_takes_read_only_bytes() -> None:
    layout = LAYOUTS[0]
    cache = KvCache(layout, NUM_BLOCKS, CPU)
    cache.scatter(1, 1, [3], np.frombuffer(b"\x01" * layout.block_bytes, dtype=np.uint8))
    assert raw_bytes(cache)[1, 3].min() == 1


@pytest.mark.parametrize(
    ("first", "count", "block_ids", "num_bytes"),
    [
        (0, 1, [NUM_BLOCKS], None),
        (0, 1, [-1], None),
        (2, 2, [0], None),
        (-1, 1, [0], None),
        (0, 1, [0], 1),
    ],
)
def test_a_copy_outside_the_cache_is_refused_before_it_starts(
    first: int, count: int, block_ids: list[int], num_bytes: int | None
) -> None:
    layout = LAYOUTS[0]
    cache = filled(layout)
    before = raw_bytes(cache)
    buffer = np.zeros(layout.block_bytes * count * len(block_ids) if num_bytes is None else num_bytes, dtype=np.uint8)
    with pytest.raises(ValueError, match="of"):
        cache.gather(first, count, block_ids, buffer)
    with pytest.raises(ValueError, match="of"):
        cache.scatter(first, count, block_ids, buffer)
    assert np.array_equal(raw_bytes(cache), before)


def test_a_buffer_with_holes_is_refused() -> None:
    cache = filled(LAYOUTS[0])
    with pytest.raises(ValueError, match="contiguous"):
        cache.gather(0, 1, [0], np.zeros(2 * LAYOUTS[0].block_bytes, dtype=np.uint8)[::2])


def test_layers_are_views_of_one_zeroed_tensor() -> None:
    layout = LAYOUTS[0]
    cache = KvCache(layout, NUM_BLOCKS, CPU)
    assert not cache.data.any()
    cache.layers[2][5, 1, 0, 3] = 7.0
    assert cache.data[2, 5, 1, 0, 3].tolist() == [7.0] * layout.head_dim
    assert cache.layers[0].shape == (NUM_BLOCKS, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    assert cache.data.is_contiguous()


def test_memory_outlives_every_other_reference_to_the_cache() -> None:
    layer = KvCache(LAYOUTS[0], NUM_BLOCKS, CPU).layers[1]
    layer.fill_(3.0)
    assert layer.sum() == 3.0 * layer.numel()


@pytest.mark.parametrize(("num_blocks", "dtype"), [(0, "float32"), (4, "float16")])
def test_an_impossible_cache_is_refused(num_blocks: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="no KV cache"):
        KvCache(KvLayout(1, 1, 1, 2, dtype), num_blocks, CPU)


def test_num_blocks_fill_the_budget_and_no_more() -> None:
    layout = LAYOUTS[0]
    whole = layout.num_layers * layout.block_bytes
    assert [num_blocks_for(layout, size) for size in (whole - 1, whole, 3 * whole + 5)] == [0, 1, 3]


def test_copied_blocks_are_whole_in_every_layer_and_nothing_else_changes() -> None:
    layout = KvLayout(3, 4, 2, 8, "bfloat16")
    cache = KvCache(layout, 6, torch.device("cpu"))
    cache.data.copy_(torch.randn(cache.data.shape))
    before = cache.data.clone()
    cache.copy_blocks([(1, 4), (2, 0), (1, 5)])
    assert torch.equal(cache.data[:, [4, 0, 5]], before[:, [1, 2, 1]])
    assert torch.equal(cache.data[:, 1:4], before[:, 1:4])
