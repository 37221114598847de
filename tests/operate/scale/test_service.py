"""The service around the policy: what it sees, what it has done, and what it tells KEDA, over real sockets."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.run.scaler.cases import CHEAP, DEAR, KNOWN, rules

from crosstie.core.errors import BadData, BadInput
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.scale.act import Actor, Drainer, Kubernetes, Moves, ScaleFailed, ScaleHook, actors
from crosstie_gateway.scale.keda import METRIC, SERVICE, ExternalScaler, messages, serve_keda
from crosstie_gateway.scale.service import CounterWatch, GatewayCounts, ScaleService, read_state
from crosstie_gateway.scaler.rules import Supply
from crosstie_gateway.scaler.scaler import Order, Scaler
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server

PAGE = """crosstie_requests_total{{pool="cheap",model="m",class="chat",outcome="served",status="200"}} {requests}
crosstie_targets_total{{class="chat",target="ttft",kept="yes"}} {kept}
crosstie_targets_total{{class="chat",target="ttft",kept="no"}} {missed}
crosstie_backend_up{{pool="cheap",backend="http://a"}} 1
crosstie_backend_up{{pool="cheap",backend="http://b"}} 0
"""


class Gateway:
    """Serves a page of metrics, on which so many requests a second have come by the clock of the test."""

    def __init__(self) -> None:
        self.now, self.per_s, self.requests = 1000.0, 10.0, 0.0

    def clock(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.requests += self.per_s * seconds

    def answer(self, request: Request, reply: Reply) -> None:
        page = PAGE.format(requests=self.requests, kept=0.9 * self.requests, missed=0.1 * self.requests)
        reply.send(200, page.encode(), content_type=b"text/plain")


class ApiServer:
    """Scale subresources of two Deployments."""

    def __init__(self, **replicas: int) -> None:
        self.replicas, self.asked = dict(replicas), list[tuple[str, str, object]]()
        self.refuses = 0

    def answer(self, request: Request, reply: Reply) -> None:
        body = json.loads(request.body) if request.body else None
        self.asked.append((request.method, request.path, body))
        if self.refuses:
            reply.send(self.refuses, json.dumps({"message": "deployments.apps is forbidden"}).encode())
            return
        name = request.path.split("/")[-2]
        if name not in self.replicas or not request.path.startswith("/apis/apps/v1/namespaces/llm/deployments/"):
            reply.send(404, b'{"message":"not found"}')
            return
        if request.method == "PATCH":
            assert request.headers[b"content-type"] == b"application/merge-patch+json"
            self.replicas[name] = json.loads(request.body)["spec"]["replicas"]
        count = self.replicas[name]
        reply.send(200, json.dumps({"spec": {"replicas": count}, "status": {"replicas": count}}).encode())


async def listening(answer: Callable[[Request, Reply], None]) -> tuple[Server, str]:
    server = Server(asyncio.get_running_loop(), answer)
    return server, f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"


async def begun(
    gateway: Gateway, *doing: Actor, state: Path | None = None, said: list[str] | None = None
) -> tuple[ScaleService, Server]:
    server, url = await listening(gateway.answer)
    say = (said if said is not None else []).append
    wanted = {"cheap": 1, "dear": 0}
    return ScaleService(Scaler(rules(), KNOWN), [url], gateway.clock, say, doing, wanted, state), server


def test_rates_targets_and_backends_are_read_and_a_gateway_that_begins_anew_counts_from_nothing() -> None:
    def counts(requests: float) -> GatewayCounts:
        found = GatewayCounts()
        found.add(PAGE.format(requests=requests, kept=0.9 * requests, missed=0.1 * requests))
        return found

    watch = CounterWatch(rules())
    assert watch.observe(0.0, counts(100.0), {"cheap": 2}) is None
    seen = watch.observe(10.0, counts(150.0), {"cheap": 2})
    assert seen is not None
    assert seen.requests_per_s == {"chat": 5.0}
    ended, within = seen.ended["chat"]
    assert (ended, round(within, 9)) == (50, 0.9)
    assert seen.ready == {"cheap": 1, "dear": 0}
    again = watch.observe(20.0, counts(30.0), {"cheap": 2})
    assert again is not None
    assert again.requests_per_s == {"chat": 3.0}


def test_scale_subresources_are_read_and_patched_and_no_more() -> None:
    async def main() -> None:
        gateway, api = Gateway(), ApiServer(cheap=1, dear=0)
        there, at = await listening(api.answer)
        doing = actors(rules(), Kubernetes(at, "llm", "secret"), None)
        service, server = await begun(gateway, *doing)
        await service.step()
        gateway.passes(60.0)
        decision = await service.step()
        assert decision is not None
        assert api.replicas == {name: order.replicas for name, order in decision.orders.items()}
        assert api.replicas["cheap"] + api.replicas["dear"] >= 6
        changed = [one for one in api.asked if one[0] != "GET"]
        assert {path.rsplit("/", 1)[1] for _, path, _ in changed} == {"scale"}
        server.close()
        there.close()

    run_on_loop(main())


def test_more_than_there_is_is_never_asked_for_and_said_with_what_to_do() -> None:
    async def main() -> None:
        gateway, api, lines = Gateway(), ApiServer(cheap=1, dear=0), list[str]()
        there, at = await listening(api.answer)
        service, server = await begun(gateway, Kubernetes(at, "llm"), said=lines)
        gateway.per_s = 1000.0
        for _ in range(3):
            await service.step()
            gateway.passes(60.0)
        assert api.replicas == {"cheap": CHEAP.most, "dear": DEAR.most}
        assert sum("raise `most` of cheap, dear" in line for line in lines) == 1
        server.close()
        there.close()

    run_on_loop(main())


@pytest.mark.parametrize(
    ("status", "said"), [(403, "docs/scaling.md has the Role to get llm/deployments/cheap/scale"), (500, "answers 500")]
)
def test_an_api_server_that_refuses_leaves_the_fleet_as_it_is_and_is_said_once(status: int, said: str) -> None:
    async def main() -> None:
        gateway, api, lines = Gateway(), ApiServer(cheap=1, dear=0), list[str]()
        there, at = await listening(api.answer)
        service, server = await begun(gateway, Kubernetes(at, "llm"), said=lines)
        api.refuses = status
        for _ in range(3):
            assert await service.step() is None
            gateway.passes(60.0)
        assert api.replicas == {"cheap": 1, "dear": 0}
        assert len([line for line in lines if said in line]) == 1
        api.refuses = 0
        await service.step()
        assert lines[-1] == "all is well again"
        server.close()
        there.close()

    run_on_loop(main())


def test_a_resource_that_the_api_server_does_not_have_is_named() -> None:
    async def main() -> None:
        there, at = await listening(ApiServer(cheap=1).answer)
        with pytest.raises(ScaleFailed, match="has no llm/deployments/other/scale; apply its manifest"):
            await Kubernetes(at, "llm").there(Supply(name="other", pool="cheap", most=1))
        there.close()

    run_on_loop(main())


def test_a_target_of_no_kind_that_can_be_scaled_is_refused_at_once() -> None:
    odd = Supply(name="odd", pool="cheap", most=1, target="daemonsets/odd")
    with pytest.raises(BadInput, match="target 'daemonsets/odd' is not one of deployments"):
        actors(rules(odd), Kubernetes("http://127.0.0.1:1", "llm"), None)


class Admin:
    """The administrator's port of a gateway: backends of one pool."""

    def __init__(self, *addresses: str) -> None:
        self.backends = {at: {"backend": at, "up": True, "draining": False, "in_flight": 5} for at in addresses}
        self.key = b"Bearer secret"

    def answer(self, request: Request, reply: Reply) -> None:
        if request.headers[b"authorization"] != self.key:
            reply.send(401, b'{"error":{"message":"no such key"}}')
        elif request.method == "GET":
            pool = {"pool": "cheap", "draining": False, "backends": list(self.backends.values())}
            reply.send(200, json.dumps({"pools": [pool]}).encode())
        else:
            at = json.loads(request.body)["backend"]
            self.backends[at]["draining"] = request.path.endswith("/drain")
            reply.send(200, b"{}")

    @property
    def draining(self) -> list[str]:
        return [at for at, one in self.backends.items() if one["draining"]]


A, B, C = (f"http://10.0.0.{number}:8000/v1" for number in (1, 2, 3))


def test_replicas_are_emptied_through_the_gateway_before_they_are_stopped() -> None:
    async def main() -> None:
        admin, one = Admin(A, B, C), Supply(name="cheap", pool="cheap", most=3)
        admin.backends[B]["in_flight"] = 2
        server, url = await listening(admin.answer)
        drainer = Drainer([url], "secret")
        await drainer.refresh()
        # The one with the fewest requests.
        moves = await drainer.obey(one, Order(replicas=3, draining=1, why=""), 3)
        assert (moves.emptying, moves.stop, admin.draining) == ((B,), (), [B])
        await drainer.refresh()
        assert drainer.empty([one], {}) == {"cheap": 0}
        admin.backends[B]["in_flight"] = 0
        await drainer.refresh()
        assert drainer.empty([one], {}) == {"cheap": 1}
        moves = await drainer.obey(one, Order(replicas=2, draining=0, why=""), 3)
        assert moves.stop == (B,)
        # As long as it is not down it stays closed; then it is let in, for when it is started again.
        await drainer.refresh()
        assert (admin.draining, drainer.empty([one], {})) == ([B], {"cheap": 0})
        admin.backends[B]["up"] = False
        await drainer.refresh()
        assert admin.draining == []
        await drainer.refresh()
        moves = await drainer.obey(one, Order(replicas=3, draining=0, why=""), 2)
        assert moves.start == (B,)
        server.close()

    run_on_loop(main())


def test_traffic_that_comes_back_opens_what_was_being_emptied() -> None:
    async def main() -> None:
        admin, one = Admin(A, B, C), Supply(name="cheap", pool="cheap", most=3)
        server, url = await listening(admin.answer)
        drainer = Drainer([url], "secret")
        await drainer.refresh()
        await drainer.obey(one, Order(replicas=3, draining=2, why=""), 3)
        assert admin.draining == [B, C]
        await drainer.refresh()
        await drainer.obey(one, Order(replicas=3, draining=0, why=""), 3)
        assert admin.draining == []
        server.close()

    run_on_loop(main())


def test_only_its_own_backends_or_pods_are_emptied() -> None:
    async def main() -> None:
        admin = Admin(A, B, C)
        server, url = await listening(admin.answer)
        drainer = Drainer([url], "secret")
        await drainer.refresh()
        own = Supply(name="spot", pool="cheap", most=3, backends=(A,))
        await drainer.obey(own, Order(replicas=1, draining=1, why=""), 1)
        assert admin.draining == [A]
        pods = Supply(name="other", pool="cheap", most=3)
        moves = await drainer.obey(pods, Order(replicas=1, draining=1, why=""), 1, {"10.0.0.2"})
        assert moves.emptying == (B,)
        with pytest.raises(ScaleFailed, match="pools is answered 401: no such key"):
            await Drainer([url], "wrong").refresh()
        server.close()

    run_on_loop(main())


class Pods(ApiServer):
    """The same, with pods and their annotations."""

    def __init__(self, **replicas: int) -> None:
        super().__init__(**replicas)
        self.costs: dict[str, str] = {}

    def answer(self, request: Request, reply: Reply) -> None:
        if "/pods" not in request.path:
            super().answer(request, reply)
            return
        if request.method == "PATCH":
            given = json.loads(request.body)["metadata"]["annotations"]
            self.costs[request.path.rsplit("/", 1)[1]] = given["controller.kubernetes.io/pod-deletion-cost"]
            reply.send(200, b"{}")
            return
        pods = [
            {"metadata": {"name": f"pod-{number}"}, "status": {"podIP": f"10.0.0.{number}"}} for number in (1, 2, 3)
        ]
        reply.send(200, json.dumps({"items": [*pods, {"metadata": {"name": "new"}, "status": {}}]}).encode())


def test_kubernetes_takes_those_away_that_were_emptied() -> None:
    async def main() -> None:
        api, one = Pods(cheap=3), Supply(name="cheap", pool="cheap", most=3)
        server, url = await listening(api.answer)
        cluster = Kubernetes(url, "llm")
        assert await cluster.hosts(one) == {"10.0.0.1", "10.0.0.2", "10.0.0.3"}
        await cluster.obey(one, Order(replicas=3, draining=1, why=""), 3, Moves(emptying=(B,)))
        assert (api.costs, api.replicas) == ({"pod-2": "-100"}, {"cheap": 3})
        await cluster.obey(one, Order(replicas=2, draining=0, why=""), 3, Moves(stop=(B,)))
        assert api.replicas == {"cheap": 2}
        server.close()

    run_on_loop(main())


def test_a_hook_that_failed_is_run_again() -> None:
    async def main() -> None:
        gateway, lines = Gateway(), list[str]()
        service, server = await begun(gateway, ScaleHook("false", print), said=lines)
        for _ in range(3):
            await service.step()
            gateway.passes(60.0)
        assert service.wanted == {"cheap": 1, "dear": 0}
        assert sum("ended with status 1" in line for line in lines) == 1
        assert sum(line.startswith("cheap: 1 -> ") for line in lines) == 2
        server.close()

    run_on_loop(main())


def test_a_gateway_that_does_not_answer_changes_nothing() -> None:
    async def main() -> None:
        gateway, lines = Gateway(), list[str]()
        service, server = await begun(gateway, said=lines)
        server.close()
        assert await service.step() is None
        assert service.wanted == {"cheap": 1, "dear": 0}
        assert "nothing is decided and nothing changed" in lines[0]
        assert "crosstie_scale_up 0" in service.page()

    run_on_loop(main())


def test_a_hook_is_told_what_to_have_and_one_that_fails_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        out, script = tmp_path / "out", tmp_path / "hook.sh"
        script.write_text(f'#!/bin/sh\necho "$CROSSTIE_SUPPLY $CROSSTIE_BEFORE $CROSSTIE_REPLICAS" >> {out}\n')
        script.chmod(0o755)
        one = Supply(name="cheap", pool="cheap", most=9)
        order = Order(replicas=4, draining=0, why="")
        await ScaleHook(str(script), print).obey(one, order, 1, None)
        await ScaleHook(str(script), print).obey(one, order, 4, None)
        assert out.read_text() == "cheap 1 4\n"
        script.write_text(f'#!/bin/sh\necho "$CROSSTIE_START|$CROSSTIE_STOP" > {out}\n')
        await ScaleHook(str(script), print).obey(
            one, order, 1, Moves(stop=("http://a",), start=("http://b", "http://c"))
        )
        assert out.read_text() == "http://b http://c|http://a\n"
        with pytest.raises(ScaleFailed, match="ended with status 1"):
            await ScaleHook("false", print).obey(one, order, 1, None)

    run_on_loop(main())


def test_what_is_learnt_is_kept_and_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        gateway, file = Gateway(), tmp_path / "state.json"
        assert read_state(file).at_s is None
        service, server = await begun(gateway, state=file)
        for _ in range(2):
            await service.step()
            gateway.passes(60.0)
        assert read_state(file) == service.scaler.state
        file.write_text("[]")
        with pytest.raises(BadData, match="is no state of a scaler"):
            read_state(file)
        server.close()

    run_on_loop(main())


def test_the_page_has_what_an_autoscaler_reads() -> None:
    async def main() -> None:
        gateway = Gateway()
        service, server = await begun(gateway)
        for _ in range(2):
            await service.step()
            gateway.passes(60.0)
        made = service.current()
        assert made is not None
        wanted = made.orders["cheap"].replicas
        assert f'crosstie_scale_desired_replicas{{supply="cheap",pool="cheap"}} {wanted}' in service.page()
        # What was seen long ago is told to nobody.
        gateway.passes(3600.0)
        assert service.current() is None
        assert "desired_replicas" not in service.page()
        server.close()

    run_on_loop(main())


def test_keda_is_told_over_grpc() -> None:
    grpc = pytest.importorskip("grpc")

    async def main() -> None:
        gateway = Gateway()
        service, server = await begun(gateway)
        keda, port = await serve_keda(service, "127.0.0.1:0")
        made = messages()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            def call(method: str, answer: str):  # type: ignore[no-untyped-def]
                return channel.unary_unary(
                    f"/{SERVICE}/{method}",
                    request_serializer=lambda asked: asked.SerializeToString(),
                    response_deserializer=made[answer].FromString,
                )

            mine = made["ScaledObjectRef"](name="any", namespace="llm", scalerMetadata={"supply": "cheap"})
            spec = await call("GetMetricSpec", "GetMetricSpecResponse")(mine)
            assert [(one.metricName, one.targetSizeFloat) for one in spec.metricSpecs] == [(METRIC, 1.0)]
            asked = made["GetMetricsRequest"](scaledObjectRef=mine, metricName=METRIC)
            with pytest.raises(grpc.aio.AioRpcError) as early:
                await call("GetMetrics", "GetMetricsResponse")(asked)
            assert early.value.code() == grpc.StatusCode.UNAVAILABLE
            pushed = channel.unary_stream(
                f"/{SERVICE}/StreamIsActive",
                request_serializer=lambda one: one.SerializeToString(),
                response_deserializer=made["IsActiveResponse"].FromString,
            )(mine)
            await service.step()
            gateway.passes(60.0)
            decision = await service.step()
            assert decision is not None
            value = (await call("GetMetrics", "GetMetricsResponse")(asked)).metricValues[0]
            assert value.metricValueFloat == value.metricValue == decision.orders["cheap"].replicas > 0
            assert (await call("IsActive", "IsActiveResponse")(mine)).result
            assert (await pushed.read()).result
            other = made["ScaledObjectRef"](name="other")
            with pytest.raises(grpc.aio.AioRpcError, match="no supply 'other': there are cheap, dear"):
                await call("IsActive", "IsActiveResponse")(other)
            pushed.cancel()
        await keda.stop(0.0)
        server.close()

    asyncio.run(main())


def test_the_messages_are_keda_s_on_the_wire() -> None:
    made = messages()
    # By hand: field 1, "a"; field 3, a map's entry of supply and b.
    assert made["ScaledObjectRef"](name="a", scalerMetadata={"supply": "b"}).SerializeToString() == (
        b"\x0a\x01a\x1a\x0b\x0a\x06supply\x12\x01b"
    )
    assert made["MetricValue"](metricName="m", metricValue=3).SerializeToString() == b"\x0a\x01m\x10\x03"
    assert ExternalScaler.__doc__
