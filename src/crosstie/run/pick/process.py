"""The picker as a process: a gateway whose requests come from Envoy, and go to backends through it."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

from crosstie.core.fleet import Fleet
from crosstie.run.gateway.notices import Notice
from crosstie.run.pick.picked import PickedExchange, check_endpoints
from crosstie.run.pick.server import PickServer
from crosstie.run.pick.stream import PickStream
from crosstie.run.service.process import GatewayProcess
from crosstie.run.service.start import Observers, Served, ServeOptions, run, would_serve

# How long those are waited for whom the end cuts short, so that they are told.
_LAST_S = 0.3


class PickProcess(GatewayProcess):
    """`fallbacks`: how many endpoints are named after the first."""

    def __init__(self, *given: Any, fallbacks: int = 2, **more: Any):
        super().__init__(*given, **more)
        self._fallbacks = fallbacks

    async def start(self, host: str, port: int) -> None:
        check_endpoints(self.fleet)
        await super().start(host, port)

    async def _listen(self, host: str, port: int) -> int:
        gateway = self.gateway
        gateway.exchange, gateway.ops_apart = PickedExchange, True
        self.server.tells_peers = True
        self.calls = PickServer(gateway.loop, self._open, lambda: gateway.ready)
        return await self.calls.start(host, port, self.server.tls)

    def _open(self, wake: Callable[[], None], peer: str) -> PickStream:
        return PickStream(self.server, wake, peer, self._fallbacks)

    def load(self, fleet: Fleet) -> None:
        check_endpoints(fleet)
        super().load(fleet)

    async def stop(self) -> bool:
        """Its health says no before it takes no more, so that Envoy asks another."""
        gateway = self.gateway
        gateway.draining = True
        busy = len(gateway.exchanges)
        if busy:
            self.notify(Notice("draining", "info", f"draining: {busy} requests are being answered", requests=busy))
        if self._is_leaving:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(gateway.serving.lame_duck_s):
                    await self._hurried.wait()
        stopping = gateway.loop.create_task(self.calls.stop(gateway.serving.drain_s))
        hurried = gateway.loop.create_task(self._hurried.wait())
        limit = max(gateway.serving.drain_s - _LAST_S, 0.0)
        await asyncio.wait([stopping, hurried], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        cut_off = len(gateway.exchanges)
        if cut_off:
            gateway.give_up()
            await asyncio.sleep(_LAST_S)
        await self.calls.stop(None)
        await stopping
        self.server.close()
        await self._close()
        return not cut_off


def run_picker(
    options: ServeOptions, observers: Observers, on_ready: Callable[[Served], None], *, fallbacks: int = 2
) -> bool:
    """Picks in this process until a signal ends it; whether every request was answered. Raises CrosstieError."""
    return run(options, observers, on_ready, partial(PickProcess, fallbacks=fallbacks))


def would_pick(options: ServeOptions, observers: Observers) -> Served:
    """What would be picked from; nothing is started. Raises CrosstieError where it could not be."""
    served = would_serve(options, observers)
    check_endpoints(served.fleet)
    return served
