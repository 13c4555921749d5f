"""What `baton serve` decides before anything starts."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import Settings, resolve_settings
from common.errors import StartupError
from deploy.child_log import event_of, last_event, startup_error, tail
from deploy.cluster_plan import MemoryNeed, effective_auth, memory_need, plan_parts, worker_threads
from deploy.paths import KEEP_DEAD_RUN_S, RUN_PREFIX, baton_home, remove_dead_runs, run_directory
from deploy.preflight import available_memory_bytes, check_memory, choose_grpc_port, compiler_note
from deploy.restart_policy import STARTUP_ERROR_EXIT, RestartPolicy, after_death, describe_exit

MIB = 1 << 20


def parts_of(**settings):
    return plan_parts(
        resolve_settings(settings, environ={}).settings,
        redis_url="unix:///r",
        model="/m",
        port=8000,
        grpc_port=8001,
        num_cores=4,
        suffix="-x",
    )


def test_every_part_gets_its_own_id_and_the_users_settings():
    parts = parts_of(prefill=2, decode=3, max_running=7, host="0.0.0.0")
    assert [p.name for p in parts] == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert len({p.worker_id for p in parts}) == len(parts)
    for part in parts:
        assert part.settings["max_running"] == 7
        assert part.settings["model"] == "/m"
        resolve_settings(part.settings, environ={})  # a valid set
    assert parts[0].settings["host"] == "0.0.0.0"
    assert parts[0].settings["port"] == 8000
    assert {p.settings["host"] for p in parts[1:]} == {"127.0.0.1"}
    assert {p.settings["grpc_port"] for p in parts[1:]} == {0}


def test_routers_know_that_both_phases_share_the_cores_unless_told_otherwise():
    assert parts_of()[0].settings["shared_cores"]
    assert not parts_of(prefill=0)[0].settings["shared_cores"]
    assert not parts_of(shared_cores=False)[0].settings["shared_cores"]


@given(st.integers(1, 256), st.integers(0, 64), st.integers(1, 64))
def test_a_phase_never_gets_more_threads_than_cores_nor_a_worker_none(cores, prefill, decode):
    threads = worker_threads(cores, prefill, decode)
    assert threads >= 1
    assert threads * max(prefill, decode) <= max(cores, prefill, decode)


def test_a_thread_count_that_is_set_is_kept():
    assert worker_threads(2, 1, 1, setting=7) == 7
    assert worker_threads(2, 1, 1) == 2


def test_memory_counts_the_dtype_that_runs():
    settings = resolve_settings({"dtype": "float32", "kv_cache_bytes": MIB, "decode": 2}, environ={}).settings
    need = memory_need(settings, weights_file_bytes=100, file_dtype="bfloat16")
    assert (need.weights_bytes, need.num_workers) == (200, 3)


def test_memory_counts_the_landing_ring_and_that_of_pulls():
    small, large = (
        memory_need(
            resolve_settings({"landing_slots": n, "landing_slot_bytes": MIB}, environ={}).settings,
            weights_file_bytes=100,
            file_dtype="float32",
        )
        for n in (8, 1008)
    )
    assert large.total_bytes - small.total_bytes == 2 * 1250 * MIB


@pytest.mark.parametrize("key", ["landing_slots", "landing_slot_bytes", "num_threads"])
def test_a_size_that_no_machine_has_is_refused_before_it_is_allocated(key):
    with pytest.raises(StartupError, match=rf"bad value for '{key}'.*less than"):
        resolve_settings({key: 10**12}, environ={})


def test_one_port_for_both_protocols_is_refused():
    with pytest.raises(StartupError, match="--port and --grpc-port are both 8000"):
        choose_grpc_port("127.0.0.1", 8000, 8000)


def test_too_little_memory_is_told_with_what_to_do():
    need = MemoryNeed(weights_bytes=500 * MIB, kv_cache_bytes=512 * MIB, landing_bytes=32 * MIB, num_workers=2)
    check_memory(need, need.total_bytes)
    with pytest.raises(
        StartupError, match=r"too little memory: 2 workers need about 2\.8 GiB .* kv_cache_bytes"
    ) as error:
        check_memory(need, need.total_bytes - 1)
    assert "\n" not in str(error.value)


def test_a_missing_compiler_is_told_where_it_matters(monkeypatch):
    monkeypatch.setattr("deploy.preflight.has_prebuilt", lambda isa: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler (no-such-compiler)" in compiler_note("auto")
    assert compiler_note("torch") == ""
    monkeypatch.setenv("CXX", "sh")
    assert compiler_note("auto") == ""


def test_a_containers_limit_counts(tmp_path):
    assert available_memory_bytes(tmp_path) > MIB  # no such files: the machine's
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert available_memory_bytes(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > MIB


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([3, 1, -9, -11])), max_size=30))
def test_restarts_wait_a_bounded_time_and_end_after_too_many_fast_deaths(deaths):
    policy = RestartPolicy()
    fast = 0
    for ran_s, exit_code in deaths:
        verdict = after_death(policy, exit_code=exit_code, ran_s=ran_s, fast_deaths=fast)
        fast = verdict.fast_deaths
        assert (verdict.delay_s is None) == (fast > policy.max_fast_deaths)
        if verdict.delay_s is None:
            break
        assert policy.first_delay_s <= verdict.delay_s <= policy.longest_delay_s
        assert ran_s < policy.young_s or fast == 0


def test_a_part_that_was_drained_stays_down():
    verdict = after_death(RestartPolicy(), exit_code=0, ran_s=1.0, fast_deaths=3)
    assert (verdict.delay_s, verdict.is_over) == (None, True)


def test_a_start_that_can_not_succeed_is_not_tried_again():
    verdict = after_death(RestartPolicy(), exit_code=STARTUP_ERROR_EXIT, ran_s=1000.0, fast_deaths=0)
    assert verdict.delay_s is None


def test_exits_are_named():
    assert [describe_exit(code) for code in (0, 3, -9, -99)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "killed by signal 99",
    ]


def test_a_log_tells_what_its_process_does_and_why_it_could_not_start(tmp_path):
    path = tmp_path / "x.log"
    assert (tail(path, 5), last_event(path), startup_error(path)) == ([], "", "")
    path.write_text(
        "2026-01-01T00:00:00Z [info     ] loading weights                [common.model] role=decode\nsome noise\n"
        "baton: tensor 'a' is missing from m.safetensors\n"
    )
    assert last_event(path) == "loading weights"
    assert startup_error(path) == "tensor 'a' is missing from m.safetensors"
    assert event_of('{"event": "ready", "level": "info"}') == "ready"
    assert event_of('{"event": ') == ""


def test_only_the_end_of_a_log_is_read(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("first\n" + "x" * 100_000 + "\nlast\n")
    lines = tail(path, 10)
    assert lines[-1] == "last"
    assert sum(map(len, lines)) < 20_000


def test_home_follows_xdg():
    assert str(baton_home({"XDG_CACHE_HOME": "/x"})) == "/x/baton"
    assert baton_home({"XDG_CACHE_HOME": "relative"}) == baton_home({})


def test_a_run_directory_is_private_and_goes_unless_the_run_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with run_directory() as path:
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
    with pytest.raises(StartupError), run_directory() as told:
        raise StartupError("tensor x is missing")
    assert not told.exists()
    with pytest.raises(StartupError), run_directory() as kept:
        raise StartupError("see the log", exit_code=1)
    assert kept.exists()


def test_only_old_directories_of_dead_runs_are_removed(tmp_path):
    dead, alive, fresh = 2**22 + 1, os.getpid(), 2**22 + 2
    now = time.time()
    for pid in (dead, alive, fresh):
        (tmp_path / f"{RUN_PREFIX}{pid}-abc").mkdir()
    (tmp_path / "other").mkdir()
    old = now - KEEP_DEAD_RUN_S - 60
    for pid in (dead, alive):
        os.utime(tmp_path / f"{RUN_PREFIX}{pid}-abc", (old, old))
    remove_dead_runs(tmp_path, now)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f"{RUN_PREFIX}{alive}-abc", f"{RUN_PREFIX}{fresh}-abc", "other"]
    )


def test_several_routers_are_parts_of_their_own_on_the_same_ports():
    settings = Settings(router_processes=3)
    parts = plan_parts(settings, redis_url="unix:///r", model="/m", port=1, grpc_port=2, num_cores=2)
    routers = [part for part in parts if part.role == "router"]
    assert [part.name for part in routers] == ["router", "router-1", "router-2"]
    assert all(part.settings["reuse_port"] and part.settings["port"] == 1 for part in routers)


@pytest.mark.parametrize(
    ("named", "auth"),
    [({}, "anonymous"), ({"host": "0.0.0.0"}, "keys"), ({"auth": "keys"}, "keys"), ({"tenants_file": "t"}, "keys"),
     ({"host": "0.0.0.0", "auth": "anonymous"}, "anonymous")],
)  # fmt: skip
def test_a_laptop_asks_nobody_for_a_key_and_everything_else_does_unless_told(named, auth):
    assert effective_auth(Settings(**named)) == auth
