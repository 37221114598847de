"""Many models on shared pools, over emulated machines: who is loaded where, who waits, and what goes wrong."""

import asyncio
import json
import random
from typing import Any

import msgspec
import pytest
from tests.needs import one_in
from tests.run.gateway.fakes import until
from tests.run.hosting.shared import MODELS, PATIENT, SPEED, Hosted, hosted, shared_pool, with_hosts
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie.host.hosted import Hosted as Size
from crosstie_gateway.emulate.faults import Fault, read_fault

A, B, C, D, *_ = MODELS
LOADINGS = ["vllm-sleep", "llamacpp-router"]
GIB = 2.0**30


async def ask(one: Hosted, model: str, tokens: int = 4, **more: Any) -> tuple[int, str]:
    """Status, and why it went where it did."""
    answer = await one.running.ask(model=model, max_tokens=tokens, **more)
    return answer.status, (answer.header(b"x-crosstie-reason") or b"").decode()


@pytest.mark.parametrize("loading", LOADINGS)
def test_a_cold_request_is_served_after_a_load(loading: Any) -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, loading=loading)) as one:
            status, why = await ask(one, A)
            assert status == 200
            assert "for a load" in why
            assert len(one.where(A)) == 1
            assert one.where(B) == []
            assert one.engine(one.where(A)[0], A).state == "loaded"
            status, why = await ask(one, A)
            assert status == 200
            assert why.endswith("; loaded")
            metric = one.running.metric
            assert await metric("crosstie_model_loads_total", model=A) == 1
            assert await metric("crosstie_cold_requests_total", model=A) == 1
            assert await metric("crosstie_model_resident", model=A) == 1
            assert await metric("crosstie_model_load_seconds_count", model=A) == 1
            assert await metric("crosstie_model_load_seconds_sum", model=A) >= 1.9
            assert await metric("crosstie_model_evictions_total") == 0

    asyncio.run(run())


def test_explain_says_what_is_loaded_where() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B)) as one:
            await ask(one, A)
            explained = []
            for model in (A, B):
                answer = await one.running.ask("/crosstie/explain", model=model)
                explained.append(json.loads(answer.body))
            loaded, absent = explained
            assert loaded["outcome"] == "send"
            assert loaded["replica"] == f"{loaded['pool']}/{one.where(A)[0] + 1}"
            assert absent["outcome"] == "wait"
            assert absent["reason"] == f"{B} has to be loaded first: 2 asleep"
            # Only the model that was asked for, and nothing is loaded for a question.
            assert [row["dropped"] for row in absent["considered"]] == ["asleep: it is not loaded"]
            assert one.count("loads", B) == 0
            listed = json.loads((await one.running.get("/v1/models")).body)
            assert {row["id"] for row in listed["data"]} == {A, B}
            ready = json.loads((await one.running.get("/ready")).body)
            assert ready["pools"] == {"shared": {"up": 4, "of": 4}}

    asyncio.run(run())


@pytest.mark.parametrize("loading", one_in(2, LOADINGS))
def test_six_models_on_two_replicas(loading: Any) -> None:
    """Twice as many as fit at a time: all are served, memory suffices at any moment, and both sides count the same."""

    async def run() -> None:
        draw = random.Random(3)
        async with hosted(shared_pool(*MODELS, loading=loading)) as one:
            most = 0.0

            async def look() -> None:
                nonlocal most
                while True:
                    for index in range(2):
                        engines = [one.engine(index, model) for model in MODELS]
                        most = max(most, sum(e.takes.taken_bytes for e in engines if e.state != "unloaded"))
                    await asyncio.sleep(0)

            looking = asyncio.create_task(look())

            async def client() -> list[int]:
                return [(await ask(one, draw.choice(MODELS)))[0] for _ in range(8)]

            statuses = [status for some in await asyncio.gather(*(client() for _ in range(6))) for status in some]
            looking.cancel()
            assert statuses == [200] * 48
            assert 2 * 20 * GIB <= most <= 45 * GIB
            assert one.count("asked") == 48
            await until(lambda: not one.pool._moves)
            loaded = {(i, m) for i in range(2) for m in MODELS if one.engine(i, m).state == "loaded"}
            assert loaded == {(i, m) for i in range(2) for m in MODELS if m in one.pool.slots[i].resident}
            assert one.count("loads") - one.count("evictions") == len(loaded)
            assert one.count("evictions") >= 2
            assert one.count("failed") == 0

    asyncio.run(run())


@pytest.mark.slow
def test_a_hot_model_stays_while_others_come_and_go() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, C, D, replicas=1)) as one:
            ended = asyncio.Event()

            async def hot() -> int:
                served = 0
                while not ended.is_set():
                    served += (await ask(one, A))[0] == 200
                return served

            await ask(one, A)
            hammering = asyncio.create_task(hot())
            for model in (B, C, D, B, C):
                assert (await ask(one, model))[0] == 200
                # Until it has had its time: what has just come may stay, and then the hot one would have to go.
                came = one.running.gateway.now()
                await until(lambda came=came: one.running.gateway.now() > came + 8.0)  # type: ignore[misc]
            ended.set()
            assert await hammering > 20
            assert one.count("evictions", A) == 0
            assert one.count("evictions") >= 2

    asyncio.run(run())


def test_two_models_that_alternate_do_not_swap_at_every_request() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1, memory_gib=25.0)) as one:

            async def client(model: str) -> list[int]:
                return [(await ask(one, model))[0] for _ in range(40)]

            statuses = await asyncio.gather(client(A), client(B), client(A), client(B))
            assert all(status == 200 for some in statuses for status in some)
            # 160 requests that alternate; each turn lasts at least as long as its model must stay.
            assert one.count("loads") <= 40
            assert one.count("loads") >= 2

    asyncio.run(run())


def test_a_pinned_model_is_there_from_the_start_and_never_leaves() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, C, D, replicas=1, pinned=B)) as one:
            await until(lambda: one.where(B) == [0])
            assert one.count("asked") == 0
            for model in (A, C, D, A):
                assert (await ask(one, model))[0] == 200
            assert one.count("evictions", B) == 0
            assert one.where(B) == [0]
            assert one.count("evictions") >= 2

    asyncio.run(run())


def test_a_client_that_goes_while_its_model_is_loaded() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B)) as one:
            waiting = asyncio.create_task(ask(one, A))
            await until(lambda: one.pool._moves)
            waiting.cancel()
            await until(lambda: not one.running.gateway.exchanges)
            # What has begun is finished, and serves the next one.
            await until(lambda: len(one.where(A)) == 1)
            assert len(one.running.gateway.waiting) == 0
            assert await one.running.metric("crosstie_requests_total", outcome="client gone") == 1
            status, why = await ask(one, A)
            assert (status, why.endswith("; loaded")) == (200, True)

    asyncio.run(run())


def test_where_a_load_fails_the_next_replica_is_tried() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B)) as one:
            one.engine(0, A).takes = Size(A, 1e15, 2.0)
            status, why = await ask(one, A)
            assert status == 200
            assert "for a load" in why
            assert one.where(A) == [1]
            if one.count("failed"):
                assert one.state(0, A) == "failed"
                assert any("could not be loaded on replica 0" in line for line in one.running.notices)
            assert await one.running.metric("crosstie_load_failures_total", model=A) == one.count("failed")

    asyncio.run(run())


def test_a_model_that_loads_nowhere_is_refused_with_a_time_to_come_back() -> None:
    async def run() -> None:
        impatient = msgspec.structs.replace(PATIENT, queue_s=2.0)
        async with hosted(shared_pool(A, B), serving=impatient) as one:
            for index in range(2):
                one.engine(index, A).takes = Size(A, 1e15, 2.0)
            answer = await one.running.ask(model=A, max_tokens=2)
            said = json.loads(answer.body)["error"]
            assert (answer.status, said["code"]) == (503, "model_not_loaded")
            # What the engine said is the operator's to know.
            assert "failed" in said["message"]
            assert "out of memory" not in said["message"]
            assert any("out of memory" in line for line in one.running.notices)
            assert int(answer.header(b"retry-after") or 0) >= 1
            await until(lambda: one.count("failed") >= 2)
            # The other model is not touched by that.
            assert (await ask(one, B))[0] == 200
            # And the first is there again as soon as it can be.
            for index in range(2):
                one.engine(index, A).takes = Size(A, 1.0, 2.0)

            async def served() -> bool:
                return (await ask(one, A))[0] == 200

            async with asyncio.timeout(LIMIT_S):
                while not await served():
                    await asyncio.sleep(0.05)

    asyncio.run(run())


@pytest.mark.parametrize("loading", LOADINGS)
def test_a_backend_that_dies_in_the_middle_of_a_load(loading: Any) -> None:
    async def run() -> None:
        pool = shared_pool(A, B, loading=loading)
        slow = tuple(msgspec.structs.replace(host, load_s=20.0) for host in pool.hosts)
        async with hosted(msgspec.structs.replace(pool, hosts=slow)) as one:
            waiting = asyncio.create_task(ask(one, A))
            await until(lambda: one.pool._moves)
            first = next(iter(one.pool._moves))
            crash = {"kind": "crash", "for_s": 1000.0}
            for server in one.emulated.replicas:
                if server.index == first:
                    server.inject(_fault(**crash))
            status, why = await waiting
            assert status == 200
            assert "for a load" in why
            assert one.where(A) == [1 - first]
            assert one.count("failed", A) == 1

    asyncio.run(run())


def _fault(**fields: Any) -> Fault:
    return read_fault(json.dumps(fields).encode())


@pytest.mark.parametrize("loading", LOADINGS)
def test_a_replica_that_was_started_anew_has_lost_its_models(loading: Any) -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1, loading=loading)) as one:
            assert (await ask(one, A))[0] == 200
            for server in one.emulated.replicas:
                server.inject(_fault(kind="crash", for_s=20.0))
            replica = one.pool.replicas[0, A]
            await until(lambda: not replica.up)
            await until(lambda: replica.up)
            status, why = await ask(one, A)
            assert (status, one.count("loads", A)) == (200, 2)
            assert "for a load" in why

    asyncio.run(run())


def test_a_router_that_lost_its_models_unnoticed_costs_nobody_an_answer() -> None:
    """Restarted between two looks: the first request finds out, and waits for the load that it causes."""

    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1, loading="llamacpp-router"), verify_s=1000.0) as one:
            assert (await ask(one, A))[0] == 200
            one.engine(0, A).unload()
            assert one.where(A) == [0]
            status, why = await ask(one, A)
            assert (status, one.count("loads", A)) == (200, 2)
            assert "for a load" in why

    asyncio.run(run())


def test_what_others_do_with_a_replica_is_noticed() -> None:
    """Somebody puts a model to sleep, and wakes another. There is room for one: what is asleep is not loaded ahead."""

    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1, memory_gib=25.0)) as one:
            assert (await ask(one, A))[0] == 200
            one.engine(0, A).unload()
            one.engine(0, B).state = "loaded"
            await until(lambda: (one.where(A), one.where(B)) == ([], [0]))
            assert (await ask(one, B))[1].endswith("; loaded")
            assert "for a load" in (await ask(one, A))[1]

    asyncio.run(run())


def test_a_model_with_requests_in_flight_is_not_put_away() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1, memory_gib=25.0)) as one:
            await ask(one, A)
            one.engine(0, A).replica.pace(slower=1000.0)
            long = asyncio.create_task(one.running.ask(model=A, max_tokens=600, ignore_eos=True))
            await until(lambda: one.pool.replicas[0, A].in_flight == 1)
            other = asyncio.create_task(ask(one, B))
            await until(lambda: one.state(0, A) == "leaving")
            assert one.engine(0, A).state == "loaded"
            # Nobody new is let in beside it, so that it can leave at all.
            third = asyncio.create_task(ask(one, A))
            one.engine(0, A).replica.pace(slower=1.0)
            answer = await long
            assert answer.status == 200
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 600
            assert (await other)[0] == 200
            assert (await third)[0] == 200
            assert one.count("evictions") >= 1

    asyncio.run(run())


def test_reloads_of_the_fleet_file() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, C, replicas=1)) as one:
            gateway, whole = one.running.gateway, one.running.process.fleet
            assert (await ask(one, A))[0] == 200
            assert (await ask(one, B))[0] == 200

            def load(fleet: Any) -> None:
                gateway.load(fleet)
                one.hosting.reloaded(fleet)

            pool = one.pool
            load(msgspec.structs.replace(whole, serving=msgspec.structs.replace(PATIENT, retries=1)))
            # Nothing has changed for the pool: what it has learnt stays.
            assert one.pool is pool
            assert (await ask(one, A))[1].endswith("; loaded")
            load(with_hosts(whole, A, C))
            assert one.pool is not pool
            assert (await ask(one, A))[1].endswith("; loaded")
            assert (await ask(one, B))[0] == 404
            assert (await ask(one, C))[0] == 200
            load(whole)
            assert (await ask(one, B))[0] == 200

    asyncio.run(run())


def test_a_file_whose_models_do_not_fit_is_refused_and_the_old_one_goes_on() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, replicas=1)) as one:
            fleet = one.running.process.fleet
            small = msgspec.structs.replace(fleet.pools[0], host_memory_gib=10.0)
            with pytest.raises(BadInput, match=r"pool shared: .* takes 20.0 GiB; no replica of the pool has more"):
                one.running.gateway.load(msgspec.structs.replace(fleet, pools=(small,)))
            assert (await ask(one, A))[0] == 200

    asyncio.run(run())


def test_a_load_under_way_when_the_file_changes() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, C, replicas=1)) as one:
            waiting = asyncio.create_task(ask(one, A))
            await until(lambda: one.pool._moves)
            fleet = with_hosts(one.running.process.fleet, A, B)
            one.running.gateway.load(fleet)
            one.hosting.reloaded(fleet)
            assert (await waiting)[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("loading", LOADINGS)
def test_what_is_loading_when_the_file_changes_is_counted_with(loading: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine goes on with what it has begun: another model beside it would be one too many."""

    async def run() -> None:
        pool = shared_pool(A, B, C, replicas=1, memory_gib=25.0, loading=loading)
        async with hosted(pool) as one:
            engine = one.engine(0, A)
            done, due = engine._loaded, asyncio.Queue[tuple[Any, ...]]()
            # It loads until it is told that it has.
            monkeypatch.setattr(engine, "_loaded", lambda *given: due.put_nowait(given))
            first = asyncio.create_task(ask(one, A))
            await until(lambda: engine.state == "loading")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            fleet = with_hosts(one.running.process.fleet, A, B)
            one.running.gateway.load(fleet)
            one.hosting.reloaded(fleet)
            second = asyncio.create_task(ask(one, B))
            # An engine that was stopped and begins anew has two of them.
            while not second.done():
                done(*await due.get()) if not due.empty() else await asyncio.sleep(0.01)
            assert (await second)[0] == 200
            assert not [line for line in one.running.notices if "could not be loaded" in line]
            assert one.count("failed") == 0

    asyncio.run(run())


def test_many_cold_models_do_not_hold_up_one_that_is_loaded() -> None:
    """More kinds wait than the waiting room tries for a place."""

    async def run() -> None:
        # Pinned, or on a slow machine the others could have its place before it is asked for again.
        pool = shared_pool(*MODELS, replicas=1, memory_gib=45.0, pinned=A)
        slow = tuple(msgspec.structs.replace(host, load_s=2.0 if host.model == A else 900.0) for host in pool.hosts)
        async with hosted(msgspec.structs.replace(pool, hosts=slow)) as one:
            assert (await ask(one, A))[0] == 200
            cold = [
                asyncio.create_task(
                    ask(one, model, headers={"x-crosstie-pool": "shared", "x-crosstie-priority": level})
                )
                for model in MODELS[1:]
                for level in ("low", "normal", "high")
            ]
            await until(lambda: len(one.running.gateway.waiting) == len(cold))
            status, why = await ask(one, A)
            assert (status, why.endswith("; loaded")) == (200, True)
            for task in cold:
                task.cancel()
            await asyncio.gather(*cold, return_exceptions=True)

    asyncio.run(run())


def test_engines_that_cannot_sleep_are_told_of() -> None:
    """vLLM without its development mode has no such pages."""

    async def run() -> None:
        impatient = msgspec.structs.replace(PATIENT, queue_s=0.1)
        async with hosted(shared_pool(A, B, replicas=1), serving=impatient) as one:
            for model in (A, B):
                engine = one.engine(0, model)
                engine._answer = super(type(engine), engine)._answer  # type: ignore[method-assign]
            one.pool.unsure.add(0)
            answer = await one.running.ask(model=A)
            assert answer.status == 503
            assert b"do not say what they have loaded" in answer.body
            assert b"127.0.0.1" not in answer.body
            await until(lambda: any("--enable-sleep-mode" in line for line in one.running.notices))

    asyncio.run(run())


def test_times_are_the_fleets() -> None:
    """Emulated seconds, which pass SPEED times as fast, in the load's histogram as in the answer's reason."""

    async def run() -> None:
        async with hosted(shared_pool(A, B)) as one:
            _, why = await ask(one, A)
            waited = float(why.partition("; waited ")[2].partition(" s")[0])
            assert waited >= 2.0
            assert SPEED > 1.0

    asyncio.run(run())


def test_a_replica_that_hangs_holds_up_no_other() -> None:
    """It takes connections and says nothing: what it has cannot be asked, and the others go on."""

    async def run() -> None:
        async with hosted(shared_pool(A, B, C, D), every_s=0.02, verify_s=0.1) as one:
            for server in one.emulated.replicas:
                if server.index == 0:
                    server.inject(_fault(kind="hang"))
            one.pool.unsure.add(0)
            for model in (A, B):
                assert (await ask(one, model))[0] == 200
                assert one.where(model) == [1]

    asyncio.run(run())


def test_a_replica_that_is_drained_gets_no_models() -> None:
    async def run() -> None:
        async with hosted(shared_pool(A, B, C, D)) as one:
            for model in MODELS[:4]:
                one.pool.replicas[0, model].draining = True
            for model in (A, B, C):
                assert (await ask(one, model))[0] == 200
            assert one.pool.slots[0].resident == {}

    asyncio.run(run())
