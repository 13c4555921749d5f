"""The host tier: what the pool evicts is found again with its own content, in bounds, or is gone and said so."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.kvcache.block_hash import chain_hashes, hash_seed
from common.kvcache.block_pool import BlockPool
from common.kvcache.host_arena import HostArena
from common.kvcache.host_tier import HostTier
from common.kvcache.kv_cache import KvCache
from common.kvcache.layout import KvLayout
from common.kvcache.prefix_cache import PrefixCache

NUM_BLOCKS = 5
LAYOUT = KvLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16")


def h(i: int) -> bytes:
    return i.to_bytes(16, "big")


class Copier:
    """Content by block and by slot."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}
        self.num_calls = 0

    def save(self, block_ids, slots) -> None:
        self.num_calls += 1
        assert len(set(slots)) == len(slots)
        self.slots |= {slot: self.blocks[block_id] for block_id, slot in zip(block_ids, slots, strict=True)}

    def load(self, slots, block_ids) -> None:
        self.blocks |= {block_id: self.slots[slot] for slot, block_id in zip(slots, block_ids, strict=True)}


def filled(num_blocks: int, num_slots: int, content: range) -> tuple[BlockPool, PrefixCache, Copier]:
    """A pool whose blocks were filled with h(i), one after the other, and let go."""
    pool, copier = BlockPool(num_blocks), Copier()
    cache = PrefixCache(pool, HostTier(num_slots, copier))
    for i in content:
        (block_id,) = pool.allocate(1) or []
        copier.blocks[block_id] = h(i)
        cache.register(block_id, h(i))
        pool.release([block_id])
    return pool, cache, copier


def test_an_evicted_run_comes_back_with_its_content_and_is_counted_apart():
    pool, cache, copier = filled(3, 8, range(6))
    taken = cache.allocate([h(i) for i in range(6)][1:4], 3)
    assert taken is not None
    assert (taken.num_cached, taken.num_restored) == (3, 2)
    assert [copier.blocks[b] for b in taken.block_ids] == [h(1), h(2), h(3)]
    assert all(pool.references(b) == 1 for b in taken.block_ids)
    assert cache.host_stats.num_loaded_total == 2


def test_one_allocation_copies_out_at_once_and_nothing_twice():
    pool, cache, copier = filled(4, 8, range(4))
    taken = pool.allocate(4) or []
    assert copier.num_calls == 1
    pool.release(taken)
    again = cache.allocate([h(i) for i in range(4)], 4)
    assert again is not None
    pool.release(again.block_ids)
    assert pool.allocate(4) is not None
    assert copier.num_calls == 1, "the tier is inclusive: what came from it is still there"


def test_the_least_recently_used_is_dropped_and_the_index_hears_of_it():
    pool, cache, _ = filled(1, 2, range(3))
    assert cache.take_changes() is not None
    assert pool.allocate(1) is not None  # h(2) moves out, h(0) is dropped
    changes = cache.take_changes()
    assert changes is not None
    assert (changes.stored, changes.evicted) == ([], [h(0)])
    assert (changes.host_stored, changes.host_evicted) == ([h(2)], [h(0)])


def test_pinned_content_outlives_what_is_younger_and_pins_are_bounded():
    pool, copier = BlockPool(1), Copier()
    tier = HostTier(2, copier)
    cache = PrefixCache(pool, tier)
    assert tier.pin([h(0)])
    assert not tier.pin([h(1), h(2)])
    for i in range(5):
        (block_id,) = pool.allocate(1) or []
        copier.blocks[block_id] = h(i)
        cache.register(block_id, h(i))
        pool.release([block_id])
    assert h(0) in tier
    tier.unpin([h(0)])
    with pytest.raises(ValueError, match="more often"):
        tier.unpin([h(0)])
    tier.check_integrity({})


def test_no_room_in_a_tier_of_pins_is_a_miss_and_nothing_else():
    pool, copier = BlockPool(2), Copier()
    tier = HostTier(1, copier)
    cache = PrefixCache(pool, tier)
    assert tier.pin([h(0)])
    for i in range(3):
        (block_id,) = pool.allocate(1) or []
        copier.blocks[block_id] = h(i)
        cache.register(block_id, h(i))
        pool.release([block_id])
    pool.release(pool.allocate(2) or [])
    assert h(1) not in tier
    taken = cache.allocate([h(0), h(1)], 2)
    assert taken is not None
    assert (taken.num_cached, taken.num_restored) == (1, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_arena_moves_every_byte_of_every_layer(dtype):
    layout = KvLayout(3, 4, 2, 8, dtype)
    cache = KvCache(layout, 6, torch.device("cpu"))
    arena = HostArena(cache, 4)
    rng = np.random.default_rng(0)
    before = rng.integers(0, 255, 3 * 2 * layout.block_bytes, dtype=np.uint8)
    cache.scatter(0, 3, [5, 1], before)
    arena.save([5, 1], [3, 0])
    cache.data.zero_()
    arena.load([3, 0], [2, 4])
    after = np.zeros_like(before)
    cache.gather(0, 3, [2, 4], after)
    assert (after == before).all()
    cache.gather(0, 3, [5, 1], after)
    assert not after.any()


class TierMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet come, share, are pinned and go, in a pool and a tier that are too small."""

    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots: int) -> None:
        self.copier = Copier()
        self.tier = HostTier(num_slots, self.copier)
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, self.tier)
        self.held: list[list[int]] = []
        self.pinned: list[list[bytes]] = []
        self.index: set[bytes] = set()
        self.host_index: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=10), spare=st.integers(0, 2), keep=st.integers(0, 2))
    def admit(self, tokens: list[int], spare: int, keep: int) -> None:
        hashes = chain_hashes(hash_seed("m"), tokens, 2)
        in_use = {b for table in self.held for b in table}
        free = self.pool.num_free
        taken = self.cache.allocate(hashes, len(hashes) + spare, keep)
        if taken is None:
            assert self.pool.num_free == free
            return
        assert self.pool.num_free >= keep
        assert len(taken.block_ids) == len(hashes) + spare
        for i, block_id in enumerate(taken.block_ids):
            if i < taken.num_cached:
                assert self.copier.blocks[block_id] == hashes[i], "a hash leads to foreign content"
            else:
                assert block_id not in in_use, "a block that is in use was handed out for writing"
                self.copier.blocks[block_id] = hashes[i] if i < len(hashes) else b"scratch"
                if i < len(hashes):
                    self.cache.register(block_id, hashes[i])
        self.held.append(taken.block_ids)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def pin(self, tokens: list[int]) -> None:
        hashes = chain_hashes(hash_seed("m"), tokens, 2)
        if self.tier.pin(hashes):
            self.pinned.append(hashes)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.tier.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule()
    def follow(self) -> None:
        changes = self.cache.take_changes()
        if changes is not None:
            for index, stored, evicted in (
                (self.index, changes.stored, changes.evicted),
                (self.host_index, changes.host_stored, changes.host_evicted),
            ):
                assert not index & set(stored)
                assert set(evicted) <= index
                index |= set(stored)
                index -= set(evicted)
        every = {*self.tier._pinned, *self.tier._unpinned}
        assert self.host_index == every
        assert self.index == every | set(self.cache.hashes()), "the follower's index differs from the truth"

    @invariant()
    def counts_hold(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(Counter(b for table in self.held for b in table))
        self.cache.check_integrity(Counter(x for hashes in self.pinned for x in hashes))
        assert len(self.tier) <= self.tier.num_slots
        for block_hash, slot in (self.tier._pinned | self.tier._unpinned).items():
            assert self.copier.slots[slot] == block_hash, "a slot holds other content than its hash says"


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
