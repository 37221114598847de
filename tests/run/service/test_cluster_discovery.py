"""A gateway over pods that an API server knows: they come when they are ready, go before they refuse, and no request
is lost by that, nor by the API server's own end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.run.cluster.api_server import ApiServer, api_server, endpoint_slice, pod
from tests.run.gateway.fakes import CATALOG, Fake, Running, fakes, fleet_of, pool_of, running, until

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.cluster.api import ClusterApi
from crosstie_gateway.service.discovery import ClusterDiscovery

SERVICE = "kube://default/services/vllm"


class Found:
    def __init__(self, gateway: Running, server: ApiServer):
        self.gateway, self.server = gateway, server

    @property
    def backends(self) -> list[str]:
        return list(self.gateway.gateway.backends)

    async def served_by(self) -> str:
        return str(json.loads((await self.gateway.ask()).body)["served_by"])


@asynccontextmanager
async def found(fleet: Fleet, server: ApiServer, **settings: Any) -> AsyncIterator[Found]:
    discovery = ClusterDiscovery(server.api, **settings)
    try:
        async with running(fleet, components=[discovery]) as made:
            yield Found(made, server)
    finally:
        await discovery.stop()


def plain(*backends: str) -> Fleet:
    return fleet_of(pool_of("a", *backends), policy="round-robin")


def url_of(fake: Fake) -> str:
    return f"http://127.0.0.1:{fake.port}/v1"


def served(server: ApiServer, *ready: Fake, leaving: tuple[Fake, ...] = ()) -> None:
    """A slice a pod, since fakes share one address."""
    for fake in (*ready, *leaving):
        gone = {"ready": False, "serving": True, "terminating": True}
        end = {"addresses": ["127.0.0.1"], "conditions": gone if fake in leaving else {"ready": True}}
        endpoint_slice(server, fake.name, fake.port, end)


@pytest.mark.slow
def test_pods_that_become_ready_are_routed_to_and_those_that_leave_are_not() -> None:
    async def scenario() -> None:
        async with fakes(2) as [first, second]:
            with api_server() as server:
                served(server, first)
                async with found(plain(SERVICE), server) as at:
                    assert at.backends == [url_of(first)]
                    assert await at.served_by() == "fake-0"
                    served(server, second)
                    await until(lambda: len(at.backends) == 2)
                    assert {await at.served_by() for _ in range(4)} == {"fake-0", "fake-1"}
                    # What it is answering it finishes.
                    first.mode = "hang"
                    asked = [asyncio.ensure_future(at.gateway.ask()) for _ in range(2)]
                    await until(lambda: first.held)
                    served(server, leaving=(first,))
                    await until(lambda: at.backends == [url_of(second)])
                    assert [await at.served_by() for _ in range(3)] == ["fake-1"] * 3
                    first._ok({}, first.held.pop())
                    assert {json.loads((await one).body)["served_by"] for one in asked} == {"fake-0", "fake-1"}
                    assert await at.gateway.metric("crosstie_cluster_endpoints", backend=SERVICE) == 1
                    assert any("1 ready: 1 went" in line for line in at.gateway.notices)

    run_on_loop(scenario())


def test_an_api_server_that_ends_takes_nobody_with_it() -> None:
    async def scenario() -> None:
        async with fakes(2) as [first, second]:
            with api_server() as server:
                served(server, first)
                async with found(plain(SERVICE), server) as at:
                    await asyncio.to_thread(server.stop)
                    await until(lambda: any("cannot be reached" in line for line in at.gateway.notices))
                    assert await at.served_by() == "fake-0"
                    server.delete("EndpointSlice", "fake-0")
                    served(server, second)
                    server.compact()
                    server.start()
                    await until(lambda: at.backends == [url_of(second)])
                    assert await at.served_by() == "fake-1"
                    await until(lambda: any("the API server answers again" in line for line in at.gateway.notices))

    run_on_loop(scenario())


def test_a_gateway_starts_before_its_pods_and_takes_the_first() -> None:
    async def scenario() -> None:
        async with fakes(1) as [fake]:
            with api_server() as server:
                async with found(plain(SERVICE), server) as at:
                    assert at.backends == [f"{SERVICE}#a"]
                    await until(lambda: not next(iter(at.gateway.gateway.backends.values())).replica.up)
                    assert (await at.gateway.ask()).status in (502, 503)
                    served(server, fake)
                    await until(lambda: at.backends == [url_of(fake)])
                    assert await at.served_by() == "fake-0"

    run_on_loop(scenario())


def on(accelerator: str, source: str) -> Pool:
    more = {"accelerator": accelerator, "precision": "fp8", "stack": "vllm", "replicas": 1}
    return pool_of(accelerator, source, **more)


def test_pools_that_look_in_one_place_take_the_pods_of_their_own_accelerator() -> None:
    async def scenario() -> None:
        async with fakes(1) as [fake]:
            with api_server() as server:
                source = f"kube://default/pods/app=vllm:{fake.port}"
                pod(server, "a", "127.0.0.1", accelerator="mi300x")
                pod(server, "b", "127.0.0.2", accelerator="h200")
                pod(server, "c", "127.0.0.3")
                pod(server, "d", "127.0.0.4", accelerator="mi999x")
                async with found(fleet_of(on("mi300x", source), on("h200", source)), server) as at:
                    pools = {
                        one.name: one.backends for one in at.gateway.process.prepared(at.gateway.process.read).pools
                    }
                    assert pools == {
                        "mi300x": (f"http://127.0.0.1:{fake.port}/v1",), "h200": (f"http://127.0.0.2:{fake.port}/v1",),
                    }  # fmt: skip
                    said = [line for line in at.gateway.notices if line.startswith("pod ")]
                    assert sorted(line.split(":")[0] for line in said) == ["pod c", "pod d"]
                    assert any(
                        "crosstie.io/accelerator=mi999x names no accelerator of the catalog" in one for one in said
                    )
                    assert any("and several pools look for pods there" in one for one in said)

    run_on_loop(scenario())


def test_a_pod_that_is_not_what_its_pool_has_is_left_out() -> None:
    async def scenario() -> None:
        with api_server() as server:
            source = "kube://default/pods/app=vllm:8000"
            pod(server, "a", "127.0.0.1", accelerator="h200")
            pod(server, "b", "127.0.0.2", model="another")
            async with found(fleet_of(on("mi300x", source)), server) as at:
                assert at.backends == [f"{source}#mi300x"]
                said = " ".join(at.gateway.notices)
                assert "pod a: crosstie.io/accelerator=h200 is not what pool mi300x has" in said
                assert "pod b: crosstie.io/model=another is not what pool mi300x has" in said

    run_on_loop(scenario())


def test_a_fleet_that_names_a_cluster_where_there_is_none_is_refused_and_the_old_one_goes_on() -> None:
    def nowhere() -> ClusterApi:
        raise BadInput("kube:// backends: no cluster is known here")

    async def scenario() -> None:
        async with fakes(1) as [fake], running(plain(url_of(fake)), components=[ClusterDiscovery(nowhere)]) as at:
            with pytest.raises(BadInput, match="no cluster is known here"):
                at.process.load(plain(SERVICE))
            assert list(at.gateway.backends) == [url_of(fake)]

    run_on_loop(scenario())


@pytest.mark.parametrize(("kind", "status", "said"), [
    ("InferencePool", 404, "the API server has no InferencePool (inference.networking.k8s.io/v1): install the Gateway"),
    ("InferencePool", 403, "may not list and watch inferencepools and pods in namespace default: give it a Role"),
])  # fmt: skip
def test_a_fleet_that_asks_for_what_the_api_server_has_not_leaves_those_who_serve(
    tmp_path: Path, kind: str, status: int, said: str
) -> None:
    """And once it has it, its pods take over."""
    file, source = tmp_path / "fleet.toml", "kube://default/inferencepools/chat"

    async def scenario() -> None:
        async with fakes(2) as [first, second]:
            with api_server() as server:
                server.refusals[kind] = status
                async with found(plain(url_of(first)), server) as at:
                    file.write_text(fleet_text(plain(source)))
                    at.gateway.process.read_again(file)
                    await until(lambda: any(said in line for line in at.gateway.notices))
                    assert any("what the pool had goes on" in line for line in at.gateway.notices)
                    assert at.backends == [url_of(first)]
                    assert await at.served_by() == "fake-0"
                    pod(server, "a", "127.0.0.1")
                    spec = {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": second.port}]}
                    server.put("InferencePool", "chat", spec=spec)
                    server.refusals.clear()
                    await until(lambda: at.backends == [url_of(second)])
                    assert await at.served_by() == "fake-1"

    run_on_loop(scenario())


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ("kube://default/services/vllm", True),
        ("kube:///pods/app.kubernetes.io/name=vllm,tier!=old:8000", True),
        ("kube://prod/inferencepools/chat:8000", True),
        ("kube://default/pods/app=vllm", False),
        ("kube://default/deployments/vllm", False),
        ("kube://default/services/Vllm_1", False),
        ("kube://default/services/vllm:0", False),
        ("kube://", False),
    ],
)
def test_what_names_nothing_of_a_cluster_is_refused(tmp_path: Path, given: str, right: bool) -> None:
    file = tmp_path / "fleet.toml"
    text = f'format = 1\nname = "f"\n[[pool]]\nname = "a"\nmodel = "m"\nbackends = ["{given}"]\n'
    file.write_text(text)
    if right:
        fleet = read_fleet(CATALOG, file)
        file.write_text(fleet_text(fleet))
        assert read_fleet(CATALOG, file).pools[0].backends == (given,)
    else:
        with pytest.raises(CrosstieError, match=r"backends\[0\].*names nothing of a cluster"):
            read_fleet(CATALOG, file)


def test_one_place_for_two_pools_alike_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    pools = "".join(f'[[pool]]\nname = "{name}"\nmodel = "m"\nbackends = ["{SERVICE}"]\n' for name in "ab")
    file.write_text(f'format = 1\nname = "f"\n{pools}')
    with pytest.raises(CrosstieError, match="it would get twice its share"):
        read_fleet(CATALOG, file)
