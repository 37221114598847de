"""A backend as the gateway holds it: its connections, its health, its breaker, and what `route` knows of it."""

import os

from crosstie.core.fleet import Pool
from crosstie.route.live import Replica
from crosstie.run.gateway.breaker import Breaker
from crosstie.run.wire.client import Origin

# Engines whose ways of going on with an answer are known, by what their /v1/models says of its owner. An emulated
# replica does as vLLM does, but sets no limit of its own to completions.
ENGINES = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "crosstie-emulated": "emulated"}


class Backend:
    def __init__(self, origin: Origin, replica: Replica, pool: Pool):
        self.origin, self.replica = origin, replica
        self.breaker = Breaker()
        # None until it was asked for the first time.
        self.healthy: bool | None = None
        self.why = "not asked yet"
        self.fails = 0
        # Its model was put away by a command, and its server with it: that it does not answer is no fault.
        self.put_away = False
        # Paths that this engine turned out not to have, and until when that is believed.
        self.lacks: dict[str, float] = {}
        # Which of the known engines it is, "" for none: as the fleet file says until it has been asked.
        self.engine: str = pool.stack if pool.stack is not None and pool.stack in ENGINES.values() else ""
        self.identified = False
        self.configure(pool)

    def configure(self, pool: Pool) -> None:
        self.pool = pool
        self.model = pool.served_as or pool.model
        # Keys that were read from files often have a line end, which would end the header and begin another.
        key = os.environ.get(pool.api_key_env, "").strip() if pool.api_key_env else ""
        self.authorization = b"Bearer " + key.encode() if key else None
        at = self.origin.address
        self.host_line = b"host: " + at.authority + b"\r\n"
        self.base = (at.base or "/v1").encode()
        self.name = pool.name.encode()

    def judge(self, now: float) -> None:
        """Tells `route` whether it may be chosen."""
        # Where the breaker lets it back it is on trial, and brought up slowly: the first fault shuts it again.
        self.breaker.check(now)
        if self.healthy is False and not self.put_away:
            self.replica.went_down(self.why)
        elif self.breaker.state == "open":
            self.replica.went_down("its circuit breaker is open")
        elif not self.replica.up:
            self.replica.came_up(now)

    def succeeded(self) -> None:
        self.breaker.succeeded()
        self.fails = 0

    def failed(self, why: str, now: float, *, refused: bool = False) -> None:
        """A fault of its own. A refused connection needs no second witness."""
        self.breaker.failed(now)
        if refused:
            self.healthy, self.why = False, why
        self.judge(now)

    def probed(self, fault: str | None, now: float, *, refused: bool = False) -> None:
        if fault is None:
            self.fails = 0
            self.healthy, self.why = True, ""
        else:
            self.fails += 1
            # What comes back may be another.
            self.identified = False
            # A slow answer happens to the busy; twice in a row is a fact.
            if refused or self.fails >= 2 or self.healthy is None:
                self.healthy, self.why = False, fault
        self.judge(now)
