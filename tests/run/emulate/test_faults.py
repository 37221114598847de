"""Each fault made to happen, seen from the outside; and every slip in asking for one."""

import asyncio
import json

import pytest
from tests.run.emulate.running import CHAT, Client, chat, emulating, fleet, pool
from tests.waiting import LIMIT_S, until

from crosstie.core.errors import BadInput
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.faults import POISON, Fault, Faults, ScriptedFault, read_fault, read_script

LONG = chat(max_tokens=400, ignore_eos=True)


async def comes_back(client: Client, path: str = "/health") -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                if (await client.get(path)).status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.02)


def test_a_crash_drops_everyone_refuses_and_comes_back_empty() -> None:
    async def body() -> None:
        async with emulating(speed=2.0) as (_, client):
            connection, reader = await client.begin(CHAT, chat(max_tokens=20_000, ignore_eos=True))
            await until(lambda: reader.pieces)
            assert (await client.fault(kind="crash", for_s=6.0)).status == 200
            async with asyncio.timeout(LIMIT_S):
                assert not await reader.done, "the stream was cut, not ended"
            connection.abort()
            with pytest.raises(OSError, match=r"refused|Connect call failed"):
                await client.origin.open(1.0)
            await comes_back(client)
            metrics = await client.metrics()
            assert metrics["vllm:num_requests_running"] == metrics["vllm:prompt_tokens_total"] == 0
            assert (await client.post(CHAT, chat(max_tokens=2))).status == 200
            assert json.loads((await client.get("/emulate/fault")).body)["faults"] == []

    run_on_loop(body())


def test_a_hang_takes_requests_and_says_nothing_until_it_ends() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            await client.fault(kind="hang")
            waiting = asyncio.ensure_future(client.post(CHAT, chat(max_tokens=2)))
            probe = asyncio.ensure_future(client.get("/health"))
            done, _ = await asyncio.wait({waiting, probe}, timeout=0.3)
            assert not done
            assert (await client.get("/emulate/fault", "DELETE")).status == 200
            assert (await waiting).status == (await probe).status == 200
            await client.fault(kind="hang", health=True)
            assert (await client.get("/health")).status == 200
            waiting = asyncio.ensure_future(client.post(CHAT, chat(max_tokens=2)))
            done, _ = await asyncio.wait({waiting}, timeout=0.1)
            assert not done
            await client.get("/emulate/fault", "DELETE")
            assert (await waiting).status == 200

    run_on_loop(body())


def test_a_hang_stops_streams_that_run() -> None:
    async def body() -> None:
        async with emulating(speed=2.0) as (_, client):
            connection, reader = await client.begin(CHAT, LONG)
            await until(lambda: reader.pieces)
            await client.fault(kind="hang")
            await asyncio.sleep(0.1)
            had = len(reader.pieces)
            await asyncio.sleep(0.3)
            assert len(reader.pieces) == had
            await client.get("/emulate/fault", "DELETE")
            async with asyncio.timeout(LIMIT_S):
                assert await reader.done
            connection.abort()

    run_on_loop(body())


def test_a_slow_replica_takes_longer_and_recovers() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (made, client):

            async def took() -> float:
                before = (await client.metrics())["vllm:inter_token_latency_seconds_sum"]
                await client.post(CHAT, chat(max_tokens=50, ignore_eos=True))
                return (await client.metrics())["vllm:inter_token_latency_seconds_sum"] - before

            usual = await took()
            await client.fault(kind="slow", factor=4)
            assert await took() == pytest.approx(4 * usual, rel=0.05)
            await client.get("/emulate/fault", "DELETE")
            assert made.replicas[0].replica.engine.slower == 1.0
            assert await took() == pytest.approx(usual, rel=0.05)

    run_on_loop(body())


@pytest.mark.parametrize("mid_event", [False, True])
def test_streams_are_cut_after_so_many_tokens(mid_event: bool) -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            await client.fault(kind="cut", after_tokens=10, mid_event=mid_event)
            got = await client.stream(LONG)
            assert (got.status, got.whole) == (200, False)
            assert b"[DONE]" not in got.raw
            whole_events = got.raw[: got.raw.rfind(b"\n\n") + 2]
            texts = [
                json.loads(line[6:])["choices"][0]["delta"]["content"]
                for line in whole_events.decode().split("\n\n")
                if line
            ]
            assert len("".join(texts)) == 40
            assert got.raw.endswith(b"\n\n") != mid_event
            assert (await client.post(CHAT, LONG)).status == 200, "whole answers are not cut"
            assert (await client.metrics())["vllm:num_requests_running"] == 0

    run_on_loop(body())


def test_errors_and_a_full_queue_hit_their_share_and_spare_health() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            await client.fault(kind="error", status=502, share=0.5)
            answers = [await client.post(CHAT, chat(max_tokens=1)) for _ in range(6)]
            assert [answer.status for answer in answers] == [200, 502, 200, 502, 200, 502]
            assert json.loads(answers[1].body)["error"]["code"] == 502
            assert (await client.get("/health")).status == 200
            await client.fault(kind="error", health=False)
            assert (await client.get("/health")).status == 500
            await client.get("/emulate/fault", "DELETE")
            await client.fault(kind="reject")
            refused = await client.post(CHAT, chat(max_tokens=1))
            assert (refused.status, json.loads(refused.body)["error"]["type"]) == (503, "ServiceUnavailableError")

    run_on_loop(body())


def test_a_replica_that_refuses_closes_connections_at_once() -> None:
    async def body() -> None:
        async with emulating(speed=1.0) as (made, client):
            assert (await client.get("/health")).status == 200
            await client.fault(kind="refuse", for_s=3.0)
            with pytest.raises(OSError, match="connection lost"):
                await client.get("/health")
            reader, writer = await asyncio.open_connection("127.0.0.1", made.replicas[0].port)
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
            writer.close()
            await comes_back(client)

    run_on_loop(body())


def test_somebody_before_it_asks_to_sign_in() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            await client.fault(kind="login", share=0.5)
            one, two = [await client.post(CHAT, chat(max_tokens=2)) for _ in range(2)]
            assert (one.status, two.status) == (200, 200)
            assert b"choices" in one.body
            assert b"Sign in" in two.body
            assert (await client.get("/health")).body == b""

    run_on_loop(body())


def test_keep_alives_come_and_no_token_until_it_is_cut() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            await client.fault(kind="ping")
            connection, reader = await client.begin(CHAT, LONG)
            await until(lambda: len(reader.pieces) > 2)
            assert set(b"".join(piece for _, piece in reader.pieces).split(b"\n\n")) == {b": ping", b""}
            await client.get("/emulate/fault", "DELETE")
            async with asyncio.timeout(LIMIT_S):
                assert not await reader.done, "the stream was cut, not ended"
            connection.abort()

    run_on_loop(body())


def test_poison_is_for_those_prompts_alone() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            poison = chat(max_tokens=2, messages=[{"role": "user", "content": f"say: {POISON}"}])
            assert (await client.post(CHAT, poison)).status == 200
            await client.fault(kind="poison")
            assert (await client.post(CHAT, poison)).status == 500
            assert (await client.post(CHAT, chat(max_tokens=2))).status == 200

    run_on_loop(body())


def test_a_script_comes_by_itself_to_whom_it_names() -> None:
    async def body() -> None:
        script = [read_script("one/1:error@0.5+100,status=500"), read_script("two:reject")]
        both = fleet(pool(replicas=2), pool("two"))
        async with emulating(both, speed=10.0, faults=script) as (made, _):
            await until(lambda: all(made.replicas[at].faults for at in (1, 2)))
            in_force = {one.name: [fault.kind for fault in one.faults.values()] for one in made.replicas}
            assert in_force == {"one/0": [], "one/1": ["error"], "two/0": ["reject"]}

    run_on_loop(body())


def test_a_share_is_counted_not_drawn() -> None:
    faults = Faults()
    faults.set(Fault(kind="error", share=0.25))
    assert [faults.hits("error") is not None for _ in range(8)] == [False, False, False, True] * 2
    faults.set(Fault(kind="error", share=0.0))
    assert not any(faults.hits("error") for _ in range(8))
    assert faults.hits("reject") is None


def test_what_a_script_says() -> None:
    got = read_script("chat-mi300x/2:cut@30+60.5,after_tokens=5,mid_event=true,share=0.5")
    assert got == ScriptedFault(
        "chat-mi300x", 2, 30.0, Fault(kind="cut", for_s=60.5, after_tokens=5, mid_event=True, share=0.5)
    )
    assert read_script("a:slow,factor=2") == ScriptedFault("a", None, 0.0, Fault(kind="slow", factor=2.0))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("crash", "write POOL"),
        ("a:", "write POOL"),
        ("a/b:crash", "'b' is no index"),
        ("a:explode", "'explode' is no fault; there are crash, hang"),
        ("a:crash@soon", "the start: 'soon'"),
        ("a:crash@-1", "the start: '-1'"),
        ("a:crash+nan", "how long it lasts"),
        ("a:slow", "slow needs a factor"),
        ("a:slow,factor=0", "factor 0: must be from"),
        ("a:slow,factor=x", "factor: 'x'"),
        ("a:slow,factor=2,factor=3", "factor is given twice"),
        ("a:crash,share=0.5", "share has no meaning for crash"),
        ("a:error,share=2", "share 2: must be from 0 to 1"),
        ("a:error,status=200", "status 200: must be from 400 to 599"),
        ("a:error,tone=low", "tone"),
        ("a:error,share", "'share': write key=value"),
        ("a:hang,health=3", "health"),
    ],
)  # fmt: skip
def test_slips_in_a_script(line: str, says: str) -> None:
    with pytest.raises(BadInput, match=r"^--fault ") as refused:
        read_script(line)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"kind": "melt"}', b'{"kind": "crash", "when": 1}', b'{"kind": "slow"}']
)
def test_slips_in_a_fault(body: bytes) -> None:
    with pytest.raises(BadInput):
        read_fault(body)

    async def ask() -> None:
        async with emulating() as (_, client):
            answer = await client.post("/emulate/fault", body)
            assert (answer.status, json.loads(answer.body)["error"]["type"]) == (400, "BadRequestError")
            assert (await client.get("/emulate/fault", "PUT")).status == 405

    run_on_loop(ask())
