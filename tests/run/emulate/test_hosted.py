"""Engines that share an emulated machine: sleep and wake as vLLM has them, a router as llama.cpp has it."""

import asyncio
import json
from typing import Any

import pytest
from tests.run.emulate.running import CATALOG, CHAT, Client, chat, fleet
from tests.run.hosting.shared import shared_pool
from tests.waiting import LIMIT_S, until

from crosstie_gateway.emulate.fleet import start

A, B, C = "llama-3.1-8b", "qwen3-8b", "mistral-7b"


def shared(loading: Any, *models: str) -> Any:
    return fleet(shared_pool(*models, replicas=1, loading=loading))


async def said(client: Client, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    answer = await (client.get(path) if body is None else client.post(path, body))
    return answer.status, json.loads(answer.body)


def test_engines_sleep_and_wake_as_vllm_s_do() -> None:
    async def run() -> None:
        made = await start(CATALOG, shared("vllm-sleep", A, B, C), speed=20.0)
        first, second, third = (Client(host.backends[0]) for host in made.fleet.pools[0].hosts)
        assert await said(first, "/is_sleeping") == (200, {"is_sleeping": True})
        assert (await first.get("/health")).status == 200
        # Who sleeps takes requests and answers when it is awake.
        asking = asyncio.create_task(first.post(CHAT, chat(max_tokens=3)))
        woken = await said(first, "/wake_up", {})
        assert woken == (200, {"status": "awake", "tags": None})
        assert (await asking).status == 200
        assert await said(first, "/is_sleeping") == (200, {"is_sleeping": False})
        assert (await said(second, "/wake_up", {}))[0] == 200
        # Two of 20 GiB are all that 45 hold.
        status, told = await said(third, "/wake_up", {})
        assert (status, "out of memory" in told["error"]["message"]) == (500, True)
        assert await said(second, "/sleep?level=1", {}) == (200, {"status": "sleeping", "level": 1})
        assert (await said(third, "/wake_up", {}))[0] == 200
        assert (await said(third, "/sleep?level=3", {}))[0] == 400
        for client in (first, second, third):
            client.origin.close()
        await made.close()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_what_becomes_of_requests_when_a_server_is_to_sleep(mode: str) -> None:
    async def run() -> None:
        made = await start(CATALOG, shared("vllm-sleep", A, B), speed=20.0)
        client = Client(made.fleet.pools[0].hosts[0].backends[0])
        await client.post("/wake_up", {})
        connection, reader = await client.begin(CHAT, chat(max_tokens=2000, ignore_eos=True))
        await reader.headed.wait()
        assert (await client.post(f"/sleep?mode={mode}", {})).status == 200
        assert await reader.done is (mode == "wait")
        connection.abort()
        client.origin.close()
        await made.close()

    asyncio.run(run())


def test_a_router_loads_and_unloads_as_llama_cpp_s_does() -> None:
    async def run() -> None:
        made = await start(CATALOG, shared("llamacpp-router", A, B, C), speed=20.0)
        client = Client(made.fleet.pools[0].backends[0])

        async def states() -> dict[str, Any]:
            return {row["id"]: row["status"] for row in (await said(client, "/models"))[1]["data"]}

        async def loaded(model: str) -> dict[str, Any]:
            found: dict[str, Any] = {"value": "loading"}
            async with asyncio.timeout(LIMIT_S):
                while found["value"] == "loading":
                    found = (await states())[model]
            return found

        assert await states() == {model: {"value": "unloaded"} for model in (A, B, C)}
        status, told = await said(client, CHAT, chat(model=A))
        assert (status, told["error"]["message"]) == (400, "model is not loaded")
        assert (await said(client, "/models/load", {"model": "nobody"}))[0] == 404
        assert await said(client, "/models/load", {"model": A}) == (200, {"success": True})
        assert (await said(client, "/models/load", {"model": A}))[0] == 400
        assert await loaded(A) == {"value": "loaded"}
        assert (await said(client, CHAT, chat(model=A, max_tokens=2)))[0] == 200
        assert (await client.get("/metrics")).status == 400
        assert (await client.get("/health")).status == 200
        await client.post("/models/load", {"model": B})
        await loaded(B)
        await client.post("/models/load", {"model": C})
        # Its process ends where memory does not suffice.
        assert await loaded(C) == {"value": "unloaded", "failed": True, "exit_code": 1}
        assert await said(client, "/models/unload", {"model": A}) == (200, {"success": True})
        assert (await states())[A] == {"value": "unloaded"}
        assert (await said(client, "/models/unload", {"model": A}))[0] == 400
        client.origin.close()
        await made.close()

    asyncio.run(run())


def test_engines_that_compute_at_the_same_time_take_turns() -> None:
    """Both answer for many seconds, or until their client leaves: a stalled machine finds them at it, too."""

    async def run() -> None:
        made = await start(CATALOG, shared("vllm-sleep", A, B), speed=2.0)
        clients = [Client(host.backends[0]) for host in made.fleet.pools[0].hosts]
        for client in clients:
            await client.post("/wake_up", {})
        engines = [made.replica("shared", 0, model) for model in (A, B)]

        def slower() -> list[float]:
            return [one.replica.engine.slower for one in engines]

        first, _ = await clients[0].begin(CHAT, chat(model=A, max_tokens=8000, ignore_eos=True))
        await until(lambda: engines[0].replica.busy)
        assert slower()[0] == 1.0
        second, _ = await clients[1].begin(CHAT, chat(model=B, max_tokens=8000, ignore_eos=True))
        await until(lambda: slower() == [2.0, 2.0])
        second.abort()
        await until(lambda: slower()[0] == 1.0)
        assert engines[0].replica.busy
        first.abort()
        for client in clients:
            client.origin.close()
        await made.close()

    asyncio.run(run())
