"""From nothing to an answer: a request is held, the scaler hears of it, KEDA is told, and an emulated replica begins."""

import asyncio

import msgspec
import pytest
from tests.run.emulate.running import CATALOG, SMALL, fleet, pool
from tests.run.gateway.fakes import CALM, fleet_of, running, until
from tests.run.gateway.test_serving import CHAT
from tests.run.pick.envoys import free_port
from tests.run.scaler.cases import CHEAP, KNOWN, rules

from crosstie_gateway.emulate.fleet import start
from crosstie_gateway.scale import service as module
from crosstie_gateway.scale.keda import SERVICE, messages, serve_keda
from crosstie_gateway.scale.service import CounterWatch, GatewayCounts, ScaleService
from crosstie_gateway.scaler.scaler import FleetObservation, Scaler

HOLDS = msgspec.structs.replace(CALM, hold_s=100.0, start_s=60.0, health_every_s=0.05)
ZERO = rules(CHEAP, to_zero=True)


def observed(scaler: Scaler, minute: int, per_s: float, wanted: int) -> int:
    """Replicas to have, where all that were asked for serve and are empty as soon as they may be."""
    drains = len(scaler.state.supplies["cheap"].drains)
    seen = FleetObservation(
        at_s=60.0 * minute, over_s=60.0, requests_per_s={"chat": per_s}, ready={"cheap": wanted},
        wanted={"cheap": wanted}, empty={"cheap": drains},
    )  # fmt: skip
    return scaler.decide(seen).orders["cheap"].replicas


@pytest.mark.parametrize(("to_zero", "left"), [(True, 0), (False, 1)])
@pytest.mark.slow
def test_a_pool_goes_to_zero_only_where_the_rules_say_so(to_zero: bool, left: int) -> None:
    scaler, wanted = Scaler(rules(CHEAP, to_zero=to_zero), KNOWN), 2
    for minute in range(300):
        wanted = observed(scaler, minute, 3.0 if minute < 30 else 0.0, wanted)
    assert wanted == left
    assert observed(scaler, 301, 0.5, wanted) >= 1


def test_a_request_that_is_held_has_come_and_comes_once() -> None:
    watch = CounterWatch(ZERO)

    def counts(held: int, ended: int) -> GatewayCounts:
        found = GatewayCounts()
        found.add(f'crosstie_held{{model="m",class="chat"}} {held}\ncrosstie_requests_total{{class="chat"}} {ended}\n')
        return found

    rates = []
    for moment, (held, ended) in enumerate([(0, 0), (2, 0), (2, 0), (0, 2)]):
        seen = watch.observe(float(moment), counts(held, ended), {"cheap": 0})
        rates.append(None if seen is None else seen.requests_per_s["chat"])
    assert rates == [None, 2.0, 0.0, 0.0]


def test_a_held_request_brings_a_replica_up_by_keda_and_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc = pytest.importorskip("grpc")
    monkeypatch.setattr(module, "_PEEK_S", 0.05)

    async def main() -> None:
        place = pool("cheap", backends=(f"http://127.0.0.1:{free_port()}/v1",))
        served = fleet_of(place, classes=(msgspec.structs.replace(CHAT, model=SMALL),), serving=HOLDS)
        async with running(served) as at:
            scaler = Scaler(ZERO, KNOWN)
            now = asyncio.get_running_loop().time
            service = ScaleService(scaler, [f"http://127.0.0.1:{at.port}"], now, print, wanted={"cheap": 0})
            keda, port = await serve_keda(service, "127.0.0.1:0")
            scaling, made = asyncio.ensure_future(service.run()), messages()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                active = channel.unary_stream(
                    f"/{SERVICE}/StreamIsActive",
                    request_serializer=lambda one: one.SerializeToString(),
                    response_deserializer=made["IsActiveResponse"].FromString,
                )(made["ScaledObjectRef"](name="cheap"))
                await until(lambda: service.watch.before is not None)
                asked = asyncio.ensure_future(at.ask(model=SMALL, stream=True, max_tokens=4))
                while not (await active.read()).result:
                    pass
                # As KEDA would have it started.
                emulated = await start(CATALOG, fleet(place), speed=100.0)
                answer = await asked
                assert (answer.status, b"emulated" in answer.body) == (200, True)
                assert await at.metric("crosstie_cold_starts_total", outcome="held") == 1
                active.cancel()
                await emulated.close()
            scaling.cancel()
            await keda.stop(0.0)

    asyncio.run(main())
