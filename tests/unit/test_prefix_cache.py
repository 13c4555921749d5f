"""A hash leads to the block that holds its content, or nowhere; whoever follows the changes knows the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kvcache.block_hash import chain_hashes, hash_seed
from common.kvcache.block_pool import BlockPool
from common.kvcache.prefix_cache import NetChanges, PrefixCache

NUM_BLOCKS = 8


def h(i: int) -> bytes:
    return i.to_bytes(16, "big")


def make_cache(num_blocks: int = 4) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool)


def test_match_takes_the_longest_leading_run_and_a_reference_to_each():
    pool, cache = make_cache()
    block_ids = pool.allocate(3)
    assert block_ids is not None
    cache.register(block_ids[0], h(1))
    cache.register(block_ids[2], h(3))
    assert cache.match([h(1), h(2), h(3)]) == [block_ids[0]]
    assert pool.references(block_ids[0]) == 2
    assert cache.match([h(2), h(1)]) == []


def test_content_outlives_its_sequence_until_it_is_evicted():
    pool, cache = make_cache(2)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    cache.register(block_ids[0], h(1))
    pool.release(block_ids)
    assert cache.match([h(1)]) == [block_ids[0]]
    pool.release([block_ids[0]])
    assert pool.allocate(2) is not None
    assert cache.match([h(1)]) == []
    cache.check_integrity()


def test_of_equal_content_the_first_block_keeps_the_hash():
    pool, cache = make_cache()
    first, second = pool.allocate(2) or []
    assert cache.register(first, h(1))
    assert not cache.register(second, h(1))
    assert cache.register(first, h(1))  # again, by a second sequence that shares the block
    pool.release([second])
    assert pool.num_reusable == 0  # its content is nobody's
    assert cache.match([h(1)]) == [first]


def test_a_block_never_changes_its_content_while_cached():
    pool, cache = make_cache()
    (block_id,) = pool.allocate(1) or []
    cache.register(block_id, h(1))
    with pytest.raises(ValueError, match="other content"):
        cache.register(block_id, h(2))


def test_changes_are_told_once_and_cancel_out():
    pool, cache = make_cache(1)
    (block_id,) = pool.allocate(1) or []
    cache.register(block_id, h(1))
    changes = cache.take_changes()
    assert changes is not None
    assert (changes.stored, changes.evicted) == ([h(1)], [])
    assert cache.take_changes() is None
    pool.release([block_id])
    (block_id,) = pool.allocate(1) or []
    cache.register(block_id, h(2))
    pool.release([block_id])
    (block_id,) = pool.allocate(1) or []  # h(2) came and went unseen
    changes = cache.take_changes()
    assert changes is not None
    assert (changes.stored, changes.evicted) == ([], [h(1)])


def test_integrity_check_finds_a_forgotten_hash():
    pool, cache = make_cache()
    (block_id,) = pool.allocate(1) or []
    cache.register(block_id, h(1))
    del cache._hash_by_block[block_id]
    with pytest.raises(RuntimeError, match="differ in size"):
        cache.check_integrity()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans())), st.sets(st.integers(0, 5)))
def test_net_changes_lead_from_the_old_set_to_the_new_one(moves, before):
    now, net = set(before), NetChanges()
    for i, present in moves:
        if present != (i in now):  # a set changes only by what it lacks or has
            net.record(h(i), present=present)
            (now.add if present else now.discard)(i)
    assert net.growth == len(now) - len(before)
    changes = net.take()
    assert {h(i) for i in now} == ({h(i) for i in before} | set(changes.stored)) - set(changes.evicted)
    assert len(changes.stored) + len(changes.evicted) == len(now ^ before)
    assert len(net) == 0


class CacheMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet of tokens come, fill their blocks, share prefixes and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.content: dict[int, bytes] = {}  # block id → what its owner wrote
        self.held: list[list[int]] = []
        self.followed: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=10))
    def admit(self, tokens: list[int]) -> None:
        hashes = chain_hashes(hash_seed("m"), tokens, 2)
        shared = self.cache.match(hashes)
        assert [self.content[b] for b in shared] == hashes[: len(shared)], "a hash leads to foreign content"
        fresh = self.pool.allocate(len(hashes) - len(shared))
        if fresh is None:
            self.pool.release(shared)
            return
        in_use = {b for table in self.held for b in table} | set(shared)
        assert not in_use & set(fresh), "a block that is in use was handed out for writing"
        for block_id, block_hash in zip(fresh, hashes[len(shared) :], strict=True):
            self.content[block_id] = block_hash
            self.cache.register(block_id, block_hash)
        self.held.append(shared + fresh)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def follow(self) -> None:
        changes = self.cache.take_changes()
        if changes is not None:
            assert not self.followed & set(changes.stored)
            assert set(changes.evicted) <= self.followed
            self.followed = (self.followed | set(changes.stored)) - set(changes.evicted)
        assert self.followed == set(self.cache.hashes()), "the follower's index differs from the truth"

    @invariant()
    def counts_hold(self) -> None:
        references: dict[int, int] = {}
        for table in self.held:
            for block_id in table:
                references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)
        self.cache.check_integrity()
        assert self.pool.num_free == NUM_BLOCKS - len(references)

    def teardown(self) -> None:
        for table in self.held:
            self.pool.release(table)
        assert self.pool.num_free == NUM_BLOCKS


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
