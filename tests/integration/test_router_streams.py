"""Streams over real sockets when clients leave, workers die, readers are slow and the router stops."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from common.errors import BatonError, ErrorKind
from tests.fakes.mock_worker import Failure, MockWorker, scripted_token
from tests.fakes.router_cluster import MockCluster, mock_cluster, streamed
from tests.fakes.tiny_folder import make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_folder(tmp_path_factory.mktemp("router") / "tiny")


async def given_up(cluster: MockCluster, *workers: MockWorker) -> None:
    """Until each worker was told to abort its one sequence and holds nothing."""
    for worker in workers:
        await worker.until(lambda worker=worker: len(worker.aborted) == 1 and not worker.live)
    await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "the router to forget it")
    cluster.assert_nothing_left()


async def test_a_client_that_leaves_a_stream_is_noticed_by_both_workers(folder):
    async with mock_cluster(folder) as cluster:
        decode, prefill = cluster.decodes[0], cluster.prefills[0]
        decode.steps.close()
        prefill.last_frames.close()
        async with streamed(cluster, max_tokens=100) as events:
            await events.next()
            decode.steps.permit()
            await events.next()
        await given_up(cluster, decode, prefill)
        assert decode.aborted == prefill.aborted


async def test_a_client_that_leaves_before_the_first_token_is_noticed(folder):
    async with mock_cluster(folder) as cluster:
        for stream in (False, True):
            for worker in cluster.workers:
                worker.aborted.clear()
            cluster.prefills[0].first_tokens.close()
            body = {"prompt": "hello", "stream": stream, "max_tokens": 100}
            waiting = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
            await cluster.prefills[0].until(lambda: cluster.prefills[0].live)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await given_up(cluster, cluster.decodes[0], cluster.prefills[0])


async def test_decode_may_be_ahead_of_the_prefill_legs_frames(folder):
    async with mock_cluster(folder) as cluster:
        plain = await cluster.complete(max_tokens=12, return_token_ids=True)
        cluster.prefills[0].last_frames.close()
        task = asyncio.create_task(cluster.complete(max_tokens=12, return_token_ids=True))
        await cluster.decodes[0].until(lambda: len(cluster.decodes[0].seen) == 2 and not cluster.decodes[0].live)
        cluster.prefills[0].last_frames.open()
        assert (await task)["choices"] == plain["choices"]
        cluster.assert_nothing_left()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_decode_workers_death_does_not_change_the_stream(folder, after, sampled):
    async with mock_cluster(folder, decode=2) as cluster:
        body = {"max_tokens": 20, "return_token_ids": True, "stop": ["\x00\x00never"]}
        body |= {"temperature": 0.8, "seed": 5} if sampled else {"temperature": 0}
        undisturbed = await cluster.complete(**body)
        for worker in cluster.decodes:
            worker.steps.close()
            worker.seen.clear()
        async with streamed(cluster, stream_options={"include_usage": True}, **body) as events:
            while len(events.token_ids) < 1:
                await events.next()
            victim = next(worker for worker in cluster.decodes if worker.live)
            heir = next(worker for worker in cluster.decodes if worker is not victim)
            victim.steps.permit(after)
            while len(events.token_ids) < 1 + after:
                await events.next()
            await victim.kill()
            heir.steps.open()
            await events.rest()
        assert events.token_ids == undisturbed["choices"][0]["token_ids"]
        assert events.text == undisturbed["choices"][0]["text"]
        assert events.events[-1]["usage"] == undisturbed["usage"]
        assert events.done
        assert heir.seen[0].sampling.seed == victim.seen[0].sampling.seed
        page = (await cluster.http.get("/metrics")).text
        assert 'baton_request_retries_total{reason="lease_lost"} 1.0' in page
        cluster.assert_nothing_left()


async def test_a_prefill_workers_death_costs_only_a_second_prefill(folder):
    async with mock_cluster(folder, prefill=2) as cluster:
        undisturbed = await cluster.complete(max_tokens=6)
        for worker in cluster.prefills:
            worker.first_tokens.close()
        task = asyncio.create_task(cluster.complete(max_tokens=6))
        await cluster.until(lambda: any(worker.live for worker in cluster.prefills), "the prefill command")
        victim = next(worker for worker in cluster.prefills if worker.live)
        await victim.kill()
        for worker in cluster.prefills:
            worker.first_tokens.open()
        assert (await task)["choices"] == undisturbed["choices"]
        cluster.assert_nothing_left()


@pytest.mark.parametrize("kind", ["LEASE_LOST", "CORRUPT_KV", "STALE_EPOCH", "DRAINING"])
async def test_reported_failures_are_answered_elsewhere(folder, kind):
    async with mock_cluster(folder, decode=2) as cluster:
        undisturbed = await cluster.complete(max_tokens=6)
        for worker in cluster.decodes:
            worker.failures.append(Failure(kind, after_tokens=2))
        assert (await cluster.complete(max_tokens=6))["choices"] == undisturbed["choices"]
        cluster.assert_nothing_left()


async def test_a_worker_that_comes_back_finishes_what_it_dropped(folder):
    """The only decode worker restarts under the same id: a new epoch, and the stream goes on."""
    async with mock_cluster(folder) as cluster:
        undisturbed = await cluster.complete(max_tokens=6)
        old = cluster.decodes[0]
        old.steps.close()
        task = asyncio.create_task(cluster.complete(max_tokens=6))
        await old.until(lambda: old.live)
        await old.kill()
        fresh = await cluster.add_worker("decode", worker_id=old.worker_id)
        assert (await task)["choices"] == undisturbed["choices"]
        cluster.assert_nothing_left()
        await fresh.kill()


async def test_a_reader_that_reads_nothing_stops_nobody(folder):
    async with mock_cluster(folder, settings={"max_model_len": 500}) as cluster:
        host, port = cluster.router.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
        body = b'{"prompt": "hello", "stream": true, "max_tokens": 450, "return_token_ids": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await cluster.decodes[0].until(lambda: cluster.decodes[0].seen)
        # It reads nothing, and the others are served; its own request ends, too.
        await asyncio.gather(*(cluster.complete(max_tokens=20) for _ in range(5)))
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "all requests to end")
        received = b""
        async with asyncio.timeout(10):
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(2**16)
        assert received.count(b'"finish_reason":"length"') == 1
        assert received.count(b"[DONE]") == 1
        writer.close()
        await writer.wait_closed()
        cluster.assert_nothing_left()


async def test_a_hundred_requests_a_third_given_up_at_random_leave_nothing(folder):
    rng = random.Random(3)

    async def one(cluster: MockCluster, index: int) -> str:
        tokens = rng.choice((1, 2, 17, 60))
        leave_after = rng.randrange(4) if index % 3 == 0 else None
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice((1, 16, 33, 100)))]
        async with streamed(
            cluster, prompt=prompt, max_tokens=tokens, return_token_ids=True, ignore_eos=True
        ) as events:
            while leave_after is None or len(events.events) < leave_after:
                if await events.next() is None:
                    assert events.done
                    assert events.token_ids == [scripted_token(prompt, i) for i in range(tokens)]
                    return "finished"
        return "left"

    async with mock_cluster(folder, prefill=2, decode=2) as cluster:
        outcomes = await asyncio.gather(*(one(cluster, i) for i in range(100)))
        assert {"finished", "left"} == set(outcomes)
        await cluster.until(lambda: cluster.router.dispatcher.num_in_flight == 0, "every request's end")
        for worker in cluster.workers:
            await worker.until(lambda worker=worker: not worker.live)
        cluster.assert_nothing_left()
        page = (await cluster.http.get("/metrics")).text
        assert "baton_requests_running 0.0" in page
        assert "baton_requests_waiting 0.0" in page


async def test_shutdown_lets_requests_finish_within_the_grace(folder):
    async with mock_cluster(folder, settings={"shutdown_grace_s": 30.0}) as cluster:
        cluster.decodes[0].steps.close()
        async with streamed(cluster, max_tokens=3) as events:
            await events.next()
            stopping = asyncio.create_task(cluster.stop_router())
            await cluster.until(lambda: not cluster.router.dispatcher.accepting, "the router to drain")
            cluster.decodes[0].steps.open()
            await events.rest()
        assert (events.finish_reasons, events.done) == (["length"], True)
        await asyncio.wait_for(stopping, 10)


async def test_shutdown_ends_with_an_error_event_what_outlasts_the_grace(folder):
    async with mock_cluster(folder) as cluster:
        cluster.decodes[0].steps.close()
        async with streamed(cluster, max_tokens=3) as events:
            await events.next()
            await cluster.stop_router()
            await events.rest()
        assert events.events[-1]["error"]["code"] == "draining"
        assert not events.done
        await cluster.decodes[0].until(lambda: not cluster.decodes[0].live)
        with pytest.raises(httpx.ConnectError):
            await cluster.http.get("/health")


async def test_new_requests_are_refused_while_draining(folder):
    async with mock_cluster(folder) as cluster:
        cluster.router.dispatcher.refuse_new(BatonError(ErrorKind.DRAINING, "down", retry_after_s=1.0))
        response = await cluster.http.post("/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert (await cluster.http.get("/ready")).status_code == 503
        assert (await cluster.http.get("/health")).status_code == 200
