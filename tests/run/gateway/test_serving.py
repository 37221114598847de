"""A gateway over backends that behave: what passes through it, what it adds, what it refuses."""

import asyncio
import json
import re
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, HASTY, MODEL, fakes, fleet_of, pool_of, running, until
from tests.wire.sockets import said
from tests.wire.test_server import on_loop

from crosstie.core.fleet import ServedClass
from crosstie.core.workload import Target
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.gateway import Gateway

CHAT = ServedClass(
    name="chat", model=MODEL, requests_per_s=1.0, input_tokens=100.0, output_tokens=20.0,
    ttft=Target(seconds=1.0, percentile=0.95), tpot=Target(seconds=0.1, percentile=0.9), routes=(),
)  # fmt: skip


@on_loop
async def test_an_answer_passes_and_says_where_it_came_from_and_why() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        answer = await at.ask(temperature=0.5, tools=[{"type": "function"}], unknown={"deep": [1, None]})
        assert answer.status == 200
        assert json.loads(answer.body)["served_by"] == "fake-0"
        assert answer.header(b"x-crosstie-pool") == b"one"
        assert answer.header(b"x-crosstie-reason")
        assert (answer.header(b"x-request-id") or b"").startswith(b"req-")
        _, heard = fake.hit[0]
        assert heard["unknown"] == {"deep": [1, None]}
        assert heard["tools"] == [{"type": "function"}]


@on_loop
async def test_a_body_reaches_its_backend_byte_for_byte() -> None:
    raw = b'{"model":"llama-3.1-8b" ,\n "x": 1.10e2, "messages" : [{"role":"user","content":"\\u00e9"}]}'
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        lines = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        assert b"200 OK" in await said(at.port, lines % len(raw) + raw)
        assert fake.hit[0][0].body == raw


@on_loop
async def test_what_stands_behind_the_path_is_passed_on() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        assert (await at.ask("/v1/chat/completions?api-version=7")).status == 200
        assert (fake.hit[0][0].path, fake.hit[0][0].query) == ("/v1/chat/completions", "api-version=7")


@on_loop
async def test_a_stream_passes_whole_and_its_usage_is_counted_but_not_shown() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        answer = await at.ask(stream=True)
        got = payloads(answer.body)
        assert got[-1] == b"[DONE]"
        assert [json.loads(one)["choices"][0]["delta"].get("content") for one in got[:-1]] == [
            "w0 ",
            "w1 ",
            "w2 ",
            "w3 ",
            "w4 ",
            None,
        ]
        assert answer.header(b"x-engine") == b"fake"
        assert answer.header(b"x-crosstie-pool") == b"one"
        assert b"forged" not in [value for _, value in answer.headers]
        assert fake.hit[0][1]["stream_options"] == {"include_usage": True}
        assert await at.metric("crosstie_tokens_total", kind="output") == 5
        assert await at.metric("crosstie_tokens_total", kind="input") == 7
        # Who asks for the usage gets it.
        asked = await at.ask(stream=True, stream_options={"include_usage": True})
        assert json.loads(payloads(asked.body)[-2])["usage"]["completion_tokens"] == 5


@on_loop
async def test_the_name_that_backends_know_a_model_by() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, served_as="org/Model"))) as at:
        for name in (MODEL, "org/Model"):
            assert (await at.ask(model=name)).status == 200
        assert [heard["model"] for _, heard in fake.hit] == ["org/Model"] * 2
        models = json.loads((await at.get("/v1/models")).body)
        assert {one["id"] for one in models["data"]} == {MODEL, "org/Model"}
        assert (await at.get("/v1/models/org/Model")).status == 200
        assert (await at.get("/v1/models/other")).status == 404


@on_loop
async def test_a_client_s_key_is_passed_on_unless_the_pool_has_its_own() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        await at.ask(headers={"authorization": "Bearer mine", "x-engine-wish": "this", "x-crosstie-priority": "high"})
        heard = fake.hit[0][0].headers
        assert heard[b"authorization"] == b"Bearer mine"
        assert heard[b"x-engine-wish"] == b"this"
        assert b"x-crosstie-priority" not in heard


def _is_told(gateway: Gateway, line: str) -> bool:
    return line in gateway.metrics_page()


@on_loop
async def test_sessions_are_counted() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        # After the first turn nobody knows that another comes.
        told = []
        for last, count in (("false", 0), ("false", 1), ("true", 0)):
            await at.ask(headers={"x-crosstie-session": "a", "x-crosstie-last-turn": last})
            warm = f'crosstie_sessions{{state="warm"}} {count}'
            await until(partial(_is_told, at.gateway, warm))
            explained = await at.ask("/crosstie/explain", headers={"x-crosstie-session": "a"})
            told.append(json.loads(explained.body)["session"])
        assert [session and (session["home"], session["turns"], session["in_flight"]) for session in told] == [
            ("one/1", 1, 0),
            ("one/1", 2, 0),
            None,
        ]
        assert 30 < told[1]["waited_for_s"] <= 60
        page = at.gateway.metrics_page()
        assert "crosstie_sessions_begun_total 1" in page
        assert 'crosstie_session_turns_total{found="home"} 2' in page
        assert len(at.gateway.live.sessions) == 0


def test_a_pool_s_own_key_takes_the_place_of_the_client_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_KEY", "theirs")

    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, api_key_env="FAKE_KEY"))) as at:
            answer = await at.ask(headers={"authorization": "Bearer mine", "x-api-key": "mine", "api-key": "mine"})
            assert fake.hit[0][0].headers[b"authorization"] == b"Bearer theirs"
            assert fake.hit[0][0].headers.keys().isdisjoint({b"x-api-key", b"api-key"})
            assert b"theirs" not in answer.body + b"".join(value for _, value in answer.headers)

    run_on_loop(test())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
def test_the_other_paths_of_the_api(path: str) -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
            assert (await at.ask(path, prompt="x", input="x")).status == 200
            assert fake.hit[0][0].path == path

    run_on_loop(test())


@pytest.mark.parametrize(
    ("body", "headers", "status", "word"),
    [
        ({"model": "nobody"}, {}, 404, "nobody"),
        ({"model": None}, {}, 400, "model"),
        ({}, {"x-crosstie-class": "nobody"}, 400, "chat"),
        ({}, {"x-crosstie-pool": "nobody"}, 400, "one"),
        ({}, {"x-crosstie-ttft-ms": "soon"}, 400, "milliseconds"),
        ({}, {"x-crosstie-tpot-ms": "-1"}, 400, "milliseconds"),
        ({}, {"x-crosstie-priority": "urgent"}, 400, "low, normal, high"),
        ({}, {"x-crosstie-last-turn": "maybe"}, 400, "true, false"),
        ({}, {"x-crosstie-pause-ms": "soon"}, 400, "x-crosstie-pause-ms"),
        ({"messages": [{"role": "user", "content": "x" * 400_000}]}, {}, 400, "8,?192"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            {},
            400,
            "image",
        ),
    ],
)
def test_what_no_pool_can_serve_is_refused_in_words(
    body: dict[str, Any], headers: dict[str, str], status: int, word: str
) -> None:
    async def test() -> None:
        async with fakes() as [fake]:
            fleet = fleet_of(pool_of("one", fake.url, modalities=("text",)), classes=(CHAT,))
            async with running(fleet) as at:
                answer = await at.ask(headers=headers, **body)
                assert answer.status == status
                error = json.loads(answer.body)["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert re.search(word, error["message"]), error
                assert not fake.hit

    run_on_loop(test())


@on_loop
async def test_the_gateway_s_own_pages_answer() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url), classes=(CHAT,))) as at:
        assert json.loads((await at.get("/health")).body)["status"] == "ok"
        assert json.loads((await at.get("/ready")).body) == {"status": "ready", "pools": {"one": {"up": 1, "of": 1}}}
        assert (await at.get("/nowhere")).status == 404
        assert (await at.get("/v1/chat/completions")).status == 405
        assert (await at.ask("/health")).status == 405
        fake.crash()
        await until(lambda: not at.gateway.ready)
        assert (await at.get("/ready")).status == 503
        assert (await at.get("/health")).status == 200


@on_loop
async def test_explaining_a_decision_sends_nothing() -> None:
    async with fakes(2) as [one, two]:
        fleet = fleet_of(pool_of("one", one.url), pool_of("two", two.url, max_context=100), classes=(CHAT,))
        async with running(fleet) as at:
            answer = await at.ask("/crosstie/explain", messages=[{"role": "user", "content": "x" * 4000}])
            told = json.loads(answer.body)
            assert told["pool"] == "one"
            assert told["request"]["class"] == "chat"
            assert told["request"]["ttft_target_s"] == 1.0
            dropped = {entry["pool"]: entry["dropped"] for entry in told["considered"]}
            assert dropped["one"] is None
            assert "100" in dropped["two"]
            assert not one.hit
            assert not two.hit


@on_loop
async def test_an_explanation_has_what_the_last_requests_saw_beside_their_own_predictions() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url), classes=(CHAT,))) as at:

        async def of_late() -> Any:
            (one,) = json.loads((await at.ask("/crosstie/explain")).body)["considered"]
            return one["of_late"]

        assert await of_late() is None
        for _ in range(3):
            await at.ask(stream=True)
        found = await of_late()
        assert found["requests"] == 3
        assert all(found[f"{name}_{when}_p50_s"] > 0 for name in ("ttft", "tpot") for when in ("predicted", "seen"))


@on_loop
async def test_hints_choose_pool_and_class() -> None:
    async with fakes(2) as [one, two]:
        fleet = fleet_of(pool_of("one", one.url), pool_of("two", two.url, usd_per_gpu_hour=9.0), classes=(CHAT,))
        async with running(fleet) as at:
            for _ in range(3):
                assert (await at.ask(headers={"x-crosstie-pool": "two"})).header(b"x-crosstie-pool") == b"two"
            assert len(two.hit) == 3
            await at.ask(headers={"x-crosstie-class": "chat"})
            assert await at.metric("crosstie_requests_total", **{"class": "chat", "outcome": "served"}) == 4


@on_loop
async def test_metrics_are_what_prometheus_reads() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url), classes=(CHAT,))) as at:
        await at.ask(stream=True)
        families = {
            one.name: one for one in parser.text_string_to_metric_families((await at.get("/metrics")).body.decode())
        }
        assert families["crosstie_ttft_seconds"].type == "histogram"
        assert families["crosstie_requests"].samples[0].value == 1
        assert families["crosstie_targets"].samples
        assert families["crosstie_backend_up"].samples[0].value == 1


@on_loop
async def test_the_engine_s_own_load_is_seen() -> None:
    async with fakes(2) as [one, two]:
        one.metrics = b"vllm:num_requests_running 60\nvllm:num_requests_waiting 40\nvllm:kv_cache_usage_perc 0.99\n"
        two.metrics = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        fleet = fleet_of(
            *(
                pool_of(name, fake.url, accelerator="mi300x", precision="native", stack="vllm", max_in_flight=256)
                for name, fake in (("one", one), ("two", two))
            ),
            classes=(CHAT,),
            # What they say once is believed for minutes.
            serving=msgspec.structs.replace(CALM, metrics_every_s=100.0, health_every_s=100.0),
        )
        async with running(fleet) as at:
            await until(lambda: all(replica.reported for replica in at.gateway.live.replicas()))
            # Before anybody has answered: how fast they are on a busy machine would count as well.
            one.mode = two.mode = "hang"
            asked = [asyncio.create_task(at.ask()) for _ in range(5)]
            await until(lambda: len(one.hit) + len(two.hit) == 5)
            # Others keep the first one busy, so it is left alone.
            assert len(two.hit) == 5
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


@on_loop
async def test_metrics_are_read_no_more_often_than_is_asked_for() -> None:
    """Whether a backend is well is looked at more often than what it has to do."""
    async with fakes() as [fake]:
        fake.metrics = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        serving = msgspec.structs.replace(CALM, metrics_every_s=3600.0, health_every_s=0.05)
        async with running(fleet_of(pool_of("one", fake.url), serving=serving)):
            await until(lambda: fake.probes >= 5 and fake.scrapes)
            assert fake.scrapes == 1


@on_loop
async def test_many_at_once_and_nothing_is_mixed_up() -> None:
    async with fakes(2) as [one, two], running(fleet_of(pool_of("one", one.url), pool_of("two", two.url))) as at:
        one.pause_s = two.pause_s = 0.01
        answers = await asyncio.gather(
            *(at.ask(stream=i % 2 == 0, headers={"x-request-id": f"id-{i}"}) for i in range(100))
        )
        assert [answer.status for answer in answers] == [200] * 100
        assert [answer.header(b"x-request-id") for answer in answers] == [b"id-%d" % i for i in range(100)]
        assert len(one.hit) + len(two.hit) == 100
        heard = sorted(request.headers[b"x-request-id"] for request, _ in one.hit + two.hit)
        assert heard == sorted(b"id-%d" % i for i in range(100))


@on_loop
async def test_who_finds_no_room_waits_for_it_and_is_turned_away_in_time() -> None:
    async with fakes() as [fake]:
        narrow = pool_of("one", fake.url, max_in_flight=1)
        async with running(fleet_of(narrow, serving=msgspec.structs.replace(CALM, max_queued=3))) as at:
            answers = await asyncio.gather(*(at.ask() for _ in range(4)))
            assert [answer.status for answer in answers] == [200] * 4
            # Nobody is answered before all have come.
            fake.mode = "hang"
            asked = [asyncio.create_task(at.ask()) for _ in range(8)]
            await until(lambda: sum(task.done() for task in asked) == 4)
            fake.let_go()
            many = await asyncio.gather(*asked)
            statuses = [answer.status for answer in many]
            assert statuses.count(429) == 4
            assert statuses.count(200) == 4
            turned = next(answer for answer in many if answer.status == 429)
            assert int(turned.header(b"retry-after") or 0) >= 1
            assert json.loads(turned.body)["error"]["code"] == "fleet_saturated"
        fake.mode = "hang"
        async with running(fleet_of(narrow, serving=HASTY)) as at:
            late = await asyncio.gather(*(at.ask() for _ in range(2)))
            assert {answer.status for answer in late} <= {429, 504}


@on_loop
async def test_the_urgent_are_let_in_first_and_the_least_urgent_shed() -> None:
    async with fakes() as [fake]:
        fake.mode = "hang"
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1), serving=msgspec.structs.replace(CALM, max_queued=2))
        async with running(fleet) as at:
            asked: list[asyncio.Task[Any]] = []

            def come() -> int:
                return len(fake.hit) + len(at.gateway.waiting) + sum(task.done() for task in asked)

            for i, level in enumerate(["normal", "low", "normal", "high"]):
                headers = {"x-crosstie-priority": level, "x-request-id": level + str(i)}
                asked.append(asyncio.create_task(at.ask(headers=headers)))
                # One after the other: the first is sent, two wait, and for the last of them one is shed.
                await until(lambda: come() == len(asked))
            await until(asked[1].done)
            fake.let_go()
            answers = await asyncio.gather(*asked)
            assert [answer.status for answer in answers] == [200, 429, 200, 200]
            order = [request.headers[b"x-request-id"] for request, _ in fake.hit]
            assert order == [b"normal0", b"high3", b"normal2"]


@on_loop
async def test_counters_are_there_before_anything_is_counted() -> None:
    """So that the increase over a first burst is the burst."""
    async with fakes() as [fake], running(fleet_of(pool_of("p", fake.url), classes=(CHAT,))) as at:
        page = (await at.get("/metrics")).body.decode()
        for sample in (
            'crosstie_requests_total{pool="p",model="llama-3.1-8b",class="chat",outcome="served",status="200"}',
            'crosstie_targets_total{class="chat",target="ttft",kept="yes"}',
            'crosstie_targets_total{class="chat",target="tpot",kept="no"}',
            'crosstie_tokens_total{pool="p",kind="output"}',
            'crosstie_backend_faults_total{pool="p"}',
            'crosstie_ttft_seconds_count{pool="p"}',
        ):
            # Compiled, all samples are floats.
            assert re.search(rf"^{re.escape(sample)} 0(\.0)?$", page, re.MULTILINE), sample
        assert (await at.ask()).status == 200
        served = {"class": "chat", "outcome": "served", "status": "200"}
        assert await at.metric("crosstie_requests_total", **served) == 1
