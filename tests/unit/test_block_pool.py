"""The pool never loses, doubles or shares a block by mistake."""

from __future__ import annotations

import pytest

from common.kvcache.block_pool import BlockPool
from common.kvcache.block_table import BlockTable


def test_allocate_gives_all_or_none():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    second = pool.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    pool.check_integrity(dict.fromkeys(range(4), 1))


def test_nothing_can_be_allocated_of_nothing():
    assert BlockPool(1).allocate(0) == []
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_release_of_a_free_block_is_refused():
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    assert block_ids is not None
    pool.release(block_ids)
    with pytest.raises(ValueError, match="more often"):
        pool.release(block_ids)
    pool.check_integrity({})


def test_an_empty_block_can_be_neither_shared_nor_retained():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="nothing to share"):
        pool.acquire([0])
    with pytest.raises(ValueError, match="nobody's"):
        pool.retain(0)


def test_a_shared_block_is_free_only_after_its_last_release():
    pool = BlockPool(1)
    assert pool.allocate(1) == [0]
    pool.acquire([0])
    pool.release([0])
    assert pool.num_free == 0
    pool.release([0])
    assert pool.num_free == 1


def test_empty_blocks_are_taken_before_cached_ones_are_evicted():
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.extend
    block_ids = pool.allocate(2)
    assert block_ids is not None
    pool.retain(block_ids[0])
    pool.release(block_ids)
    assert (pool.num_free, pool.num_reusable) == (3, 1)
    assert pool.allocate(2) is not None
    assert evicted == []
    assert pool.allocate(1) == [block_ids[0]]
    assert evicted == [block_ids[0]]


def test_eviction_takes_the_least_recently_used_and_of_a_sequence_its_tail_first():
    pool, evicted = BlockPool(4), []
    pool.on_evict = evicted.extend
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None
    assert new is not None
    for block_id in old + new:
        pool.retain(block_id)
    pool.release(old)
    pool.release(new)
    pool.acquire(old)  # used again: now the newest
    pool.release(old)
    assert pool.allocate(4) is not None
    assert evicted == [new[1], new[0], old[1], old[0]]


def test_integrity_check_finds_a_wrong_count():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="its owners hold 2"):
        pool.check_integrity({0: 2})
    with pytest.raises(RuntimeError, match="its owners hold 0"):
        pool.check_integrity({})
    pool._empty.append(0)
    with pytest.raises(RuntimeError, match="in 2 places"):
        pool.check_integrity()


def test_a_block_table_only_grows_and_covers_what_it_has():
    table = BlockTable(block_size=4)
    table.append([7, 3])
    assert [table.num_missing(n) for n in (0, 1, 8, 9, 13)] == [0, 0, 0, 1, 2]
    assert (list(table.covering(1)), list(table.covering(5)), list(table.covering(0))) == ([7], [7, 3], [])
    with pytest.raises(ValueError, match="need 3 blocks"):
        table.covering(9)
    assert table.clear() == [7, 3]
    assert len(table) == 0
