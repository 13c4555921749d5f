"""A tenant's quota where only this router counts: the same buckets as router/tenancy/quota.lua, without Redis. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LocalBucket:
    """Levels at the moment `at` (seconds); may be negative. num_running: requests that hold a place."""

    at: float
    requests: float
    tokens: float
    num_running: int = 0

    def take(
        self, now: float, requests_per_minute: float, tokens_per_minute: float, most: int, tokens: int
    ) -> tuple[float, str] | None:
        """None: granted. Else seconds to wait, and which limit is exhausted. 0: no limit."""
        past_s = max(0.0, now - self.at)
        self.at = now
        self.requests = min(requests_per_minute, self.requests + past_s * requests_per_minute / 60)
        self.tokens = min(tokens_per_minute, self.tokens + past_s * tokens_per_minute / 60)
        if requests_per_minute and self.requests < min(1.0, requests_per_minute):
            return (1 - self.requests) * 60 / requests_per_minute, "requests_per_minute"
        needed = min(tokens, tokens_per_minute)
        if tokens_per_minute and self.tokens < needed:
            return (needed - self.tokens) * 60 / tokens_per_minute, "tokens_per_minute"
        if most and self.num_running >= most:
            return 1.0, "max_concurrent"
        self.requests -= 1
        self.tokens -= tokens
        self.num_running += 1
        return None
