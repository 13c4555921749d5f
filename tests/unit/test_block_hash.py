"""Equal hashes mean: same model, same scope, same tokens from the very start. In every process, today and tomorrow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.kvcache.block_hash import HASH_BYTES, chain_hashes, hash_seed

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)
BLOCK_SIZE = st.integers(1, 9)
FIELD = st.text(max_size=6)


@given(TOKENS, BLOCK_SIZE)
def test_only_full_blocks_have_a_hash(token_ids, block_size):
    hashes = chain_hashes(hash_seed("m"), token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(TOKENS, BLOCK_SIZE, st.integers(0, 40))
def test_a_chain_may_be_computed_in_parts(token_ids, block_size, cut):
    whole = chain_hashes(hash_seed("m"), token_ids, block_size)
    at = min(cut // block_size, len(whole))
    parent = whole[at - 1] if at else hash_seed("m")
    assert whole[:at] + chain_hashes(parent, token_ids[at * block_size :], block_size) == whole


@given(TOKENS, TOKENS, BLOCK_SIZE)
def test_chains_agree_exactly_as_far_as_the_tokens_do(first, second, block_size):
    a, b = (chain_hashes(hash_seed("m"), token_ids, block_size) for token_ids in (first, second))
    for i, (one, other) in enumerate(zip(a, b, strict=False), start=1):
        assert (one == other) == (first[: i * block_size] == second[: i * block_size])


@given(st.tuples(FIELD, FIELD, FIELD), st.tuples(FIELD, FIELD, FIELD))
def test_no_value_of_one_field_poses_as_anothers(first, second):
    """A salt that equals an adapter's name, or that spells another field out, shares nothing with it."""
    assert (hash_seed(*first) == hash_seed(*second)) == (first == second)
    model, scope, adapter = first
    assert hash_seed(model, scope, adapter) != hash_seed(model, f"{scope}adapter:{len(adapter)}:{adapter}")


def test_the_index_of_a_running_cluster_stays_valid_across_releases():
    assert hash_seed("model", "scope").hex() == "05c709fa7b865f525c6847a6e67be3fa"
    assert chain_hashes(hash_seed("model", "scope"), [1, 2, 3, 4], 2)[1].hex() == "e4988f257afe89c68e874f2badee7497"
