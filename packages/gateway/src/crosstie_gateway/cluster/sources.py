"""What a `kube://` backend stands for: pods that are ready and stay, and their ports, followed as the API server has
them; or what is in the way."""

import random
import threading
from collections.abc import Callable, Iterable, Mapping

import msgspec

from crosstie.catalog.kube import ACCELERATOR, MODEL, KubeSource
from crosstie_gateway.cluster.api import GONE, ApiFault, Asked, ClusterApi, ClusterObject, WatchStream


class Endpoint(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """A replica's base URL, and what the labels of its pod say it is; "": nothing."""

    url: str
    pod: str = ""
    model: str = ""
    accelerator: str = ""


class _Condition(msgspec.Struct, frozen=True):
    type: str = ""
    status: str = ""


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: tuple[_Condition, ...] = ()


class _SliceConditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    conditions: _SliceConditions = _SliceConditions()
    target_ref: _Target | None = None


class _SlicePort(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _LabelSelector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}


class _Number(msgspec.Struct, frozen=True):
    number: int = 0


class _PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    selector: _LabelSelector = _LabelSelector()
    target_ports: tuple[_Number, ...] = ()


def pod_endpoints(pods: Iterable[ClusterObject], ports: tuple[int, ...]) -> tuple[Endpoint, ...]:
    """Of pods that are ready. A pod with a deletion timestamp gets nothing new: its engine was told to end."""
    ends = []
    for pod in pods:
        status = msgspec.json.decode(pod.status, type=_PodStatus)
        ready = any(condition.type == "Ready" and condition.status == "True" for condition in status.conditions)
        if not ready or not status.pod_ip or status.phase != "Running" or pod.metadata.deletion_timestamp:
            continue
        labels = pod.metadata.labels or {}
        ends += [
            Endpoint(
                url=_url(status.pod_ip, port),
                pod=pod.metadata.name,
                model=labels.get(MODEL, ""),
                accelerator=labels.get(ACCELERATOR, ""),
            )
            for port in ports
        ]
    return tuple(sorted(ends))


def slice_endpoints(slices: Iterable[ClusterObject], port: int) -> tuple[Endpoint, ...]:
    """Port 0: the one named http, or the only one there is."""
    whole = [each for each in slices if not each.metadata.deletion_timestamp]
    # Of one family: where a pod has an address of each, both are the same replica.
    family = "IPv4" if any(each.address_type == "IPv4" for each in whole) else "IPv6"
    ends: dict[str, Endpoint] = {}
    for each in whole:
        if each.address_type != family:
            continue
        at = port or _slice_port(msgspec.json.decode(each.ports, type=tuple[_SlicePort, ...] | None) or ())
        for end in msgspec.json.decode(each.endpoints, type=tuple[_SliceEndpoint, ...] | None) or ():
            # Unknown means ready, by the definition of the field.
            if end.conditions.ready is False or end.conditions.terminating or not end.addresses or not at:
                continue
            # One pod may stand in two slices while it is moved from one to the other; its first address is it.
            url = _url(end.addresses[0], at)
            ends[url] = Endpoint(url=url, pod=end.target_ref.name if end.target_ref else "")
    return tuple(sorted(ends.values()))


def _slice_port(ports: tuple[_SlicePort, ...]) -> int:
    named = [port.port for port in ports if port.name == "http" and port.port]
    every = [port.port for port in ports if port.port]
    return named[0] if named else every[0] if len(every) == 1 else 0


def pool_pods(pool: ClusterObject) -> tuple[str, tuple[int, ...]]:
    """The labels of an InferencePool's pods, and the ports at which each of them answers."""
    spec = msgspec.json.decode(pool.spec, type=_PoolSpec)
    labels = ",".join(f"{key}={value}" for key, value in sorted(spec.selector.match_labels.items()))
    return labels, tuple(port.number for port in spec.target_ports if port.number)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}/v1" if ":" in address else f"http://{address}:{port}/v1"


_FIRST_S, _MOST_S = 0.1, 2.0

# Objects by name, whenever they have changed; or what is wrong. Called in the watcher's thread.
Tell = Callable[[Mapping[str, ClusterObject] | None, ApiFault | None], None]


class Watcher:
    """One kind of objects, kept as the API server has them: listed once, then followed by what changes. What is known
    stays until somebody says otherwise. A stream that ends is resumed there; after any other end everything is listed
    again, and the listing is the truth."""

    def __init__(self, api: ClusterApi, asked: Asked, tell: Tell):
        self._api, self.asked, self._tell = api, asked, tell
        self._stopping = threading.Event()
        self._stream: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{asked.resource}", daemon=True)
        self._objects: dict[str, ClusterObject] = {}
        # From where the next stream begins; "": everything is to be listed first.
        self._version = ""
        self._pause_s = _FIRST_S

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """At once: as a daemon its thread keeps nobody from leaving."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._list()
                self._stream = self._api.watch(self.asked, self._version)
            except ApiFault as fault:
                self._version = ""
                if fault.status != GONE and not self._stopping.is_set():
                    self._tell(None, fault)
                # Not all at the same moment: a server that has just come back has enough to do.
                self._stopping.wait(self._pause_s * random.uniform(0.5, 1.0))
                self._pause_s = min(2 * self._pause_s, _MOST_S)
                continue
            try:
                self._follow(self._stream)
            except ApiFault:
                # Whether something is wrong, the listing will tell.
                self._version = ""
            # A server that ends every stream at once is not asked in a circle.
            self._stopping.wait(_FIRST_S)

    def _list(self) -> None:
        if self._version:
            return
        listed = self._api.list(self.asked)
        self._objects = {item.metadata.name: item for item in listed.items or ()}
        self._version = listed.metadata.resource_version
        self._told()

    def _follow(self, stream: WatchStream) -> None:
        for event in stream:
            if self._stopping.is_set():
                stream.close()
                return
            self._pause_s = _FIRST_S
            meta = event.object.metadata
            self._version = meta.resource_version or self._version
            # A bookmark has a version and nothing else.
            if event.type in ("ADDED", "MODIFIED"):
                self._objects[meta.name] = event.object
            elif event.type == "DELETED":
                self._objects.pop(meta.name, None)
            else:
                continue
            self._told()

    def _told(self) -> None:
        try:
            self._tell(self._objects.copy(), None)
        except msgspec.MsgspecError as error:
            # Of one object that cannot be read its watcher must not end.
            raise ApiFault(0, f"what it answers is not Kubernetes' ({error})") from None


_SERVICE = "kubernetes.io/service-name"


class EndpointSource:
    """`on_change` is called in a thread of its own with the endpoints, or with None and why they are not known now."""

    def __init__(
        self, api: ClusterApi, source: KubeSource, on_change: Callable[[tuple[Endpoint, ...] | None, str], None]
    ):  # fmt: skip
        self._api, self.source, self._on_change = api, source, on_change
        self.namespace = source.namespace or api.namespace
        # Of an InferencePool: its pods' labels and ports.
        self._chosen: tuple[str, tuple[int, ...]] | None = None
        self._pods: Watcher | None = None
        self._lock = threading.Lock()
        self._stopped = False
        if source.kind == "pods":
            self._first = self._watch_pods(source.name, (source.port,))
        else:
            self._first = self._of_slices() if source.kind == "services" else self._of_pool()

    def start(self) -> None:
        self._first.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for watcher in (self._first, self._pods):
                if watcher is not None:
                    watcher.stop()

    def _watch_pods(self, labels: str, ports: tuple[int, ...]) -> Watcher:
        asked = Asked(resource="pods", namespace=self.namespace, labels=labels)
        watcher = Watcher(self._api, asked, lambda pods, fault: tell(pods, fault))

        def tell(pods: Mapping[str, ClusterObject] | None, fault: ApiFault | None) -> None:
            # A watcher for the pool's former labels may still speak.
            if self._pods in (None, watcher):
                self._tell(fault, () if pods is None else pod_endpoints(pods.values(), ports))

        return watcher

    def _of_slices(self) -> Watcher:
        asked = Asked(resource="endpointslices", namespace=self.namespace, labels=f"{_SERVICE}={self.source.name}")

        def tell(slices: Mapping[str, ClusterObject] | None, fault: ApiFault | None) -> None:
            self._tell(fault, () if slices is None else slice_endpoints(slices.values(), self.source.port))

        return Watcher(self._api, asked, tell)

    def _of_pool(self) -> Watcher:
        asked = Asked(resource="inferencepools", namespace=self.namespace, name=self.source.name)
        return Watcher(self._api, asked, self._pool_told)

    def _pool_told(self, pools: Mapping[str, ClusterObject] | None, fault: ApiFault | None) -> None:
        if pools is None:
            self._tell(fault, ())
            return
        pool = pools.get(self.source.name)
        chosen = pool_pods(pool) if pool is not None else None
        if chosen is not None and self.source.port:
            chosen = chosen[0], (self.source.port,)
        with self._lock:
            if chosen == self._chosen and self._pods is not None:
                return
            self._chosen, before = chosen, self._pods
            if before is not None:
                before.stop()
            if self._stopped or chosen is None or not chosen[0]:
                self._pods = None
            else:
                self._pods = self._watch_pods(*chosen)
                self._pods.start()
                return
        # Not empty, but unknown: a pool that is made anew is away for a moment, and its pods go on.
        self._on_change(None, f"there is no InferencePool {self.source.name} in namespace {self.namespace}")

    def _tell(self, fault: ApiFault | None, endpoints: tuple[Endpoint, ...]) -> None:
        if fault is None:
            self._on_change(endpoints, "")
        else:
            self._on_change(None, self._why(fault))

    def _why(self, fault: ApiFault) -> str:
        resource = {"pods": "pods", "services": "endpointslices", "inferencepools": "inferencepools"}[self.source.kind]
        if fault.status == 0:
            return f"the API server cannot be reached ({fault.said})"
        if fault.status == 401:
            return "the API server does not accept the gateway's credentials"
        if fault.status == 403:
            also = " and pods" if resource == "inferencepools" else ""
            return f"the gateway may not list and watch {resource}{also} in namespace {self.namespace}: give it a Role"
        if fault.status == 404 and resource == "inferencepools":
            return (
                "the API server has no InferencePool (inference.networking.k8s.io/v1): install the Gateway API "
                "Inference Extension, or name pods by their labels"
            )
        return f"the API server says {fault.status}: {fault.said}"
