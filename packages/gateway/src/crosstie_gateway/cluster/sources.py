"""What a `kube://` backend stands for: followed, and told as endpoints or as what is in the way."""

import threading
from collections.abc import Callable, Mapping

from crosstie.catalog.kube import KubeSource
from crosstie_gateway.cluster.api import ApiFault, Asked, ClusterApi, ClusterObject
from crosstie_gateway.cluster.endpoints import Endpoint, pod_endpoints, pool_pods, slice_endpoints
from crosstie_gateway.cluster.watcher import Watcher

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
