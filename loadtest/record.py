"""What is written down about one request. All times are seconds of one monotonic clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from loadtest.errors import BenchError


class Failure(StrEnum):
    """Why a request did not count as served. HTTP refusals are counted by code: see RequestRecord.failure_name."""

    HTTP_STATUS = "http"
    GRPC_STATUS = "grpc"
    CONNECT = "connect"
    DISCONNECT = "disconnect"
    STREAM_ERROR = "stream_error"
    TIMEOUT = "timeout"
    EMPTY_STREAM = "empty_stream"
    NO_FINISH_REASON = "no_finish_reason"
    PROTOCOL = "protocol"
    # Given up by us (Ctrl-C, or a probe that was already lost): neither served nor the server's fault.
    CANCELLED = "cancelled"


class TargetError(BenchError):
    """The server can't be reached or does not speak the expected API."""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request; written by the runner and the target while it runs, read-only afterwards.

    intended_s: when it was due; every latency runs from here. sent_s: when its bytes were handed to the kernel.
    events_s: arrival of each token-carrying event. event_tokens: tokens seen in them (exact where the server sends
    token ids, else one an event). output_tokens: from the server's usage, else event_tokens.
    """

    index: int
    stream: int
    turn: int
    intended_s: float
    requested_tokens: int
    sent_s: float = 0.0
    end_s: float = 0.0
    events_s: array[float] = field(default_factory=lambda: array("d"))
    event_tokens: int = 0
    usage_prompt_tokens: int | None = None
    usage_cached_tokens: int | None = None
    usage_output_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    failure_code: str = ""
    failure_detail: str = ""
    # Kept only where a later turn sends the answer back.
    keep_answer: bool = False
    answer_text: list[str] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def output_tokens(self) -> int:
        return self.event_tokens if self.usage_output_tokens is None else self.usage_output_tokens

    @property
    def ttft_s(self) -> float | None:
        return self.events_s[0] - self.intended_s if self.events_s else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        if self.output_tokens < 2 or not self.events_s:
            return None
        return (self.events_s[-1] - self.events_s[0]) / (self.output_tokens - 1)

    @property
    def failure_name(self) -> str:
        """E.g. "http_429", "grpc_unavailable", "timeout": the key under which errors are counted."""
        name = str(self.failure) if self.failure else ""
        return f"{name}_{self.failure_code}" if self.failure_code else name

    def fail(self, failure: Failure, detail: str = "", code: str = "") -> None:
        """The first failure stays: what follows is its consequence."""
        if self.failure is None:
            self.failure, self.failure_code, self.failure_detail = failure, code, detail[:300]

    def close(self, now: float) -> None:
        """The stream has ended: judge it. Success needs tokens and a finish reason.

        A target that knows when the last byte came has set end_s; what failed ends now.
        """
        if self.failure is None and not self.events_s:
            self.fail(Failure.EMPTY_STREAM, "the stream ended without a token")
        elif self.failure is None and self.finish_reason is None:
            self.fail(Failure.NO_FINISH_REASON, "the stream ended without a finish reason")
        if self.failure is not None or not self.end_s:
            self.end_s = now
