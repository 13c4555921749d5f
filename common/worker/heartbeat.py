"""Watches the engine's loop and tells everybody how it is: routers, gRPC health, and the supervisor.

engine.pulse ──► silence, against what its step may take ──► WELL     reports go out, SERVING, watchdog patted
   (4 a second)                                              STALLED  reports say so, NOT_SERVING
                                                             LOST     `lost` is set: the worker ends
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from common import sd_notify
from common.engine.cost_rates import CostRates
from common.engine.engine_thread import EngineThread
from common.rpc.grpc_server import GrpcServer
from common.silence import SilenceTimer
from common.step_rates import StepRates
from common.telemetry import get_logger
from common.worker.info import BEAT_S
from common.worker.liveness import Liveness, LivenessLimits, allowed_silence_s, judge
from common.worker.session import SessionHub

_log = get_logger(__name__)
# A pat each so many beats.
_BEATS_A_PAT: Final = round(sd_notify.PAT_S / BEAT_S)


class Heartbeat:
    """`run` is a task of the host, from before the worker serves until after its sessions have ended.

    learned: the engine's step rates, None until known. measured: what stands for them until then.
    """

    def __init__(
        self,
        engine: EngineThread,
        hub: SessionHub,
        server: GrpcServer,
        limits: LivenessLimits,
        learned: Callable[[], StepRates | None],
        measured: CostRates,
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._server = server
        self._limits = limits
        self._learned = learned
        self._measured = measured
        self._serving = False
        self._shown = False
        self.liveness = Liveness.WELL
        self.lost: asyncio.Event = asyncio.Event()

    async def set_serving(self, serving: bool) -> None:
        """Whether health says SERVING while the engine is well."""
        self._serving = serving
        await self._show()

    async def run(self) -> None:
        """Until cancelled."""
        silence, beats, turn = SilenceTimer(BEAT_S, time.monotonic()), -1, 0
        while True:
            pulse = self._engine.pulse
            silence.look(time.monotonic())
            if pulse.beats != beats:
                beats = pulse.beats
                silence.heard()
            allowed_s = allowed_silence_s(self._limits, pulse.step, self._learned(), self._measured)
            await self._on_verdict(judge(self._limits, silence.seconds, allowed_s), silence.seconds)
            self._hub.beat(beats, stalled=self.liveness is not Liveness.WELL)
            if self.liveness is Liveness.WELL and turn % _BEATS_A_PAT == 0:
                sd_notify.notify("WATCHDOG=1")
            turn += 1
            await asyncio.sleep(BEAT_S)

    async def _on_verdict(self, liveness: Liveness, silence_s: float) -> None:
        if liveness is not self.liveness:
            self.liveness = liveness
            about = {"liveness": str(liveness), "silent_s": round(silence_s, 1)}
            (_log.info if liveness is Liveness.WELL else _log.error)("engine's heartbeat", **about)
            await self._show()
        if liveness is Liveness.LOST:
            self.lost.set()

    async def _show(self) -> None:
        serving = self._serving and self.liveness is Liveness.WELL
        if serving != self._shown:
            self._shown = serving
            await self._server.set_serving(serving)
