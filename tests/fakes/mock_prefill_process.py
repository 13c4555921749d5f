"""One mock prefill worker in a process of its own, for tests that stop processes: REDIS_URL CLUSTER FINGERPRINT ID.

It never answers a prompt: its requests wait until somebody does something about it.
"""

from __future__ import annotations

import asyncio
import sys

from redis.asyncio import Redis

from tests.fakes.mock_worker import MockWire, MockWorker


async def main(redis_url: str, cluster: str, fingerprint: str, worker_id: str) -> None:
    worker = MockWorker("prefill", MockWire(), fingerprint, worker_id=worker_id)
    worker.first_tokens.close()
    await worker.start()
    async with Redis.from_url(redis_url) as redis:
        await worker.register(redis, cluster)
        print("up", flush=True)
        await worker.until(lambda: worker.seen, timeout_s=60)
        print("busy", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
