"""From objects of an API server to where requests can be sent: pods that are ready and stay, and their ports."""

from collections.abc import Iterable

import msgspec

from crosstie.catalog.kube import ACCELERATOR, MODEL
from crosstie_gateway.cluster.api import ClusterObject


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
