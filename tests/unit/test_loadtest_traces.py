"""Trace readers read the formats, name the bad line, and replay equal hash ids as equal prefixes."""

import random

import numpy as np
import pytest

from loadtest.errors import BenchError
from loadtest.tokens import TokenSource
from loadtest.traces import read_trace
from loadtest.workloads.registry import parse_workload

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [4, 5, 6]}\n'
    '{"timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [4, 5]}\n'
    '{"timestamp": 4000, "input_length": 700, "output_length": 7, "hash_ids": [9, 5], "extra": true}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109\r\n"
)


@pytest.fixture
def write(tmp_path):
    def write(text, name="trace"):
        path = tmp_path / name
        path.write_text(text, newline="")
        return path

    return write


def replay(path, spec="", seed=0):
    workload = parse_workload(f"trace:path={path}{spec}")
    return list(workload.sessions(TokenSource(seed), random.Random(0)))


def test_mooncake_times_start_at_zero_and_lengths_are_kept(write):
    entries = read_trace(write(MOONCAKE))
    assert [e.at_s for e in entries] == [0.0, 0.5, 3.0]
    assert [(e.input_tokens, e.output_tokens) for e in entries] == [(1100, 20), (1024, 0), (700, 7)]
    assert entries[0].block_ids == (4, 5, 6)


def test_azure_files_of_both_years_are_read(write):
    entries = read_trace(write(AZURE))
    assert entries[1].at_s == pytest.approx(4.314579, abs=1e-5)
    assert entries[0].input_tokens == 374
    zoned = AZURE.replace("46.6805900", "46.680590+00:00").replace("50.9951690", "50.995169+00:00")
    assert read_trace(write(zoned, "zoned"))[1].at_s == pytest.approx(4.314579, abs=1e-5)


def test_requests_out_of_order_are_sorted(write):
    lines = MOONCAKE.splitlines(keepends=True)
    assert [e.at_s for e in read_trace(write("".join(reversed(lines))))] == [0.0, 0.5, 3.0]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (MOONCAKE + "{oops\n", 4, "Mooncake"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', 4, "output_length"),
        (MOONCAKE + '{"timestamp": 1, "input_length": "5", "output_length": 1, "hash_ids": []}\n', 4, "int"),
        (MOONCAKE + '\n{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}\n', 5, "at least"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}\n', 4, "too many"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n', 4, "64-bit"),
        (AZURE + "2023-11-16 18:15:51,12\r\n", 4, "columns"),
        (AZURE + "yesterday,12,3\r\n", 4, "yesterday"),
        (AZURE + "2023-11-16 18:15:51,many,3\r\n", 4, "many"),
        ("time,in,out\n1,2,3\n", 1, "header"),
    ],
)
def test_a_bad_line_is_named(write, text, line, reason):
    path = write(text)
    with pytest.raises(BenchError) as caught:
        read_trace(path)
    assert f"{path}, line {line}:" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("text", ["", AZURE.splitlines()[0]])
def test_a_trace_without_requests_is_refused(write, text):
    with pytest.raises(BenchError):
        read_trace(write(text))


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(BenchError, match="No such file"):
        read_trace(tmp_path / "absent")


def test_equal_hash_ids_replay_as_equal_token_prefixes(write):
    first, second, third = (s.turns[0].token_ids for s in replay(write(MOONCAKE)))
    assert (len(first), len(second), len(third)) == (1100, 1024, 700)
    assert np.array_equal(first[:1024], second)
    # Id 5 in another place after another parent: the same block, but no shared prefix.
    assert np.array_equal(third[512:], first[512:700])
    assert not np.array_equal(third[:512], first[:512])


def test_a_divided_trace_shares_the_same_share_of_its_prompts(write):
    first, second, _ = (s.turns[0].token_ids for s in replay(write(MOONCAKE), ",divide=8"))
    assert (len(first), len(second)) == (137, 128)
    assert np.array_equal(first[:128], second)


def test_tokens_without_a_block_id_are_the_requests_own(write):
    line = '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n'
    first, second = (s.turns[0].token_ids for s in replay(write(line * 2)))
    assert np.array_equal(first[:512], second[:512])
    assert not np.array_equal(first[512:], second[512:])


def test_azure_prompts_share_nothing(write):
    first, second = (s.turns[0].token_ids for s in replay(write(AZURE)))
    assert not np.array_equal(first[:20], second[:20])


def test_skipping_starts_the_clock_at_the_first_request_left(write):
    assert [s.at_s for s in replay(write(MOONCAKE), ",skip=1")] == [0.0, 2.5]
    with pytest.raises(BenchError, match="nothing is left"):
        replay(write(MOONCAKE), ",skip=3")


def test_a_server_is_asked_for_at_least_one_token(write):
    assert [s.turns[0].max_tokens for s in replay(write(MOONCAKE))] == [20, 1, 7]


def test_the_prefixes_of_a_replay_repeat_as_often_as_its_ids(write):
    """Blocks seen before over all blocks, from the tokens themselves, on a made-up trace with a known answer."""
    lines = [
        f'{{"timestamp": {i}, "input_length": {512 * len(ids)}, "output_length": 1, "hash_ids": {ids}}}\n'
        for i, ids in enumerate([[0, 1], [0, 2], [0, 1, 3], [4]])
    ]
    seen, hits, total = set(), 0, 0
    for session in replay(write("".join(lines))):
        tokens = session.turns[0].token_ids
        for end in range(512, len(tokens) + 1, 512):
            prefix = tokens[:end].tobytes()
            hits += prefix in seen
            total += 1
            seen.add(prefix)
    assert (hits, total) == (3, 8)
