"""Every error Baton can give, in one table: gRPC status, HTTP status, OpenAI type and code, and who may retry.

DESIGN's error table. Anything raised on purpose is a BatonError; anything else is a bug and leaves as INTERNAL.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import grpc

Retry = Literal["no", "client", "inside"]


class ErrorKind(StrEnum):
    """What went wrong, from the point of view of who must act."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH = "context_length_exceeded"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    UNKNOWN_MODEL = "model_not_found"
    OVER_QUOTA = "rate_limit_exceeded"
    OVERLOADED = "overloaded"
    DEADLINE_UNREACHABLE = "deadline_unreachable"
    NO_WORKER = "no_worker"
    DRAINING = "draining"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    STALE_EPOCH = "stale_epoch"
    LEASE_LOST = "lease_lost"
    CORRUPT_KV = "corrupt_kv"
    WORKER_FAILED = "worker_failed"
    INTERNAL = "internal_error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """How one kind leaves the system. `retry`: "inside" kinds are answered by re-prefill and never reach a client."""

    grpc_status: grpc.StatusCode
    http_status: int
    openai_type: str
    retry: Retry

    @property
    def is_fault(self) -> bool:
        """Something is wrong on our side; else the client asked for too much, or left."""
        return self.http_status >= 500


_S = grpc.StatusCode
ERROR_TABLE: Final[dict[ErrorKind, ErrorRow]] = {
    ErrorKind.INVALID_REQUEST: ErrorRow(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "no"),
    ErrorKind.CONTEXT_LENGTH: ErrorRow(_S.INVALID_ARGUMENT, 400, "invalid_request_error", "no"),
    ErrorKind.UNAUTHENTICATED: ErrorRow(_S.UNAUTHENTICATED, 401, "authentication_error", "no"),
    ErrorKind.PERMISSION_DENIED: ErrorRow(_S.PERMISSION_DENIED, 403, "permission_error", "no"),
    ErrorKind.UNKNOWN_MODEL: ErrorRow(_S.NOT_FOUND, 404, "invalid_request_error", "no"),
    ErrorKind.OVER_QUOTA: ErrorRow(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "client"),
    ErrorKind.OVERLOADED: ErrorRow(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "client"),
    ErrorKind.DEADLINE_UNREACHABLE: ErrorRow(_S.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "client"),
    ErrorKind.NO_WORKER: ErrorRow(_S.UNAVAILABLE, 503, "server_error", "client"),
    ErrorKind.DRAINING: ErrorRow(_S.UNAVAILABLE, 503, "server_error", "client"),
    ErrorKind.DEADLINE_EXCEEDED: ErrorRow(_S.DEADLINE_EXCEEDED, 504, "server_error", "client"),
    ErrorKind.STALE_EPOCH: ErrorRow(_S.ABORTED, 500, "server_error", "inside"),
    ErrorKind.LEASE_LOST: ErrorRow(_S.ABORTED, 500, "server_error", "inside"),
    ErrorKind.CORRUPT_KV: ErrorRow(_S.ABORTED, 500, "server_error", "inside"),
    ErrorKind.WORKER_FAILED: ErrorRow(_S.ABORTED, 500, "server_error", "inside"),
    ErrorKind.INTERNAL: ErrorRow(_S.INTERNAL, 500, "server_error", "client"),
    ErrorKind.CANCELLED: ErrorRow(_S.CANCELLED, 499, "invalid_request_error", "no"),
}


class BatonError(Exception):
    """An error with a kind.

    message: one line that says what, where and what to do. param: the request field at fault, if one is.
    retry_after_s: how long a client should wait, where the kind is worth a retry.
    """

    def __init__(
        self, kind: ErrorKind, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def row(self) -> ErrorRow:
        return ERROR_TABLE[self.kind]

    def __str__(self) -> str:
        return self.message


class StartupError(Exception):
    """A worker or router can't start: one line naming what, where and what to do. The CLI exits with `exit_code`."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def invalid(message: str, param: str | None = None) -> BatonError:
    """Short for the most frequent user error."""
    return BatonError(ErrorKind.INVALID_REQUEST, message, param=param)
