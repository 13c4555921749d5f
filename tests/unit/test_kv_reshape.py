"""Any shape to any shape, against a plain copy: block sizes, tensor-parallel ranks, prefixes that are here already."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.reshape import Reshape, copy_parts, shard
from tests.kv_fakes import NumpyKvStore

SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 32])
TP = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def shapes(draw: st.DrawFn) -> tuple[KvLayout, int, int, int, int, int]:
    """A whole model's layout, both TP sizes, the local block size, the sequence's tokens and those already held."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    ranks = TP.filter(lambda n: heads % n == 0 or n % heads == 0)
    wire_tp, local_tp = draw(ranks), draw(ranks)
    full = KvLayout(draw(st.integers(1, 3)), draw(SIZES), heads, draw(st.integers(1, 4)), "float32")
    local_size = draw(SIZES)
    num_tokens = draw(st.integers(1, 70))
    held = draw(st.integers(0, num_tokens // local_size)) * local_size
    return full, wire_tp, local_tp, local_size, num_tokens, held


def sent_blocks(kv: np.ndarray, layout: KvLayout, first_token: int) -> np.ndarray:
    """kv [layers, tokens, 2, heads, dim] as one rank of the sender holds it, from the block with first_token on."""
    size = layout.block_size
    origin = first_token // size * size
    num_blocks = -(-(kv.shape[1] - origin) // size) if kv.shape[1] > first_token else 0
    blocks = np.full((layout.num_layers, num_blocks, 2, layout.num_kv_heads, size, layout.head_dim), np.nan, np.float32)
    for token in range(origin, min(kv.shape[1], origin + num_blocks * size)):
        block, offset = divmod(token - origin, size)
        blocks[:, block, :, :, offset] = kv[:, token][:, :, layout.first_kv_head : layout.end_kv_head]
    return blocks


@given(shapes(), st.randoms(use_true_random=False))
def test_every_token_and_head_lands_where_a_plain_copy_puts_it(shape, random) -> None:
    full, wire_tp, local_tp, local_size, num_tokens, held = shape
    kv = np.arange(full.num_layers * num_tokens * 2 * full.num_kv_heads * full.head_dim, dtype=np.float32)
    kv = kv.reshape(full.num_layers, num_tokens, 2, full.num_kv_heads, full.head_dim)
    local_full = KvLayout(full.num_layers, local_size, full.num_kv_heads, full.head_dim, "float32")
    num_blocks = -(-(num_tokens - held) // local_size)
    for rank in range(local_tp):
        local = shard(local_full, rank, local_tp)
        target = np.full(
            (local.num_layers, num_blocks + 3, 2, local.num_kv_heads, local_size, local.head_dim), -1.0, np.float32
        )
        block_ids = random.sample(range(num_blocks + 3), num_blocks)
        for wire_rank in range(wire_tp):
            wire = shard(full, wire_rank, wire_tp)
            reshape = Reshape(wire, local, held, num_blocks)
            sent = sent_blocks(kv, wire, held)
            assert reshape.fits(sent.shape[1])
            assert reshape.num_tokens(sent.shape[1]) >= num_tokens
            done = 0
            while done < sent.shape[1]:
                count = random.randint(1, sent.shape[1] - done)
                parts = reshape.parts(done, count)
                copy_parts(target, sent[:, done : done + count], parts, block_ids, reshape)
                done += count
        for token in range(held, num_tokens):
            block, offset = divmod(token - held, local_size)
            expected = kv[:, token][:, :, local.first_kv_head : local.end_kv_head]
            np.testing.assert_array_equal(target[:, block_ids[block], :, :, offset], expected)
        others = [i for i in range(num_blocks + 3) if i not in block_ids]
        assert (target[:, others] == -1).all(), "a block of somebody else was written"


@given(SIZES, SIZES, st.integers(0, 20), st.integers(0, 6), st.integers(0, 40))
def test_only_so_many_blocks_fit_as_reach_the_last_local_one_and_are_all_of_use(
    wire_size: int, local_size: int, held_blocks: int, num_blocks: int, num_wire: int
) -> None:
    wire, local = (KvLayout(1, size, 1, 1, "float32") for size in (wire_size, local_size))
    reshape = Reshape(wire, local, held_blocks * local_size, num_blocks)
    touched = {part.block for part in reshape.parts(0, num_wire)}
    useful = {part.wire_block for part in reshape.parts(0, num_wire)}
    all_of_use = useful == set(range(num_wire))
    assert reshape.fits(num_wire) == (all_of_use and touched == set(range(num_blocks)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("wire_size", "local_size"), [(16, 32), (32, 16), (8, 24), (24, 16)])
def test_the_kv_cache_takes_another_block_size_as_a_plain_store_does(dtype, wire_size, local_size) -> None:
    wire = KvLayout(3, wire_size, 2, 8, dtype)
    local = KvLayout(3, local_size, 2, 8, dtype)
    num_tokens, held = 100, local_size
    num_blocks = -(-(num_tokens - held) // local_size)
    reshape = Reshape(wire, local, held, num_blocks)
    num_wire = -(-num_tokens // wire_size) - held // wire_size
    data = np.random.default_rng(3).integers(0, 256, 3 * num_wire * wire.block_bytes, np.uint8)
    cache, plain = KvCache(local, 8, torch.device("cpu")), NumpyKvStore(local, 8)
    ids = [5, 2, 7, 0, 1, 6][:num_blocks]
    for store in (cache, plain):
        store.scatter_parts(0, 3, ids, data, reshape.parts(0, num_wire), reshape)
    out = np.empty(3 * num_blocks * local.block_bytes, np.uint8)
    cache.gather(0, 3, ids, out)
    assert out.tobytes() == plain.blocks(ids)


@pytest.mark.parametrize(("heads", "tp_size"), [(3, 2), (4, 3), (2, 3)])
def test_heads_that_cant_be_shared_out_evenly_are_refused_with_both_numbers(heads: int, tp_size: int) -> None:
    with pytest.raises(ValueError, match=rf"{heads} KV heads.* of {tp_size}"):
        shard(KvLayout(1, 16, heads, 8, "float32"), 0, tp_size)
