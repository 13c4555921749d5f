"""A proxy in front of vLLM's own disaggregation: one prefill server, one decode server, joined by its NIXL connector.

    client ──► proxy ──max_tokens=1──► prefill        its answer names the KV: kv_transfer_params
                 └──the request, with them──► decode ──stream──► client

Run by the interpreter of vLLM's environment, which has httpx, starlette and uvicorn:

    VENV/bin/python vllm_pd_proxy.py PORT PREFILL_PORT DECODE_PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

# What the prefill server is told: nothing is known yet of the KV that it shall keep for somebody else.
ASK_FOR_KV = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def build(prefill_url: str, decode_url: str) -> Starlette:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    prefill = httpx.AsyncClient(base_url=prefill_url, timeout=None, limits=limits)
    decode = httpx.AsyncClient(base_url=decode_url, timeout=None, limits=limits)

    async def generate(request: Request) -> Response:
        body = await request.json()
        first_leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_KV}
        first_leg.pop("stream_options", None)
        prefilled = await prefill.post(request.url.path, json=first_leg)
        if prefilled.status_code != 200:
            return Response(prefilled.content, prefilled.status_code, media_type="application/json")
        second_leg = {**body, "kv_transfer_params": prefilled.json()["kv_transfer_params"]}

        async def stream() -> AsyncIterator[bytes]:
            async with decode.stream("POST", request.url.path, json=second_leg) as answer:
                async for chunk in answer.aiter_raw():
                    yield chunk

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        answer = await decode.get("/v1/models")
        return Response(answer.content, answer.status_code, media_type="application/json")

    async def health(_: Request) -> Response:
        """200 once both answer."""
        try:
            codes = [(await client.get("/health")).status_code for client in (prefill, decode)]
        except httpx.TransportError:
            codes = [503]
        return JSONResponse({}, status_code=max(codes))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await prefill.aclose()
        await decode.aclose()

    routes = [
        Route("/v1/completions", generate, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    port, prefill_port, decode_port = map(int, sys.argv[1:])
    app = build(f"http://127.0.0.1:{prefill_port}", f"http://127.0.0.1:{decode_port}")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
