"""A backend as the gateway holds it: its connections, health, breaker and load, and what `route` knows of it."""

import contextlib
import os
import re
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from crosstie.core.fleet import Pool
from crosstie.route.live import Replica
from crosstie.route.load import EngineLoad
from crosstie.wire.client import Headers, Origin
from crosstie.wire.fetch import Answer, fetch

# Engines that the gateway knows how to resume on, by the owner in their /v1/models. An emulated replica does as vLLM,
# without a limit of its own for completions.
ENGINES: Final = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "crosstie-emulated": "emulated"}
# What says that it is full, and how long it is left alone then, from this to that.
FULL: Final[tuple[int, ...]] = (429, 503)
FULL_S: Final = 1.0
_MOST_FULL_S: Final = 60.0
# So many faults in a row open it, or this share of the latest outcomes.
IN_A_ROW: Final = 5
SHARE: Final = 0.5
_LATEST: Final = 20
_FIRST_OPEN_S: Final = 1.0
_LONGEST_OPEN_S: Final = 30.0
# For what people have to mend.
_TRIPPED_S: Final = 10.0
# Of an engine's metrics page, the lines that are wanted: it has hundreds, and comes from every replica every second.
_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing",
            b"tgi_batch_current_size")  # fmt: skip
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred",
            b"tgi_queue_size")  # fmt: skip
# No engine has more requests; what is not below it, infinity above all, is no load to reckon with.
_MOST: Final = 1e6
_CACHE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")


class Breaker:
    """Counts a backend's own faults, never a client's mistakes. closed: all goes through; open: nothing, for a while
    that doubles; trying: one fault opens it again."""

    def __init__(self) -> None:
        self.state = "closed"
        self._in_a_row = 0
        self._latest: deque[bool] = deque(maxlen=_LATEST)
        # When it lets requests through again, where it is open.
        self.until = 0.0
        self._open_s = _FIRST_OPEN_S

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._latest.append(True)
        if self.state == "trying":
            self.state = "closed"
            self._latest.clear()
            self._open_s = _FIRST_OPEN_S

    def failed(self, now: float) -> bool:
        """Whether this fault opened it."""
        self._in_a_row += 1
        self._latest.append(False)
        if self.state == "open":
            return False
        faults = self._latest.count(False)
        often = len(self._latest) >= _LATEST // 2 and faults >= SHARE * len(self._latest)
        if self.state == "trying" or self._in_a_row >= IN_A_ROW or often:
            self.state = "open"
            self.until = now + self._open_s
            self._open_s = min(2.0 * self._open_s, _LONGEST_OPEN_S)
            return True
        return False

    def trip(self, now: float) -> None:
        """Opens it at once, for faults that last."""
        self.state = "open"
        self.until = now + max(self._open_s, _TRIPPED_S)
        self._open_s = min(2.0 * self._open_s, _LONGEST_OPEN_S)

    def open_too(self, until: float) -> None:
        """Another gateway's breaker for the same backend has opened until then."""
        self.state, self.until = "open", until

    def check(self, now: float) -> bool:
        """Whether it has just begun to let requests through again, on trial."""
        if self.state != "open" or now < self.until:
            return False
        self.state = "trying"
        self._in_a_row = 0
        self._latest.clear()
        return True


class Backend:
    def __init__(self, origin: Origin, replica: Replica, pool: Pool):
        self.origin, self.replica = origin, replica
        self.breaker = Breaker()
        # None until it was asked for the first time.
        self.healthy: bool | None = None
        self.why = "not asked yet"
        self.fails = 0
        # It refuses connections, or says itself that it is not well: no suspicion, but a fact.
        self.dead = False
        # What an operator has to mend, as far as its last fault was that.
        self.wrong = ""
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
        origin, at = self.origin, self.origin.address
        self.host_line = b"host: " + at.authority + b"\r\n" + origin.lines
        self.base, self.root = (at.base or "/v1").encode(), at.root.encode()
        # The same as a request names them, which a proxy may have to read.
        self.api, self.beside = origin.prefix + self.base, origin.prefix + self.root
        self.name = pool.name.encode()
        # By path, what a request for it names: paths that are served are few.
        self.targets: dict[str, bytes] = {}

    def ask(self, method: str, path: str, timeout_s: float, body: object = None) -> Coroutine[Any, Any, Answer]:
        """The answer to a question of the gateway's own, with its key; `body` as JSON. Raises OSError."""
        headers: Headers = [] if self.authorization is None else [(b"authorization", self.authorization)]
        said = None
        if body is not None:
            headers.append((b"content-type", b"application/json"))
            said = msgspec.json.encode(body)
        return fetch(self.origin, method, path, headers=headers, body=said, timeout_s=timeout_s)

    def full(self, asked_s: float, now: float, speed: float) -> None:
        """It said that it was full, no fault: leaves it alone for as long as it asked, within reason."""
        self.replica.full(now, min(max(asked_s, FULL_S), _MOST_FULL_S) * speed)

    @property
    def is_well(self) -> bool:
        """By itself, whatever is wrong beside it."""
        return self.healthy is not False and self.breaker.state != "open"

    def judge(self, now: float) -> bool:
        """Tells `route` whether it may be chosen; whether that has changed."""
        was = self.replica.up
        # Where the breaker lets it back it is on trial, and brought up slowly: the first fault shuts it again.
        self.breaker.check(now)
        if self.healthy is False and not self.put_away:
            self.replica.went_down(self.why, suspected=not self.dead)
        elif self.breaker.state == "open":
            why = f": {self.wrong}" if self.wrong else ""
            self.replica.went_down(f"its circuit breaker is open{why}", suspected=not self.wrong)
        elif self.replica.pool.prefill is not None and (why := self.replica.pool.prefill.why_out()):
            suspected = any(replica.suspected for replica in self.replica.pool.prefill.replicas)
            self.replica.went_down(f"its pool's prefill side is out: {why}", suspected=suspected)
        elif not was:
            self.replica.came_up(now)
        return self.replica.up != was

    def succeeded(self) -> None:
        self.breaker.succeeded()
        self.fails = 0
        self.wrong = ""

    def failed(self, why: str, now: float, *, refused: bool = False, wrong: bool = False, surely: bool = False) -> bool:
        """A fault of its own; a refused connection needs no second witness. `wrong`: it is set up wrongly and answers
        nothing; `surely`: another backend has answered what it could not."""
        self.wrong = why if wrong else ""
        if surely:
            self.breaker.trip(now)
        else:
            self.breaker.failed(now)
        if refused:
            self.healthy, self.why, self.dead = False, why, True
        return self.judge(now)

    def probed(self, fault: str | None, now: float, *, refused: bool = False, answered: bool = False) -> bool:
        """`answered`: the fault is what it says of itself."""
        self.dead = fault is not None and (refused or answered)
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
        return self.judge(now)


# What follows a name on its line.
_VALUE: Final = re.compile(rb"(?:\{[^\n]*\})? ([0-9.eE+-]+)")


def engine_load(page: bytes) -> EngineLoad | None:
    """Over all of a server's engines (DP ranks have a line each); None where no known engine wrote the page."""
    running, waiting, cache = _values(_RUNNING, page), _values(_WAITING, page), _values(_CACHE, page)
    if not running and not waiting:
        return None
    return EngineLoad(sum(running), sum(waiting), sum(cache) / len(cache) if cache else None)


def _values(names: tuple[bytes, ...], page: bytes) -> list[float]:
    """Searches for names and not for lines: pages are long, and each replica's is read every second."""
    values = []
    for name in names:
        at = page.find(name)
        while at >= 0:
            end = at + len(name)
            match = _VALUE.match(page, end) if at == 0 or page[at - 1 : at] == b"\n" else None
            if match is not None:
                with contextlib.suppress(ValueError):
                    value = float(match[1])
                    if 0.0 <= value <= _MOST:
                        values.append(value)
            at = page.find(name, end)
    return values
