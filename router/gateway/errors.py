"""Errors on their way to a client: OpenAI's body, over HTTP and inside a stream, and the rule for the unforeseen."""

from __future__ import annotations

import math
from typing import Final

import orjson
from starlette.responses import Response

from common.errors import BatonError, ErrorKind
from common.telemetry import get_logger

# HTTP statuses of the framework itself that are no BatonError.
_FRAMEWORK_CODES: Final = {404: "not_found", 405: "method_not_allowed"}

_log = get_logger(__name__)


def error_json(error: BatonError) -> bytes:
    """`{"error": …}` as OpenAI writes it; code is always a string."""
    return _body(error.message, error.row.openai_type, error.param, str(error.kind))


def error_response(error: BatonError, request_id: str) -> Response:
    headers = {"x-request-id": request_id}
    if error.row.retry == "client":
        headers["retry-after"] = str(math.ceil(error.retry_after_s or 1.0))
    return Response(error_json(error), error.row.http_status, headers, "application/json")


def framework_error_response(status: int, message: str, request_id: str, headers: dict[str, str]) -> Response:
    """For what the web framework refuses by itself, such as an unknown route."""
    body = _body(message, "invalid_request_error", None, _FRAMEWORK_CODES.get(status, "invalid_request"))
    return Response(body, status, {**headers, "x-request-id": request_id}, "application/json")


def as_baton_error(error: BaseException, request_id: str) -> BatonError:
    """A BatonError stays; anything else is a bug: it is logged in full, and the client learns only where to look."""
    if isinstance(error, BatonError):
        return error
    _log.error("unexpected error", request_id=request_id, exc_info=error)
    return BatonError(ErrorKind.INTERNAL, f"internal error; the server's log has it under request id {request_id}")


def _body(message: str, kind: str, param: str | None, code: str) -> bytes:
    one_line = " ".join(message.split())  # a chat template's complaint may have several
    return orjson.dumps({"error": {"message": one_line, "type": kind, "param": param, "code": code}})
