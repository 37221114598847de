"""Backends that stand for others: a name for all its addresses (`dns+http://vllm.default.svc:8000/v1`), a Kubernetes
source for its pods that are ready (`kube://default/services/vllm`).

What is found is loaded like a changed file: new backends are brought up slowly, old ones finish. Each worker looks for
itself, so none depends on another. While nobody can tell who is there, what is known goes on.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Generic, TypeVar

import msgspec

from crosstie.catalog.addresses import BY_NAME
from crosstie.catalog.kube import ACCELERATOR, KUBE, MODEL, kube_source, label_value
from crosstie.core.errors import CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.histogram import Family
from crosstie.wire.address import Address
from crosstie.wire.files import is_exhausted
from crosstie_gateway.cluster.api import ClusterApi
from crosstie_gateway.cluster.sources import Endpoint, EndpointSource
from crosstie_gateway.gateway.notices import Level, Notice
from crosstie_gateway.service.process import BackgroundThread, Component, GatewayProcess

# At the start, how long the first answers are waited for; what comes later is taken then.
_FIRST_S = 5.0
# Changes that come together, as in a rollout, are loaded together.
_TOGETHER_S = 0.05


class Source:
    """A backend of the fleet file that stands for others, and what is known of them."""

    def __init__(self, url: str):
        self.url = url
        self.found: tuple[Any, ...] = ()
        # Whether it was answered for, and whether that told who is there.
        self.asked = self.known = False
        # What the last failure was; empty: the last answer was good.
        self.failed = ""
        self.failures = 0

    def kept(self) -> str:
        """What goes on while nobody can tell, in words."""
        raise NotImplementedError


S = TypeVar("S", bound=Source)


class Discovery(Component, Generic[S]):
    """`prefix`: how its backends begin in a fleet file."""

    prefix = ""
    # Its metrics: of what was found, and of failures; and what is said when a source answers again.
    counts, failures, back = ("", ""), ("", ""), ""

    def __init__(self, first_s: float):
        self._first_s = first_s
        self._sources: dict[str, S] = {}
        # Sources of the fleet that is about to be loaded, whatever stands for them in it, and a pool of each.
        self._named: dict[str, Pool] = {}
        self._due: asyncio.TimerHandle | None = None
        # Whether something was found that could not be loaded yet.
        self._refused = False

    async def start(self, process: GatewayProcess) -> None:
        self._process, self._loop = process, process.gateway.loop
        before, process.prepared = process.prepared, lambda fleet: self._spread(before(fleet))
        self.check(process.fleet)
        self.reloaded(process.fleet)
        if self._sources:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._first_s):
                    while not all(source.asked for source in self._sources.values()):
                        await asyncio.sleep(0.01)
            # Later components find the fleet as it is served.
            process.fleet = process.prepared(process.read)
            process.load(process.fleet)

    async def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()

    def _wanted(self, fleet: Fleet) -> dict[str, Pool]:
        """The sources of a fleet, also where what they stand for is in their place, with a pool of each."""
        pairs = [(backend, pool) for pool in fleet.pools for backend in pool.backends]
        return {backend.partition("#")[0]: pool for backend, pool in pairs if backend.startswith(self.prefix)}

    def _spread(self, fleet: Fleet) -> Fleet:
        """The fleet with what is known in place of sources."""
        self._named = self._wanted(fleet)
        return msgspec.structs.replace(fleet, pools=tuple(self._spread_pool(pool, fleet) for pool in fleet.pools))

    def _spread_pool(self, pool: Pool, fleet: Fleet) -> Pool:
        if not any(backend.startswith(self.prefix) for backend in pool.backends):
            return pool
        urls: list[str] = []
        for backend in pool.backends:
            urls += self._places(backend, pool, fleet) if backend.startswith(self.prefix) else (backend,)
        whole = tuple(dict.fromkeys(urls))
        return msgspec.structs.replace(pool, backends=whole, replicas=len(whole))

    def _places(self, url: str, pool: Pool, fleet: Fleet) -> list[str]:
        """The addresses that a source stands for in a pool; where it has none, one that is down."""
        raise NotImplementedError

    # On the loop

    def _answered(self, source: Source, failure: str) -> bool:
        """Notes that a source was answered for; False where there is nothing to take."""
        source.asked = True
        if self._sources.get(source.url) is not source:
            return False
        if failure:
            source.failures += 1
            if failure != source.failed:
                self._say(source, "discovery_failed", f"{failure}; {source.kept()}")
        elif source.failed:
            self._say(source, "discovery_back", self.back)
        source.failed = failure
        return not failure

    def _take(self, source: Source, found: tuple[Any, ...], there: str) -> None:
        """What a source has now, `there` in words, is served from now on."""
        first = not source.known
        source.known = True
        came, went = set(found) - set(source.found), set(source.found) - set(found)
        if came or went or first:
            source.found = found
            changes = [f"{len(those)} {did}" for those, did in ((came, "came"), (went, "went")) if those]
            self._say(source, "discovered", f"{there}: {', '.join(changes) or 'nobody yet'}")
        # What goes is sent nothing more from now on; what comes can wait for others that come with it.
        if went or self._refused:
            self._load()
        elif (came or first) and self._due is None:
            self._due = self._loop.call_later(_TOGETHER_S, self._load)

    def _load(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if not self._process.port:
            # Others of its components are still being started.
            self._due = self._loop.call_later(_TOGETHER_S, self._load)
            return
        try:
            self._process.load(self._process.prepared(self._process.read))
            self._refused = False
        except CrosstieError as error:
            # To be tried again with the next answer.
            self._refused = True
            self._process.notify(Notice("fleet_refused", "error", f"what was found cannot be served yet: {error}"))

    def _say(self, source: Source, event: str, news: str) -> None:
        level: Level = "info" if event in ("discovered", "discovery_back") else "warning"
        self._process.notify(Notice(event, level, f"{source.url}: {news}", backend=source.url))

    def families(self) -> list[Family]:
        sources = [({"backend": source.url}, source) for source in self._sources.values()]
        if not sources:
            return []
        counts = [(at, float(len(source.found))) for at, source in sources]
        failures = [(at, float(source.failures)) for at, source in sources]
        (count, counted), (failure, failed) = self.counts, self.failures
        return [(count, "gauge", counted, counts), (failure, "counter", failed, failures)]


# By name

# Addresses of a host; none: it has none. Raises OSError where nobody can say.
Resolve = Callable[[str, int], tuple[str, ...]]
_TICK_S = 0.5
# How long a name without addresses keeps its last ones: renewed services are empty for a moment. Not for ever: others
# may be given the addresses, and would be sent prompts.
_GRACE_S = 30.0
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


class _Name(Source):
    """The thread only reads `at` and writes `due`."""

    def __init__(self, url: str):
        super().__init__(url)
        self.at = Address(url)
        self.every_s = self.due = 0.0
        # Since when it has had no address.
        self.empty_since: float | None = None

    def kept(self) -> str:
        return f"its last known go on ({_count(self.found)})" if self.found else "no address is known"


class NameDiscovery(Discovery[_Name]):
    """A thread looks names up, since a resolver may take long."""

    prefix = BY_NAME
    counts = "crosstie_discovered_addresses", "Addresses that a name of the fleet file has."
    failures = "crosstie_discovery_failures_total", "Times that a name could not be looked up."
    back = "can be looked up again"

    def __init__(self, resolve: Resolve = addresses_of, *, grace_s: float = _GRACE_S, first_s: float = _FIRST_S):
        super().__init__(first_s)
        self._resolve, self._grace_s = resolve, grace_s
        self._thread = BackgroundThread("discovery", self._look, _TICK_S)

    def reloaded(self, fleet: Fleet) -> None:
        """Looks up this fleet's names from now on, new ones at once."""
        wanted, before = self._wanted(fleet), self._sources
        self._sources = {url: before.get(url) or _Name(url) for url in wanted}
        for url, pool in wanted.items():
            self._sources[url].every_s = pool.reach.discover_every_s
        if self._sources and not self._thread.started:
            self._thread.start()
        if self._sources.keys() - before.keys():
            self._thread.wake()

    async def stop(self) -> None:
        await super().stop()
        # A resolver that hangs keeps nobody from leaving.
        self._thread.stop(0.0)

    def look_now(self) -> None:
        for name in self._sources.values():
            name.due = 0.0
        self._thread.wake()

    def _places(self, url: str, pool: Pool, fleet: Fleet) -> list[str]:
        known = self._sources.get(url)
        return [f"{url}#{address}" for address in known.found] if known is not None and known.found else [url]

    def _look(self) -> None:
        """In the thread."""
        for name in list(self._sources.values()):
            if self._thread.stopping or monotonic() < name.due:
                continue
            answer: tuple[str, ...] = ()
            failure = ""
            try:
                answer = self._resolve(name.at.host, name.at.port)
            except OSError as error:
                failure = f"cannot be looked up ({error.strerror or str(error) or 'no answer'})"
            name.due = monotonic() + name.every_s
            with contextlib.suppress(RuntimeError):
                # At the very end the loop may be gone.
                self._loop.call_soon_threadsafe(self._told, name, answer, failure)

    def _told(self, name: _Name, answer: tuple[str, ...], failure: str) -> None:
        if not self._answered(name, failure):
            return
        if answer:
            name.empty_since = None
        elif name.found:
            if name.empty_since is None:
                name.empty_since = monotonic()
                self._say(name, "discovery_empty", f"has no address any more; {name.kept()} for {self._grace_s:g} s")
            if monotonic() - name.empty_since < self._grace_s:
                return
        self._take(name, answer, _count(answer))


def _count(addresses: tuple[str, ...]) -> str:
    return f"{len(addresses)} address{'' if len(addresses) == 1 else 'es'}"


# By a Kubernetes API server


class _Place(Source):
    def __init__(self, url: str):
        super().__init__(url)
        self.source: EndpointSource | None = None

    def kept(self) -> str:
        return f"{len(self.found)} known go on" if self.known else "what the pool had goes on"

    def close(self) -> None:
        if self.source is not None:
            self.source.stop()


class ClusterDiscovery(Discovery[_Place]):
    prefix = KUBE
    counts = "crosstie_cluster_endpoints", "Replicas that a kube:// backend has ready."
    failures = "crosstie_cluster_failures_total", "Times that the API server could not tell."
    back = "the API server answers again"

    def __init__(self, connect: Callable[[], ClusterApi] = ClusterApi, *, first_s: float = _FIRST_S):
        super().__init__(first_s)
        self._connect = connect
        self._api: ClusterApi | None = None
        # Pools that have somebody, as they are served.
        self._served: dict[str, Pool] = {}
        # Pods that were left out, so that each is told of once.
        self._left_out: dict[str, str] = {}

    def check(self, fleet: Fleet) -> None:
        """Raises BadInput where no cluster can be asked at all; the fleet that is served goes on."""
        if (self._named or self._wanted(fleet)) and self._api is None:
            self._api = self._connect()

    def reloaded(self, fleet: Fleet) -> None:
        self._served = {pool.name: pool for pool in fleet.pools if not any(at.startswith(KUBE) for at in pool.backends)}
        wanted = self._named | self._wanted(fleet)
        for url in [url for url in self._sources if url not in wanted]:
            self._sources.pop(url).close()
        for url in sorted(wanted.keys() - self._sources.keys()):
            self._sources[url] = self._watched(url)

    def _watched(self, url: str) -> _Place:
        place, source = _Place(url), kube_source(url)
        assert self._api is not None
        assert source is not None

        def on_change(endpoints: tuple[Endpoint, ...] | None, why: str) -> None:
            with contextlib.suppress(RuntimeError):
                # At the very end the loop may be gone.
                self._loop.call_soon_threadsafe(self._changed, place, endpoints or (), why)

        place.source = EndpointSource(self._api, source, on_change)
        place.source.start()
        return place

    async def stop(self) -> None:
        await super().stop()
        for place in self._sources.values():
            place.close()

    def _spread_pool(self, pool: Pool, fleet: Fleet) -> Pool:
        places = [self._sources.get(backend) for backend in pool.backends if backend.startswith(KUBE)]
        served = self._served.get(pool.name)
        alike = served is not None and (served.model, served.accelerator) == (pool.model, pool.accelerator)
        if served is not None and alike and not all(place and place.known for place in places):
            # Nobody has said yet who is there: the pool's backends go on.
            return msgspec.structs.replace(pool, backends=served.backends, replicas=served.replicas)
        return super()._spread_pool(pool, fleet)

    def _places(self, url: str, pool: Pool, fleet: Fleet) -> list[str]:
        shared = sum(other.backends.count(url) for other in fleet.pools) > 1
        ends = place.found if (place := self._sources.get(url)) else ()
        mine = [end.url for end in ends if self._is_of(end, pool, shared)]
        # While it has nobody it is one itself, which is down.
        return mine or [f"{url}#{pool.name}"]

    def _is_of(self, end: Endpoint, pool: Pool, shared: bool) -> bool:
        """Whether a pod is of this pool, by its labels; pools that share a place need them."""
        if end.accelerator and end.accelerator not in self._process.catalog.accelerators:
            return self._leave(end, f"label {ACCELERATOR}={end.accelerator} names no accelerator of the catalog")
        if shared and not (end.accelerator or end.model):
            return self._leave(end, f"has no {ACCELERATOR} or {MODEL}, and several pools look for pods there")
        said, is_called = end.accelerator, (label_value(pool.model), label_value(pool.served_as or ""))
        wrong = [
            f"{key}={value}"
            for key, value, right in (
                (ACCELERATOR, said, not pool.accelerator or said == pool.accelerator),
                (MODEL, end.model, end.model in is_called),
            )
            if value and not right
        ]
        if wrong and not shared:
            return self._leave(end, f"{wrong[0]} is not what pool {pool.name} has")
        return not wrong

    def _leave(self, end: Endpoint, why: str) -> bool:
        if self._left_out.get(end.url) != why:
            self._left_out[end.url] = why
            self._process.notify(Notice("pod_left_out", "warning", f"pod {end.pod}: {why}", backend=end.url))
        return False

    def _changed(self, place: _Place, endpoints: tuple[Endpoint, ...], failure: str) -> None:
        if self._answered(place, failure):
            for end in set(place.found) - set(endpoints):
                self._left_out.pop(end.url, None)
            self._take(place, endpoints, f"{len(endpoints)} ready")
