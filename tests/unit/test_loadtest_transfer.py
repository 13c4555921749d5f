"""The transfer benchmark compares like with like: the same blocks for every peer, ratios to the faster memcpy."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from loadtest.errors import BenchError
from loadtest.transfer.bench import Peer, TransferOptions, peers_for, ratios, started
from loadtest.transfer.cases import CASES, Case, message, paged_set

MIB = 1 << 20
OPTIONS = TransferOptions("/nixl/bin/python", "cu12", rounds=1, budget_s=0.1, slots=16, slot_bytes=4 * MIB)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_runs_take_whole_sets_and_none_twice_before_the_pool_is_through(case: Case) -> None:
    num_runs = case.pool_blocks // case.num_blocks
    seen = np.concatenate([case.ids(run, seed=1) for run in range(min(num_runs, 20))])
    assert len(np.unique(seen)) == len(seen) == min(num_runs, 20) * case.num_blocks
    assert seen.max() < case.pool_blocks
    assert np.array_equal(case.ids(0, seed=1), case.ids(num_runs, seed=1))
    assert Case.from_json(case.to_json()) == case


def test_a_message_is_its_bytes_and_a_set_its_blocks() -> None:
    assert message(256 * MIB).num_bytes == 256 * MIB
    assert message(64 << 10) == Case("64 KiB", 64 << 10, 1)
    assert paged_set(512, 36 << 10).num_bytes == 512 * (36 << 10)


def test_every_peer_of_a_row_gets_the_same_case_and_slots_hold_at_least_a_block() -> None:
    case = paged_set(4, 8 * MIB)
    peers = peers_for(case, "tcp", OPTIONS)
    assert {peer.command[1] for peer in peers} == {case.to_json()}
    assert [peer.command[-1] for peer in peers if peer.name.startswith("Baton")] == [str(8 * MIB)] * 2
    (nixl,) = (peer for peer in peers if peer.name == "NIXL")
    assert ("UCX_TLS", "tcp") in nixl.environ


def test_ratios_are_to_the_faster_memcpy() -> None:
    rates = {"memcpy": 10.0, "memcpy, 2 threads": 20.0, "raw sockets": 2.0, "Baton put": 10.0, "Baton": 5.0}
    found = ratios(rates)
    assert found["Baton / memcpy"] == 0.25
    assert found["Baton put / raw sockets"] == 5.0
    assert not any("NIXL" in name for name in found)


def test_a_peer_that_ends_is_an_error_that_names_it() -> None:
    with pytest.raises(BenchError, match="broken ended"), started(Peer("broken", sys.executable, ("no_such_module",))):
        raise AssertionError
