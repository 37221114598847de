"""Emulated disaggregated services: the proxy's endpoint, and the replicas behind it."""

import json
from typing import Any

import pytest
from tests.run.emulate.running import CHAT, Client, chat, emulating, fleet, pool

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Pool, PoolApart, PoolSide
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.disaggregated import LEASE_S


def apart(connector: str = "vllm-moriio", prefill: int = 1, decode: int = 2, **more: Any) -> Pool:
    side = Parallelism()
    sides = PoolApart(
        prefill=PoolSide(replicas=prefill, parallelism=side), decode=PoolSide(replicas=decode, parallelism=side),
        connector=connector,
    )  # fmt: skip
    return pool(apart=sides, **more)


def test_a_service_answers_at_its_proxy_and_its_replicas_have_addresses_of_their_own() -> None:
    async def body() -> None:
        async with emulating(fleet(apart(replicas=2))) as (made, client):
            assert len(made.fleet.pools[0].backends) == 2
            names = [one.name for one in made.replicas]
            assert names[:4] == ["one/0", "one/0/prefill/0", "one/0/decode/0", "one/0/decode/1"]
            assert len({one.url for one in made.replicas}) == 8
            answer = await client.post(CHAT, chat(max_tokens=40, ignore_eos=True))
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 40
            events = await client.stream(chat(max_tokens=30, ignore_eos=True))
            assert events.whole
            metrics = await client.metrics()
            assert metrics["vllm:generation_tokens_total"] == 70

    run_on_loop(body())


def test_a_prefill_replica_gives_a_handle_and_a_decode_replica_takes_it_once() -> None:
    async def body() -> None:
        async with emulating(fleet(apart())) as (made, _):
            prefill, decode = Client(made.replicas[1].url), Client(made.replicas[2].url)
            long = "word " * 4000
            asked = chat(long, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
            first = json.loads((await prefill.post(CHAT, asked)).body)
            handle = first["kv_transfer_params"]
            assert handle["do_remote_prefill"] is True
            assert handle["remote_engine_id"] == "one/0/prefill/0"
            assert len(handle["remote_block_ids"][0]) == -(-first["usage"]["prompt_tokens"] // 16)
            given = chat(long, max_tokens=20, ignore_eos=True, kv_transfer_params=handle)
            second = json.loads((await decode.post(CHAT, given)).body)
            assert second["usage"]["completion_tokens"] == 20
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
            # The blocks have been fetched, and by vLLM's default nobody computes them again.
            again = await decode.post(CHAT, given)
            assert again.status == 500
            assert "KV load failed" in json.loads(again.body)["error"]["message"]
            # Without a handle it is a replica like any other.
            other = chat(long[::-1], max_tokens=5, ignore_eos=True)
            third = json.loads((await decode.post(CHAT, other)).body)
            assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            for one in (prefill, decode):
                one.origin.close()

    run_on_loop(body())


def test_a_handle_is_good_for_as_long_as_the_lease() -> None:
    async def body() -> None:
        async with emulating(fleet(apart())) as (made, _):
            server: Any = made.replicas[1]
            offered = server.handover.offer("one", 0.0)
            late = server.handover.offer("one", 0.0)
            assert server.handover.take(offered, LEASE_S - 1.0)
            assert not server.handover.take(late, LEASE_S + 1.0)
            assert not server.handover.take(None, 0.0)

    run_on_loop(body())


@pytest.mark.parametrize("more", [{"max_tokens": 7}, {"max_tokens": 1, "stream": True}])
def test_a_prefill_replica_is_asked_for_one_token(more: dict[str, Any]) -> None:
    async def body() -> None:
        async with emulating(fleet(apart())) as (made, _):
            prefill = Client(made.replicas[1].url)
            wanted = chat(kv_transfer_params={"do_remote_decode": True}, ignore_eos=True, **more)
            refused = await prefill.post(CHAT, wanted)
            assert refused.status == 400
            assert "max_tokens=1" in json.loads(refused.body)["error"]["message"]
            prefill.origin.close()

    run_on_loop(body())


def test_engines_of_another_protocol_have_only_their_proxy() -> None:
    async def body() -> None:
        async with emulating(fleet(apart("sglang-mori", stack="sglang"))) as (made, client):
            assert [one.name for one in made.replicas] == ["one/0"]
            answer = await client.post(CHAT, chat(max_tokens=3, ignore_eos=True))
            assert answer.status == 200

    run_on_loop(body())
