"""Backends that are found by name: `dns+http://vllm.default.svc:8000/v1` stands for every address that the name has.

A thread looks names up, since a resolver may take long. What it finds is loaded like a changed file: new backends are
brought up slowly, old ones finish. Each worker asks for itself, so none depends on another.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from time import monotonic

import msgspec

from crosstie.catalog.addresses import BY_NAME
from crosstie.core.errors import CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.histogram import Family
from crosstie.wire.address import Address
from crosstie.wire.files import is_exhausted
from crosstie_gateway.gateway.notices import Level, Notice
from crosstie_gateway.service.background import BackgroundThread
from crosstie_gateway.service.process import Component, GatewayProcess

# Addresses of a host; none: it has none. Raises OSError where nobody can say.
Resolve = Callable[[str, int], tuple[str, ...]]
_TICK_S = 0.5
# How long a name without addresses keeps its last ones: renewed services are empty for a moment. Not for ever: others
# may be given the addresses, and would be sent prompts.
_GRACE_S = 30.0
# At the start, how long the first answers are waited for; what comes later is taken then.
_FIRST_S = 5.0
_NONE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def addresses_of(host: str, port: int) -> tuple[str, ...]:
    """As the system resolves it, of one family: IPv4 and IPv6 addresses may be the same replica's."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NONE and not is_exhausted(error):
            return ()
        raise
    for family in (socket.AF_INET, socket.AF_INET6):
        given = {str(answer[4][0]) for answer in infos if answer[0] == family}
        if given:
            # In one order, whichever the resolver has chosen today.
            return tuple(sorted(given))
    return ()


class _Name:
    """A name, and what is known of it. The thread only reads `at` and writes `due`."""

    def __init__(self, url: str):
        self.url, self.at = url, Address(url)
        self.every_s = self.due = 0.0
        self.addresses: tuple[str, ...] = ()
        # Since when it has had none, and what the last failure was.
        self.empty_since: float | None = None
        self.failed = ""
        self.failures = 0
        self.asked = False

    def places(self) -> tuple[str, ...]:
        """Its replicas; without an address the name stands for one that is down."""
        return tuple(f"{self.url}#{address}" for address in self.addresses) or (self.url,)


class Discovery(Component):
    def __init__(self, resolve: Resolve = addresses_of, *, grace_s: float = _GRACE_S, first_s: float = _FIRST_S):
        self._resolve, self._grace_s, self._first_s = resolve, grace_s, first_s
        self._names: dict[str, _Name] = {}
        self._thread = BackgroundThread("discovery", self._look, _TICK_S)
        # Whether something was found that could not be loaded yet.
        self._pending = False

    async def start(self, process: GatewayProcess) -> None:
        self._process, self._loop = process, process.gateway.loop
        before, process.prepared = process.prepared, lambda fleet: self._spread(before(fleet))
        process.fleet = self._spread(process.fleet)
        self.reloaded(process.fleet)
        if self._names:
            await self._first()
            # Later components find the fleet as it is served.
            process.fleet = self._spread(process.read)
            process.load(process.fleet)
            self._pending = False

    async def _first(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_s):
                while not all(name.asked for name in self._names.values()):
                    await asyncio.sleep(0.01)

    def reloaded(self, fleet: Fleet) -> None:
        """Looks up this fleet's names from now on, new ones at once."""
        wanted = {url.partition("#")[0]: pool for pool in fleet.pools for url in pool.backends if _is_name(url)}
        before, self._names = self._names, {url: self._names.get(url) or _Name(url) for url in wanted}
        for url, pool in wanted.items():
            self._names[url].every_s = pool.reach.discover_every_s
        if self._names and not self._thread.started:
            self._thread.start()
        if self._names.keys() - before.keys():
            self._thread.wake()

    async def stop(self) -> None:
        # A resolver that hangs keeps nobody from leaving.
        self._thread.stop(0.0)

    def look_now(self) -> None:
        for name in self._names.values():
            name.due = 0.0
        self._thread.wake()

    def _spread(self, fleet: Fleet) -> Fleet:
        """The fleet with known addresses in place of names."""
        return msgspec.structs.replace(fleet, pools=tuple(map(self._spread_pool, fleet.pools)))

    def _spread_pool(self, pool: Pool) -> Pool:
        if not any(map(_is_name, pool.backends)):
            return pool
        places: list[str] = []
        for backend in pool.backends:
            known = self._names.get(backend)
            places += (backend,) if known is None else known.places()
        return msgspec.structs.replace(pool, backends=tuple(places), replicas=len(places))

    # In the thread

    def _look(self) -> None:
        for name in list(self._names.values()):
            if self._thread.stopping or monotonic() < name.due:
                continue
            answer: tuple[str, ...] | None = None
            why = ""
            try:
                answer = self._resolve(name.at.host, name.at.port)
            except OSError as error:
                why = error.strerror or str(error) or "no answer"
            name.due = monotonic() + name.every_s
            with contextlib.suppress(RuntimeError):
                # At the very end the loop may be gone.
                self._loop.call_soon_threadsafe(self._told, name, answer, why)

    # On the loop

    def _told(self, name: _Name, answer: tuple[str, ...] | None, why: str) -> None:
        name.asked = True
        if self._names.get(name.url) is not name:
            return
        if answer is None:
            name.failures += 1
            if not name.failed:
                self._say(name, "discovery_failed", f"cannot be looked up ({why}); {_last_known(name)}")
            name.failed = why
            return
        if name.failed:
            self._say(name, "discovery_back", "can be looked up again")
        name.failed = ""
        if answer:
            name.empty_since = None
        elif name.addresses:
            if name.empty_since is None:
                name.empty_since = monotonic()
                said = f"has no address any more; {_last_known(name)} for {self._grace_s:g} s"
                self._say(name, "discovery_empty", said)
            if monotonic() - name.empty_since < self._grace_s:
                return
        if answer != name.addresses:
            came, went = set(answer) - set(name.addresses), set(name.addresses) - set(answer)
            name.addresses, self._pending = answer, True
            changes = [f"{len(those)} {did}" for those, did in ((came, "came"), (went, "went")) if those]
            self._say(name, "discovered", f"{_count(answer)}: {', '.join(changes)}")
        if self._pending and self._process.port:
            self._load()

    def _load(self) -> None:
        try:
            self._process.load(self._process.prepared(self._process.read))
            self._pending = False
        except CrosstieError as error:
            # To be tried again with the next answer.
            self._process.notify(Notice("fleet_refused", "error", f"what was found cannot be served yet: {error}"))

    def _say(self, name: _Name, event: str, news: str) -> None:
        level: Level = "info" if event in ("discovered", "discovery_back") else "warning"
        self._process.notify(Notice(event, level, f"{name.url}: {news}", backend=name.url))

    def families(self) -> list[Family]:
        names = [({"backend": name.url}, name) for name in self._names.values()]
        if not names:
            return []
        counts = [(at, float(len(name.addresses))) for at, name in names]
        failures = [(at, float(name.failures)) for at, name in names]
        return [
            ("crosstie_discovered_addresses", "gauge", "Addresses that a name of the fleet file has.", counts),
            ("crosstie_discovery_failures_total", "counter", "Times that a name could not be looked up.", failures),
        ]


def _is_name(backend: str) -> bool:
    return backend.startswith(BY_NAME)


def _last_known(name: _Name) -> str:
    return f"its last known go on ({_count(name.addresses)})" if name.addresses else "no address is known"


def _count(addresses: tuple[str, ...]) -> str:
    return f"{len(addresses)} address{'' if len(addresses) == 1 else 'es'}"
