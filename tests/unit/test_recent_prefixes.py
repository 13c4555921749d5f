"""What the router remembers of its own placements: never more of a prompt than was sent, within a bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policy.recent_prefixes import MAX_HOLDERS, RecentPrefixes
from router.policy.transfer_rate import MIN_BYTES, TransferRate


def chain(name: str, length: int, shared: int = 0) -> bytes:
    """`shared` leading hashes are those of every other chain."""
    blocks = [f"{'all' if i < shared else name}{i}".encode().rjust(16, b".") for i in range(length)]
    return b"".join(blocks)


def test_the_longest_common_part_is_found_for_each_holder():
    recent = RecentPrefixes(stride=4)
    recent.note(chain("a", 40, shared=20), ["p0", "d0"], visible_at=1.0)
    recent.note(chain("b", 12, shared=9), ["p1"], visible_at=1.0)
    assert recent.num_blocks(chain("a", 99, shared=20)) == {"p0": 40, "d0": 40} | {"p1": 8}
    assert recent.num_blocks(chain("c", 99, shared=20)) == {"p0": 20, "d0": 20, "p1": 8}
    assert recent.num_blocks(chain("c", 99)) == recent.num_blocks(chain("a", 3, shared=3)) == {}


def test_what_the_index_should_know_by_now_is_not_pending():
    recent = RecentPrefixes(stride=1)
    recent.note(chain("a", 10), ["p0"], visible_at=1.0)
    recent.note(chain("a", 20), ["p0"], visible_at=2.0)
    recent.note(chain("a", 15), ["p1"], visible_at=3.0)
    assert recent.num_blocks(chain("a", 30), pending_since=0.5) == {"p0": 20, "p1": 15}
    assert recent.num_blocks(chain("a", 30), pending_since=2.5) == {"p1": 15}
    assert recent.num_blocks(chain("a", 30), pending_since=3.5) == {}
    assert recent.num_blocks(chain("a", 30)) == {"p0": 20, "p1": 15}, "but it is remembered"


def test_the_memory_is_bounded_in_chains_and_in_holders():
    recent = RecentPrefixes(stride=2, max_entries=100)
    for i in range(50):
        recent.note(chain(f"c{i}", 20), ["p0"], visible_at=1.0)
    assert len(recent) == 100
    assert recent.num_blocks(chain("c0", 20)) == {}
    for i in range(20):
        recent.note(chain("x", 8), [f"p{i}"], visible_at=1.0)
    assert set(recent.num_blocks(chain("x", 8))) == {f"p{i}" for i in range(20 - MAX_HOLDERS, 20)}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from(["p0", "p1"])), max_size=20))
def test_no_holder_is_credited_with_more_than_it_was_sent(sent):
    recent = RecentPrefixes(stride=3)
    for name, length, holder in sent:
        recent.note(chain(name, length, shared=10), [holder], visible_at=1.0)
    for name in "abc":
        for holder, num_blocks in recent.num_blocks(chain(name, 99, shared=10)).items():
            most = max(length if other == name else min(length, 10) for other, length, h in sent if h == holder)
            assert num_blocks <= most


def test_a_tokens_transfer_is_priced_by_the_best_transfers_and_small_ones_say_nothing():
    rate = TransferRate()
    assert rate.token_transfer_s == 0
    rate.note(MIN_BYTES - 1, 1.0, 10)
    assert rate.token_transfer_s == 0
    rate.note(10_000_000, 0.1, 1000)
    rate.note(5_000_000, 5.0, 1000)  # half of it was there already, and it waited for the prefill
    assert 1e-4 <= rate.token_transfer_s < 1.1e-4
