"""From what was asked to what is run: ranges, defaults, context, and messages that name the field."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from common.errors import BatonError, ErrorKind
from common.kvcache.block_hash import chain_hashes, hash_seed
from router.gateway import validation
from router.gateway.prompts import Asked, AskedSampling, ChatPrompt, TextPrompt, TokenPrompt
from router.gateway.state import ServedModel
from router.gateway.validation import prepare


class WordEncoder:
    """A token a word, preceded by 1 where special tokens are asked for. Remembers which thread it ran in."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [1] * add_special_tokens + [10 + len(word) for word in text.split()]


@pytest.fixture
def state():
    model = ServedModel(
        name="tiny", fingerprint="f", created=0, max_model_len=64, vocab_size=100, eos_token_ids=(2, 3), block_size=4,
        max_prompt_chars=4000, encoder=WordEncoder(),
        render_chat=lambda messages: " ".join(m["content"] for m in messages),
        new_detokenizer=lambda: None, token_bytes=lambda token_id: b"",
    )  # fmt: skip
    with ThreadPoolExecutor(1, thread_name_prefix="encode") as executor:
        settings = SimpleNamespace(request_timeout_s=600.0, max_choices=4)
        yield SimpleNamespace(model=model, executor=executor, settings=settings)


def asked(prompt="one two three", default_max_tokens: int | None = 16, **sampling) -> Asked:
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)
    return Asked(
        request_id="r", model="", prompt=prompt, sampling=AskedSampling(**sampling),
        default_max_tokens=default_max_tokens, cache_salt="", timeouts_s={}, received_at=time.monotonic(),
    )  # fmt: skip


async def refusal(state, request: Asked) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await prepare(state, request)
    return caught.value


async def test_what_is_not_said_gets_its_default(state):
    spec = await prepare(state, asked())
    assert spec.prompt_token_ids == [1, 13, 13, 15]
    sampling = spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)
    assert (sampling.max_tokens, sampling.stop_token_ids) == (16, (2, 3))
    assert spec.deadline == pytest.approx(spec.received_at + 600)
    assert spec.hash_seed == hash_seed("f")
    assert spec.packed_hashes == b"".join(chain_hashes(spec.hash_seed, spec.prompt_token_ids, 4))


async def test_a_seed_is_drawn_anew_unless_given(state):
    seeds = {(await prepare(state, asked())).sampling.seed for _ in range(3)}
    assert len(seeds) == 3
    assert (await prepare(state, asked(seed=7))).sampling.seed == 7
    assert (await prepare(state, asked(seed=-1))).sampling.seed == (1 << 64) - 1


async def test_a_salt_separates_the_hashes(state):
    plain, salted = await prepare(state, asked()), await prepare(state, replace(asked(), cache_salt="tenant"))
    assert plain.hash_seed != salted.hash_seed
    assert plain.packed_hashes != salted.packed_hashes


async def test_ignore_eos_keeps_the_clients_own_stop_tokens(state):
    assert (await prepare(state, asked(ignore_eos=True, stop_token_ids=(9,)))).sampling.stop_token_ids == (9,)
    assert (await prepare(state, asked(stop_token_ids=(9, 2)))).sampling.stop_token_ids == (2, 3, 9)


@pytest.mark.parametrize(("default", "wanted"), [(16, 16), (100, 60), (None, 60)])
async def test_a_default_bound_never_exceeds_the_context(state, default, wanted):
    assert (await prepare(state, asked(default_max_tokens=default))).sampling.max_tokens == wanted


async def test_prompt_and_completion_must_fit_the_context_together(state):
    assert (await prepare(state, asked([5] * 60, max_tokens=4))).sampling.max_tokens == 4
    error = await refusal(state, asked([5] * 60, max_tokens=5))
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "max_tokens")
    assert "maximum context length is 64 tokens. However, you requested 65 tokens (60 in the prompt, 5 for" in str(
        error
    )
    error = await refusal(state, asked([5] * 64))
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "you requested 65 tokens (64 in the prompt, 1 for" in str(error)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "max_tokens_field": "max_completion_tokens"}, "max_completion_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a", "b", "c", "d", "e")}, "stop"),
        ({"stop": ("a" * 2000,)}, "stop"),
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple([1] * 200)}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 5}, "best_of"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 1 << 40}, "min_tokens"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 100.5}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
        ({"logprobs": 21, "logprobs_field": "top_logprobs"}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
async def test_out_of_range_is_refused_by_name(state, sampling, param):
    error = await refusal(state, asked(**sampling))
    assert (error.kind, error.param) == (ErrorKind.INVALID_REQUEST, param)
    assert f"`{param}`" in str(error)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_k": -1}, {"min_p": 0}]
)
async def test_bounds_themselves_are_in_range(state, sampling):
    await prepare(state, asked(**sampling))


@pytest.mark.parametrize("prompt", ["", [], [100], [-1], [10**12]])
async def test_a_prompt_must_have_tokens_of_the_vocabulary(state, prompt):
    error = await refusal(state, asked(prompt))
    assert (error.kind, error.param) == (ErrorKind.INVALID_REQUEST, "prompt")


async def test_an_unknown_model_is_not_found(state):
    error = await refusal(state, replace(asked(), model="other"))
    assert (error.kind, error.param) == (ErrorKind.UNKNOWN_MODEL, "model")
    assert "other" in str(error)
    await prepare(state, replace(asked(), model="tiny"))


@pytest.mark.parametrize(
    ("timeouts", "wanted"),
    [
        ({}, 600.0),
        ({"timeout": 5.0}, 5.0),
        ({"timeout": 5.0, "x-request-timeout": 3.0}, 3.0),
        ({"timeout": 1e9}, 600.0),
    ],
)
async def test_the_tightest_timeout_counts_and_the_routers_bounds_all(state, timeouts, wanted):
    assert (await prepare(state, replace(asked(), timeouts_s=timeouts))).timeout_s == wanted


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_timeout_must_be_positive(state, value):
    assert (await refusal(state, replace(asked(), timeouts_s={"timeout": value}))).param == "timeout"


async def test_a_chat_is_rendered_and_gets_no_special_tokens_twice(state):
    chat = replace(asked(), prompt=ChatPrompt([{"role": "user", "content": "one two"}]))
    assert (await prepare(state, chat)).prompt_token_ids == [13, 13]


async def test_only_long_prompts_leave_the_event_loop(state):
    await prepare(state, asked("short"))
    long = "aaaa " * (validation.INLINE_CHARS // 4)
    await refusal(state, asked(long))
    assert [name.startswith("encode") for name in state.model.encoder.threads] == [False, True]


async def test_the_event_loop_turns_while_a_long_prompt_is_worked_on(state):
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            loop.call_soon_threadsafe(entered.set)
            asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(10)
            return [5]

    state.model = replace(state.model, encoder=Slow())
    task = asyncio.create_task(prepare(state, asked("a" * (validation.INLINE_CHARS + 1))))
    await entered.wait()
    leave.set()
    assert (await task).prompt_token_ids == [5]


async def test_text_that_cannot_fit_is_refused_without_being_tokenized(state):
    error = await refusal(state, asked("a " * state.model.max_prompt_chars))
    assert (error.kind, error.param) == (ErrorKind.CONTEXT_LENGTH, "prompt")
    assert "maximum context length is 64 tokens" in error.message
    assert state.model.encoder.threads == []


async def test_a_chat_of_many_empty_messages_leaves_the_event_loop(state):
    prompt = ChatPrompt([{"role": "user", "content": ""}] * 1000 + [{"role": "user", "content": "hi"}])
    await prepare(state, replace(asked(), prompt=prompt))
    assert state.model.encoder.threads[0].startswith("encode")
