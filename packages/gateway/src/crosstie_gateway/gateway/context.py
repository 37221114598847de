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
        # Where responses live that somebody may go on from.
        self.responses = KeptResponses()
        # Says which keys may ask, and how much; None: everyone, anything.
        self.guard: Guard | None = None
        # Follows requests while they go on.
        self.tracing: Tracing | None = None
        # Loads the models of shared pools; None: there are no such pools.
        self.hosted: HostedModels | None = None
        # Loads LoRA adapters; None: there are none.
        self.adapters: AdapterLoader | None = None
        # Other workers of this gateway, who find out what this one does; None: there are none.
        self.workers: OtherWorkers | None = None
        # Reads prompts as their engines do; None: they are estimated.
        self.tokenizing: Tokenizing | None = None
        # Other packages' guards, filters and policies; None: there are none.
        self.plugins: Plugins | None = None
        # Sends pools on trial their share; None: there are none.
        self.trials: TrialPools | None = None
        # Keeps files and runs batches; None: there are none.
        self.batches: Batches | None = None
        # Pages for operators at the clients' port; None: there are none.
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
