"""A gateway that asks for keys: who gets in, who is told what, and what a key may use."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, CATALOG, MODEL, Fake, fakes, fleet_of, pool_of, until
from tests.run.gateway.keyed import OTHER, code_of, keyed, message_of, on_loop
from tests.wire.sockets import said

from crosstie.core.fleet import SharedState
from crosstie.route.build import live_fleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import RequestLimits
from crosstie_gateway.wire.server import Reply

# Who gets in


@on_loop
async def test_a_key_is_taken_from_any_header_that_clients_use_and_goes_no_further(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key()
        for headers in (
            {"Authorization": f"Bearer {token}"}, {"AUTHORIZATION": f"bearer   {token} "}, {"api-key": token},
            {"x-api-key": token}, {"Authorization": "Basic eDp5", "x-api-key": token},
            {"Authorization": f"Bearer {token}", "x-api-key": "something else", "api-key": "and more"},
        ):  # fmt: skip
            answer = await at.at.ask(headers=headers)
            assert answer.status == 200, headers
            request, _ = at.fake.hit[-1]
            assert not request.headers.keys() & {b"authorization", b"api-key", b"x-api-key"}
            assert token.encode() not in b"".join(request.headers.values()) + request.body
        assert len(at.fake.hit) == 6


@on_loop
async def test_a_backend_gets_its_own_key_and_not_the_clients(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BACKEND_KEY", "theirs")
            pools = (pool_of("one", fake.url, api_key_env="BACKEND_KEY"),)
            async with keyed(tmp_path, pools=pools, classes=()) as at:
                token = await at.key()
                assert (await at.ask(token)).status == 200
                assert fake.hit[0][0].headers[b"authorization"] == b"Bearer theirs"


@on_loop
async def test_limits_of_the_gateways_own_account_are_not_shown_to_its_clients(tmp_path: Path) -> None:
    class Vendor(Fake):
        def _ok(self, body: dict[str, Any], reply: Reply) -> None:
            reply.send(200, b'{"choices":[]}', b"x-ratelimit-remaining-requests: 9999\r\nx-vendor: them\r\n")

    vendor = Vendor()
    await vendor.start()
    for keys, left in ((True, [b"6", b"5", b"4"]), (False, [b"9999"] * 3)):
        state = SharedState(keys=keys, store=str(tmp_path / "store.db"))
        async with keyed(tmp_path, pools=(pool_of("one", vendor.url),), classes=(), state=state) as at:
            token = await at.key(f"key-{keys}", rpm=7)
            # The head of the second is known, and of the third what of it goes on.
            answers = [await at.ask(token) for _ in range(3)]
            assert [one.header(b"x-ratelimit-remaining-requests") for one in answers] == left
            # What goes on without keys is not what goes on with them.
            at.at.gateway.context.guard = None
            answers += [await at.ask(token) for _ in range(2)]
            assert [one.header(b"x-ratelimit-remaining-requests") for one in answers[3:]] == [b"9999"] * 2
            assert [one.header(b"x-vendor") for one in answers] == [b"them"] * 5
    vendor.crash()


@on_loop
async def test_who_does_not_get_in(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key()
        start, _, secret = token.rpartition("-")
        wrong = f"{start}-{new_secret()}"
        cases: dict[str, list[dict[str, str]]] = {
            "missing_api_key": [{}, {"Authorization": "Bearer "}, {"Authorization": "Basic eDp5"}, {"x-api-key": ""}],
            "invalid_api_key": [
                {"Authorization": f"Bearer {one}"}
                for one in (
                    wrong, f"ct-{'0' * 12}-{secret}", "sk-abc", "ct", "ct--", "ct-x", "--", f"xx{token[2:]}", secret,
                    token + "x", token[:-1], f"{start}-", token.upper(), "\u00e9-\u00ff-\u00fe", "x" * 5000,
                )
            ],
        }  # fmt: skip
        told = set()
        for code, tries in cases.items():
            for headers in tries:
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")
                raw = await said(
                    at.at.port,
                    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n"
                    + lines + b"\r\n{}",
                )  # fmt: skip
                head, _, body = raw.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 401 "), headers
                assert b"\r\nwww-authenticate: Bearer" in head
                error = json.loads(body)["error"]
                assert (error["code"], error["type"]) == (code, "authentication_error"), headers
                told.add((code, error["message"]))
        # One message for all that are wrong: not which part of it was.
        assert len(told) == 2
        assert at.fake.hit == []
        assert await at.at.metric("crosstie_key_refused_total", code="invalid_api_key") == len(cases["invalid_api_key"])
        # They are counted, under no key.
        assert [(row.of, row.refused) for row in await at.written()] == [
            (("", "refused", "invalid_api_key"), 15), (("", "refused", "missing_api_key"), 4),
        ]  # fmt: skip


@on_loop
async def test_keys_are_revoked_expire_and_are_rotated_while_the_gateway_runs(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key()
        assert (await at.ask(token)).status == 200
        start, _, old = token.rpartition("-")
        secret = new_secret()
        rotated = f"{start}-{secret}"
        await at.change(digest=digest(secret), old_digest=digest(old), old_until=time.time() + 3600)
        assert (await at.ask(token)).status == 200
        assert (await at.ask(rotated)).status == 200
        await at.change(old_until=time.time() - 1)
        assert code_of(await at.ask(token)) == (401, "invalid_api_key")
        assert (await at.ask(rotated)).status == 200
        await at.change(expires_at=time.time() - 1)
        assert code_of(await at.ask(rotated)) == (401, "api_key_expired")
        await at.change(expires_at=time.time() + 3600)
        assert (await at.ask(rotated)).status == 200
        await at.change(revoked_at=1.0)
        assert code_of(await at.ask(rotated)) == (401, "api_key_revoked")
        # Only who has the secret is told what became of the key.
        assert code_of(await at.ask(f"{start}-{new_secret()}")) == (401, "invalid_api_key")


# What a key may use


@on_loop
async def test_a_key_hears_of_its_own_models_only(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        mine, all_ = await at.key(models=(MODEL,)), await at.key("bob")
        assert (await at.ask(mine)).status == 200
        exists, does_not = await at.ask(mine, model=OTHER), await at.ask(mine, model="no-such-model")
        assert code_of(exists) == code_of(does_not) == (403, "model_not_allowed")
        # The same words, so that neither tells which of them there is.
        assert message_of(exists).replace(OTHER, "X") == message_of(does_not).replace("no-such-model", "X")
        assert MODEL in message_of(exists)
        assert code_of(await at.ask(all_, model="no-such-model")) == (404, "model_not_found")
        assert (await at.ask(all_, model=OTHER)).status == 200

        listed = json.loads((await at.get("/v1/models", mine)).body)["data"]
        assert [one["id"] for one in listed] == [MODEL]
        assert len(json.loads((await at.get("/v1/models", all_)).body)["data"]) == 2
        assert (await at.get(f"/v1/models/{MODEL}", mine)).status == 200
        assert code_of(await at.get(f"/v1/models/{OTHER}", mine)) == (404, "model_not_found")
        assert code_of(await at.get("/v1/models", None)) == (401, "missing_api_key")
        assert code_of(await at.get(f"/v1/models/{MODEL}", "ct-x-y")) == (401, "invalid_api_key")

        # Pools, too: only those of its models.
        assert code_of(await at.ask(mine, {"x-crosstie-pool": "two"})) == (403, "pool_not_allowed")
        assert code_of(await at.ask(mine, {"x-crosstie-pool": "none"})) == (403, "pool_not_allowed")
        assert (await at.ask(mine, {"x-crosstie-pool": "one"})).status == 200
        assert code_of(await at.ask(all_, {"x-crosstie-pool": "none"})) == (400, "bad_request")


@on_loop
async def test_a_model_may_be_given_by_the_name_that_backends_know(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        pools = (pool_of("one", fake.url, served_as="org/Model"),)
        async with keyed(tmp_path, pools=pools, classes=()) as at:
            token = await at.key(models=("org/Model",))
            assert (await at.ask(token)).status == 200
            assert (await at.ask(token, model="org/Model")).status == 200
            # A model of a key that nobody serves any more.
            await at.change(models=("gone",))
            assert "none that is served now" in message_of(await at.ask(token))


@on_loop
async def test_what_needs_no_key_and_what_does(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        for path in ("/health", "/ready"):
            assert (await at.get(path, None)).status == 200
        # They name backends and teams, and what these spend.
        assert code_of(await at.get("/metrics", None)) == (401, "missing_api_key")
        assert code_of(await at.get("/metrics", await at.key("client"))) == (403, "explain_not_allowed")
        assert b"crosstie_backend_up" in (await at.get("/metrics", await at.key("watcher", explains=True))).body
        assert code_of(await at.at.ask("/crosstie/explain")) == (401, "missing_api_key")
        token = await at.key(models=(MODEL,), explains=True)
        own = {"Authorization": f"Bearer {token}"}
        explained = json.loads((await at.at.ask("/crosstie/explain", headers=own)).body)
        assert [one["pool"] for one in explained["considered"]] == ["one"]
        assert code_of(await at.at.ask("/crosstie/explain", headers=own, model=OTHER)) == (403, "model_not_allowed")


@on_loop
async def test_an_explanation_takes_a_right_costs_a_request_and_tells_no_address(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(rpm=2)
        own = {"Authorization": f"Bearer {token}"}
        assert code_of(await at.at.ask("/crosstie/explain", headers=own)) == (403, "explain_not_allowed")
        await at.change(explains=True)
        for _ in range(2):
            said = await at.at.ask("/crosstie/explain", headers=own)
            assert said.status == 200
            assert json.loads(said.body)["replica"] == "one/1"
            assert str(at.fake.port) not in said.body.decode()
        assert code_of(await at.at.ask("/crosstie/explain", headers=own)) == (429, "rate_limit_exceeded")
        assert code_of(await at.ask(token)) == (429, "rate_limit_exceeded")
        assert not at.fake.hit
        assert not next(iter(at.part._guard._by_id.values())).open


@on_loop
async def test_a_backend_that_is_down_is_told_of_without_its_address(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(explains=True)
        at.fake.crash()
        seen = [await at.ask(token)]
        seen.append(await at.at.ask("/crosstie/explain", headers={"Authorization": f"Bearer {token}"}))
        for answer in seen:
            assert str(at.fake.port) not in answer.body.decode(), answer
            assert "127.0.0.1" not in answer.body.decode(), answer


@pytest.mark.parametrize("shared", [False, True])
def test_what_one_key_has_sent_is_not_told_to_another(shared: bool, tmp_path: Path) -> None:
    async def test() -> None:
        serving = msgspec.structs.replace(CALM, share_prefixes=shared)
        async with keyed(tmp_path, serving=serving) as at:
            alice, bob = await at.key(explains=True), await at.key("bob", explains=True)
            document = [{"role": "user", "content": "The merger is signed on Monday. " * 600}]
            for token, knows in ((alice, True), (bob, shared)):
                if token == alice:
                    assert (await at.ask(token, messages=document)).status == 200
                own = {"Authorization": f"Bearer {token}"}
                said = json.loads((await at.at.ask("/crosstie/explain", headers=own, messages=document)).body)
                assert ("held" in said["reason"]) == knows, said
                assert (said["considered"][0]["predicted"]["cached_tokens"] > 0) == knows
            reason = (await at.ask(bob, messages=document)).header(b"x-crosstie-reason") or b""
            assert (b"held" in reason) == shared

    run_on_loop(test())


@on_loop
async def test_a_session_of_one_key_is_not_another_s_by_the_same_name(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        for name in ("alice", "bob"):
            assert (await at.ask(await at.key(name), user="42")).status == 200
        (pool, _) = at.at.gateway.live.pools
        assert len(pool.sessions) == 2


@on_loop
async def test_a_key_may_have_so_many_requests_open(tmp_path: Path) -> None:
    serving = msgspec.structs.replace(CALM, max_open_per_key=3)
    async with keyed(tmp_path, serving=serving) as at:
        for name, own, most in (("alice", {}, 3), ("bob", {"max_open": 1}, 1)):
            token = await at.key(name, **own)
            at.fake.mode = "hang"
            flying = [asyncio.create_task(at.ask(token)) for _ in range(most)]
            while len(at.fake.held) < most:
                await asyncio.sleep(0.01)
            refused = await at.ask(token)
            assert code_of(refused) == (429, "too_many_open_requests")
            assert message_of(refused) == f"this key has {most} requests open, and may have {most} at once"
            assert refused.header(b"retry-after") == b"1"
            at.fake.mode = "ok"
            # Others are not asked to wait for it.
            assert (await at.ask(await at.key(f"{name}-2"))).status == 200
            while at.fake.held:
                at.fake._ok({}, at.fake.held.pop())
            assert [(await one).status for one in flying] == [200] * most
            assert (await at.ask(token)).status == 200


@on_loop
async def test_a_key_with_200_connections_does_not_keep_another_from_its_turn(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        fake.mode = "hang"
        narrow = (pool_of("one", fake.url, max_in_flight=1),)
        serving = msgspec.structs.replace(CALM, max_queued=100)
        async with keyed(tmp_path, pools=narrow, classes=(), serving=serving) as at:
            hog, other = await at.key("hog"), await at.key("other")
            waiting = at.at.gateway.waiting
            many = [asyncio.create_task(at.ask(hog, user="hog")) for _ in range(200)]
            await until(lambda: len(waiting) == 100 and sum(one.done() for one in many) == 99)
            few = [asyncio.create_task(at.ask(other, user="other")) for _ in range(5)]
            # Places for them are taken from who has most of them.
            await until(lambda: sum(one.done() for one in many) == 104)
            assert len(waiting) == 100
            fake.mode = "ok"
            fake._ok({}, fake.held.pop())
            assert [(await one).status for one in few] == [200] * 5
            served = [body["user"] for _, body in fake.hit]
            assert served.index("other") <= 2
            assert served[:11].count("other") >= 4, "turn by turn"
            statuses = [(await one).status for one in many]
            assert (statuses.count(200), statuses.count(429)) == (96, 104)


@on_loop
async def test_classes_of_a_key(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(classes=("batch", "other"), explains=True)
        own = {"Authorization": f"Bearer {token}"}
        assert code_of(await at.ask(token, {"x-crosstie-class": "chat"})) == (403, "class_not_allowed")
        unknown = await at.ask(token, {"x-crosstie-class": "none"})
        assert code_of(unknown) == (403, "class_not_allowed")
        assert "chat" not in message_of(unknown)
        assert (await at.ask(token, {"x-crosstie-class": "batch"})).status == 200
        # One that names no class gets the key's, with its targets; those of its own stay.
        explained = json.loads((await at.at.ask("/crosstie/explain", headers=own)).body)["request"]
        assert (explained["class"], explained["ttft_target_s"]) == ("batch", 60.0)
        hinted = {**own, "x-crosstie-ttft-ms": "500"}
        explained = json.loads((await at.at.ask("/crosstie/explain", headers=hinted)).body)["request"]
        assert (explained["class"], explained["ttft_target_s"]) == ("batch", 0.5)
        assert (await at.ask(token)).status == 200
        await until(lambda: at.part.pending == 0)
        assert {row.of for row in at.store.used(["class", "outcome"])} == {("", "refused"), ("batch", "served")}
        await at.change(classes=("other",))
        assert code_of(await at.ask(token)) == (403, "class_not_allowed")


@on_loop
async def test_priorities_of_a_key(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        for most, allowed, usual in (
            ("low", ["low"], 0),
            ("normal", ["low", "normal"], 1),
            ("high", ["low", "normal", "high"], 1),
        ):
            token = await at.key(most, priority=most, explains=True)
            own = {"Authorization": f"Bearer {token}"}
            for asked in ("low", "normal", "high"):
                answer = await at.ask(token, {"x-crosstie-priority": asked})
                assert answer.status == (200 if asked in allowed else 403), (most, asked)
                if asked not in allowed:
                    assert code_of(answer) == (403, "priority_not_allowed")
            explained = json.loads((await at.at.ask("/crosstie/explain", headers=own)).body)["request"]
            assert explained["priority"] == usual
            assert code_of(await at.ask(token, {"x-crosstie-priority": "urgent"})) == (400, "bad_request")


def test_a_head_that_comes_again_is_judged_again() -> None:
    """What a head says of who asks is read once; whether that is let in is asked at every request."""
    public_id, secret = new_public_id(), new_secret()
    key = Key(id=7, name="alice", public_id=public_id, digest=digest(secret), created_at=1.0)
    fleet = fleet_of(pool_of("one", "http://h/v1"))
    guard = Guard(Router(live_fleet(CATALOG, fleet, 0.0), make_policy(fleet.policy)))
    parser = RequestParser(RequestLimits())
    said_key = f"authorization: Bearer {shown(public_id, secret)}"
    raw = f"POST / HTTP/1.1\r\nhost: h\r\n{said_key}\r\ncontent-length: 0\r\n\r\n"

    def let_in() -> int | str:
        parser.feed(raw.encode())
        request = parser.next()
        assert request is not None
        assert request.head is not None
        try:
            return guard.known(request)
        except RequestRejected as refused:
            return refused.code

    assert let_in() == "invalid_api_key"
    guard.know([key])
    assert let_in() == let_in() == 7
    guard.know([msgspec.structs.replace(key, revoked_at=2.0)])
    assert let_in() == "api_key_revoked"
    guard.know([msgspec.structs.replace(key, digest=digest("another"))])
    assert let_in() == "invalid_api_key"
    guard.know([])
    assert let_in() == "invalid_api_key"
