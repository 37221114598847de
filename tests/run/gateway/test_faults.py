"""Backends that fail in every way that real ones do, and clients that leave: each made to happen."""

import asyncio
import json

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, HASTY, MODEL, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie.wire.fetch import Answer
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads

STREAM = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    % (len(body := json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()), body)
)  # fmt: skip


def error_in(answer: Answer) -> dict[str, str]:
    """What the last event of a stream says went wrong."""
    found: dict[str, str] = json.loads(payloads(answer.body)[-1])["error"]
    return found


@pytest.mark.parametrize(
    "mode", ["error", "cut", "head-then-cut", "hang", "full", "half-body", "pings", "pings-then-cut"]
)
@pytest.mark.parametrize("stream", [True, False])
def test_as_long_as_nothing_was_sent_another_backend_tries(mode: str, stream: bool) -> None:
    async def test() -> None:
        async with fakes(2) as [bad, good]:
            bad.mode = mode
            # The bad one is the cheaper: it is asked first.
            pools = (pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url))
            async with running(fleet_of(*pools, serving=HASTY if mode in ("hang", "pings") else CALM)) as at:
                answer = await at.ask(stream=stream, max_tokens=2)
                assert answer.status == 200
                assert answer.header(b"x-crosstie-pool") == b"good"
                # A kept connection that is cut at once may just have been old: it gets a new one.
                assert len(bad.hit) in ((1, 2) if mode == "cut" else (1,))
                assert len(good.hit) == 1
                assert await at.metric("crosstie_retries_total", pool="bad") == 1
                faults = await at.metric("crosstie_backend_faults_total", pool="bad")
                assert faults == (0 if mode == "full" else 1)

    run_on_loop(test())


@pytest.mark.parametrize("counted", [True, False], ids=["usage asked for", "no usage"])
@pytest.mark.parametrize("mode", ["empty-success", "error-first", "error-after-opening", "response-begun-then-cut"])
def test_a_stream_without_a_single_token_is_tried_elsewhere(mode: str, counted: bool) -> None:
    async def test() -> None:
        async with fakes(2) as [bad, good]:
            bad.mode = mode
            fleet = fleet_of(pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url))
            async with running(fleet) as at:
                answer = await at.ask(stream=True, stream_options={"include_usage": counted})
                assert answer.header(b"x-crosstie-pool") == b"good"
                assert payloads(answer.body)[-1] == b"[DONE]"
                assert b"error" not in answer.body

    run_on_loop(test())


@on_loop
async def test_an_engine_that_tells_of_its_error_in_a_stream_is_not_talked_over() -> None:
    async with fakes() as [fake]:
        fake.mode = "error-later"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            answer = await at.ask(stream=True)
            assert error_in(answer)["message"] == "engine died"
            assert answer.body.count(b"error") == 1
            assert await at.metric("crosstie_backend_faults_total") == 1


@on_loop
async def test_an_answer_may_speak_of_errors() -> None:
    async with fakes() as [fake]:
        fake.mode = "talks-of-errors"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            assert b"upstream_cut" not in (await at.ask(stream=True)).body
            assert await at.metric("crosstie_backend_faults_total") == 0
            assert await at.metric("crosstie_requests_total", outcome="served") == 1


@on_loop
async def test_what_an_engine_does_not_do_is_no_fault_of_it() -> None:
    async with fakes(2) as [unable, able]:
        unable.mode = "unable"
        alone = pool_of("unable", unable.url, usd_per_gpu_hour=0.1)
        async with running(fleet_of(alone)) as at:
            # More than open a breaker.
            for _ in range(6):
                answer = await at.ask("/v1/embeddings", input="hello")
                assert (answer.status, answer.body) == (501, b'{"error":{"message":"no embeddings here"}}')
            assert await at.metric("crosstie_backend_faults_total") == 0
            assert await at.metric("crosstie_backend_up") == 1
        async with running(fleet_of(alone, pool_of("able", able.url))) as at:
            assert (await at.ask("/v1/embeddings", input="hello")).header(b"x-crosstie-pool") == b"able"


@on_loop
async def test_a_backend_that_goes_down_and_comes_back_is_told_of_however_that_was_found() -> None:
    """By a request that it refused, by the breaker, or by its health check."""
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        fake.mode = "error"
        for _ in range(5):
            await at.ask()
        assert at.notices == [f"pool one: {fake.url} is down: its circuit breaker is open"]
        fake.mode = "ok"
        await until(lambda: len(at.notices) == 2)
        assert at.notices[1] == f"pool one: {fake.url} is up"
        fake.crash()
        await at.ask()
        await until(lambda: len(at.notices) == 3)
        assert at.notices[2].startswith(f"pool one: {fake.url} is down: ")


@on_loop
async def test_a_backend_that_is_no_longer_in_the_fleet_keeps_no_connection() -> None:
    async with fakes(2) as [old, new], running(fleet_of(pool_of("old", old.url))) as at:
        old.pause_s = 0.1
        flying = asyncio.create_task(at.ask(stream=True))
        await until(lambda: old.hit)
        await at.get("/health")
        at.gateway.load(fleet_of(pool_of("new", new.url)))
        answer = await flying
        assert payloads(answer.body)[-1] == b"[DONE]"
        await until(lambda: not old.server.connections)
        assert (await at.ask()).header(b"x-crosstie-pool") == b"new"


@on_loop
async def test_a_refused_connection_is_retried_and_marks_the_backend_down_at_once() -> None:
    async with fakes(2) as [bad, good]:
        fleet = fleet_of(
            pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url),
            serving=msgspec.structs.replace(CALM, health_every_s=600.0),
        )  # fmt: skip
        async with running(fleet) as at:
            bad.crash()
            await until(lambda: not bad.server.connections)
            assert (await at.ask()).status == 200
            assert not at.gateway.backends[bad.url].replica.up


@on_loop
async def test_a_request_that_breaks_engines_is_not_carried_through_the_fleet() -> None:
    async with fakes(5) as made:
        for fake in made:
            fake.mode = "error"
        fleet = fleet_of(
            *(pool_of(f"p{i}", fake.url) for i, fake in enumerate(made)),
            serving=msgspec.structs.replace(CALM, retries=4),
        )
        async with running(fleet) as at:
            answer = await at.ask()
            assert answer.status == 500
            assert b"engine broke" in answer.body
            assert sum(len(fake.hit) for fake in made) == 2


@pytest.mark.parametrize("mode", ["cut-mid-event", "polite-cut", "half-then-silent", "aborted"])
def test_a_stream_that_breaks_off_ends_in_an_error_that_clients_understand(mode: str) -> None:
    async def test() -> None:
        async with fakes(2) as [bad, other]:
            bad.mode = mode
            pools = (pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("other", other.url))
            async with running(fleet_of(*pools, serving=HASTY if mode == "half-then-silent" else CALM)) as at:
                answer = await at.ask(stream=True)
                assert answer.status == 200
                sent = [one for one in payloads(answer.body)[:-1] if one != b"[DONE]"]
                words = [json.loads(one)["choices"][0]["delta"].get("content") for one in sent]
                assert words[:2] == ["w0 ", "w1 "]
                assert error_in(answer)["code"] == "upstream_cut"
                # Half an answer was sent: nobody else may begin it again.
                assert not other.hit
                assert await at.metric("crosstie_requests_total", outcome="cut") == 1

    run_on_loop(test())


@on_loop
async def test_the_error_event_of_a_responses_stream_is_its_own_kind() -> None:
    async with fakes() as [bad]:
        bad.mode = "polite-cut"
        async with running(fleet_of(pool_of("bad", bad.url))) as at:
            answer = await at.ask("/v1/responses", stream=True, input="x")
            assert b"event: error\n" in answer.body
            assert json.loads(payloads(answer.body)[-1])["type"] == "error"


@on_loop
async def test_a_client_s_mistakes_open_no_breaker() -> None:
    async with fakes() as [fake]:
        fake.mode = "bad"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            for _ in range(30):
                answer = await at.ask()
                assert answer.status == 400
                assert b"temperature must be positive" in answer.body
            fake.mode = "ok"
            assert (await at.ask()).status == 200
            assert len(fake.hit) == 31
            assert await at.metric("crosstie_backend_faults_total") == 0


@on_loop
async def test_a_backend_that_keeps_failing_is_left_alone_and_taken_back() -> None:
    async with fakes(2) as [bad, good]:
        bad.mode = "error"
        fleet = fleet_of(pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url))
        async with running(fleet) as at:
            for _ in range(20):
                assert (await at.ask()).status == 200
            # On a busy machine a probe may have been one of the five faults.
            assert 4 <= len(bad.hit) <= 5
            assert await at.metric("crosstie_breaker_open", pool="bad") == 1
            bad.mode = "ok"
            await until(lambda: at.gateway.backends[bad.url].replica.up)
            await at.ask(headers={"x-crosstie-pool": "bad"})
            assert at.gateway.backends[bad.url].breaker.state == "closed"


@on_loop
async def test_a_request_that_two_engines_fail_at_is_held_against_neither() -> None:
    """Or one client's requests would open every breaker, and nobody else be served."""
    async with fakes(3) as made:
        for fake in made:
            fake.mode = "poisoned"
        pools = [pool_of(f"p{i}", fake.url) for i, fake in enumerate(made)]
        async with running(fleet_of(*pools)) as at:
            for _ in range(20):
                assert (await at.ask(messages=[{"role": "user", "content": "poison"}])).status == 500
                assert (await at.ask()).status == 200
            assert all(backend.breaker.state == "closed" for backend in at.gateway.backends.values())
            # Each was tried twice, and no more.
            assert sum("poison" in str(body) for fake in made for _, body in fake.hit) == 40


def poison(index: int) -> list[dict[str, str]]:
    """No two alike: nobody knows it by its looks."""
    return [{"role": "user", "content": f"{'x' * index} poison {index}"}]


@pytest.mark.parametrize("mode", ["poisoned", "poison_cuts", "poison_in_a_stream"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_poison_takes_no_pool_away_from_the_innocent(mode: str, replicas: int) -> None:
    async def test() -> None:
        async with fakes(replicas) as made:
            for fake in made:
                fake.mode = mode
            async with running(fleet_of(pool_of("one", *(fake.url for fake in made)))) as at:
                for index in range(22):
                    bad = await at.ask(messages=poison(index), stream=mode == "poison_in_a_stream")
                    assert bad.status >= 500
                    assert [(await at.ask(user=str(n))).status for n in range(2)] == [200, 200]
                    # Several in a row, as an attacker would send them.
                    if index % 5 == 4:
                        for more in range(5):
                            await at.ask(messages=poison(100 * index + more), stream=mode == "poison_in_a_stream")
                        assert (await at.ask()).status == 200
                        assert (await at.get("/ready")).status == 200
                if replicas > 1:
                    # A second witness says whose fault it is, also while a breaker tries whether all is well again.
                    assert all(one.breaker.state == "closed" for one in at.gateway.backends.values())
                    return
                assert await at.metric("crosstie_panic_total", pool="one") > 0
                told = f"{MODEL}: 0 of 1 replicas are in service; those taken out are sent what they have no room for"
                assert told in at.notices
                await until(lambda: f"{MODEL}: enough replicas are in service again" in at.notices)

    run_on_loop(test())


@on_loop
async def test_below_the_panic_threshold_who_is_suspected_gets_what_others_have_no_room_for() -> None:
    async with fakes(3) as [good, bad, dead]:
        fleet = fleet_of(pool_of("one", good.url, bad.url, dead.url, max_in_flight=1))
        async with running(fleet) as at:
            dead.crash()
            now, (first, second, third) = at.gateway.now(), at.gateway.live.pools[0].replicas
            await until(lambda: not third.up)
            for _ in range(5):
                at.gateway.backends[bad.url].breaker.failed(now + 60.0)
            at.gateway.backends[bad.url].judge(now)
            assert (first.up, second.up, second.suspected, third.suspected) == (True, False, True, False)
            # In service first.
            assert [(await at.ask()).status for _ in range(3)] == [200] * 3
            assert not bad.hit
            good.mode = "hang"
            held = asyncio.create_task(at.ask())
            await until(lambda: len(good.held) == 1)
            assert (await at.ask()).status == 200
            assert len(bad.hit) == 1
            good._ok({}, good.held.pop())
            assert (await held).status == 200


@on_loop
async def test_without_a_panic_threshold_an_open_breaker_is_the_end_of_it() -> None:
    serving = msgspec.structs.replace(CALM, panic_threshold=0.0)
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
        fake.mode = "error"
        assert [(await at.ask()).status for _ in range(6)] == [500] * 5 + [503]
        assert at.notices == [f"pool one: {fake.url} is down: its circuit breaker is open"]


@pytest.mark.parametrize("mode", ["unknown_key", "login_page", "no_model", "list", "without_choices", "error_in_200"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_a_backend_says_to_the_gateway_is_not_for_clients(
    monkeypatch: pytest.MonkeyPatch, mode: str, alone: bool
) -> None:
    """A key that it does not know, a page to sign in at: another serves the request, and this one is left alone."""
    monkeypatch.setenv("INNER_KEY", "sk-inner")

    async def test() -> None:
        async with fakes(2) as [bad, good]:
            bad.mode = mode
            pools = [pool_of("bad", bad.url, usd_per_gpu_hour=0.1, api_key_env="INNER_KEY")]
            pools += [] if alone else [pool_of("good", good.url)]
            async with running(fleet_of(*pools)) as at:
                answers = [await at.ask() for _ in range(8)]
                assert all(b"inner" not in one.body for one in answers)
                assert [one.status for one in answers] == ([502] * 5 + [503] * 3 if alone else [200] * 8)
                # What another could serve shows at once that this one is set up wrongly.
                assert len(bad.hit) == (5 if alone else 1)
                assert at.gateway.backends[bad.url].breaker.state == "open"
                assert f"{bad.url} is down: its circuit breaker is open: the backend of pool bad " in at.notices[0]
                assert await at.metric("crosstie_requests_total", outcome="served") == (0 if alone else 8)

    run_on_loop(test())


@on_loop
async def test_two_backends_that_are_set_up_wrongly_do_not_use_up_the_attempts() -> None:
    async with fakes(3) as [one, two, good]:
        one.mode, two.mode = "no_model", "login_page"
        pools = [pool_of(f"p{n}", fake.url, usd_per_gpu_hour=0.1 + n) for n, fake in enumerate((one, two, good))]
        async with running(fleet_of(*pools)) as at:
            assert [(await at.ask()).header(b"x-crosstie-pool") for _ in range(5)] == [b"p2"] * 5
            assert (len(one.hit), len(two.hit)) == (1, 1)


@on_loop
async def test_a_path_that_no_backend_has_is_the_client_s_and_one_that_another_has_is_not() -> None:
    async with fakes(2) as [bad, good]:
        bad.mode = good.mode = "no_such_path"
        async with running(fleet_of(pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url))) as at:
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/embeddings"):
                for _ in range(7):
                    answer = await at.ask(path, input="hello")
                    assert (answer.status, answer.body) == (404, b'{"detail":"Not Found, says the inner network"}')
            assert all(one.breaker.state == "closed" for one in at.gateway.backends.values())
            assert await at.metric("crosstie_backend_faults_total") == 0
            assert await at.metric("crosstie_requests_total", outcome="client error", status="404") == 21
            good.mode = "ok"
            # What only some engines do is nobody's fault; where nobody chats is no engine.
            assert (await at.ask("/v1/embeddings", input="hello")).status == 200
            assert at.gateway.backends[bad.url].breaker.state == "closed"
            assert (await at.ask()).status == 200
            assert at.gateway.backends[bad.url].breaker.state == "open"
            assert at.notices[-1].endswith("has no /v1/chat/completions (404): see its address")


@on_loop
async def test_a_client_s_error_with_the_status_of_success_gets_its_own() -> None:
    async with fakes() as [fake]:
        fake.mode = "clients_error_in_200"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            for _ in range(7):
                answer = await at.ask()
                assert answer.status == 400
                assert b"temperature must be positive" in answer.body
            assert await at.metric("crosstie_requests_total", outcome="client error", status="400") == 7
            assert at.gateway.backends[fake.url].breaker.state == "closed"


@on_loop
async def test_a_key_of_the_client_s_own_is_the_client_s_to_mend() -> None:
    """Where the gateway has none, it passes on theirs, and what is said of it."""
    async with fakes() as [fake]:
        fake.mode = "unknown_key"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            answers = [await at.ask(headers={"authorization": "Bearer sk-inner"}) for _ in range(8)]
            assert [one.status for one in answers] == [401] * 8
            assert await at.metric("crosstie_backend_faults_total") == 0


@on_loop
async def test_an_unhealthy_backend_is_avoided_and_taken_back_when_it_is_well() -> None:
    async with fakes(2) as [sick, well]:
        fleet = fleet_of(pool_of("sick", sick.url, usd_per_gpu_hour=0.1), pool_of("well", well.url))
        async with running(fleet) as at:
            sick.healthy = False
            await until(lambda: not at.gateway.backends[sick.url].replica.up)
            for _ in range(3):
                await at.ask()
            assert not sick.hit
            sick.healthy = True
            await until(lambda: at.gateway.backends[sick.url].replica.up)
            assert any("is down: its health check answered 500" in line for line in at.notices)
            assert any("is up" in line for line in at.notices)


@on_loop
async def test_nobody_left_is_said_with_a_time_to_come_back() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        fake.crash()
        await until(lambda: not at.gateway.ready)
        answer = await at.ask()
        assert answer.status == 503
        assert answer.header(b"retry-after")


@on_loop
async def test_a_client_that_leaves_is_taken_off_the_engine() -> None:
    async with fakes() as [fake]:
        fake.pause_s = 0.05
        fake.tokens = 1000
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            for early in (True, False):
                fake.gone = 0
                fake.hit.clear()
                reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(STREAM)
                # Before anything was sent to it, and in the middle of the answer.
                await until(lambda: fake.hit)
                if not early:
                    await reader.readuntil(b"w3 ")
                writer.transport.abort()
                await until(lambda: fake.gone == 1)
            assert await at.metric("crosstie_requests_total", outcome="client gone") == 2
            assert await at.metric("crosstie_backend_faults_total") == 0


@on_loop
async def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    async with fakes() as [fake]:
        fake.mode = "hang"
        async with running(fleet_of(pool_of("one", fake.url, max_in_flight=1))) as at:
            writers = []
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(STREAM)
                writers.append(writer)
            await until(lambda: len(at.gateway.waiting) == 2)
            writers[1].transport.abort()
            await until(lambda: len(at.gateway.waiting) == 1)
            for writer in writers:
                writer.transport.abort()


@on_loop
async def test_a_slow_reader_slows_its_engine_and_memory_stays_small() -> None:
    async with fakes() as [fake]:
        fake.mode = "flood"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.port, limit=65536)
            writer.write(STREAM)
            # Nobody reads, so after what the sockets hold nothing more is made: the engine is held back for good.
            held_back = 0

            def stands_still() -> bool:
                nonlocal held_back
                held_back = held_back + 1 if fake.slow else 0
                return held_back > 30

            await until(stands_still)
            before = fake.flooded
            assert before < 32 * 2**20
            for _ in range(200):
                await reader.read(65536)
            await until(lambda: fake.flooded > before)
            writer.transport.abort()


@on_loop
async def test_a_client_that_reads_nothing_is_cut_off_in_the_end() -> None:
    async with fakes() as [fake]:
        fake.mode = "flood"
        async with running(fleet_of(pool_of("one", fake.url), serving=HASTY)) as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.port, limit=65536)
            writer.write(STREAM)
            await until(lambda: at.gateway.exchanges)
            await until(lambda: not at.gateway.exchanges)
            assert await at.metric("crosstie_requests_total", outcome="client stalled") == 1
            writer.transport.abort()


@on_loop
async def test_the_whole_may_take_no_longer_than_it_may() -> None:
    async with fakes() as [fake]:
        fake.pause_s, fake.tokens = 0.1, 1000
        fleet = fleet_of(pool_of("one", fake.url), serving=msgspec.structs.replace(CALM, total_timeout_s=0.5))
        async with running(fleet) as at:
            assert "within 0.5 s" in error_in(await at.ask(stream=True))["message"]


@on_loop
async def test_sigterm_s_drain_loses_no_request() -> None:
    async with fakes() as [fake]:
        fake.pause_s, fake.tokens = 0.05, 20
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            asked = [asyncio.create_task(at.ask(stream=True)) for _ in range(10)]
            await until(lambda: len(fake.hit) == 10)
            assert await at.process.stop()
            answers = [await one for one in asked]
            assert all(payloads(answer.body)[-1] == b"[DONE]" for answer in answers)
            with pytest.raises(OSError, match=r"."):
                await at.ask()
