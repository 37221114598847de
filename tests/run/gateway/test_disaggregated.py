"""Prefill and decode engines that the gateway leads a request through, by both protocols: whole answers and streams,
and every fault on either side."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.run.emulate.running import fleet as fleet_with, pool as pool_with
from tests.run.gateway.fakes import CALM, CATALOG, Running, pool_of, running, until

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Pool, PoolApart, PoolSide, Serving
from crosstie.wire.fetch import Answer
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.admin_view import fleet_view
from crosstie_gateway.wire.request import Request

PROTOCOLS = pytest.mark.parametrize("stack", ["vllm", "sglang"])
STREAMS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
RESERVED = ("kv_transfer_params", "bootstrap")
# An engine that hangs is known by its health, long before patience ends; one that is late for a second is not.
PROBING = msgspec.structs.replace(CALM, connect_timeout_s=3.0)


def led(stack: str = "vllm", prefill: int = 2, decode: int = 2, **more: Any) -> Pool:
    ports = (8998,) * prefill if stack == "sglang" else ()
    sides = PoolApart(
        prefill=PoolSide(
            replicas=prefill, parallelism=Parallelism(), bootstrap_ports=ports,
            backends=tuple(f"http://p{n}:8000/v1" for n in range(prefill)),
        ),
        decode=PoolSide(
            replicas=decode, parallelism=Parallelism(), backends=tuple(f"http://d{n}:8000/v1" for n in range(decode))
        ),
        connector="vllm-nixl" if stack == "vllm" else "sglang-mori",
    )  # fmt: skip
    return pool_with(apart=sides, stack=stack, **more)


class Service:
    """A gateway over the emulated engines of a pool, and what each of these was asked."""

    def __init__(self, made: EmulatedFleet, at: Running):
        self.at, self.engines = at, {one.name.removeprefix("one/"): one for one in made.replicas}
        self.asked: list[tuple[str, dict[str, Any], Request]] = []
        self.records: list[RequestRecord] = []
        at.gateway.listeners.append(self.records.append)
        for name, engine in self.engines.items():
            self._note(name, engine)

    def _note(self, name: str, engine: Any) -> None:
        plain = engine._decoded
        # Somebody else's client may still ask at a port that was his server's.
        own = b"req-" + self.at.gateway._run

        def decoded(request: Request, type: Any) -> Any:
            if request.headers.get(b"x-request-id", b"").startswith(own):
                self.asked.append((name, json.loads(request.body), request))
            return plain(request, type)

        engine._decoded = decoded

    def of(self, role: str) -> list[tuple[str, dict[str, Any], Request]]:
        return [one for one in self.asked if one[0].startswith(role)]

    def break_side(self, role: str, **fault: Any) -> None:
        for name, engine in self.engines.items():
            if name.startswith(role):
                engine.inject(Fault(**fault))

    async def ask(self, content: str = "Say something.", **more: Any) -> Answer:
        given: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, **more}
        return await self.at.ask(messages=[{"role": "user", "content": content}], **given)

    @property
    def idle(self) -> bool:
        """Whether no engine works on anything, or waits for a cache."""
        waiting = sum(one.handover.waiting for one in self.engines.values() if hasattr(one, "handover"))
        return not waiting and not any(one.replica.busy for one in self.engines.values())


@asynccontextmanager
async def serving(pool: Pool, *others: Pool, serve: Serving = CALM, **more: Any) -> AsyncIterator[Service]:
    made = await start(CATALOG, fleet_with(pool, serving=serve), speed=20.0)
    try:
        fleet = msgspec.structs.replace(made.fleet, pools=(*made.fleet.pools, *others), **more)
        async with running(fleet, speed=20.0) as at:
            yield Service(made, at)
    finally:
        await made.close()
        await asyncio.sleep(0.01)


def text_of(answer: Answer) -> str:
    if answer.body[:1] == b"{":
        return str(json.loads(answer.body)["choices"][0]["message"]["content"])
    events = [json.loads(one) for one in payloads(answer.body) if one != b"[DONE]"]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])


def assert_served(answer: Answer) -> None:
    assert answer.status == 200, answer.body
    assert b'"error"' not in answer.body
    # Nothing of what is between the engines reaches a client.
    assert not any(name.encode() in answer.body for name in RESERVED)
    assert answer.body[:1] == b"{" or payloads(answer.body)[-1] == b"[DONE]"


@STREAMS
def test_vllm_prefills_then_decodes_with_what_prefill_answered(stream: bool) -> None:
    async def body() -> None:
        async with serving(led("vllm")) as one:
            answer = await one.ask(stream=stream, max_completion_tokens=30, min_tokens=3)
            assert_served(answer)
            [(_, prompt, first)], [(_, decoded, second)] = one.of("prefill"), one.of("decode")
            assert (prompt["stream"], prompt["max_tokens"], prompt["max_completion_tokens"]) == (False, 1, 1)
            assert prompt["kv_transfer_params"]["do_remote_decode"] is True
            assert not {"min_tokens", "stream_options"} & prompt.keys()
            assert (decoded["max_tokens"], decoded["max_completion_tokens"], decoded["min_tokens"]) == (20, 30, 3)
            handed = decoded["kv_transfer_params"]
            assert handed["do_remote_prefill"] is True
            assert handed["remote_engine_id"].startswith("one/prefill/")
            assert first.headers[b"x-request-id"] == second.headers[b"x-request-id"]
            [record] = one.records
            assert (record.output_tokens, record.attempts) == (30, 1)
            assert record.input_tokens < 20

    run_on_loop(body())


@STREAMS
def test_sglang_has_both_meet_in_a_room(stream: bool) -> None:
    async def body() -> None:
        async with serving(led("sglang")) as one:
            assert_served(await one.ask(stream=stream))
            assert_served(await one.ask(stream=stream))
            prompts, decoded = [said for _, said, _ in one.of("prefill")], [said for _, said, _ in one.of("decode")]
            for sent in (prompts, decoded):
                assert {(said["bootstrap_host"], said["bootstrap_port"]) for said in sent} == {("127.0.0.1", 8998)}
            rooms = [said["bootstrap_room"] for said in prompts]
            assert sorted(rooms) == sorted(said["bootstrap_room"] for said in decoded)
            assert len(set(rooms)) == 2
            assert all(said["max_tokens"] == 20 for said in prompts)
            assert [record.output_tokens for record in one.records] == [20, 20]

    run_on_loop(body())


@PROTOCOLS
@pytest.mark.parametrize(
    "sent",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}}, {"bootstrap_room": 1}, {"bootstrap_host": "10.0.0.1"},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)  # fmt: skip
def test_a_client_cannot_say_whose_cache_is_read(stack: str, sent: dict[str, Any]) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            refused = await one.ask(**sent)
            assert refused.status == 400
            assert "is the gateway's to say" in json.loads(refused.body)["error"]["message"]
            assert not one.asked

    run_on_loop(body())


@PROTOCOLS
@STREAMS
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "crash"}, {"kind": "error"}, {"kind": "refuse"}, {"kind": "reject"},
        {"kind": "error", "status": 404},
    ],
    ids=lambda fault: f"{fault['kind']}{fault.get('status', '')}",
)  # fmt: skip
def test_whatever_fails_before_the_first_token_is_done_again(
    stack: str, stream: bool, side: str, fault: dict[str, Any]
) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            one.engines[f"{side}/0"].inject(Fault(**fault))
            asked = [one.ask(f"{n} " * 50, stream=stream) for n in range(6)]
            answers = await asyncio.gather(*asked)
            for answer in answers:
                assert_served(answer)
            # However often somebody tried, each is counted once.
            assert [record.output_tokens for record in one.records] == [20] * 6
            await until(lambda: one.idle)
            one.engines[f"{side}/0"].clear()

    run_on_loop(body())


# Each waits ten seconds for the same probes.
@pytest.mark.slow
@PROTOCOLS
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_who_hangs_is_given_up_once_his_health_says_so(stack: str, side: str) -> None:
    async def body() -> None:
        async with serving(led(stack), serve=PROBING) as one:
            one.engines[f"{side}/0"].inject(Fault(kind="hang"))
            answers = await asyncio.gather(*(one.ask(f"{n} " * 50, stream=n % 2 == 0) for n in range(6)))
            for answer in answers:
                assert_served(answer)
            assert [record.output_tokens for record in one.records] == [20] * 6
            one.engines[f"{side}/0"].clear()

    run_on_loop(body())


@PROTOCOLS
def test_a_prompt_that_dies_under_way_takes_its_waiting_decode_with_it(stack: str) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            for name in ("prefill/0", "prefill/1"):
                one.engines[name].replica.pace(slower=1000.0)
            task = asyncio.ensure_future(one.ask("word " * 2000, stream=True))
            await until(lambda: one.of("prefill") and (stack == "vllm" or one.of("decode")))
            [(at, _, _)] = one.of("prefill")
            for name in ("prefill/0", "prefill/1"):
                one.engines[name].replica.pace(slower=1.0)
            one.engines[at].inject(Fault(kind="crash"))
            assert_served(await task)
            assert {name for name, _, _ in one.of("prefill")} == {"prefill/0", "prefill/1"}
            # Who waited for the first prompt has been told; the next has a room of its own.
            await until(lambda: one.idle)

    run_on_loop(body())


@PROTOCOLS
def test_a_stream_that_decode_breaks_off_goes_on_with_a_fresh_prefill(stack: str) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            whole = text_of(await one.ask(stream=True, max_tokens=60))
            one.asked.clear()
            # One of the two, so that nobody is cut twice, which would end it.
            one.engines["decode/0"].inject(Fault(kind="cut", after_tokens=10))
            answers: list[Answer] = []
            # On a busy machine all may happen to go to the other.
            while not any(record.resumed for record in one.records):
                answers += await asyncio.gather(*(one.ask(stream=True, max_tokens=60) for _ in range(4)))
            for answer in answers:
                assert_served(answer)
                assert text_of(answer) == whole
            resumed = sum(record.resumed for record in one.records)
            assert len(one.of("prefill")) == len(answers) + resumed
            assert [record.output_tokens for record in one.records] == [60] * (1 + len(answers))

    run_on_loop(body())


@PROTOCOLS
@pytest.mark.parametrize(("side", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_a_pool_without_one_side_is_out_and_says_which(stack: str, side: str, other: str) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            one.break_side(side, kind="crash")
            gateway = one.at.gateway
            await until(lambda: not gateway.ready)
            await until(lambda: not any(r.up for r in gateway.live.pools[0].replicas))
            ready = await one.at.get("/ready")
            assert ready.status == 503
            seen = json.loads(ready.body)["pools"]["one"]
            assert (seen["up"], seen["of"]) == (0, 2)
            assert seen[side] == {"up": 0, "of": 2}
            assert seen[other] == {"up": 2, "of": 2}
            refused = await one.ask()
            assert refused.status == 503
            said = json.loads(refused.body)["error"]["message"]
            assert ("prefill side is out" in said) == (side == "prefill")
            assert "refuses connections" in said
            for name, engine in one.engines.items():
                if name.startswith(side):
                    engine.clear()
            await until(lambda: gateway.ready)
            assert_served(await one.ask())

    run_on_loop(body())


@PROTOCOLS
@pytest.mark.parametrize("when", ["prompt", "answer"])
def test_both_sides_are_told_that_a_client_has_gone(stack: str, when: str) -> None:
    async def body() -> None:
        async with serving(led(stack)) as one:
            for name in ("prefill/0", "prefill/1") if when == "prompt" else ("decode/0", "decode/1"):
                one.engines[name].replica.pace(slower=1000.0)
            task = asyncio.ensure_future(one.ask("word " * 2000, stream=True, max_tokens=5000))
            await until(lambda: one.of("prefill"))
            if when == "answer":
                await until(lambda: any(one.engines[f"decode/{n}"].replica.busy for n in (0, 1)))
            one.at.origin.close()
            task.cancel()
            await until(lambda: one.idle)
            assert not any(replica.in_flight for replica in one.at.gateway.live.replicas())

    run_on_loop(body())


def test_blocks_that_are_gone_are_computed_again() -> None:
    async def body() -> None:
        async with serving(led("vllm")) as one:
            handover: Any = one.engines["prefill/0"]
            take = handover.handover.take
            lost: list[Any] = []

            def expire_once(*given: Any) -> bool:
                first = not lost
                lost.append(given)
                return bool(take(*given)) and not first

            handover.handover.take = expire_once
            assert_served(await one.ask())
            assert len(lost) == 2
            assert (len(one.of("prefill")), len(one.of("decode"))) == (2, 2)

    run_on_loop(body())


@pytest.mark.parametrize("shape", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True, "logprobs": 1}, {"best_of": 2}])
def test_what_cannot_be_handed_over_vllm_decodes_alone_and_sglang_is_not_asked(shape: dict[str, Any]) -> None:
    async def body() -> None:
        given = {"path": "/v1/completions", "prompt": "hello", "max_tokens": 3, **shape}
        async with serving(led("vllm")) as one:
            await one.at.ask(**given)
            assert one.of("decode")
            assert not one.of("prefill")
            assert "kv_transfer_params" not in one.of("decode")[0][1]
        if "prompt" in shape:
            # SGLang counts rooms on from the first.
            return
        async with serving(led("sglang")) as one:
            refused = await one.at.ask(**given)
            assert refused.status == 400
            assert "prefill and decode disaggregated" in json.loads(refused.body)["error"]["message"]
            elsewhere = await one.at.ask("/v1/embeddings", input="hello")
            assert "takes no /v1/embeddings" in json.loads(elsewhere.body)["error"]["message"]
            assert not one.asked
            assert (await one.at.ask("/crosstie/explain")).status == 200

    run_on_loop(body())


def test_prompts_go_to_who_holds_their_beginning_and_others_to_who_has_less_to_do() -> None:
    async def body() -> None:
        async with serving(led("vllm")) as one:
            first, second = ("alpha " * 3000, "beta " * 3000)
            for content in (first, second, first, second, second, first):
                assert_served(await one.ask(content))
            places = [name for name, _, _ in one.of("prefill")]
            assert places[0] != places[1]
            assert places == [places[0], places[1], places[0], places[1], places[1], places[0]]
            gateway = one.at.gateway
            explained = await one.at.ask("/crosstie/explain", messages=[{"role": "user", "content": first}])
            told = json.loads(explained.body)["prefill"]
            assert told["replica"] == f"one/prefill/{int(places[0][-1]) + 1}"
            assert told["cached_tokens"] > 1000
            pool = fleet_view(gateway, gateway.live.fleet).pools[0]
            assert [seen.side for seen in pool.backends] == ["decode", "decode", "prefill", "prefill"]
            assert {seen.source for seen in pool.backends} == {"file"}
            assert await one.at.metric("crosstie_backend_up", side="prefill") == 2
            assert await one.at.metric("crosstie_backend_up", side="decode") == 2

    run_on_loop(body())


def test_a_prefill_engine_that_hands_nothing_over_is_the_operators_to_mend() -> None:
    async def body() -> None:
        async with serving(led("vllm", prefill=1)) as one:
            engine: Any = one.engines["prefill/0"]
            engine._params = lambda wanted, usage: {}
            refused = await one.ask()
            assert refused.status == 502
            assert "hands no cache over" in json.loads(refused.body)["error"]["message"]

    run_on_loop(body())


def test_another_pool_takes_what_a_broken_service_cannot() -> None:
    async def body() -> None:
        async with serving(led("vllm", prefill=1, decode=1)) as one:
            one.break_side("prefill", kind="error")
            plain = await start(CATALOG, fleet_with(pool_with("two")), speed=20.0)
            fleet = one.at.gateway.live.fleet
            both = msgspec.structs.replace(fleet, pools=(*fleet.pools, *plain.fleet.pools))
            one.at.gateway.load(both)
            for _ in range(4):
                assert_served(await one.ask())
            await plain.close()

    run_on_loop(body())


def test_engines_come_and_go_with_the_file() -> None:
    async def body() -> None:
        async with serving(led("vllm", prefill=2, decode=2)) as one:
            gateway = one.at.gateway
            fleet = gateway.live.fleet
            apart = fleet.pools[0].apart
            assert apart is not None
            fewer = msgspec.structs.replace(
                apart,
                prefill=msgspec.structs.replace(apart.prefill, backends=apart.prefill.backends[1:], replicas=1),
            )
            pools = (msgspec.structs.replace(fleet.pools[0], apart=fewer),)
            gateway.load(msgspec.structs.replace(fleet, pools=pools))
            for n in range(3):
                assert_served(await one.ask(str(n)))
            assert {name for name, _, _ in one.of("prefill")} == {"prefill/1"}
            assert len(gateway.backends) == 3

    run_on_loop(body())


def test_plain_pools_are_served_as_before_beside_it() -> None:
    """What is refused for a model whose engines are led is nobody else's concern."""

    async def body() -> None:
        async with serving(led("vllm"), pool_of("other", "http://127.0.0.1:9/v1", model="other")) as one:
            refused = await one.at.ask(model="other", kv_transfer_params={})
            assert refused.status in (502, 503)

    run_on_loop(body())
