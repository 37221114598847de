"""Pools on trial: what is copied to them and how it is compared, what they are sent, and when that ends."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import MODEL, Fake, fakes, fleet_of, pool_of, until
from tests.run.service.test_admin import KEY, Administered, administered
from tests.wire.test_server import on_loop

from crosstie.cli.admin import trials_parts
from crosstie.core.fleet import ServedClass, TokenPrice
from crosstie_gateway.service.trial_view import together
from crosstie_gateway.service.trials import TrialsService
from crosstie_gateway.service.worker_link import TrialsAnswer, TrialStopped, decode_answer, decode_request
from crosstie_gateway.wire.frames import encode
from crosstie_gateway.wire.server import Reply

SAME = (0.7, 0.2, 0.1)


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)


def speaks(fake: Fake, chances: tuple[float, float, float], pause_s: float = 0.0) -> None:
    """As an engine does that gives log-probabilities: the likeliest of three tokens, eight times."""
    words = ("yes", "no", "perhaps")
    top = [{"token": word, "logprob": math.log(p)} for word, p in zip(words, chances, strict=True)]
    best = max(top, key=lambda one: float(str(one["logprob"])))

    def answer(body: dict[str, Any], reply: Reply) -> None:
        said = {
            "id": "x",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "length",
                    "message": {"role": "assistant", "content": " ".join([str(best["token"])] * 8)},
                    "logprobs": {"content": [{**best, "top_logprobs": top} for _ in range(8)]},
                }
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 8},
        }
        fake.loop.call_later(pause_s, reply.send, 200, json.dumps(said).encode())

    fake._speaks = answer  # type: ignore[attr-defined]
    fake.mode = "speaks"


@asynccontextmanager
async def on_trial(
    old: Fake, new: Fake, classes: tuple[ServedClass, ...] = (), old_pool: dict[str, Any] | None = None, **trial: Any
) -> AsyncIterator[Administered]:
    pools = pool_of("old", old.url, **(old_pool or {})), pool_of("new", new.url, **trial)
    service = TrialsService()
    async with administered(fleet_of(*pools, classes=classes), first=[service]) as at:
        try:
            yield at
        finally:
            await service.stop()


def trials_in(at: Administered) -> TrialsService:
    return next(part for part in at.running.process.components if isinstance(part, TrialsService))


async def trial_of(at: Administered) -> dict[str, Any]:
    (found,) = (await at.get("trials"))["trials"]
    return found  # type: ignore[no-any-return]


async def compared(at: Administered, number: int) -> dict[str, Any]:
    """Asks until so many have been compared and judged."""
    (trial,) = trials_in(at)._trials.values()
    for _ in range(20 * number):
        assert (await at.running.ask()).status == 200
        await until(lambda: not trial.under_way)
        if trial.copies["compared"] >= number or trial.stopped:
            break
    return await trial_of(at)


@on_loop
async def test_a_pool_that_gives_the_same_model_is_ready() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, shadow=1.0, drained=True) as at:
        speaks(old, SAME)
        speaks(new, SAME)
        assert (await trial_of(at))["ready"] == "not yet"
        # Drained: it has copies, and no client's request.
        at.running.gateway.live.pools[1].draining = True
        found = await compared(at, 24)
        assert (found["ready"], found["verdict"], found["compared"]) == ("yes", "same", 24)
        copies = [body for _, body in new.hit if "top_logprobs" in body]
        assert len(copies) == len(new.hit)
        assert {(body["temperature"], body["model"]) for body in copies} == {(0, MODEL)}
        assert copies[-1]["messages"] == [{"role": "user", "content": "hello"}]
        # Nothing of it is anybody's request: neither counted nor charged.
        assert await at.running.metric("crosstie_requests_total") == 24
        assert await at.running.metric("crosstie_requests_total", pool="new") == 0
        assert await at.running.metric("crosstie_shadow_copies_total", outcome="compared") == 24
        assert await at.running.metric("crosstie_trial_ready", pool="new") == 1
        said = "\n".join(str(part) for part in trials_parts(await at.get("trials")))
        assert "new: ready for llama-3.1-8b: YES" in said


@on_loop
async def test_a_pool_with_another_model_is_not_ready_and_its_canary_ends() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, shadow=1.0, canary=0.0) as at:
        speaks(old, SAME)
        speaks(new, (0.2, 0.7, 0.1))
        found = await compared(at, 24)
        assert (found["ready"], found["verdict"]) == ("no", "differs")
        assert "its answers differ" in found["stopped"]
        assert "chat KL" in found["why"][1]
        assert any("its canary has ended" in notice for notice in at.notices)
        assert await at.running.metric("crosstie_canary_stopped", pool="new") == 1


@on_loop
async def test_one_that_fails_at_copies_is_not_ready() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, shadow=1.0, canary=0.0) as at:
        speaks(old, SAME)
        new.mode = "error"
        trial = trials_in(at)._trials["new"]
        for _ in range(4):
            assert (await at.running.ask()).status == 200
            await until(lambda: not trial.under_way)
        found = await trial_of(at)
        assert (found["ready"], found["why"][0]) == ("no", "4 of 4 copies failed there, and 5.0% may")


@on_loop
async def test_copies_have_little_room_and_their_own_class() -> None:
    classes = tuple(ServedClass(name=name, model=MODEL, routes=()) for name in ("chat", "other"))
    async with fakes(2) as (old, new), on_trial(old, new, classes, shadow=1.0, canary=0.0, trial_class="chat") as at:
        speaks(old, SAME)
        speaks(new, SAME, pause_s=0.3)
        await at.running.ask(headers={"x-crosstie-class": "other"})
        assert (await trial_of(at))["copies"] == {}
        asked = [at.running.ask(headers={"x-crosstie-class": "chat"}) for _ in range(6)]
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
        copies = (await trial_of(at))["copies"]
        assert copies["no room"] == 4
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("crosstie_gateway.service.trials._MOST_BYTES", 10)
            await at.running.ask(headers={"x-crosstie-class": "chat"})
        assert (await trial_of(at))["copies"]["too long"] == 1


@on_loop
async def test_nobody_pays_a_provider_for_copies() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVIDERS_KEY", "k")
        price = TokenPrice(usd_per_million_input=1.0, usd_per_million_output=1.0)
        paid = {"token_price": price, "api_key_env": "PROVIDERS_KEY", "usd_per_gpu_hour": 0.0}
        async with fakes(2) as (old, new), on_trial(old, new, old_pool=paid, shadow=1.0, canary=0.0) as at:
            speaks(old, SAME)
            assert (await at.running.ask()).status == 200
            assert (await trial_of(at))["copies"] == {"no backend": 1}
            assert len(old.hit) == 1


@on_loop
async def test_a_canary_has_its_share() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, canary=0.25) as at:
        for _ in range(200):
            assert (await at.running.ask()).status == 200
        assert 20 <= len(new.hit) <= 85
        found = await trial_of(at)
        assert found["served"] == len(new.hit)
        assert await at.running.metric("crosstie_canary_requests_total", pool="new") == len(new.hit)


@on_loop
async def test_a_canary_that_fails_ends_and_no_client_sees_it() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, canary=1.0) as at:
        new.mode = "error"
        for _ in range(10):
            assert (await at.running.ask()).status == 200
        assert "requests failed there, and 5.0% may" in (await trial_of(at))["stopped"]
        before = len(new.hit)
        # Its breaker may close: it is not asked again.
        new.mode = "ok"
        at.running.gateway.backends[new.url].breaker.succeeded()
        for _ in range(10):
            assert (await at.running.ask()).status == 200
        assert len(new.hit) == before
        assert sum("its canary has ended" in notice for notice in at.notices) == 1
        # Until the file says something else of it.
        pools = tuple(
            msgspec.structs.replace(pool, canary=0.5) if pool.name == "new" else pool
            for pool in at.running.gateway.live.fleet.pools
        )
        at.running.process.load(msgspec.structs.replace(at.running.gateway.live.fleet, pools=pools))
        assert (await trial_of(at))["stopped"] == ""


@on_loop
async def test_a_canary_that_is_slow_ends() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, canary=0.5) as at:
        new.pause_s = 0.06
        for _ in range(30):
            await asyncio.gather(*(at.running.ask() for _ in range(8)))
            if (await trial_of(at))["stopped"]:
                break
        assert "times as long as elsewhere" in (await trial_of(at))["stopped"]


@on_loop
async def test_a_canary_serves_where_nobody_else_does_unless_it_has_ended() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, canary=0.0) as at:
        old.crash()
        await until(lambda: not at.running.gateway.backends[old.url].replica.up)
        assert (await at.running.ask()).status == 200
        service = trials_in(at)
        service._stop(service._trials["new"], "of a test")
        assert (await at.running.ask()).status == 503
        # Whoever names it gets it.
        assert (await at.running.ask(headers={"x-crosstie-pool": "new"})).status == 200


@on_loop
async def test_without_a_trial_there_is_nothing_to_say() -> None:
    async with fakes(1) as [fake], administered(fleet_of(pool_of("p", fake.url)), first=[TrialsService()]) as at:
        assert await at.get("trials") == {"trials": []}
        assert at.running.gateway.context.trials is None
        assert str(next(iter(trials_parts({"trials": []})))).startswith("no pool is on trial")


@on_loop
async def test_workers_tell_each_other_of_trials() -> None:
    async with fakes(2) as (old, new), on_trial(old, new, shadow=1.0, canary=0.5) as at:
        speaks(old, SAME)
        speaks(new, SAME)
        await compared(at, 8)
        service = trials_in(at)
        answer = decode_answer(encode(TrialsAnswer(service.views())))
        assert isinstance(answer, TrialsAnswer)
        (view,) = answer.trials
        assert (view.pool, view.compared, view.verdict) == ("new", 8, "same")
        # One has compared, the other has sent; together it is one pool's.
        other = msgspec.structs.replace(view, compared=0, verdict=None, served=7, faults=1)
        both = together([other, view], 1.5, 0.05)
        assert (both.compared, both.served, both.faults) == (8, view.served + 7, view.faults + 1)
        told = decode_request(encode(TrialStopped("new", "of another worker")))
        assert isinstance(told, TrialStopped)
        service._on_stopped(told)
        before = len(new.hit)
        for _ in range(20):
            assert (await at.running.ask()).status == 200
        assert not any("top_logprobs" not in body for _, body in new.hit[before:])
        assert (await trial_of(at))["stopped"] == "of another worker"
