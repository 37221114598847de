"""How much a key may use: requests and tokens a minute, budgets, and those of its team."""

import asyncio
import json
import time
from pathlib import Path

import msgspec
import pytest
from tests.run.gateway.fakes import MODEL, until
from tests.run.gateway.keyed import code_of, keyed, message_of, on_loop
from tests.wire.sockets import said

from crosstie.core.usage import hour_of
from crosstie_gateway.ledger.usage import UsageBatch, UsageCounts, day_end


@on_loop
async def test_a_body_is_not_taken_of_who_may_not_ask(tmp_path: Path) -> None:
    """Whoever has no key, no requests or no money left is told so by the head alone."""
    async with keyed(tmp_path) as at:
        tokens = {
            "spent": await at.key("spent", usd_per_day=1.0), "often": await at.key("often", rpm=1),
            "free": await at.key("free"),
        }  # fmt: skip
        assert (await at.ask(tokens["often"])).status == 200
        at.part._guard._by_id[1].own_usd = 2.0
        seen = {}
        for name, token in {**tokens, "nobody": "ct-a-b", "unnamed": ""}.items():
            key = f"authorization: Bearer {token}\r\n" if token else ""
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{key}content-length: 20000000\r\n"
            data = (head + "expect: 100-continue\r\n\r\n").encode()
            answer = await said(at.at.process.port, data, until=b"\r\n\r\n" if name == "free" else None)
            seen[name] = answer
        assert seen.pop("free").startswith(b"HTTP/1.1 100")
        codes = {
            name: (int(one.split()[1]), json.loads(one.split(b"\r\n\r\n")[1])["error"]["code"])
            for name, one in seen.items()
        }
        assert codes == {
            "spent": (429, "insufficient_quota"), "often": (429, "rate_limit_exceeded"),
            "nobody": (401, "invalid_api_key"), "unnamed": (401, "missing_api_key"),
        }  # fmt: skip
        assert b"retry-after" in seen["often"]
        assert b"www-authenticate: Bearer" in seen["nobody"]
        refused = {row.of: row.refused for row in await at.written() if row.refused}
        assert refused[("often", "refused", "rate_limit_exceeded")] == 1
        assert refused[("spent", "refused", "insufficient_quota")] == 1


@on_loop
async def test_requests_a_minute(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token, free = await at.key(rpm=3), await at.key("bob")
        answers = [await at.ask(token) for _ in range(5)]
        assert [one.status for one in answers] == [200, 200, 200, 429, 429]
        assert [one.header(b"x-ratelimit-remaining-requests") for one in answers] == [b"2", b"1", b"0", b"0", b"0"]
        assert answers[0].header(b"x-ratelimit-limit-requests") == b"3"
        assert answers[0].header(b"x-ratelimit-limit-tokens") is None
        assert code_of(answers[3]) == (429, "rate_limit_exceeded")
        assert 1 <= int(answers[3].header(b"retry-after") or 0) <= 121
        streamed = await at.ask(free, stream=True)
        assert streamed.status == 200
        assert streamed.header(b"x-ratelimit-limit-requests") is None
        # Changed while it runs; what was refused has not been counted.
        await at.change(rpm=4)
        assert [(await at.ask(token, stream=True)).status for _ in range(2)] == [200, 429]
        assert [(row.of, row.requests, row.refused) for row in await at.written()] == [
            (("alice", "refused", "rate_limit_exceeded"), 0, 3), (("alice", "served", ""), 4, 0),
            (("bob", "served", ""), 1, 0),
        ]  # fmt: skip


@on_loop
async def test_tokens_a_minute_are_estimated_and_then_settled(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(tpm=1000)
        # It is let in for what it asks for, and then counted for what it got: 7 tokens in, 5 out.
        first = await at.ask(token, stream=True, max_tokens=19)
        assert first.header(b"x-ratelimit-limit-tokens") == b"1000"
        minute = int(time.time() // 60)
        guard = at.part._guard
        assert sum(guard.tally.total(1, one)[1] for one in (minute - 1, minute)) == 12
        assert (await at.ask(token, messages=[{"role": "user", "content": "x " * 1900}])).status == 200
        large = await at.ask(token, messages=[{"role": "user", "content": "x " * 3000}])
        assert code_of(large) == (429, "rate_limit_exceeded")
        # More than there will ever be room for: nobody should try again.
        assert large.header(b"x-should-retry") == b"false"
        assert large.header(b"retry-after") is None
        assert "1,000 a minute" in message_of(large)
        # Many answers at once are as much as one after the other, however their number is written.
        for copies in ({"n": 128}, {"best_of": 128}, {"n": "128"}, {"n": 128.0}):
            assert code_of(await at.ask(token, max_tokens=19, **copies)) == (429, "rate_limit_exceeded")
        # While these are answered they count for what they may come to.
        at.fake.mode = "hang"
        pending = asyncio.create_task(at.ask(token, messages=[{"role": "user", "content": "x " * 1500}]))
        await until(lambda: at.at.gateway.exchanges)
        refused = await at.ask(token, messages=[{"role": "user", "content": "x " * 1500}])
        assert code_of(refused) == (429, "rate_limit_exceeded")
        assert int(refused.header(b"retry-after") or 0) >= 1
        at.fake.held[0].send(500, b"{}")
        assert (await pending).status == 500
        at.fake.mode = "ok"
        # What failed has used nothing.
        assert (await at.ask(token, messages=[{"role": "user", "content": "x " * 1500}])).status == 200


@on_loop
async def test_a_budget_holds_for_what_is_in_flight_and_for_what_others_spend(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1.0, usd_per_month=100.0)
        assert (await at.ask(token)).status == 200
        now = time.time()
        # Another gateway writes to the same store.
        line = (hour_of(now), 1, MODEL, "", "elsewhere", "served", "")
        at.store.write(UsageBatch("another", 1, {line: UsageCounts(1, 1, 1, 1, 1.5)}))
        await until(lambda: at.part._guard._by_id[1].today_usd >= 1.5)
        spent = await at.ask(token)
        assert code_of(spent) == (429, "insufficient_quota")
        assert "budget of 1 USD a day (UTC) is spent" in message_of(spent)
        # To the end of the day; and a client that would try again sooner is told not to.
        assert abs(int(spent.header(b"retry-after") or 0) - (day_end(now) - now)) < 60
        assert spent.header(b"x-should-retry") == b"false"
        # More money.
        await at.change(usd_per_day=2.0)
        assert (await at.ask(token)).status == 200
        await at.change(usd_per_day=None, usd_per_month=1.2)
        assert "a month (UTC) is spent" in message_of(await at.ask(token))


@on_loop
async def test_requests_in_flight_reserve_what_they_may_cost(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1e6)
        at.fake.mode = "hang"
        first = asyncio.create_task(at.ask(token))
        guard = at.part._guard
        await until(lambda: guard._by_id.get(1) and guard._by_id[1].reserved_usd > 0)
        reserved = guard._by_id[1].reserved_usd
        # Enough for one and a half: the second has to wait for the first.
        await at.change(usd_per_day=1.5 * reserved)
        held = await at.ask(token)
        assert code_of(held) == (429, "insufficient_quota")
        assert int(held.header(b"retry-after") or 0) <= 6
        assert held.header(b"x-should-retry") is None
        at.fake.held[0].send(500, b"{}")
        assert (await first).status == 500
        # It failed, so it cost nothing.
        await until(lambda: guard._by_id[1].reserved_usd == 0.0)
        at.fake.mode = "ok"
        assert (await at.ask(token)).status == 200


@on_loop
async def test_a_budget_is_not_overrun_by_many_at_once(tmp_path: Path) -> None:
    """What they announce is reserved: as many are let in as the budget has room for, however many come."""
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1e6)
        at.fake.mode = "hang"
        first = asyncio.create_task(at.ask(token, max_tokens=1000, n=2))
        holder = at.part._guard._by_id[1]
        await until(lambda: holder.reserved_usd > 0)
        one_usd = holder.reserved_usd
        assert holder.more_usd == 0.0
        await at.change(usd_per_day=5.5 * one_usd)
        others = [asyncio.create_task(at.ask(token, max_tokens=1000, n=2)) for _ in range(45)]
        await until(lambda: sum(one.done() for one in others) == 41 and len(at.fake.held) == 5)
        refused = [code_of(one.result()) for one in others if one.done()]
        assert refused == [(429, "insufficient_quota")] * 41
        # All of them come to what they announced, to the token.
        usage = {"prompt_tokens": 10, "completion_tokens": 2000}
        for reply in at.fake.held:
            said = {"choices": [{"index": at, "message": {"content": "w " * 2000}} for at in (0, 1)], "usage": usage}
            reply.send(200, json.dumps(said).encode())
        answers = await asyncio.gather(first, *others)
        assert sorted(one.status for one in answers) == [200] * 5 + [429] * 41
        assert holder.reserved_usd == 0.0
        await at.written()
        assert 0 < at.store.spent(time.time())[1][0] <= 5.5 * one_usd


@on_loop
async def test_what_one_request_may_cost_is_told_where_it_is_more_than_is_left(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1e-6)
        dear = await at.ask(token, max_tokens=8000)
        assert code_of(dear) == (429, "insufficient_quota")
        assert "max_tokens" in message_of(dear)
        assert dear.header(b"x-should-retry") == b"false"


@on_loop
async def test_who_does_not_say_how_long_its_answer_may_be_is_let_in_for_what_is_usual(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1e6)
        at.fake.mode = "hang"
        pending = [asyncio.create_task(at.ask(token))]
        holder = at.part._guard._by_id[1]
        await until(lambda: holder.reserved_usd > 0)
        usual, more = holder.reserved_usd, holder.more_usd
        assert more > 10 * usual, "the whole context is much more than is usual"
        # With plenty left nobody waits for anybody.
        pending += [asyncio.create_task(at.ask(token)) for _ in range(5)]
        await until(lambda: len(at.fake.held) == 6)
        assert holder.in_flight == 6
        for reply in at.fake.held:
            reply.send(400, b"{}")
        for one in pending:
            await one
        at.fake.held.clear()
        # With less than the worst of one left it is let in all the same, but alone.
        await at.change(usd_per_day=4 * usual)
        pending = [asyncio.create_task(at.ask(token))]
        await until(lambda: len(at.fake.held) == 1)
        assert holder.in_flight == 1
        held = await at.ask(token)
        assert code_of(held) == (429, "insufficient_quota")
        assert "in flight" in message_of(held)
        # Whoever says so is not held up by it.
        pending.append(asyncio.create_task(at.ask(token, max_tokens=1)))
        await until(lambda: len(at.fake.held) == 2)
        assert holder.in_flight == 2
        at.fake.mode = "ok"
        for reply in at.fake.held:
            reply.send(400, b"{}")
        for one in pending:
            await one
        assert (await at.ask(token)).status == 200


@on_loop
async def test_a_team_s_limits_hold_beside_those_of_its_keys(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        team = at.store.put_team("research", lambda one: msgspec.structs.replace(one, rpm=3, usd_per_day=1e6))
        alice = await at.key("alice", team_id=team.id, rpm=2)
        bob = await at.key("bob", team_id=team.id)
        carol = await at.key("carol")
        for token in (alice, alice):
            assert (await at.ask(token)).status == 200
        own = await at.ask(alice)
        assert code_of(own) == (429, "rate_limit_exceeded")
        assert "this key has 2 requests a minute" in message_of(own)
        assert (await at.ask(bob)).status == 200
        shared = await at.ask(bob)
        assert code_of(shared) == (429, "rate_limit_exceeded")
        assert "team research has 3 requests a minute" in message_of(shared)
        # Of nobody else's team.
        for _ in range(4):
            assert (await at.ask(carol)).status == 200
        await at.written()
        rows = {row.of[0]: row for row in at.store.used(["team"])}
        assert (rows["research"].requests, rows[""].requests) == (3, 4)
        spent = at.store.spent(time.time())
        assert (
            spent[team.account_id][0] == pytest.approx(spent[1][0] + spent[2][0]) == pytest.approx(rows["research"].usd)
        )
        assert await at.at.metric("crosstie_team_usd_total", team="research") == pytest.approx(rows["research"].usd)
        # Those that were refused are requests too.
        assert await at.at.metric("crosstie_team_requests_total", team="research") == 5
        assert await at.at.metric("crosstie_team_tokens_total", team="research") == 36
        # Without the team there is no limit of it.
        await at.change("bob", team_id=None)
        assert (await at.ask(bob)).status == 200


@on_loop
async def test_keys_of_a_team_spend_one_budget(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        team = at.store.put_team("research", lambda one: msgspec.structs.replace(one, usd_per_month=1e6))
        alice = await at.key("alice", team_id=team.id)
        bob = await at.key("bob", team_id=team.id, usd_per_day=1e6)
        at.fake.mode = "hang"
        first = asyncio.create_task(at.ask(alice, max_tokens=1000))
        await until(lambda: at.fake.held)
        (account,) = at.part._guard.teams
        one_usd = account.reserved_usd
        assert one_usd > 0
        at.store.put_team("research", lambda one: msgspec.structs.replace(one, usd_per_month=1.5 * one_usd))
        await at.followed()
        held = await at.ask(bob, max_tokens=1000)
        assert code_of(held) == (429, "insufficient_quota")
        assert "team research's" in message_of(held)
        holder = at.part._guard._by_id[2]
        assert (holder.reserved_usd, account.reserved_usd) == (0.0, one_usd), "who was refused has reserved nothing"
        at.fake.held[0].send(400, b"{}")
        assert (await first).status == 400
        assert account.reserved_usd == 0.0
        # Another gateway has spent it with a key of the team.
        line = (hour_of(time.time()), 1, MODEL, "", "elsewhere", "served", "")
        at.store.write(UsageBatch("another", 1, {line: UsageCounts(1, 1, 1, 1, 2 * one_usd)}))
        await until(lambda: account.month_usd > 0)
        spent = await at.ask(bob, max_tokens=1)
        assert "team research's budget" in message_of(spent)
        assert "a month (UTC) is spent" in message_of(spent)


@on_loop
async def test_a_new_day_begins_with_a_full_budget_before_the_store_has_said_so(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1.0, usd_per_month=100.0)
        holder = at.part._guard._by_id[1]
        with pytest.MonkeyPatch.context() as patch:
            # The store is not heard any more.
            patch.setattr(at.part, "_begin", lambda: None)
            await until(lambda: at.part._running is None)
            holder.today_usd = holder.month_usd = 5.0
            assert code_of(await at.ask(token)) == (429, "insufficient_quota")
            at.part._guard._day_ends = time.time() - 1
            assert (await at.ask(token)).status == 200
            assert (holder.today_usd, holder.month_usd) == (0.0, 5.0)
