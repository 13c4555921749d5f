"""What a model made of one token at its place, as it travels from the sampler to the client. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution: before penalties, bias and temperature.

    rank: 1 for the likeliest token. top: (token id, logprob) of the likeliest, likeliest first, ties by id; as many as
    the request asked for, so `token_id` may be missing from them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
