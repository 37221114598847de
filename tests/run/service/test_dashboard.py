"""The page of operators without a browser: who is let in, who may change what, what is sent, and how often it is made."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from typing import Any

import pytest
from tests.run.gateway.fakes import MODEL, Running, fakes, fleet_of, pool_of, running, until
from tests.run.service.test_admin import KEY, Administered, two_pools

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Serving
from crosstie.wire.address import Address
from crosstie.wire.client import Headers, Origin
from crosstie.wire.fetch import Answer, fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.service import door_keys as sessions
from crosstie_gateway.service.admin_door import AdminDoor
from crosstie_gateway.service.admin_view import FleetView, merged
from crosstie_gateway.service.door_keys import DoorKeys
from crosstie_gateway.service.served_view import DayCounts, ServedView, SessionsView, TeamView, Totals, totals

OPERATOR = "an-operators-own-key"
PINNED = {"x-crosstie-pool": "one"}


@pytest.fixture(autouse=True)
def own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    monkeypatch.setenv("CROSSTIE_OPERATOR_KEY", OPERATOR)


class Visitor:
    """Somebody with a browser's habits: keeps the cookie, sends the token."""

    def __init__(self, origin: Origin):
        self.origin = origin
        self.cookie = self.csrf = b""

    async def ask(self, method: str, path: str, body: Any = None, headers: Headers | None = None) -> Answer:
        lines = list(headers or [])
        if self.cookie and not any(name == b"cookie" for name, _ in lines):
            lines.append((b"cookie", self.cookie))
        if self.csrf and not any(name == b"x-crosstie-csrf" for name, _ in lines):
            lines.append((b"x-crosstie-csrf", self.csrf))
        if body is not None and not any(name == b"content-type" for name, _ in lines):
            lines.append((b"content-type", b"application/json"))
        sent = json.dumps(body).encode() if body is not None else None
        return await fetch(self.origin, method, path, headers=lines, body=sent)

    async def sign_in(self, key: str) -> Answer:
        answer = await self.ask("POST", "/crosstie/session", {"key": key})
        if answer.status == 200:
            self.cookie = (answer.header(b"set-cookie") or b"").partition(b";")[0]
            self.csrf = json.loads(answer.body)["csrf"].encode()
        return answer


class Shown(Administered):
    """A gateway whose page is at the clients' port as well."""

    def __init__(self, made: Running, door: AdminDoor):
        super().__init__(made, door)
        self.origins = [self.origin]

    def visitor(self) -> Visitor:
        self.origins.append(Origin(asyncio.get_running_loop(), Address(f"http://127.0.0.1:{self.running.port}/v1")))
        return Visitor(self.origins[-1])


@asynccontextmanager
async def shown(fleet: Fleet, **settings: Any) -> AsyncIterator[Shown]:
    door = AdminDoor("127.0.0.1", 0, shown=True)
    async with running(fleet, components=[door], **settings) as made:
        one = Shown(made, door)
        try:
            yield one
        finally:
            for origin in one.origins:
                origin.close()
            await door.stop()


async def events(visitor: Visitor, port: int, count: int) -> list[dict[str, Any]]:
    """The first ones of a stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(b"GET /crosstie/live HTTP/1.1\r\nhost: 127.0.0.1\r\ncookie: %b\r\n\r\n" % visitor.cookie)
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(120.0):
            while len(found) < count:
                line = await reader.readline()
                # The last chunk of an answer that is whole.
                assert line not in (b"", b"0\r\n"), "the stream ended"
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
    finally:
        writer.close()
    return found


def test_who_comes_without_a_key_sees_the_empty_page_alone() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            for path, kind in (("", b"text/html"), ("/app.js", b"text/javascript"), ("/style.css", b"text/css")):
                answer = await visitor.ask("GET", f"/crosstie{path}")
                assert answer.status == 200
                assert (answer.header(b"content-type") or b"").startswith(kind)
            assert (await visitor.ask("GET", "/crosstie/")).status == 200
            for method, path in (("GET", "session"), ("GET", "live"), ("GET", "why?request=x"), ("POST", "drain"),
                                 ("POST", "weight"), ("DELETE", "session")):  # fmt: skip
                answer = await visitor.ask(method, f"/crosstie/{path}", {"pool": "one"} if method == "POST" else None)
                assert answer.status == 401, path
            for wrong in ("", KEY + "x", KEY[:-1], None, 7, ["x"], {"key": KEY}):
                assert (await visitor.ask("POST", "/crosstie/session", {"key": wrong})).status == 401
            assert (await visitor.ask("POST", "/crosstie", {})).status == 405
            assert any("turned away" in line for line in gateway.notices)
            assert not any(KEY in line for line in gateway.notices)

    run_on_loop(scenario())


def test_every_answer_says_that_it_is_neither_kept_nor_framed_nor_guessed_at() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            signed = await visitor.sign_in(KEY)
            paths = ("", "/app.js", "/session", "/why?request=none")
            for answer in [signed, *[await visitor.ask("GET", f"/crosstie{path}") for path in paths]]:
                policy = answer.header(b"content-security-policy") or b""
                for part in (
                    b"default-src 'none'",
                    b"script-src 'self'",
                    b"connect-src 'self'",
                    b"frame-ancestors 'none'",
                ):
                    assert part in policy
                assert b"unsafe" not in policy
                assert answer.header(b"cache-control") == b"no-store"
                assert answer.header(b"x-content-type-options") == b"nosniff"
                assert answer.header(b"x-frame-options") == b"DENY"
            cookie = signed.header(b"set-cookie") or b""
            assert b"HttpOnly" in cookie
            assert b"SameSite=Strict" in cookie
            assert b"Secure" not in cookie
            by_tls = await gateway.visitor().ask(
                "POST", "/crosstie/session", {"key": KEY}, [(b"x-forwarded-proto", b"https")]
            )
            assert b"; Secure" in (by_tls.header(b"set-cookie") or b"")
            assert KEY.encode() not in signed.body + cookie

    run_on_loop(scenario())


def test_an_operator_looks_and_an_administrator_changes() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            operator, administrator = gateway.visitor(), gateway.visitor()
            assert json.loads((await operator.sign_in(OPERATOR)).body)["role"] == "operator"
            assert json.loads((await administrator.sign_in(f" {KEY}\n")).body)["role"] == "administrator"
            refused = await operator.ask("POST", "/crosstie/drain", {"pool": "one"})
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (403, "read_only")
            assert set((await gateway.states()).values()) == {"up"}
            # The page's keys are not the API's of administrators.
            assert (await gateway.raw("GET", "/admin/v1/pools", key=OPERATOR)).status == 401
            done = await administrator.ask("POST", "/crosstie/drain", {"pool": "one"})
            assert json.loads(done.body)["what"] == "drain pool one"
            assert (await gateway.states())[made[0].url] == "drained"
            await administrator.ask("POST", "/crosstie/undrain", {"pool": "one"})
            assert (await administrator.ask("POST", "/crosstie/weight", {"weights": {"two": 3}})).status == 200
            assert [pool["weight"] for pool in (await gateway.get("pools"))["pools"]][1] == 3.0
            wrong = await administrator.ask("POST", "/crosstie/drain", {"pool": "nope"})
            assert wrong.status == 400
            assert "nope" in json.loads(wrong.body)["error"]["message"]
            assert any("(page): drain pool one: done" in line for line in gateway.notices)

    run_on_loop(scenario())


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x-crosstie-csrf", b"")],
        [(b"x-crosstie-csrf", b"0" * 64)],
        [(b"origin", b"https://evil.example")],
        [(b"origin", b"null")],
        [(b"sec-fetch-site", b"cross-site")],
        [(b"sec-fetch-site", b"same-site")],
        [(b"content-type", b"text/plain")],
        [(b"content-type", b"application/x-www-form-urlencoded")],
    ],
)
def test_what_another_page_makes_a_browser_send_changes_nothing(headers: Headers) -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            await visitor.sign_in(KEY)
            answer = await visitor.ask("POST", "/crosstie/drain", {"pool": "one"}, headers)
            assert answer.status in (403, 415)
            assert set((await gateway.states()).values()) == {"up"}

    run_on_loop(scenario())


def test_who_guesses_keys_has_to_wait_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_there(address: str) -> Headers:
        return [(b"x-forwarded-for", address.encode())]

    async def scenario() -> None:
        serving = Serving(trusted_proxies=("127.0.0.1",))
        async with fakes(2) as made, shown(two_pools(made, serving=serving)) as gateway:
            visitor = gateway.visitor()

            async def tried(key: str, address: str) -> Answer:
                return await visitor.ask("POST", "/crosstie/session", {"key": key}, from_there(address))

            for n in range(sessions.OF_ONE):
                assert (await tried(f"guess-{n}", "192.0.2.1")).status == 401
            refused = await tried(KEY, "192.0.2.1")
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "too_many_keys")
            assert 1 <= int(refused.header(b"retry-after") or b"0") <= sessions.WINDOW_S + 1
            assert (await tried(KEY, "192.0.2.2")).status == 200
            # From everywhere at once.
            for n in range(sessions.OF_ALL - sessions.OF_ONE):
                assert (await tried("guess", f"198.51.100.{n}")).status == 401
            assert (await tried(KEY, "192.0.2.3")).status == 429
            # The administrators' own door is another matter, and so is who is signed in.
            assert (await gateway.raw("GET", "/admin/v1/pools")).status == 200
            monkeypatch.setattr(sessions, "WINDOW_S", 0.0)
            assert (await tried(KEY, "192.0.2.1")).status == 200

    run_on_loop(scenario())


def test_a_wrong_key_counts_for_a_minute() -> None:
    wrong = sessions.WrongKeys()
    for n in range(sessions.OF_ONE):
        assert wrong.wait_s("a", float(n)) == 0.0
        wrong.add("a", float(n))
    assert wrong.wait_s("a", 10.0) == pytest.approx(sessions.WINDOW_S - 10.0)
    assert wrong.wait_s("b", 10.0) == 0.0
    assert wrong.wait_s("a", sessions.WINDOW_S + 0.1) == 0.0


def test_a_session_ends_by_time_by_sign_out_and_by_any_other_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            await visitor.sign_in(OPERATOR)
            assert (await visitor.ask("GET", "/crosstie/session")).status == 200
            for forged in (
                visitor.cookie.replace(b"operator", b"administrator"), visitor.cookie[:-1] + b"_", b"crosstie_session=",
                b"crosstie_session=a.b.c.d", b"crosstie_session=\xff.\xff", b"other=1",
            ):  # fmt: skip
                answer = await visitor.ask("GET", "/crosstie/session", headers=[(b"cookie", forged)])
                assert answer.status == 401, forged
            kept = [(b"cookie", b"theme=dark; " + visitor.cookie)]
            assert (await visitor.ask("GET", "/crosstie/session", headers=kept)).status == 200
            answer = await visitor.ask("DELETE", "/crosstie/session")
            assert answer.status == 200
            assert b"Max-Age=0" in (answer.header(b"set-cookie") or b"")
            assert (await visitor.ask("GET", "/crosstie/session")).status == 401
            later = gateway.visitor()
            monkeypatch.setattr(sessions, "LASTS_S", -1)
            await later.sign_in(KEY)
            assert (await later.ask("GET", "/crosstie/session")).status == 401

    run_on_loop(scenario())


def test_the_page_is_at_the_clients_port_only_where_it_was_asked_for() -> None:
    async def scenario() -> None:
        door = AdminDoor("127.0.0.1", 0)
        async with fakes(2) as made, running(two_pools(made), components=[door]) as plain:
            admin = Administered(plain, door)
            assert (await plain.get("/crosstie/")).status == 404
            assert (await admin.raw("GET", "/crosstie/", key=None)).status == 200
            elsewhere = await admin.raw("GET", "/crosstie/session", headers=[(b"host", b"evil.example")], key=None)
            assert elsewhere.status in (400, 403)
            admin.origin.close()
            await door.stop()

    run_on_loop(scenario())


def test_a_snapshot_is_made_once_for_all_pages_and_only_while_one_is_open() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            dashboard = gateway.door.dashboard
            await gateway.running.ask()
            visitor = gateway.visitor()
            await visitor.sign_in(OPERATOR)
            several = await asyncio.gather(*(events(visitor, gateway.running.port, 3) for _ in range(5)))
            assert dashboard.made < 3 * 5
            await until(lambda: dashboard._telling is None)
            before = dashboard.made
            for _ in range(3):
                await gateway.running.ask()
            assert dashboard.made == before
            admin = await gateway.get("pools")
            for found in several:
                rows = [row for one in found for row in one["decisions"]]
                assert [row["pool"] for row in rows] == ["one"]
                assert {pool["pool"] for pool in found[-1]["fleet"]["pools"]} == {"one", "two"}
                assert found[-1]["fleet"].keys() == admin.keys()

    run_on_loop(scenario())


def test_the_figures_are_those_of_the_metrics_page() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            for _ in range(3):
                await gateway.running.ask(stream=True, headers=PINNED)
            one = (await gateway.get("pools"))["served"][0]
            assert one["total"]["requests"] == 3
            for kind in ("input", "output"):
                counted = await gateway.running.metric("crosstie_tokens_total", pool="one", kind=kind)
                assert one["total"][f"{kind}_tokens"] == counted > 0
            assert one["today"] == one["total"]
            assert one["today_usd"] == pytest.approx(one["usd_per_hour"] * one["today_s"] / 3600.0)

    run_on_loop(scenario())


def test_sessions_that_went_on_are_shown_by_class() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            for name in ("a", "b", "a"):
                await gateway.running.ask(headers=PINNED | {"x-crosstie-session": name})
            (agents,) = (await gateway.get("pools"))["sessions"]
            assert (agents["class"], agents["begun"], agents["warm"], agents["waiting"]) == (MODEL, 1, 1, 0)
            assert agents["home"] + agents["moved"] + agents["evicted"] == 1
            assert agents["usd"] > 0.0
            assert await gateway.running.metric("crosstie_sessions", state="warm") == 1

    run_on_loop(scenario())


def test_midnight_begins_a_new_day() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            await gateway.running.ask(headers=PINNED)
            day = DayCounts(gateway.running.gateway)
            assert day.views()[0].today.requests == 1
            day.begin_day()
            assert day.views()[0].today == Totals()
            assert day.views()[0].total.requests == 1
            await gateway.running.ask(headers=PINNED)
            assert day.views()[0].today.requests == 1
            day.close()
            assert totals(gateway.running.gateway)["two"] == Totals()

    run_on_loop(scenario())


def test_a_decision_is_explained_by_what_it_was_and_what_it_would_be_now() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            await visitor.sign_in(OPERATOR)
            await gateway.running.ask(headers={"x-request-id": "this-one"})
            said = json.loads((await visitor.ask("GET", "/crosstie/why?request=this-one")).body)
            assert said["pool"] == "one"
            assert said["reason"]
            assert {one["pool"] for one in said["considered"]} == {"one", "two"}
            assert (await visitor.ask("GET", "/crosstie/why?request=another")).status == 404
            assert not gateway.door.admin.recent.is_followed

    run_on_loop(scenario())


def test_a_stream_ends_with_its_session() -> None:
    async def scenario() -> None:
        async with fakes(1) as made, shown(fleet_of(pool_of("one", made[0].url))) as gateway:
            visitor = gateway.visitor()
            await visitor.sign_in(OPERATOR)
            following = asyncio.create_task(events(visitor, gateway.running.port, 10**6))
            await until(lambda: gateway.door.dashboard._readers)
            await visitor.ask("DELETE", "/crosstie/session")
            with pytest.raises(AssertionError, match="the stream ended"):
                await following

    run_on_loop(scenario())


def test_a_large_body_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with fakes(1) as made, shown(fleet_of(pool_of("one", made[0].url))) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.running.port)
            writer.write(b"POST /crosstie/session HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n{")
            assert b" 413 " in await reader.readline()
            writer.close()

    run_on_loop(scenario())


def test_operators_have_a_key_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_OPERATOR_KEY", KEY)
    with pytest.raises(BadInput, match="CROSSTIE_OPERATOR_KEY: is the administrator's"):
        DoorKeys()
    monkeypatch.setenv("CROSSTIE_OPERATOR_KEY", "short")
    with pytest.raises(BadInput, match="CROSSTIE_OPERATOR_KEY: must be 16"):
        DoorKeys()
    monkeypatch.delenv("CROSSTIE_OPERATOR_KEY")
    assert DoorKeys().role_of(OPERATOR) is None


def _worker(requests: int, spent: float, own: float) -> FleetView:
    done = Totals(requests=requests, output_tokens=1000 * requests)
    served = ServedView(pool="a", usd_per_hour=3.6, is_bought=False, total=done, today=done, today_s=1000.0)
    team = TeamView("t", requests, 10, 1.0, 5.0, 0.0, spent, spent, own)
    return FleetView(
        fleet="f", policy="p", queued=0, exchanges=0, pools=[], leaving=[], served=[served], teams=[team],
        targets=[], refused={"x": requests}, sessions=[SessionsView(class_name="agents", warm=1, home=requests, usd=own)],
    )  # fmt: skip


def test_what_workers_counted_adds_up_and_what_they_read_does_not() -> None:
    view = merged([_worker(1, 2.0, 0.25), _worker(3, 2.5, 0.5)])
    (one,), (team,) = view.served, view.teams
    assert one.total.requests == 4
    # A dollar in a thousand seconds, whoever of the two counts them.
    assert one.today_usd == pytest.approx(1.0)
    assert (team.requests, team.today_usd) == (4, 3.25)
    assert view.refused == {"x": 4}
    assert view.sessions == [SessionsView(class_name="agents", warm=2, home=4, usd=0.75)]


def test_a_pool_that_is_paid_by_the_token_costs_what_was_charged() -> None:
    done = Totals(input_tokens=500_000, output_tokens=500_000, charged_usd=2.0)
    bought = ServedView(pool="a", usd_per_hour=0.0, is_bought=True, total=done, today=done, today_s=10.0)
    bought.price()
    assert bought.today_usd == 2.0


@pytest.mark.parametrize("other", ['a={"x":1}', "a=b c", "a[1]=2", "\xe9=1", "a"])
def test_a_session_is_found_beside_cookies_that_python_s_own_reader_gives_up_at(other: str) -> None:
    known = sessions.Sessions(b"secret")
    signed = known.cookie_of(known.begin("operator"))
    line = f"{other}; {sessions.COOKIE}={signed}"
    assert not SimpleCookie(line)
    assert known.find(line.encode("latin-1")) is not None
