"""LoRA adapters by name, over emulated engines: loaded when asked for, kept where they are, unloaded, lost and missing."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, CATALOG, MODEL, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.keyed import keyed
from tests.wire.test_server import on_loop

from crosstie.core.fleet import Adapter, Pool, Serving
from crosstie.wire.fetch import Answer
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.emulate.server import EmulatedServer

SPEED = 20.0
A, B, C = "sql", "legal", "poems"


def pool(replicas: int = 2, **changes: Any) -> Pool:
    plain: dict[str, Any] = {
        "accelerator": "mi300x", "precision": "fp8", "stack": "vllm", "replicas": replicas, "usd_per_gpu_hour": 1.3,
        "adapters": tuple(Adapter(name=name, path=f"/adapters/{name}") for name in (A, B, C)),
    }  # fmt: skip
    return pool_of("one", **{**plain, **changes})


class Adapted:
    def __init__(self, at: Running, emulated: EmulatedFleet):
        self.at, self.emulated = at, emulated

    def engine(self, index: int) -> EmulatedServer:
        return self.emulated.replica("one", index)

    def where(self, adapter: str) -> list[int]:
        return [n for n, one in enumerate(self.emulated.replicas) if adapter in one.adapters.loaded]

    @property
    def loads(self) -> int:
        return sum(one.adapters.loads for one in self.emulated.replicas)

    async def ask(self, model: str, **body: Any) -> Answer:
        return await self.at.ask(model=model, **{"max_tokens": 4, **body})


@contextlib.asynccontextmanager
async def adapted(pool: Pool, serving: Serving = CALM) -> AsyncIterator[Adapted]:
    emulated = await start(CATALOG, fleet_of(pool, serving=serving), speed=SPEED)
    try:
        async with running(emulated.fleet, speed=SPEED) as at:
            yield Adapted(at, emulated)
    finally:
        await emulated.close()


def why(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return (answer.header(b"x-crosstie-reason") or b"").decode()


@on_loop
async def test_an_adapter_is_loaded_when_it_is_asked_for_and_then_stays() -> None:
    async with adapted(pool()) as one:
        first = await one.ask(A)
        assert why(first).endswith(f"; adapter {A} has to be loaded there")
        assert json.loads(first.body)["model"] == A
        (home,) = one.where(A)
        assert one.engine(home).adapters.loaded == {A: f"/adapters/{A}"}
        for _ in range(4):
            assert why(await one.ask(A)).endswith(f"; adapter {A} is loaded there")
        assert (one.loads, one.where(A)) == (1, [home])
        assert await one.at.metric("crosstie_adapter_loads_total", pool="one", outcome="loaded") == 1
        assert "adapter" not in why(await one.ask(MODEL))
        assert await one.at.metric("crosstie_requests_total", model=A, outcome="served") == 5


@on_loop
async def test_models_list_adapters_and_whose_they_are() -> None:
    async with adapted(pool()) as one:
        listed = {said["id"]: said for said in json.loads((await one.at.get("/v1/models")).body)["data"]}
        assert listed[A]["parent"] == MODEL
        assert listed[A]["pools"] == ["one"]
        assert "parent" not in listed[MODEL]
        assert json.loads((await one.at.get(f"/v1/models/{B}")).body)["id"] == B
        assert (await one.ask("no-such-adapter")).status == 404


@on_loop
async def test_many_who_want_it_at_once_have_it_loaded_once() -> None:
    async with adapted(pool(1)) as one:
        answers = await asyncio.gather(*(one.ask(A, stream=n % 2 == 0) for n in range(12)))
        assert {answer.status for answer in answers} == {200}
        assert one.loads == 1


@on_loop
async def test_when_its_replica_is_full_another_one_loads_it_too() -> None:
    async with adapted(pool(max_in_flight=1)) as one:
        await one.ask(A)
        (home,) = one.where(A)
        one.engine(home).inject(Fault(kind="hang", health=True))
        held = asyncio.get_running_loop().create_task(one.ask(A))
        await until(lambda: one.at.gateway.backends[one.engine(home).url].replica.in_flight == 1)
        assert why(await one.ask(A)).endswith("has to be loaded there")
        assert one.where(A) == [0, 1]
        one.engine(home).clear()
        assert (await held).status == 200


@on_loop
async def test_the_least_used_makes_room_and_what_is_in_use_does_not() -> None:
    async with adapted(pool(1, max_adapters=2)) as one:
        for name in (A, B, A, C):
            await one.ask(name)
        assert list(one.engine(0).adapters.loaded) == [A, C]
        assert (one.loads, one.engine(0).adapters.unloads) == (3, 1)
        one.engine(0).inject(Fault(kind="slow", factor=1000.0))
        loop = asyncio.get_running_loop()
        slow = [loop.create_task(one.ask(name, max_tokens=50)) for name in (A, C)]
        await until(lambda: one.at.gateway.live.replicas()[0].in_flight == 2)
        waiting = loop.create_task(one.ask(B))
        await until(lambda: len(one.at.gateway.waiting) == 1)
        assert one.loads == 3
        one.engine(0).clear()
        assert [answer.status for answer in await asyncio.gather(*slow, waiting)] == [200, 200, 200]
        assert one.where(B) == [0]


@on_loop
async def test_one_that_cannot_be_loaded_here_is_loaded_elsewhere_and_nowhere_is_said() -> None:
    async with adapted(pool()) as one:
        one.engine(0).adapters.broken.add(A)
        assert why(await one.ask(A))
        assert one.where(A) == [1]
        for index in (0, 1):
            one.engine(index).adapters.broken.add(B)
        answer = await one.ask(B)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "adapter_not_loaded")
        assert any(f"adapter {B} could not be loaded" in line and "404" in line for line in one.at.notices)
        # No fault of the replicas: they serve whatever else there is.
        assert all(replica.up for replica in one.at.gateway.live.replicas())
        assert (await one.ask(MODEL)).status == 200


@on_loop
async def test_a_load_that_does_not_end_is_given_up() -> None:
    serving = msgspec.structs.replace(CALM, adapter_load_s=0.2)
    async with adapted(pool(1), serving) as one:
        one.engine(0).adapters._later = lambda after_s, do: None
        answer = await one.ask(A)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "adapter_not_loaded")
        assert any("not within 0.2 s" in line for line in one.at.notices)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_was_restarted_is_given_it_again(stream: bool) -> None:
    @on_loop
    async def test() -> None:
        async with adapted(pool(1)) as one:
            await one.ask(A)
            # So quickly that nobody has noticed.
            one.engine(0).adapters.loaded.clear()
            assert (await one.ask(A, stream=stream)).status == 200
            assert (one.loads, one.where(A)) == (2, [0])

    test()


@on_loop
async def test_what_another_worker_has_loaded_is_not_loaded_again() -> None:
    async with adapted(pool(1, max_adapters=2)) as one:
        one.engine(0).adapters.loaded |= {A: "/adapters/sql", B: "/adapters/legal"}
        assert (await one.ask(A)).status == 200
        assert one.loads == 0
        assert one.at.gateway.live.replicas()[0].adapters.loaded == [B, A]  # type: ignore[union-attr]
        assert (await one.ask(C)).status == 200
        assert list(one.engine(0).adapters.loaded) == [A, C]


@on_loop
async def test_a_replica_that_went_down_is_not_believed_to_have_anything() -> None:
    async with adapted(pool(1)) as one:
        await one.ask(A)
        replica = one.at.gateway.live.replicas()[0]
        assert replica.adapters is not None
        assert replica.adapters.loaded == [A]
        replica.went_down("gone")
        assert replica.adapters.loaded == []
        replica.came_up(one.at.gateway.now())


@on_loop
async def test_a_client_that_leaves_while_it_is_loaded_leaves_nothing_behind() -> None:
    async with adapted(pool(1)) as one:
        one.engine(0).adapters._later = lambda after_s, do: None
        asking = asyncio.get_running_loop().create_task(one.ask(A))
        await until(lambda: one.at.gateway.live.replicas()[0].in_flight == 1)
        asking.cancel()
        await until(lambda: one.at.gateway.live.replicas()[0].in_flight == 0)


@on_loop
async def test_sglang_has_its_own_places_and_names() -> None:
    async with fakes() as [fake]:
        adapters = (Adapter(name=A, path="/adapters/sql"),)
        async with running(fleet_of(pool_of("one", fake.url, stack="sglang", adapters=adapters))) as at:
            assert (await at.ask(model=A)).status == 200
        (load, asked), (chat, body) = fake.hit
        assert (load.path, asked) == ("/load_lora_adapter", {"lora_name": A, "lora_path": "/adapters/sql"})
        assert (chat.path, body["model"]) == ("/v1/chat/completions", f"{MODEL}:{A}")


@in_folder
async def test_a_key_has_the_adapters_that_it_was_given_and_no_others(tmp_path: Path) -> None:
    async with keyed(tmp_path) as one:
        fleet = one.at.process.fleet
        adapters = tuple(Adapter(name=name, path=f"/adapters/{name}") for name in (A, B))
        pools = (msgspec.structs.replace(fleet.pools[0], adapters=adapters), *fleet.pools[1:])
        one.at.process.load(msgspec.structs.replace(fleet, pools=pools))
        some = await one.key("some", models=(A,))
        base = await one.key("base", models=(MODEL,))
        every = await one.key("every")

        async def may(token: str) -> set[str]:
            return {said["id"] for said in json.loads((await one.get("/v1/models", token)).body)["data"]} & {
                A,
                B,
                MODEL,
            }

        assert await may(some) == {A}
        assert await may(base) == {MODEL}
        assert await may(every) == {A, B, MODEL}
        assert (await one.ask(some, model=MODEL)).status == 403
        assert (await one.ask(base, model=A)).status == 403


@on_loop
async def test_more_adapters_at_once_than_places_take_turns_and_none_is_refused() -> None:
    async with adapted(pool(1, max_adapters=2)) as one:
        await one.ask(A)
        loop = asyncio.get_running_loop()
        asked = [loop.create_task(one.ask((A, B, C)[turn % 3])) for turn in range(30)]
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 30
        assert len(one.engine(0).adapters.loaded) <= 2
