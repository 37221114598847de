"""Signed tokens beside keys: whose they are, which are refused and how, and what happens when their issuer changes."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import OKPAlgorithm, RSAAlgorithm
from tests.run.gateway.fakes import Fake, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.issuer import AUDIENCE, Issuer
from tests.waiting import LIMIT_S
from tests.wire.sockets import said

from crosstie.core.errors import BadInput
from crosstie.core.fleet import JwtIdentity, SharedState
from crosstie.wire.fetch import Answer
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.gateway.tokens import TokenRefused, TokenVerifier, subject_id
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import Store
from crosstie_gateway.service.ledger import Ledger
from crosstie_gateway.service.token_keys import TokenKeys, check_url

TEAM = "research"


class Guarded:
    def __init__(self, at: Running, fake: Fake, issuer: Issuer, store: Store, ledger: Ledger):
        self.at, self.fake, self.issuer, self.store, self.ledger = at, fake, issuer, store, ledger

    async def ask(self, token: str, path: str = "/v1/chat/completions", **body: Any) -> Answer:
        return await self.at.ask(path, headers={"authorization": f"Bearer {token}"}, **body)

    @property
    def verifier(self) -> TokenVerifier:
        guard = self.at.gateway.context.guard
        assert guard is not None
        assert guard.tokens is not None
        return guard.tokens

    async def refused(self, token: str) -> tuple[int, str]:
        answer = await self.ask(token)
        assert token.encode() not in answer.body
        return answer.status, json.loads(answer.body)["error"]["code"]

    async def taken(self, token: str) -> None:
        """Waits until it is."""
        async with asyncio.timeout(LIMIT_S):
            while (await self.ask(token)).status != 200:
                await asyncio.sleep(0.01)

    async def used(self, *by: Any) -> list[tuple[str, ...]]:
        await until(lambda: self.ledger.pending == 0)
        return [one.of for one in self.store.used(by)]


@contextlib.asynccontextmanager
async def guarded(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> AsyncIterator[Guarded]:
    issuer, place = Issuer(), str(folder / "store.db")
    await issuer.start()
    store = open_store(place, create=True)
    store.put_team(TEAM, lambda team: msgspec.structs.replace(team, **changes))
    ledger, keys = Ledger(), TokenKeys()
    said = {"issuer": issuer.url, "audience": (AUDIENCE,), "team": TEAM, "refresh_unknown_s": 0.05, **(config or {})}
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url), state=SharedState(keys=True, store=place), jwt=JwtIdentity(**said))
        async with running(fleet, components=[ledger, keys]) as at:
            try:
                yield Guarded(at, fake, issuer, store, ledger)
            finally:
                await keys.stop()
                await ledger.stop()
                store.close()
                issuer.close()


@in_folder
async def test_a_token_is_an_identity_and_its_subject_is_charged(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        answer = await at.ask(at.issuer.token("alice"))
        assert answer.status == 200
        request, _ = at.fake.hit[0]
        assert b"authorization" not in request.headers
        assert (await at.ask(at.issuer.token("bob"))).status == 200
        assert await at.used("key", "team") == [("alice", TEAM), ("bob", TEAM)]
        spent = at.store.spent(time.time())
        assert sum(usd for usd, _ in spent.values()) > 0.0
        team = at.store.all_teams()[0].account_id
        assert spent[team][0] == pytest.approx(sum(usd for of, (usd, _) in spent.items() if of != team))
        assert (await at.refused("ct-no-key"))[1] == "invalid_api_key"
        assert (await at.refused("a.b.c")) == (401, "invalid_token")


@in_folder
async def test_what_does_not_hold_is_refused_with_a_code_that_says_why(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        now, issuer = int(time.time()), at.issuer
        issuer.keys["stranger"] = Issuer().keys["first"]
        cases = {
            "token_expired": issuer.token(exp=now - 100),
            "token_not_yet_valid": issuer.token(nbf=now + 500),
            "wrong_audience": issuer.token(aud="somebody"),
            "wrong_issuer": issuer.token(iss="https://elsewhere.example"),
            "unknown_token_key": issuer.token(kid="stranger"),
        }
        for code, token in cases.items():
            assert await at.refused(token) == (401, code)
        for without in ("exp", "sub", "iss", "aud"):
            assert (await at.refused(issuer.token(**{without: None})))[1] == "invalid_token"  # type: ignore[arg-type]
        whole = issuer.token()
        head, _, signature = whole.split(".")
        forged = base64.urlsafe_b64encode(json.dumps({"sub": "root", "exp": now + 99}).encode()).decode().rstrip("=")
        assert (await at.refused(f"{head}.{forged}.{signature}")) == (401, "invalid_token")
        assert (await at.ask(whole)).header(b"www-authenticate") is None
        assert not at.store.all_keys()
        # A little late, and a little early, is a clock's fault.
        assert (await at.ask(issuer.token(exp=now - 5))).status == 200
        assert (await at.ask(issuer.token(nbf=now + 5))).status == 200
        refused = await at.ask(issuer.token(aud="somebody"))
        assert refused.header(b"www-authenticate") == b"Bearer"


@in_folder
async def test_neither_no_signature_nor_a_public_key_as_a_secret_opens_the_door(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        issuer = at.issuer
        claims = {"iss": issuer.url, "aud": AUDIENCE, "sub": "root", "exp": int(time.time()) + 600}
        none = jwt.encode(claims, "", algorithm="none", headers={"kid": "first"})
        assert await at.refused(none) == (401, "invalid_token")
        # Signed by hand: the libraries refuse to do it.
        public = issuer.keys["first"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        parts = [json.dumps({"alg": "HS256", "kid": "first"}).encode(), json.dumps(claims).encode()]
        text = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        mark = base64.urlsafe_b64encode(hmac.new(public, text, hashlib.sha256).digest()).rstrip(b"=")
        assert await at.refused((text + b"." + mark).decode()) == (401, "invalid_token")


@in_folder
async def test_keys_rotate_and_those_that_are_gone_are_not_believed_any_longer(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        issuer = at.issuer
        old = issuer.token()
        assert (await at.ask(old)).status == 200
        issuer.rotate("second", keep=True)
        new = issuer.token(kid="second")
        assert await at.refused(new) == (401, "unknown_token_key")

        await at.taken(new)
        assert (await at.ask(old)).status == 200
        issuer.rotate("third")
        await at.taken(issuer.token(kid="third"))
        # It was verified before, and remembered until then.
        assert await at.refused(old) == (401, "unknown_token_key")


@in_folder
async def test_names_of_keys_that_somebody_made_up_do_not_have_the_issuer_asked_each_time(tmp_path: Path) -> None:
    async with guarded(tmp_path, {"refresh_unknown_s": 3600.0}) as at:
        before = len(at.issuer.asked)
        at.issuer.keys |= {f"made-up-{n}": at.issuer.keys["first"] for n in range(20)}
        for n in range(20):
            assert await at.refused(at.issuer.token(kid=f"made-up-{n}")) == (401, "unknown_token_key")
        assert len(at.issuer.asked) - before <= 2


@in_folder
async def test_while_the_issuer_is_away_its_known_keys_stay(tmp_path: Path) -> None:
    async with guarded(tmp_path, {"refresh_s": 0.05}) as at:
        at.issuer.away = True
        await until(
            lambda: any(
                "jwt: the issuer's keys cannot be had, the 1 that are known stay" in line for line in at.at.notices
            )
        )
        assert (await at.ask(at.issuer.token())).status == 200
        at.issuer.away = False
        await until(lambda: "jwt: the issuer's keys are known again" in at.at.notices)


@in_folder
async def test_whatever_an_issuer_publishes_the_next_refresh_comes(tmp_path: Path) -> None:
    """A refresh that ended for good would let in whoever holds a key that was withdrawn."""
    async with guarded(tmp_path, {"refresh_s": 0.02}) as at:
        issuer, old = at.issuer, at.issuer.token()
        # As some serialisers write what a key does not say.
        issuer.rotate("second")
        issuer.published[0] |= {"key_ops": None, "use": None}
        await at.taken(issuer.token(kid="second"))
        assert await at.refused(old) == (401, "unknown_token_key")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(TokenVerifier, "_usable", lambda self, one: 1 // 0)
            await until(lambda: any("ZeroDivisionError" in line for line in at.at.notices))
            assert "jwks_failing" in {getattr(line, "event", "") for line in at.at.notices}
            assert await at.at.metric("crosstie_jwks_failures_total") >= 1
        await until(lambda: "jwt: the issuer's keys are known again" in at.at.notices)


@in_folder
async def test_an_issuer_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    async with guarded(tmp_path, {"jwks": str(keys)}) as at:
        assert await at.refused(at.issuer.token()) == (503, "token_keys_unavailable")
        keys.write_text(json.dumps({"keys": at.issuer.published}))
        before = at.at.process.fleet
        assert before.jwt is not None
        at.at.process.load(msgspec.structs.replace(before, jwt=msgspec.structs.replace(before.jwt, leeway_s=1.0)))
        verifier = at.verifier
        await until(lambda: verifier.keys == 1)
        assert (await at.ask(at.issuer.token())).status == 200


@in_folder
async def test_a_token_is_verified_once(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        token = at.issuer.token()
        assert (await at.ask(token)).status == 200
        verifier = at.verifier
        verifier._verify = None  # type: ignore[method-assign, assignment]
        assert (await at.ask(token)).status == 200
        assert token.encode() not in b"".join(verifier._remembered)


@in_folder
async def test_limits_and_budgets_of_its_team_hold_for_all_its_subjects(tmp_path: Path) -> None:
    async with guarded(tmp_path, rpm=2) as at:
        statuses = [(await at.ask(at.issuer.token(name))).status for name in ("alice", "bob", "carol")]
        assert statuses == [200, 200, 429]


@in_folder
async def test_a_budget_that_is_spent_is_spent_for_the_next_subject(tmp_path: Path) -> None:
    async with guarded(tmp_path, usd_per_day=1e-6) as at:
        first = await at.ask(at.issuer.token("alice"), max_tokens=1)
        assert first.status in (200, 429)
        at.at.gateway.context.guard.teams[0].today_usd = 1.0  # type: ignore[union-attr]
        answer = await at.ask(at.issuer.token("bob"), max_tokens=1)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (429, "insufficient_quota")


@in_folder
async def test_other_processes_hear_of_a_subject_and_may_go_on_with_what_it_began(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        assert (await at.ask(at.issuer.token("alice"))).status == 200
        await at.used("key")
        alice = subject_id(at.issuer.url, "alice")
        elsewhere = Guard(at.at.gateway.router)
        with pytest.raises(RequestRejected) as refused:
            elsewhere.check_key(alice)
        assert refused.value.status == 503
        news = at.store.news(-1, 0.0)
        elsewhere.know(news.keys or [], news.teams, news.subjects)
        elsewhere.check_key(alice)
        assert [account.whose for account in elsewhere._by_id[alice].accounts] == ["this key", f"team {TEAM}"]
        version = news.version
        assert (await at.ask(at.issuer.token("alice"))).status == 200
        await at.used("key")
        assert at.store.news(-1, 0.0).version == version


@in_folder
async def test_a_claim_says_which_team_it_is(tmp_path: Path) -> None:
    config = {"team": None, "team_claim": "groups", "teams": {"eng": TEAM, "ops": "nobody-made-it"}}
    async with guarded(tmp_path, config) as at:
        assert (await at.ask(at.issuer.token(groups=["sales", "eng"]))).status == 200
        assert await at.refused(at.issuer.token(groups="ops")) == (403, "unknown_team")
        assert await at.refused(at.issuer.token(groups=["sales"])) == (403, "unknown_team")
        assert await at.refused(at.issuer.token()) == (403, "unknown_team")
        assert (TEAM,) in await at.used("team")


@in_folder
async def test_scopes_are_rights(tmp_path: Path) -> None:
    async with guarded(tmp_path, {"scope": "llm", "explain_scope": "llm.explain"}) as at:
        assert await at.refused(at.issuer.token()) == (403, "insufficient_scope")
        plain, more = at.issuer.token(scope="openid llm"), at.issuer.token(scp=["llm", "llm.explain"])
        assert (await at.ask(plain)).status == 200
        assert (await at.ask(more, "/crosstie/explain")).status == 200
        assert (await at.ask(plain, "/crosstie/explain")).status == 403


@in_folder
async def test_the_head_is_enough_to_be_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as at:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\nauthorization: Bearer {}\r\n\r\n"
        answer = await said(at.at.port, head.format(at.issuer.token(exp=1)).encode())
        assert b" 401 " in answer.split(b"\r\n")[0]
        assert b"token_expired" in answer


def verifier(*keys: dict[str, Any], **config: Any) -> TokenVerifier:
    made = TokenVerifier(JwtIdentity(issuer="https://issuer", audience=(AUDIENCE,), **config))
    made.know(keys)
    return made


def claims(**more: Any) -> dict[str, Any]:
    return {"iss": "https://issuer", "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600, **more}


def test_rsa_and_edwards_keys_and_a_set_of_one_needs_no_name() -> None:
    big, small = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 1024)
    strong = RSAAlgorithm.to_jwk(big.public_key(), as_dict=True)
    weak = RSAAlgorithm.to_jwk(small.public_key(), as_dict=True)
    assert verifier(strong).verified(jwt.encode(claims(), big, algorithm="RS256").encode()).subject == "alice"
    assert verifier({**strong, "kid": "a"}).verified(jwt.encode(claims(), big, algorithm="PS256").encode()).subject
    assert verifier(weak).keys == 0
    assert verifier({**strong, "key_ops": None, "use": None}).keys == 1
    assert (
        verifier({**strong, "key_ops": ["sign"]}, {**strong, "key_ops": "verify"}, {**strong, "key_ops": 7}).keys == 0
    )
    secret = {"kty": "oct", "k": "c2VjcmV0", "kid": "s"}
    assert verifier(secret, {**strong, "use": "enc"}, {"kty": "RSA", "n": "!", "e": "AQAB"}).keys == 0
    edwards = ed25519.Ed25519PrivateKey.generate()
    public = OKPAlgorithm.to_jwk(edwards.public_key(), as_dict=True)
    both = verifier(strong, public)
    assert both.verified(jwt.encode(claims(), edwards, algorithm="EdDSA").encode()).subject == "alice"
    # A key that says what it is for is not taken for anything else.
    named = verifier({**strong, "kid": "a", "alg": "RS512"})
    with pytest.raises(TokenRefused, match="not known"):
        named.verified(jwt.encode(claims(), big, algorithm="RS256", headers={"kid": "a"}).encode())
    with pytest.raises(TokenRefused, match="not signed in a way"):
        verifier(strong, algorithms=("ES256",)).verified(jwt.encode(claims(), big, algorithm="RS256").encode())
    critical = jwt.encode(claims(), big, algorithm="RS256", headers={"crit": ["exp"]}).encode()
    with pytest.raises(TokenRefused, match="not signed in a way"):
        verifier(strong).verified(critical)
    with pytest.raises(TokenRefused, match="whose it is"):
        verifier(strong).verified(jwt.encode(claims(sub="a\nb"), big, algorithm="RS256").encode())


def test_without_its_library_one_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(BadInput, match=r"pip install '\./packages/gateway\[jwt\]'"):
        verifier()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie_gateway.gateway.tokens._MOST_REMEMBERED", 3)
    edwards = ed25519.Ed25519PrivateKey.generate()
    made = verifier(OKPAlgorithm.to_jwk(edwards.public_key(), as_dict=True))
    for n in range(9):
        made.verified(jwt.encode(claims(sub=f"s{n}"), edwards, algorithm="EdDSA").encode())
    assert len(made._remembered) == 3


def test_a_subject_has_one_number_and_no_key_has_it() -> None:
    assert subject_id("https://a", "x") == subject_id("https://a", "x") != subject_id("https://b", "x")
    assert 2**50 <= subject_id("https://a", "x") < 2**51


def test_keys_are_not_fetched_in_the_open() -> None:
    check_url("https://issuer.example/keys")
    check_url("http://127.0.0.1:8080/keys")
    with pytest.raises(BadInput, match="not https"):
        check_url("http://issuer.example/keys")


@in_folder
async def test_an_issuer_that_calls_itself_something_else_is_not_believed(tmp_path: Path) -> None:
    async with guarded(tmp_path, {"refresh_s": 0.05}) as at:
        at.issuer.called = "https://elsewhere.example"
        await until(lambda: any("calls itself something else" in line for line in at.at.notices))
