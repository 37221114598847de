"""What a backend says of itself, taken for what it is: keep-alives, choices that were cut, when to come back."""

from tests.run.gateway.fakes import HASTY, fakes, fleet_of, pool_of, running, until
from tests.run.wire.test_server import on_loop

# Keep-alives


@on_loop
async def test_a_stream_that_only_pings_on_has_fallen_silent() -> None:
    async with fakes() as [fake]:
        fake.mode = "half-then-pings"
        async with running(fleet_of(pool_of("one", fake.url), serving=HASTY)) as at:
            answer = await at.ask(stream=True)
            assert b"fell silent" in answer.body
            assert answer.body.count(b'"content"') == 2
            # What comes once the stream is the client's is passed on: proxies before it wait for it.
            assert b"\n: ping\n\n" in answer.body
            assert await at.metric("crosstie_requests_total", outcome="cut") == 1


@on_loop
async def test_a_ping_is_no_first_token() -> None:
    async with fakes() as [fake]:
        fake.mode = "pings"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            asked = at.gateway.loop.create_task(at.ask(stream=True))
            await until(lambda: fake.pings > 3)
            (exchange,) = at.gateway.exchanges
            assert not exchange.reply.started
            assert exchange.record.ttft_s is None
            assert exchange.attempt is not None
            assert exchange.attempt.flight.first_at is None
            (reply,) = fake.held
            reply.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
            await until(lambda: exchange.record.ttft_s is not None)
            reply.end()
            assert b'"content":"a"' in (await asked).body
            assert await at.metric("crosstie_ttft_seconds_count") == 1
