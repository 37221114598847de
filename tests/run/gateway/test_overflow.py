"""A provider who is paid by the token, end to end: when it is asked, what that costs, and what it may cost."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie.core.fleet import Serving, TokenPrice
from crosstie_gateway.service.peers import ProviderSpending, account_of
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.tally import BoardTally

PRICE = TokenPrice(usd_per_million_input=1000.0, usd_per_million_output=10_000.0)
# No patience: whoever finds no room is not to wait for it.
AT_ONCE = msgspec.structs.replace(CALM, queue_s=0.0)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", "sk-provider")


@asynccontextmanager
async def with_provider(
    price: TokenPrice = PRICE, serving: Serving = AT_ONCE, **settings: Any
) -> AsyncIterator[tuple[Running, Fake, Fake]]:
    """One place in the fleet, and a provider."""
    async with fakes(2) as [own, provider]:
        own.metrics = provider.metrics = b"vllm:num_requests_running 0\n"
        bought = pool_of("bought", provider.url, usd_per_gpu_hour=0.0, token_price=price, api_key_env="PROVIDER_KEY",
                         served_as="their-name")  # fmt: skip
        fleet = fleet_of(pool_of("own", own.url, max_in_flight=1), bought, serving=serving)
        async with running(fleet, components=[ProviderSpending()], **settings) as at:
            yield at, own, provider


@asynccontextmanager
async def full(at: Running, own: Fake) -> AsyncIterator[None]:
    """While the fleet's one place is taken."""
    own.mode = "hang"
    asking = asyncio.get_running_loop().create_task(at.ask())
    await until(lambda: len(own.held) == 1)
    try:
        yield
    finally:
        own.mode = "ok"
        own.held.pop().send(200, json.dumps({"choices": [], "usage": own.usage}).encode())
        await asking


@on_loop
async def test_the_fleet_has_what_it_has_room_for_and_the_provider_the_rest_at_its_price() -> None:
    async with with_provider() as (at, own, provider):
        assert (await at.ask()).header(b"x-crosstie-pool") == b"own"
        assert not provider.hit
        async with full(at, own):
            answer = await at.ask(headers={"authorization": "Bearer of-a-client"})
        assert (answer.status, answer.header(b"x-crosstie-pool")) == (200, b"bought")
        assert (answer.header(b"x-crosstie-reason") or b"").startswith(b"overflow, the fleet is full: ")
        # 7 tokens in and 5 out, as the provider counts them.
        assert float(answer.header(b"x-crosstie-cost-usd") or 0) == pytest.approx(0.057)
        request, body = provider.hit[0]
        assert (request.headers[b"authorization"], body["model"]) == (b"Bearer sk-provider", "their-name")
        assert await at.metric("crosstie_provider_spent_usd", pool="bought", **{"in": "day"}) == pytest.approx(0.057)
        assert await at.metric("crosstie_usd_total", pool="bought") == pytest.approx(0.057)
        assert (await at.ask()).header(b"x-crosstie-pool") == b"own"


@on_loop
async def test_what_the_provider_had_in_its_cache_is_charged_as_it_says() -> None:
    price = msgspec.structs.replace(PRICE, usd_per_million_cached_input=100.0)
    async with with_provider(price) as (at, own, provider), full(at, own):
        provider.details = {"prompt_tokens_details": {"cached_tokens": 4}}
        for stream in (False, True):
            await at.ask(stream=stream)
        # 3 tokens in, 4 cached and 5 out, twice.
        spent = await at.metric("crosstie_provider_spent_usd", pool="bought", **{"in": "day"})
        assert spent == pytest.approx(2 * (0.003 + 0.0004 + 0.05))


@on_loop
async def test_whoever_is_patient_waits_for_the_fleet_first() -> None:
    patient = msgspec.structs.replace(CALM, queue_s=0.3)
    async with with_provider(serving=patient) as (at, own, provider):
        async with full(at, own):
            asking = asyncio.get_running_loop().create_task(at.ask())
            await until(lambda: len(at.gateway.waiting) == 1)
            assert not provider.hit
            answer = await asking
        assert answer.header(b"x-crosstie-pool") == b"bought"


@on_loop
async def test_a_full_queue_is_no_reason_to_turn_anybody_away_who_can_be_bought() -> None:
    serving = msgspec.structs.replace(CALM, max_queued=0)
    async with with_provider(serving=serving) as (at, own, _), full(at, own):
        assert (await at.ask()).header(b"x-crosstie-pool") == b"bought"


@on_loop
async def test_a_provider_that_is_full_is_left_alone_as_long_as_it_asks_for_and_the_fleet_is_waited_for() -> None:
    async with with_provider(serving=CALM) as (at, own, provider):
        provider.mode, provider.full_headers = "limited", b"retry-after: 30\r\n"
        late = {"x-crosstie-ttft-ms": "5000"}
        async with full(at, own):
            asking = asyncio.get_running_loop().create_task(at.ask(headers=late))
            await until(lambda: len(provider.hit) == 1 and len(at.gateway.waiting) == 1)
            again = asyncio.get_running_loop().create_task(at.ask(headers=late))
            await until(lambda: len(at.gateway.waiting) == 2)
        for answer in (await asking, await again):
            assert (answer.status, answer.header(b"x-crosstie-pool")) == (200, b"own")
        assert len(provider.hit) == 1
        assert at.gateway.backends[provider.url].replica.busy_until - at.gateway.now() > 10.0
        assert await at.metric("crosstie_provider_spent_usd", pool="bought") == 0.0


@on_loop
async def test_what_may_be_spent_is_spent_and_no_more_and_the_refusal_says_so() -> None:
    limited = msgspec.structs.replace(PRICE, max_usd_per_day=0.1)
    async with with_provider(limited) as (at, own, provider), full(at, own):
        statuses = [(await at.ask(max_tokens=5)).status for _ in range(3)]
        assert statuses == [200, 429, 429]
        assert len(provider.hit) == 1
        explained = json.loads((await at.ask("/crosstie/explain", max_tokens=5)).body)
        why = {one["pool"]: one["dropped"] for one in explained["considered"]}["bought"]
        assert why.startswith("spending: 0.057 of 0.1 USD in a day")
        assert await at.metric("crosstie_provider_max_usd", pool="bought", **{"in": "day"}) == 0.1


@on_loop
async def test_workers_have_one_limit_together() -> None:
    limited, board = msgspec.structs.replace(PRICE, max_usd_per_day=0.1), Board(2)
    async with with_provider(limited, board=board, row=0) as (at, own, _), full(at, own):
        other = BoardTally(board, 1)
        assert (await at.ask(max_tokens=1)).status == 200
        assert other.held(account_of("bought", "day"))[0] == pytest.approx(0.057)
        other.hold(account_of("bought", "day"), 0.09, 0.0)
        assert (await at.ask(max_tokens=1)).status == 429
    board.close()


@on_loop
async def test_an_empty_account_is_the_operator_s_to_fill() -> None:
    async with with_provider() as (at, own, provider), full(at, own):
        provider.mode = "unpaid"
        answer = await at.ask()
        assert answer.status == 429
        assert b"balance" not in answer.body
        assert at.gateway.backends[provider.url].wrong


@on_loop
async def test_a_provider_is_not_asked_after_like_an_engine_of_one_s_own() -> None:
    async with with_provider() as (at, own, provider):
        await until(lambda: own.scrapes >= 3)
        assert provider.scrapes == 0
        assert MODEL in json.loads((await at.get("/v1/models")).body)["data"][0]["id"]
