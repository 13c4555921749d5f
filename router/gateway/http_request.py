"""What every HTTP request has: an id, a body within bounds, and a time by which it must be answered."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Final

from starlette.requests import Request

from common.errors import BatonError, ErrorKind, invalid
from common.tracing import TraceContext, TraceSampler
from router.tenancy.directory import TenantDirectory
from router.tenancy.tenant import ANONYMOUS, Tenant

MAX_BODY_BYTES: Final = 16 << 20
# Lists and objects of a body: parsing a million of them would stop the event loop for seconds.
MAX_CONTAINERS: Final = 20_000
# Of usual text, or of a number and its comma.
BYTES_A_TOKEN: Final = 8
BODY_TIMEOUT_S: Final = 60.0
TIMEOUT_HEADER: Final = "x-request-timeout"
# A whole JSON string.
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SCOPE_KEY: Final = "baton.request_id"
_TRACE_KEY: Final = "baton.trace"
_TENANT_KEY: Final = "baton.tenant"


def request_id_of(request: Request) -> str:
    """The client's x-request-id where it is harmless, else one of our own; the same for the request's whole life."""
    known: str | None = request.scope.get(_SCOPE_KEY)
    if known is None:
        given = request.headers.get("x-request-id", "")
        known = given if _SANE_ID.fullmatch(given) else secrets.token_hex(12)
        request.scope[_SCOPE_KEY] = known
    return known


def trace_of(request: Request, sampler: TraceSampler) -> TraceContext | None:
    """The context of the request's root span; the same for the request's whole life."""
    if _TRACE_KEY not in request.scope:
        request.scope[_TRACE_KEY] = sampler.start(request.headers.get("traceparent", ""))
    known: TraceContext | None = request.scope[_TRACE_KEY]
    return known


def tenant_of(request: Request) -> Tenant:
    """Who asks, once `admit_tenant` has let it in."""
    tenant: Tenant = request.scope.get(_TENANT_KEY, ANONYMOUS)
    return tenant


def admit_tenant(request: Request, directory: TenantDirectory) -> None:
    """Raises UNAUTHENTICATED or PERMISSION_DENIED."""
    request.scope[_TENANT_KEY] = directory.authenticate(request.headers.get("authorization"))


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Raises INVALID_REQUEST once it exceeds max_bytes, or says that it will; the rest is not read.
    Raises INVALID_REQUEST for one of more than MAX_CONTAINERS lists and objects.
    Raises DEADLINE_EXCEEDED for one that is not here after BODY_TIMEOUT_S.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read_all(request, max_bytes)
    except TimeoutError:
        message = f"the request's body did not arrive within {BODY_TIMEOUT_S:g} s"
        raise BatonError(ErrorKind.DEADLINE_EXCEEDED, message) from None
    if len(body) > MAX_CONTAINERS and _num_containers(body) > MAX_CONTAINERS:
        raise invalid(f"the body has more than {MAX_CONTAINERS} lists and objects")
    return body


def max_body_bytes(max_prompt_chars: int, max_model_len: int, max_prompts: int) -> int:
    """The largest body of which anything could be served: one prompt of which each character is escaped, or many of
    usual text, and the rest.
    """
    return min(MAX_BODY_BYTES, (1 << 20) + 6 * max_prompt_chars + BYTES_A_TOKEN * max_model_len * max_prompts)


def _num_containers(body: bytes) -> int:
    """Brackets in strings are text: where there are many brackets, strings are looked at, else nothing needs to be."""
    opened = body.count(b"[") + body.count(b"{")
    return opened if opened <= MAX_CONTAINERS else sum(map(_STRING.sub(b"", body).count, (b"[", b"{")))


async def _read_all(request: Request, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise BatonError(ErrorKind.CANCELLED, "the client left before its request was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> BatonError:
    return invalid(f"the body is larger than {max_bytes / (1 << 20):.3g} MiB, more than the model's context could hold")


def timeouts_of(request: Request, body_timeout_s: float | None) -> dict[str, float]:
    """Field name → seconds, for each place where the client may set a timeout. Raises INVALID_REQUEST."""
    timeouts = {} if body_timeout_s is None else {"timeout": body_timeout_s}
    header = request.headers.get(TIMEOUT_HEADER)
    if header is not None:
        try:
            timeouts[TIMEOUT_HEADER] = float(header)
        except ValueError:
            raise invalid(f"`{TIMEOUT_HEADER}` must be a number of seconds", TIMEOUT_HEADER) from None
    return timeouts
