"""Logprobs as the OpenAI endpoints and vLLM's extension write them. Plain dicts, for orjson.

A token may be a part of a character. Chat gives its bytes beside a text with U+FFFD; completions, which have no room
for them, spell it "bytes:\\xf0\\x9f", as OpenAI's did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from common.logprobs import TokenLogprobs

TokenBytes = Callable[[int], bytes]


def chat_logprobs(logprobs: Iterable[TokenLogprobs], num_top: int, token_bytes: TokenBytes) -> dict[str, Any]:
    """The `logprobs` object of a chat choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}

    content = [
        {**entry(each.token_id, each.logprob), "top_logprobs": [entry(*pair) for pair in each.top[:num_top]]}
        for each in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], offset: int, token_bytes: TokenBytes
) -> dict[str, Any]:
    """The parallel arrays of a completion choice. logprobs: one for each of token_ids; None for a prompt's first token.

    offset: characters of text before the first of them. The drawn token stands among the likeliest in any case.
    """
    tokens = [_spelled(token_bytes(token_id)) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += num_chars(token_bytes(token_id))
    return {
        "text_offset": offsets,
        "token_logprobs": [None if each is None else each.logprob for each in logprobs],
        "tokens": tokens,
        "top_logprobs": [None if each is None else _top(each, token_bytes) for each in logprobs],
    }


def prompt_logprobs(logprobs: Iterable[TokenLogprobs], token_bytes: TokenBytes) -> list[dict[str, Any] | None]:
    """vLLM's extension: one object a prompt token, by token id; null for the first, which follows nothing."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": token_bytes(token_id).decode(errors="replace")}

    told: list[dict[str, Any] | None] = [None]
    for each in logprobs:
        own = {str(each.token_id): entry(each.token_id, each.logprob, each.rank)}
        told.append(own | {str(t): entry(t, value, rank) for rank, (t, value) in enumerate(each.top, 1)})
    return told


def num_chars(raw: bytes) -> int:
    """Characters that begin in these bytes: so a text's tokens add up to its length, however it is cut."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def _top(each: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    pairs = dict((*each.top, (each.token_id, each.logprob)))
    return {_spelled(token_bytes(token_id)): logprob for token_id, logprob in pairs.items()}


def _spelled(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
