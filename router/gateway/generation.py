"""One continuation as its client sees it: its tokens with their text, and the moments at which they were written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from common.logprobs import TokenLogprobs
from common.sampling_params import FinishReason
from router.dispatcher import Dispatcher
from router.gateway.text_stream import Detokenizer, StopHit, TextStream
from router.request import RequestRun
from router.spec import End, Finished, GenerationSpec


class WriteObserver(Protocol):
    """Told when tokens reach the client; the metrics are one. Seconds."""

    def on_first_token(self, ttft_s: float) -> None: ...

    def on_tokens(self, gap_s: float, num_tokens: int) -> None: ...

    def on_last_token(self, mean_gap_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """first_index: of token_ids in the output. text may lag behind the tokens. end: set once, in the last delta.
    logprobs, prompt_logprobs: see Delta.
    """

    first_index: int
    token_ids: Sequence[int]
    text: str
    end: End | None
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Generation:
    """Made and started by `start_choices`; `close` it, however it ends. index: among the client's choices."""

    def __init__(
        self,
        spec: GenerationSpec,
        index: int,
        detokenizer: Detokenizer,
        observer: WriteObserver,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self.request_id = spec.request_id
        self._text = TextStream(
            detokenizer,
            spec.stop,
            spec.sampling.stop_token_ids,
            min_tokens=spec.sampling.min_tokens,
            include_stop=spec.include_stop,
        )
        self._has_stop = bool(spec.stop) or spec.include_stop
        self._observer = observer
        self._clock = clock
        self._received_at = spec.received_at
        self._first_written_at = 0.0
        self._last_written_at = 0.0
        self._num_tokens = 0
        self._num_written = 0
        self._ended = False
        self._run: RequestRun | None = None

    def attach(self, run: RequestRun) -> None:
        """What it shows. Once, before anything is taken."""
        self._run = run

    def take(self) -> TextDelta:
        """What is new; possibly nothing. After a delta with an end there is no more."""
        if self._run is None:
            return TextDelta(0, (), "", None)
        news = self._run.take()
        first_index, token_ids, end = self._num_tokens, news.token_ids, news.end
        piece = self._text.push(token_ids) if token_ids else ""
        text = ""
        if isinstance(end, Finished) and isinstance(piece, str):
            text, piece = piece, self._text.finish()
        if isinstance(piece, StopHit):
            # finish() counts no token of its own: the stop string ends with the last one.
            token_ids = token_ids[: piece.num_tokens] if piece.num_tokens else token_ids
            usage = self._run.stop(first_index + len(token_ids))
            end = Finished(FinishReason.STOP, usage)
            piece = piece.text
        self._num_tokens = first_index + len(token_ids)
        self._ended = end is not None
        logprobs = news.logprobs[: len(token_ids)]
        return TextDelta(first_index, token_ids, text + piece, end, logprobs, news.prompt_logprobs)

    def take_text(self) -> str | None:
        """As `take`, only the text, where nothing but text can come: no end, no stop string. Else None."""
        if self._has_stop or self._run is None or self._run.ended:
            return None
        token_ids = self._run.take_token_ids()
        self._num_tokens += len(token_ids)
        return str(self._text.push(token_ids))

    @property
    def ended(self) -> bool:
        """Whether the next `take` brings the end."""
        return self._run is not None and self._run.ended

    def mark_written(self) -> None:
        """The last delta was handed to the connection just now."""
        num_new = self._num_tokens - self._num_written
        if num_new:
            now = self._clock()
            if self._num_written == 0:
                self._first_written_at = now
                self._observer.on_first_token(now - self._received_at)
            else:
                self._observer.on_tokens(now - self._last_written_at, num_new)
            self._last_written_at = now
            self._num_written = self._num_tokens
        if self._ended and self._num_written > 1:
            span = self._last_written_at - self._first_written_at
            self._observer.on_last_token(span / (self._num_written - 1))

    def close(self) -> None:
        """Abort what still runs; a no-op for what ended."""
        if self._run is not None:
            self._run.abort()


def start_choices(
    spec: GenerationSpec,
    first_index: int,
    dispatcher: Dispatcher,
    new_detokenizer: Callable[[], Detokenizer],
    notify: Callable[[Generation], None],
    observer: WriteObserver,
    clock: Callable[[], float],
) -> list[Generation]:
    """All continuations of one prompt, of indices first_index and on. Raises what Dispatcher.submit_choices raises.

    notify: called with a generation whenever its `take` has news.
    """
    generations = [
        Generation(spec, first_index + i, new_detokenizer(), observer, clock) for i in range(spec.num_choices)
    ]
    runs = dispatcher.submit_choices(spec, [partial(notify, generation) for generation in generations])
    for generation, run in zip(generations, runs, strict=True):
        generation.attach(run)
    return generations
