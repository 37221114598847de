"""Backends that a Kubernetes API server knows: `kube://default/services/vllm` stands for its pods that are ready.

Each worker looks for itself (as in `discovery`), and loads what it finds like a changed file. While the API server is
away, what is known goes on.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from crosstie.catalog.kube import ACCELERATOR, KUBE, MODEL, kube_source, label_value
from crosstie.core.errors import CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.histogram import Family
from crosstie_gateway.cluster.api import ClusterApi
from crosstie_gateway.cluster.endpoints import Endpoint
from crosstie_gateway.cluster.sources import EndpointSource
from crosstie_gateway.gateway.notices import Level, Notice
from crosstie_gateway.service.process import Component, GatewayProcess

# At the start, how long the first answers are waited for; what comes later is taken then.
_FIRST_S = 5.0
# Changes that come together, as in a rollout, are loaded together.
_TOGETHER_S = 0.05


class _Place:
    """A `kube://` address, and what is known of it."""

    def __init__(self, url: str):
        self.url = url
        self.endpoints: tuple[Endpoint, ...] = ()
        self.failed = ""
        self.failures = 0
        # Whether it was answered for, and whether that told who is there.
        self.asked = self.known = False
        self.source: EndpointSource | None = None


class ClusterDiscovery(Component):
    def __init__(self, connect: Callable[[], ClusterApi] = ClusterApi, *, first_s: float = _FIRST_S):
        self._connect, self._first_s = connect, first_s
        self._api: ClusterApi | None = None
        self._places: dict[str, _Place] = {}
        # Addresses that the fleet has which is about to be loaded, whatever stands for them in it.
        self._named: set[str] = set()
        # Pools that have somebody, as they are served.
        self._served: dict[str, Pool] = {}
        # Pods that were left out, so that each is told of once.
        self._left_out: dict[str, str] = {}
        self._due: asyncio.TimerHandle | None = None

    async def start(self, process: GatewayProcess) -> None:
        self._process, self._loop = process, process.gateway.loop
        self._accelerators = process.catalog.accelerators
        before, process.prepared = process.prepared, lambda fleet: self._spread(before(fleet))
        self.check(process.fleet)
        self.reloaded(process.fleet)
        if self._places:
            await self._first()
            process.fleet = process.prepared(process.read)
            process.load(process.fleet)

    async def _first(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_s):
                while not all(place.asked for place in self._places.values()):
                    await asyncio.sleep(0.01)

    def check(self, fleet: Fleet) -> None:
        """Raises BadInput where no cluster can be asked at all; the fleet that is served goes on."""
        if (self._named or _wanted(fleet)) and self._api is None:
            self._api = self._connect()

    def reloaded(self, fleet: Fleet) -> None:
        self._served = {pool.name: pool for pool in fleet.pools if not any(at.startswith(KUBE) for at in pool.backends)}
        wanted = self._named | _wanted(fleet)
        for url in [url for url in self._places if url not in wanted]:
            source = self._places.pop(url).source
            if source is not None:
                source.stop()
        for url in sorted(wanted - self._places.keys()):
            self._places[url] = self._watched(url)

    def _watched(self, url: str) -> _Place:
        place, source = _Place(url), kube_source(url)
        assert self._api is not None
        assert source is not None

        def on_change(endpoints: tuple[Endpoint, ...] | None, why: str) -> None:
            with contextlib.suppress(RuntimeError):
                # At the very end the loop may be gone.
                self._loop.call_soon_threadsafe(self._changed, place, endpoints, why)

        place.source = EndpointSource(self._api, source, on_change)
        place.source.start()
        return place

    async def stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
        for place in self._places.values():
            if place.source is not None:
                place.source.stop()

    def _spread(self, fleet: Fleet) -> Fleet:
        """The fleet with known replicas in place of `kube://` addresses."""
        self._named = _wanted(fleet)
        sharing = [backend for pool in fleet.pools for backend in pool.backends if backend.startswith(KUBE)]
        shared = {backend for backend in sharing if sharing.count(backend) > 1}
        return msgspec.structs.replace(fleet, pools=tuple(self._spread_pool(pool, shared) for pool in fleet.pools))

    def _spread_pool(self, pool: Pool, shared: set[str]) -> Pool:
        if not any(backend.startswith(KUBE) for backend in pool.backends):
            return pool
        places = [self._places.get(backend) for backend in pool.backends if backend.startswith(KUBE)]
        served = self._served.get(pool.name)
        alike = served is not None and (served.model, served.accelerator) == (pool.model, pool.accelerator)
        if served is not None and alike and not all(place and place.known for place in places):
            # Nobody has said yet who is there: the pool's backends go on.
            return msgspec.structs.replace(pool, backends=served.backends, replicas=served.replicas)
        urls: list[str] = []
        for backend in pool.backends:
            if not backend.startswith(KUBE):
                urls.append(backend)
                continue
            ends = place.endpoints if (place := self._places.get(backend)) else ()
            mine = [end.url for end in ends if self._is_of(end, pool, backend in shared)]
            # While it has nobody it is one itself, which is down.
            urls += mine or [f"{backend}#{pool.name}"]
        whole = tuple(dict.fromkeys(urls))
        return msgspec.structs.replace(pool, backends=whole, replicas=len(whole))

    def _is_of(self, end: Endpoint, pool: Pool, shared: bool) -> bool:
        """Whether a pod is of this pool, by its labels; pools that share a place need them."""
        if end.accelerator and end.accelerator not in self._accelerators:
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

    # On the loop

    def _changed(self, place: _Place, endpoints: tuple[Endpoint, ...] | None, why: str) -> None:
        place.asked = True
        if self._places.get(place.url) is not place:
            return
        if endpoints is None:
            place.failures += 1
            if why != place.failed:
                going = f"{len(place.endpoints)} known go on" if place.known else "what the pool had goes on"
                self._say(place, "discovery_failed", f"{why}; {going}")
            place.failed = why
            return
        if place.failed:
            self._say(place, "discovery_back", "the API server answers again")
        place.failed, first = "", not place.known
        place.known = True
        if endpoints != place.endpoints or first:
            came, went = set(endpoints) - set(place.endpoints), set(place.endpoints) - set(endpoints)
            place.endpoints = endpoints
            for end in went:
                self._left_out.pop(end.url, None)
            changes = [f"{len(ends)} {did}" for ends, did in ((came, "came"), (went, "went")) if ends] or ["nobody yet"]
            self._say(place, "discovered", f"{len(endpoints)} ready: {', '.join(changes)}")
            # A pod that goes is sent nothing more from now on; one that comes can wait for others that come with it.
            if went:
                self._load()
            elif self._due is None:
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
        except CrosstieError as error:
            self._process.notify(Notice("fleet_refused", "error", f"what was found cannot be served yet: {error}"))

    def _say(self, place: _Place, event: str, news: str) -> None:
        level: Level = "info" if event in ("discovered", "discovery_back") else "warning"
        self._process.notify(Notice(event, level, f"{place.url}: {news}", backend=place.url))

    def families(self) -> list[Family]:
        places = [({"backend": place.url}, place) for place in self._places.values()]
        if not places:
            return []
        counts = [(at, float(len(place.endpoints))) for at, place in places]
        failures = [(at, float(place.failures)) for at, place in places]
        return [
            ("crosstie_cluster_endpoints", "gauge", "Replicas that a kube:// backend has ready.", counts),
            ("crosstie_cluster_failures_total", "counter", "Times that the API server could not tell.", failures),
        ]


def _wanted(fleet: Fleet) -> set[str]:
    return {backend.partition("#")[0] for pool in fleet.pools for backend in pool.backends if backend.startswith(KUBE)}
