"""Endpoints as an API server has them, over real HTTP: readiness, restarts, relists, 410, and what is refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.run.cluster.api_server import ApiServer, api_server, endpoint_slice, pod
from tests.waiting import comes_true

from crosstie.catalog.kube import kube_source
from crosstie_gateway.cluster.sources import Endpoint, EndpointSource


class Seen:
    """What a source has told, in order."""

    def __init__(self) -> None:
        self.now: tuple[str, ...] | None = None
        self.ends: tuple[Endpoint, ...] = ()
        self.faults: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, endpoints: tuple[Endpoint, ...] | None, why: str) -> None:
        with self.lock:
            if endpoints is None:
                self.faults.append(why)
            else:
                self.ends, self.now = endpoints, tuple(one.url for one in endpoints)


@contextmanager
def followed(server: ApiServer, url: str, **settings: Any) -> Iterator[Seen]:
    source = kube_source(url)
    assert source is not None
    seen = Seen()
    made = EndpointSource(server.api(**settings), source, seen)
    made.start()
    try:
        yield seen
    finally:
        made.stop()


def at(*addresses: str, port: int = 8000) -> tuple[str, ...]:
    return tuple(f"http://{one}:{port}/v1" for one in addresses)


PODS = "kube://default/pods/app=vllm:8000"


def test_pods_come_when_they_are_ready_and_go_when_they_are_to_leave() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1", accelerator="mi300x", model="llama-3.1-8b")
        pod(server, "b", "10.0.0.2", ready=False)
        server.put(
            "Pod", "other", metadata={"labels": {"app": "web"}}, status={"phase": "Running", "podIP": "10.0.0.9"}
        )
        with followed(server, PODS) as seen:
            assert comes_true(lambda: seen.now == at("10.0.0.1"))
            assert seen.ends[0] == Endpoint(url=at("10.0.0.1")[0], pod="a", model="llama-3.1-8b", accelerator="mi300x")
            pod(server, "b", "10.0.0.2")
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))
            # While it still answers, and before anybody has ended it.
            pod(server, "a", "10.0.0.1", leaving=True)
            assert comes_true(lambda: seen.now == at("10.0.0.2"))
            server.delete("Pod", "b")
            assert comes_true(lambda: seen.now == ())
            assert server.lists("Pod") == 1
            assert not seen.faults


def test_a_restarted_server_is_asked_again_and_what_it_had_lost_meanwhile_is_gone() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        pod(server, "b", "10.0.0.2")
        with followed(server, PODS) as seen:
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))
            server.stop()
            assert comes_true(lambda: bool(seen.faults))
            assert "the API server cannot be reached" in seen.faults[0]
            # What is known goes on.
            assert seen.now == at("10.0.0.1", "10.0.0.2")
            server.delete("Pod", "a")
            pod(server, "c", "10.0.0.3")
            server.compact()
            server.start()
            assert comes_true(lambda: seen.now == at("10.0.0.2", "10.0.0.3"))
            pod(server, "d", "10.0.0.4")
            assert comes_true(lambda: seen.now == at("10.0.0.2", "10.0.0.3", "10.0.0.4"))


def test_a_stream_that_ends_is_taken_up_where_it_ended() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        with followed(server, PODS) as seen:
            assert comes_true(lambda: server.watches("Pod") == 1)
            server.end_streams()
            pod(server, "b", "10.0.0.2")
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))
            assert (server.lists("Pod"), seen.faults) == (1, [])


def test_an_answer_of_410_means_to_list_again_and_is_no_fault() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        with followed(server, PODS) as seen:
            assert comes_true(lambda: server.watches("Pod") == 1)
            # From here on nobody can begin where it ended.
            server.kept = 10**9
            server.end_streams()
            assert comes_true(lambda: server.lists("Pod") > 2)
            server.kept = 0
            pod(server, "b", "10.0.0.2")
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))
            assert not seen.faults


def test_a_silent_stream_is_taken_for_dead() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        # Shorter than the pause between two bookmarks.
        with followed(server, PODS, silent_s=0.05) as seen:
            assert comes_true(lambda: server.watches("Pod") > 2)
            pod(server, "b", "10.0.0.2")
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))


def test_slices_of_a_service_have_its_ready_addresses_of_one_family() -> None:
    with api_server() as server:
        ready = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "name": "a"}}
        leaving = {"addresses": ["10.0.0.2"], "conditions": {"ready": True, "serving": True, "terminating": True}}
        waiting = {"addresses": ["10.0.0.3"], "conditions": {"ready": False}}
        unknown: dict[str, Any] = {"addresses": ["10.0.0.4"], "conditions": {}}
        endpoint_slice(server, "s1", 8000, ready, leaving, waiting)
        endpoint_slice(server, "s2", 8000, ready, unknown)
        endpoint_slice(server, "s6", 8000, {"addresses": ["fd00::1"], "conditions": {"ready": True}}, family="IPv6")
        endpoint_slice(server, "o1", 8000, ready, service="other")
        with followed(server, "kube://default/services/vllm") as seen:
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.4"))
            endpoint_slice(server, "s1", 8000)
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.4"))
            server.delete("EndpointSlice", "s2")
            server.delete("EndpointSlice", "s1")
            assert comes_true(lambda: seen.now == ("http://[fd00::1]:8000/v1",))


def pool(server: ApiServer, **labels: str) -> None:
    ports = [{"number": 8000}, {"number": 8001}]
    server.put("InferencePool", "chat", spec={"selector": {"matchLabels": labels}, "targetPorts": ports})


def test_an_inference_pool_says_which_pods_and_at_which_ports() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        with followed(server, "kube://default/inferencepools/chat") as seen:
            assert comes_true(lambda: seen.faults == ["there is no InferencePool chat in namespace default"])
            pool(server, app="vllm")
            # Ranks of one pod, a replica each.
            assert comes_true(lambda: seen.now == at("10.0.0.1") + at("10.0.0.1", port=8001))
            server.put("Pod", "b", metadata={"labels": {"app": "new"}}, status={
                "phase": "Running", "podIP": "10.0.0.2", "conditions": [{"type": "Ready", "status": "True"}],
            })  # fmt: skip
            pool(server, app="new")
            assert comes_true(lambda: seen.now == at("10.0.0.2") + at("10.0.0.2", port=8001))


@pytest.mark.parametrize(
    ("kind", "status", "url", "said"),
    [
        ("InferencePool", 404, "kube://default/inferencepools/chat", "the API server has no InferencePool (inference.networking.k8s.io/v1): install the Gateway API Inference Extension"),
        ("Pod", 403, PODS, "the gateway may not list and watch pods in namespace default: give it a Role"),
        ("Pod", 401, PODS, "does not accept the gateway's credentials"),
        ("EndpointSlice", 500, "kube://default/services/vllm", "the API server says 500: as it happens"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_said_with_what_to_do(kind: str, status: int, url: str, said: str) -> None:
    with api_server() as server:
        server.refusals[kind] = status
        with followed(server, url) as seen:
            assert comes_true(lambda: bool(seen.faults))
            assert said in seen.faults[0]
            assert seen.now is None


def test_an_object_that_cannot_be_read_ends_no_watch() -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        with followed(server, PODS) as seen:
            assert comes_true(lambda: seen.now == at("10.0.0.1"))
            server.put("Pod", "b", metadata={"labels": {"app": "vllm"}}, status={"podIP": 7})
            assert comes_true(lambda: any("not Kubernetes'" in one for one in seen.faults))
            assert seen.now == at("10.0.0.1")
            pod(server, "b", "10.0.0.2")
            assert comes_true(lambda: seen.now == at("10.0.0.1", "10.0.0.2"))
