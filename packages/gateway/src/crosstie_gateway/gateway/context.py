"""What all requests of a gateway share: clock, settings, router, backends, counts, and other parts. The gateway makes
it and keeps it up to date."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

from crosstie.core.fleet import Serving
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.router import Router
from crosstie_gateway.gateway.adapters import AdapterLoader
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.gateway.interfaces import (
    Batches,
    HostedModels,
    OtherWorkers,
    OwnPages,
    Plugins,
    Tokenizing,
    Tracing,
    TrialPools,
)
from crosstie_gateway.gateway.kept_sessions import SessionKeeper
from crosstie_gateway.gateway.metrics import Metrics
from crosstie_gateway.gateway.responses import KeptResponses

_monotonic: Final = monotonic


class Context:
    def __init__(self, loop: asyncio.AbstractEventLoop, router: Router, serving: Serving, speed: float):
        self.loop, self.router, self.serving = loop, router, serving
        # Times that `route` sees run so many times as fast as the clock; patience with sockets is in real seconds.
        self.speed = speed
        self.backends: dict[str, Backend] = {}
        self.metrics = Metrics()
        # The loop's time as of the last tick: patience needs no better, and streams ask at every event.
        self.clock = loop.time()
        self.responses = KeptResponses()
        # Parts that a gateway may be without; `interfaces` says what each does. No guard: everyone may ask anything.
        self.guard: Guard | None = None
        self.tracing: Tracing | None = None
        self.hosted: HostedModels | None = None
        self.adapters: AdapterLoader | None = None
        self.keeper = SessionKeeper(self.backends)
        self.workers: OtherWorkers | None = None
        self.tokenizing: Tokenizing | None = None
        self.plugins: Plugins | None = None
        self.trials: TrialPools | None = None
        self.batches: Batches | None = None
        self.own_pages: OwnPages | None = None
        # Called with each decision: the request's id, attempts before it, the request as the router sees it.
        self.on_decision: Callable[[bytes, int, Ask, Decision], None] | None = None
        # Called when a backend came up or went down.
        self.on_backend_changed: Callable[[Backend], None] = lambda backend: None
        # Called with the model of a request that is sent to a backend which was taken out of service.
        self.on_panic: Callable[[str], None] = lambda model: None
        # Called when this process could open no more files.
        self.on_exhausted: Callable[[], None] = lambda: None

    def now(self) -> float:
        # Not the loop's time, which uvloop counts in whole milliseconds.
        return _monotonic() * self.speed
