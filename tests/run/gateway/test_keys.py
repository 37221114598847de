"""A gateway that asks for keys: who gets in, who is told what, what is counted and what it does without its store."""

import asyncio
import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, CATALOG, MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.wire.sockets import said

from crosstie.core.errors import BadInput, CrosstieError, StoreFailed
from crosstie.core.fleet import ServedClass, SharedState
from crosstie.core.usage import Used, hour_of, total
from crosstie.core.workload import Target
from crosstie.route.build import live_fleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.wire.fetch import Answer, fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import Store
from crosstie_gateway.ledger.usage import UsageBatch, UsageCounts, day_end
from crosstie_gateway.service import ledger as ledger_module
from crosstie_gateway.service.ledger import Ledger
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import RequestLimits
from crosstie_gateway.wire.server import Reply

OTHER = "qwen3-8b"
# For requests that have to be in flight while something else happens.
CLASSES = tuple(
    ServedClass(
        name=name, model=model, requests_per_s=1.0, input_tokens=length, output_tokens=20.0,
        ttft=Target(seconds=ttft, percentile=0.95), tpot=None, routes=(),
    )
    for name, model, length, ttft in (
        ("chat", MODEL, 1.0, 1.0), ("batch", MODEL, 9000.0, 60.0), ("other", OTHER, 1.0, 2.0),
    )
)  # fmt: skip


class Keyed:
    """A gateway with keys, its store and its ledger."""

    def __init__(self, at: Running, store: Store, part: Ledger, fake: Fake):
        self.at, self.store, self.part, self.fake = at, store, part, fake

    async def key(self, name: str = "alice", **fields: Any) -> str:
        """Makes a key, and waits until the gateway knows it."""
        public_id, secret = new_public_id(), new_secret()
        self.store.add_key(Key(name=name, public_id=public_id, digest=digest(secret), created_at=1.0, **fields))
        await self.followed()
        return shown(public_id, secret)

    async def change(self, name: str = "alice", **fields: Any) -> None:
        self.store.change_key(name, lambda key: msgspec.structs.replace(key, **fields))
        await self.followed()

    async def followed(self) -> None:
        version = self.store.news(-1, 0.0).version
        await until(lambda: self.part._version == version)

    async def ask(self, token: str | None, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        own = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.at.ask(headers={**own, **(headers or {})}, **body)

    async def get(self, path: str, token: str | None) -> Answer:
        lines = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        return await fetch(self.at.origin, "GET", path, headers=lines)

    async def written(self) -> list[Used]:
        await until(lambda: self.part.pending == 0)
        return self.store.used(["key", "outcome", "code"])


@contextlib.asynccontextmanager
async def keyed(folder: Path, place: str | None = None, every_s: float = 0.02, **changes: Any) -> AsyncIterator[Keyed]:
    """`place`: of the store; a file in the folder where none is given. `every_s`: how often it is read and written,
    which nearly every test waits for."""
    place = place or str(folder / "store.db")
    store = open_store(place, create=True)
    part = Ledger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "_EVERY_S", every_s)
        async with fakes() as [fake]:
            fleet = fleet_of(
                pool_of("one", fake.url), pool_of("two", fake.url.replace("127.0.0.1", "localhost"), model=OTHER),
                classes=CLASSES, state=SharedState(keys=True, store=place),
            )  # fmt: skip
            async with running(msgspec.structs.replace(fleet, **changes), components=[part]) as at:
                try:
                    yield Keyed(at, store, part, fake)
                finally:
                    await part.stop()
                    store.close()


def code_of(answer: Answer) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["code"]


def message_of(answer: Answer) -> str:
    return str(json.loads(answer.body)["error"]["message"])


Test = Callable[[Path], Any]


def on_loop(test: Test) -> Callable[[Path], None]:
    def runs(tmp_path: Path) -> None:
        run_on_loop(test(tmp_path))

    runs.__name__ = test.__name__
    return runs


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


# How much


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


# Usage


@on_loop
async def test_what_is_written_is_what_was_served(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key()
        for stream in (True, False, True):
            assert (await at.ask(token, stream=stream)).status == 200
        at.fake.mode = "error-later"
        assert (await at.ask(token, stream=True)).status == 200
        at.fake.mode = "ok"
        assert (await at.ask(token, {"x-crosstie-class": "nonsense"})).status == 400
        rows = {row.of: row for row in await at.written()}
        served, cut = rows["alice", "served", ""], rows["alice", "cut", "upstream_cut"]
        assert (served.requests, served.input_tokens, served.output_tokens) == (3, 21, 15)
        assert (cut.requests, cut.failed) == (1, 1)
        assert cut.output_tokens > 0
        assert rows["alice", "refused", "bad_request"].refused == 1
        # The same dollars as the metrics tell, for what was served whole.
        assert served.usd == pytest.approx(await at.at.metric("crosstie_usd_total"))
        assert served.usd > 0
        assert at.store.spent(time.time())[1][0] == pytest.approx(served.usd + cut.usd)


@on_loop
async def test_usage_without_keys(tmp_path: Path) -> None:
    place = str(tmp_path / "store.db")
    async with keyed(tmp_path, state=SharedState(store=place)) as at:
        assert (await at.ask(None)).status == 200
        # Nobody's business here: passed on as before.
        assert (await at.ask("whatever")).status == 200
        assert at.fake.hit[1][0].headers[b"authorization"] == b"Bearer whatever"
        assert [(row.of, row.requests) for row in await at.written()] == [(("", "served", ""), 2)]


@on_loop
async def test_without_a_store_there_is_no_ledger(tmp_path: Path) -> None:
    async with keyed(tmp_path, state=SharedState()) as at:
        assert (await at.ask(None)).status == 200
        assert at.at.gateway.listeners == []
        assert "crosstie_ledger" not in at.at.gateway.metrics_page()


@on_loop
async def test_keys_can_be_required_from_a_reload_on(tmp_path: Path) -> None:
    place = str(tmp_path / "store.db")
    async with keyed(tmp_path, state=SharedState(store=place)) as at:
        fleet = at.at.process.fleet
        assert (await at.ask(None)).status == 200
        at.part.reloaded(msgspec.structs.replace(fleet, state=SharedState(store=place, keys=True)))
        assert (await at.ask(None)).status == 401
        at.part.reloaded(msgspec.structs.replace(fleet, state=SharedState(store=place)))
        assert (await at.ask(None)).status == 200


@on_loop
async def test_a_reload_changes_no_store(tmp_path: Path) -> None:
    """Least of all from none to one with keys, which would let everyone in while the file says that nobody is."""
    place = str(tmp_path / "store.db")
    for before, now, key in (
        (SharedState(), SharedState(store=place, keys=True), "store"),
        (SharedState(store=place, keys=True), SharedState(store=place + "2", keys=True), "store"),
        (SharedState(store=place, keys=True), SharedState(), "store"),
        (SharedState(store=place), SharedState(store=place, redis="redis://127.0.0.1/0"), "redis"),
    ):
        async with keyed(tmp_path, state=before) as at:
            fleet = at.at.process.fleet
            status = (await at.ask(None)).status
            with pytest.raises(BadInput, match=f"^state.{key}: is another now"):
                at.at.process.load(msgspec.structs.replace(fleet, state=now))
            assert (await at.ask(None)).status == status


@pytest.mark.slow
@on_loop
async def test_a_store_that_fails_stops_nobody_and_loses_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosstie_gateway.ledger.sqlite._BUSY_S", 0.02)
        async with keyed(tmp_path) as at:
            token = await at.key()
            other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            for _ in range(3):
                assert (await at.ask(token)).status == 200
            await until(lambda: at.part.failures >= 2)
            assert (await at.ask(token)).status == 200
            assert await at.at.metric("crosstie_ledger_pending") == 4
            assert await at.at.metric("crosstie_ledger_failures_total") >= 2
            # Said once, not at every try.
            assert sum("which is tried again" in line for line in at.at.notices) == 1
            other.execute("ROLLBACK")
            other.close()
            assert total(await at.written()).requests == 4
            await until(lambda: any("answers again" in line for line in at.at.notices))


@pytest.mark.slow
@on_loop
async def test_a_commit_of_which_nobody_knows_is_counted_once(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key(usd_per_day=1000.0)
        store = at.part._store
        assert store is not None
        honest, tries = store.write, list[int]()

        def write(batch: UsageBatch) -> bool:
            done = honest(batch)
            tries.append(batch.sequence)
            if len(tries) < 3:
                raise StoreFailed("the connection was lost while it was committed")
            return done

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write", write)
            assert (await at.ask(token)).status == 200
            await until(lambda: at.part.failures)
            assert (await at.ask(token)).status == 200
            await until(lambda: at.part.pending == 0)
        # The first batch as it was, three times; the second request came with another.
        assert tries == [1, 1, 1, 2]
        (row,) = await at.written()
        assert row.requests == 2
        holder = at.part._guard._by_id[1]
        await until(lambda: holder.own_usd == pytest.approx(0.0, abs=1e-12))
        assert holder.today_usd == pytest.approx(row.usd)


@on_loop
async def test_a_store_that_does_not_answer_is_reported_and_waited_for(tmp_path: Path) -> None:
    async with keyed(tmp_path) as at:
        token = await at.key()
        store = at.part._store
        assert store is not None
        honest, answers = store.write, threading.Event()

        def write(batch: UsageBatch) -> bool:
            answers.wait(60)
            return honest(batch)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write", write)
            patch.setattr(ledger_module, "_SILENT_S", 0.1)
            assert (await at.ask(token)).status == 200
            await until(lambda: any("does not answer" in line for line in at.at.notices))
            assert (await at.ask(token)).status == 200
            assert at.part.pending == 2
            answers.set()
            assert total(await at.written()).requests == 2


@on_loop
async def test_the_last_requests_are_written_before_it_ends(tmp_path: Path) -> None:
    # So seldom that nothing is written before.
    async with keyed(tmp_path, every_s=3600.0, state=SharedState(store=str(tmp_path / "store.db"))) as at:
        await until(lambda: at.part._running is None)
        assert (await at.ask(None)).status == 200
        assert at.part.pending == 1
        await at.part.stop()
        assert at.part.pending == 0
        assert at.store.used([])[0].requests == 1


@on_loop
async def test_what_cannot_be_written_at_the_end_is_reported(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "_LAST_S", 0.2)
        async with keyed(tmp_path, state=SharedState(store=str(tmp_path / "store.db"))) as at:
            for file in tmp_path.iterdir():
                file.unlink()
            assert (await at.ask(None)).status == 200
            await at.part.stop()
            assert any("usage of 1 requests is lost" in line for line in at.at.notices)


@on_loop
async def test_a_store_that_cannot_be_opened_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"something else" * 500)
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url), state=SharedState(keys=True, store=str(tmp_path / "store.db")))
        process = GatewayProcess(CATALOG, fleet, components=[Ledger()])
        with pytest.raises(CrosstieError, match="no SQLite file"):
            await process.start("127.0.0.1", 0)


@on_loop
async def test_lines_are_bounded_and_numbers_are_kept(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosstie_gateway.gateway.record._MOST_LINES", 1)
        async with keyed(tmp_path, every_s=3600.0, state=SharedState(store=str(tmp_path / "store.db"))) as at:
            await until(lambda: at.part._running is None)
            for model in (MODEL, OTHER, OTHER):
                assert (await at.ask(None, model=model)).status == 200
            await at.part.stop()
            assert [(row.of, row.requests, row.output_tokens) for row in at.store.used(["model"])] == [
                (("",), 2, 10), ((MODEL,), 1, 5),
            ]  # fmt: skip


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
