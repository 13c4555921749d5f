"""The generations of one HTTP request: started together, ended together, and given up when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import reduce

from starlette.types import Receive

from common.errors import BatonError
from router.gateway.generation import Generation, TextDelta, start_choices
from router.gateway.mailbox import Mailbox
from router.gateway.state import GatewayState
from router.spec import Finished, GenerationSpec, Usage


class GenerationGroup:
    """The choices of specs[0], then those of specs[1] …, numbered through. Owned by one response."""

    def __init__(self, state: GatewayState, specs: Sequence[GenerationSpec]) -> None:
        self._mailbox: Mailbox[Generation] = Mailbox()
        self._open: set[Generation] = set()
        self._usages: list[Usage] = []
        self._put_back: dict[Generation, TextDelta] = {}
        try:
            for index, spec in enumerate(specs):
                first, post = index * spec.num_choices, self._mailbox.post
                choices = start_choices(
                    spec, first, state.dispatcher, state.model.new_detokenizer, post, state.metrics, state.clock
                )
                self._open.update(choices)
        except BaseException as error:
            self.close()
            for waiting in specs[index + 1 :]:
                state.quotas.release(waiting.lease_id, 0)
            if isinstance(error, BatonError):
                spec = specs[index]
                state.refuse(error, spec.request_id, spec.trace, spec.operation, spec.received_at)
            raise

    @property
    def done(self) -> bool:
        return not self._open

    @property
    def usage(self) -> Usage:
        """Of all finished generations together."""
        return reduce(Usage.plus, self._usages, Usage(0, 0, 0))

    async def next(self) -> tuple[Generation, TextDelta]:
        """The next news of any, perhaps with its end, an error included. Raises ClosedMailboxError when the client is
        gone.
        """
        while True:
            generation = await self._mailbox.get()
            if generation not in self._open:
                continue
            delta = self._put_back.pop(generation, None) or generation.take()
            if delta.end is not None:
                self._open.discard(generation)
                if isinstance(delta.end, Finished):
                    self._usages.append(delta.end.usage)
            return generation, delta

    def set_express(self, handle: Callable[[Generation], bool] | None) -> None:
        """See Mailbox."""
        self._mailbox.set_express(handle)

    def put_back(self, generation: Generation, delta: TextDelta) -> None:
        """What was taken by somebody else, its end among it, is the next that `next` returns for it."""
        self._put_back[generation] = delta

    def close(self) -> None:
        """Abort whatever still runs."""
        self._mailbox.set_express(None)
        for generation in self._open:
            generation.close()
        self._open.clear()

    @asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """While inside, the client's disconnect makes `next` raise; at the end nothing runs any more."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            self.close()
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._mailbox.close()
