"""One request's life: placed, reserved, prefilled, decoded, and begun again elsewhere when a worker fails it.

Everything here is synchronous and on the event loop, but for the placement, which is a task of the request. Workers'
frames come in by the two legs; the gateway is notified and takes what is new. See router/request_state.py for the
states and router/token_merger.py for the order of tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from common.errors import BatonError, ErrorKind
from common.logprobs import TokenLogprobs
from common.rpc.worker_messages import Fork, PullSource, SequenceSpec, TransferTarget
from common.sampling_params import FinishReason
from common.telemetry import get_logger
from router.cluster.messages import LegNews
from router.cluster.worker_session import SessionState
from router.leg import Leg
from router.placer import Placer, WorkerPair
from router.policy.suspicion import PROVEN_TOKENS, Record, Verdict, after_failure, verdict
from router.request_record import RequestFacts, RequestRecord
from router.request_state import TERMINAL, RequestState, check_move
from router.spec import Delta, End, Finished, GenerationSpec, Usage
from router.token_merger import LogprobsMerger, TokenMerger

# Times that a request leaves a decode worker which has no blocks for it. A move is no failure, and no attempt of these.
MAX_MOVES: Final = 3
# Times that draining workers may hand a request back before that counts as a failure: a whole fleet may be rolled.
MAX_HAND_BACKS: Final = 16
# Before an attempt that can only go to a worker which has just failed; doubled each time.
RETRY_PAUSE_S: Final = 0.2
# Usage and timings come with the prefill leg's last frame, when its transfer is over; no client waits longer for them.
LEG_END_WAIT_S: Final = 1.0
# Answered by another attempt: the request is not at fault.
RETRYABLE: Final = frozenset(
    {ErrorKind.LEASE_LOST, ErrorKind.CORRUPT_KV, ErrorKind.STALE_EPOCH, ErrorKind.DRAINING, ErrorKind.WORKER_FAILED}
)
# Reported by one leg, perhaps caused by the other.
_BETWEEN_LEGS: Final = frozenset({ErrorKind.LEASE_LOST, ErrorKind.CORRUPT_KV, ErrorKind.STALE_EPOCH})

_log = get_logger(__name__)


class RunContext(Protocol):
    """What a request needs of the dispatcher that owns it."""

    @property
    def placer(self) -> Placer: ...

    def clock(self) -> float: ...

    def next_transfer_id(self) -> str: ...

    def on_retry(self, reason: ErrorKind) -> None: ...

    def on_placed(self, run: RequestRun, num_uncached_tokens: int) -> None: ...

    def on_first_token(self, run: RequestRun) -> None: ...

    def on_output(self, run: RequestRun, num_tokens: int) -> None: ...

    def on_move(self) -> None: ...

    def try_alone(self, run: RequestRun) -> None:
        """To be started when no other suspect is at a worker."""

    def on_proven(self, run: RequestRun) -> None:
        """A suspect has shown that it does no harm."""

    def on_guilty(self, run: RequestRun, error: BatonError) -> None:
        """It kills workers: it and the other choices of its prompt are to fail."""

    def on_end(self, run: RequestRun, record: RequestRecord) -> None: ...


class RequestRun:
    """Owned by the Dispatcher; the gateway holds it to `take`, `stop` and `abort`.

    notify: called whenever `take` has something new; must not block.
    """

    def __init__(self, spec: GenerationSpec, context: RunContext, notify: Callable[[], None]) -> None:
        self.spec = spec
        self.state = RequestState.QUEUED
        self._context = context
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._facts = RequestFacts(spec, context.clock())
        self._merger = TokenMerger(spec.sampling.max_tokens)
        self._logprobs = LogprobsMerger(spec.sampling.max_tokens, len(spec.prompt_token_ids))
        self._num_taken = 0
        self._end: End | None = None
        self._attempt = 0
        self._base = 0  # output tokens that were there at the attempt's start
        self._failed: set[str] = set()
        self._record = Record()
        self._on_trial = False
        self._moved_from: set[str] = set()
        self._num_moves = 0
        self._num_hand_backs = 0
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._dispatch: asyncio.Task[None] | None = None
        # Other continuations of the prompt, until they are sent together with this one.
        self._forks: list[RequestRun] = []
        # What this attempt's decode worker was asked for; its prefill worker is asked for the same.
        self._sent: SequenceSpec | None = None
        self._sent_forks: list[RequestRun] = []
        self._pull_sources: tuple[PullSource, ...] = ()
        # Reason and number of output tokens, known as soon as a leg says so, perhaps before all tokens are here.
        self._finish: tuple[FinishReason, int] | None = None
        self._finish_timer: asyncio.TimerHandle | None = None
        self._deadline_timer = self._loop.call_at(spec.deadline, self._on_deadline)
        self._begin_attempt()

    # -- for the gateway

    def start(self) -> None:
        """Its turn has come: a placement is looked for. Until then it waits in the dispatcher's queue."""
        self._dispatch = asyncio.create_task(self._place_and_open())

    def adopt(self, forks: Sequence[RequestRun]) -> None:
        """Other continuations of the same prompt, which need no start of their own: this one's placement, prefill and
        transfer are theirs, too. After that each is a request like any other, and is repeated by itself.
        """
        self._forks = list(forks)

    def take(self) -> Delta:
        """Output tokens since the last call, and the end if it was reached; after an end there is nothing more."""
        tokens = self._merger.token_ids
        first, self._num_taken = self._num_taken, len(tokens)
        if not self._logprobs:
            return Delta(tokens[first:], self._end)
        prompt_logprobs = self._logprobs.take_prompt() if tokens else ()
        return Delta(tokens[first:], self._end, self._logprobs.take(first, len(tokens)), prompt_logprobs)

    def take_token_ids(self) -> Sequence[int]:
        """As `take`, for a request that has not ended."""
        tokens = self._merger.token_ids
        first, self._num_taken = self._num_taken, len(tokens)
        return tokens[first:]

    @property
    def ended(self) -> bool:
        return self._end is not None

    def stop(self, num_tokens: int) -> Usage:
        """The text ended with output token number `num_tokens` (a stop string): workers are told to drop the rest."""
        usage = self._facts.usage(num_tokens)
        if self.state not in TERMINAL:
            self._terminate(RequestState.FINISHED, Finished(FinishReason.STOP, usage), FinishReason.STOP, num_tokens)
        return usage

    def abort(self) -> None:
        """The client is gone. Both workers hear of it at once. A no-op after the end."""
        if self.state not in TERMINAL:
            error = BatonError(ErrorKind.CANCELLED, "the request was cancelled")
            self._terminate(RequestState.ABORTED, error, "abort")

    def fail(self, error: BatonError) -> None:
        """End with an error. A no-op after the end."""
        if self.state not in TERMINAL:
            self._terminate(RequestState.FAILED, error, error.kind)

    def look(self) -> RequestRecord:
        """Where it stands, while it runs."""
        num_tokens = len(self._merger.token_ids)
        return self._facts.record("running", self.state, num_tokens, self._context.clock(), None)

    # -- an attempt

    def _begin_attempt(self) -> None:
        self._attempt += 1
        self._base = len(self._merger.token_ids)
        self._facts.begin_attempt(self._base)

    async def _place_and_open(self) -> None:
        self._facts.attempt.placing_at = self._context.clock()
        try:
            pair = await self._place()
            if self.state in TERMINAL:  # redis-py can lose a cancellation; see common/tasks.py
                return
            self._dispatch = None
            self._open_legs(pair)
        except BatonError as error:
            self._dispatch = None
            self.fail(error)
        except Exception:
            _log.exception("placement failed", **self._log_ids())
            self._dispatch = None
            self.fail(BatonError(ErrorKind.INTERNAL, "the router failed to place the request"))

    async def _place(self) -> WorkerPair:
        placer, retrying = self._context.placer, self._attempt > 1
        num_tokens = len(self.spec.prompt_token_ids) + self._base
        avoided = self._failed | self._moved_from
        pair = await placer.place(num_tokens, self.spec.packed_hashes, avoided, wait=retrying)
        if not self._failed.isdisjoint(pair.worker_ids):
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** max(0, self._record.num_failures - 1))
            pair = await placer.place(num_tokens, self.spec.packed_hashes, avoided, wait=True)
        return pair

    def _open_legs(self, pair: WorkerPair) -> None:
        if not self._subscribe(pair, pair.uncached_prefill_tokens, pair.new_decode_blocks):
            return
        self._sent_forks = [fork for fork in self._forks if fork.state not in TERMINAL and fork._join(pair)]
        self._forks = []
        self._sent = self._sequence_spec(self._sent_forks)
        self._pull_sources = pair.pull_sources
        pair.decode.send_reserve(self._sent, prefill_here=pair.prefill is None)

    def _join(self, pair: WorkerPair) -> bool:
        """Go along with the first continuation of the prompt."""
        self._facts.attempt.placing_at = self._context.clock()
        return self._subscribe(pair, 0, 0)

    def _subscribe(self, pair: WorkerPair, num_prefill_tokens: int, num_blocks: int) -> bool:
        """Hear of this attempt from both workers. False where one was lost; that has been seen to."""
        transfer_id = self._context.next_transfer_id()
        alone = pair.prefill is None
        self._decode = Leg(self, "decode", pair.decode, transfer_id)
        self._prefill = None if pair.prefill is None else Leg(self, "prefill", pair.prefill, transfer_id)
        computing = self._prefill or self._decode
        attempt = self._facts.attempt
        attempt.placed_at = self._context.clock()
        attempt.transfer_id, attempt.decode_id = transfer_id, self._decode.worker_id
        attempt.prefill_id = "" if self._prefill is None else self._prefill.worker_id
        attempt.predicted_cached_tokens = pair.predicted_cached_tokens
        self._context.on_placed(self, pair.uncached_prefill_tokens)
        for leg in self._legs():
            try:
                leg.subscribe(
                    prefill_tokens=num_prefill_tokens if leg is computing else 0,
                    blocks=num_blocks if leg is self._decode else 0,
                )
            except BatonError as error:
                leg.on_lost(error)
                return False
        if alone:
            self._facts.note_dispatch(self._context.clock())
        self._move(RequestState.PREFILLING if alone else RequestState.RESERVING)
        return True

    def _sequence_spec(self, forks: Sequence[RequestRun]) -> SequenceSpec:
        spec = self.spec
        emitted = self._merger.token_ids[: self._base]
        return SequenceSpec(
            transfer_id=self._facts.attempt.transfer_id,
            request_id=spec.request_id,
            token_ids=[*spec.prompt_token_ids, *emitted] if emitted else spec.prompt_token_ids,
            num_prompt_tokens=len(spec.prompt_token_ids),
            hash_seed=spec.hash_seed,
            sampling=replace(spec.sampling, prompt_logprobs=None) if emitted else spec.sampling,
            deadline=spec.deadline,
            traceparent="" if spec.trace is None else spec.trace.traceparent,
            priority=spec.priority,
            forks=tuple(Fork(run._facts.attempt.transfer_id, run.spec.sampling.seed) for run in forks),
        )

    # -- what the legs tell

    def on_reserved(self, target: TransferTarget) -> None:
        if self.state is not RequestState.RESERVING or self._prefill is None or self._sent is None:
            return
        for run in (self, *self._sent_forks):
            run._note_sent()
        self._prefill.session.send_prefill(self._sent, target, self._pull_sources)

    def _note_sent(self) -> None:
        if self.state is RequestState.RESERVING:
            self._move(RequestState.PREFILLING)
            self._facts.note_dispatch(self._context.clock())

    def on_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        self._logprobs.add_prompt(first_index, logprobs)

    def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        if logprobs:
            self._logprobs.add(first_index, logprobs)
        if not self._merger.add(first_index, token_ids):
            return
        if self.state is RequestState.PREFILLING:
            self._move(RequestState.DECODING)
            self._facts.attempt.first_token_at = self._context.clock()
            self._context.on_first_token(self)
        self._context.on_output(self, len(token_ids))
        self._notify()
        if self._on_trial and len(self._merger.token_ids) - self._base >= PROVEN_TOKENS:
            self._on_trial = False
            self._context.on_proven(self)
        if self._finish is not None:
            self._check_finish()

    def on_news(self, leg: Leg, news: LegNews) -> None:
        if news.num_wanted_blocks:
            self._on_preempted(leg, news.num_wanted_blocks)
            return
        now = self._context.clock()
        if leg.role == "decode":
            self._facts.note_decode(news, now)
        if news.error is not None:
            if news.error.kind is not ErrorKind.DRAINING or not self._take_back(leg):
                self._on_failure(leg, news.error)
            return
        if leg is (self._prefill or self._decode):
            self._facts.note_prefill(news, now)
        reason = news.finish_reason
        if reason is FinishReason.ABORT:
            self._on_failure(leg, BatonError(ErrorKind.DRAINING, "the worker gave the sequence up"))
            return
        if reason is not None and news.num_output_tokens is not None:
            self._finish = (reason, min(news.num_output_tokens, self.spec.sampling.max_tokens))
        self._check_finish()
        if self.state not in TERMINAL and self._finish_timer is None and self._is_stuck():
            self._on_failure(leg, BatonError(ErrorKind.LEASE_LOST, "the workers ended the sequence without its end"))

    def on_lost(self, leg: Leg, error: BatonError) -> None:
        self._on_failure(leg, error, died=True)

    def _on_failure(self, leg: Leg, error: BatonError, *, died: bool = False) -> None:
        """died: the leg's worker was lost. Whom else to avoid follows from who reports which kind."""
        died = died or error.kind is ErrorKind.WORKER_FAILED
        if died:
            blamed = {leg.worker_id}
        else:
            legs = self._legs() if error.kind in _BETWEEN_LEGS else [leg]
            blamed = {each.worker_id for each in legs}
        leg.close(abort=True)
        if self.state in TERMINAL:
            return
        if self._has_all_tokens():
            self._finish_now()
            return
        self._facts.note_failure(error, blamed, self._context.clock())
        if error.kind not in RETRYABLE:
            self.fail(error)
            return
        num_tokens = len(self._merger.token_ids) - self._base
        if num_tokens >= PROVEN_TOKENS:
            self._failed.clear()  # of long ago
        silent = leg.session.state is SessionState.SILENT
        self._record = after_failure(
            self._record, num_tokens=num_tokens, died=died, silent=silent, on_trial=self._on_trial
        )
        self._on_trial = False
        match verdict(self._record):
            case Verdict.GUILTY:
                message = f"workers failed {self._record.num_deaths} times while they computed this request"
                self._context.on_guilty(self, BatonError(ErrorKind.INTERNAL, f"{message}; it is not tried again"))
            case Verdict.GIVE_UP:
                self.fail(_public_error(error, self._attempt))
            case Verdict.TRIAL:
                self._retry(error, blamed, on_trial=True)
            case Verdict.AGAIN:
                self._retry(error, blamed, on_trial=False)

    def _retry(self, error: BatonError, blamed: set[str], *, on_trial: bool) -> None:
        about = {"attempt": self._attempt, "workers": sorted(blamed), "phase": str(self.state), "on_trial": on_trial}
        tokens = len(self._merger.token_ids)
        ids = {**self._log_ids(), "transfer_id": self._facts.attempt.transfer_id}
        _log.info("request is tried again", **ids, kind=str(error.kind), message=error.message, tokens=tokens, **about)
        self._failed |= blamed
        self._context.on_retry(error.kind)
        self._reset()
        self._on_trial = on_trial
        if on_trial:
            self._context.try_alone(self)
        else:
            self.start()

    def _on_preempted(self, leg: Leg, num_blocks: int) -> None:
        """The decode worker has no blocks for the sequence now, and is not at fault. Where another has, it goes on
        there from what was emitted; else this one takes it up again by itself."""
        if self.state is not RequestState.DECODING or leg is not self._decode or self._num_moves == MAX_MOVES:
            return
        if not self._context.placer.has_room_elsewhere(leg.worker_id, num_blocks):
            return
        _log.info("request moves", **self._log_ids(), worker_id=leg.worker_id, tokens=len(self._merger.token_ids))
        self._num_moves += 1
        self._moved_from = {leg.worker_id}
        self._context.on_move()
        self._reset()
        self.start()

    def _take_back(self, leg: Leg) -> bool:
        """From a worker that drains: no failure of anybody. It goes on elsewhere. False: it did so too often, or has
        nothing left to do."""
        if self._num_hand_backs == MAX_HAND_BACKS or self._has_all_tokens():
            return False
        tokens = len(self._merger.token_ids)
        _log.info("request is handed back", **self._log_ids(), worker_id=leg.worker_id, tokens=tokens)
        self._num_hand_backs += 1
        self._moved_from = {leg.worker_id}
        self._context.on_move()
        self._reset()
        self.start()
        return True

    def _reset(self) -> None:
        """To begin again elsewhere, from prompt and emitted tokens."""
        self._close_legs(abort=True)
        self._merger.restart()
        self._finish = None
        if self.state is not RequestState.QUEUED:  # a worker may be lost before its leg was opened
            self._move(RequestState.QUEUED)
        self._begin_attempt()

    # -- the end

    def _has_all_tokens(self) -> bool:
        tokens = self._merger.token_ids
        if self._finish is None and tokens:
            # The frame that said so may have died with its worker.
            reason = self.spec.sampling.finish_reason(tokens[-1], len(tokens))
            self._finish = None if reason is None else (reason, len(tokens))
        return self._finish is not None and len(tokens) >= self._finish[1]

    def _is_stuck(self) -> bool:
        """Whether no open leg could bring what is missing."""
        decode_over = self._decode is None or not self._decode.open
        if self._prefill is None:
            return decode_over
        first_token_came = len(self._merger.token_ids) > self._base
        return not self._prefill.open and (decode_over or not first_token_came)

    def _check_finish(self) -> None:
        if self._finish is None or not self._has_all_tokens():
            return
        if self._prefill is None or not self._prefill.open or self._facts.knows_cached_tokens:
            self._finish_now()
        elif self._finish_timer is None:
            self._finish_timer = self._loop.call_later(LEG_END_WAIT_S, self._finish_now)

    def _finish_now(self) -> None:
        if self._finish is not None and self.state not in TERMINAL:
            reason, num_tokens = self._finish
            end = Finished(reason, self._facts.usage(num_tokens))
            self._terminate(RequestState.FINISHED, end, reason, num_tokens)

    def _on_deadline(self) -> None:
        if self._has_all_tokens():
            self._finish_now()
        timeout = f"its timeout of {self.spec.timeout_s:g} s"
        if self.state is RequestState.QUEUED and not self._context.placer.has_worker:
            message = f"no worker became available within {timeout}; try again shortly"
            self.fail(BatonError(ErrorKind.NO_WORKER, message, retry_after_s=1.0))
            return
        message = f"the request was not finished within {timeout}"
        self.fail(BatonError(ErrorKind.DEADLINE_EXCEEDED, message, retry_after_s=1.0))

    def _terminate(self, state: RequestState, end: End, outcome: str, num_tokens: int | None = None) -> None:
        """The only way out: every timer, task, leg and share of load is given back here."""
        phase = self.state
        self._move(state)
        self._end = end
        self._deadline_timer.cancel()
        if self._finish_timer is not None:
            self._finish_timer.cancel()
        if self._dispatch is not None:
            self._dispatch.cancel()
        # A leg that is still open after a regular end only files its blocks: let it.
        regular = state is RequestState.FINISHED and self._finish is not None
        self._close_legs(abort=not regular)
        count = len(self._merger.token_ids) if num_tokens is None else num_tokens
        error = end if isinstance(end, BatonError) else None
        forks, self._forks = self._forks, []
        for fork in forks:
            fork.fail(error or BatonError(ErrorKind.INTERNAL, "the first continuation ended before it was sent"))
        self._context.on_end(self, self._facts.record(str(outcome), phase, count, self._context.clock(), error))
        self._notify()

    def _log_ids(self) -> dict[str, str]:
        ids = {"request_id": self.spec.request_id}
        return ids if self.spec.trace is None else {**ids, "trace_id": self.spec.trace.trace_id}

    def _legs(self) -> list[Leg]:
        return [leg for leg in (self._decode, self._prefill) if leg is not None]

    def _close_legs(self, *, abort: bool) -> None:
        for leg in self._legs():
            leg.close(abort=abort)
        self._prefill = self._decode = None

    def _move(self, state: RequestState) -> None:
        self.state = check_move(self.state, state)


def _public_error(error: BatonError, attempts: int) -> BatonError:
    """Kinds that mean something to routers only never reach a client."""
    message = f"workers failed {attempts} attempts at this request ({error.message}); try again shortly"
    return BatonError(ErrorKind.NO_WORKER, message, retry_after_s=1.0)
