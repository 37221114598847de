"""The administrator's door: who is let in, what they see, and that each change is carried out, kept and reported."""

import asyncio
import json
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import Fake, Running, fakes, fleet_of, pool_of, running, until

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.wire.address import Address
from crosstie.wire.client import Headers, Origin
from crosstie.wire.fetch import Answer, fetch
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads
from crosstie_gateway.service.admin_door import AdminDoor
from crosstie_gateway.service.door_keys import DoorKeys
from crosstie_gateway.service.process import Component
from crosstie_gateway.service.worker_link import (
    ChangesRequest,
    Failed,
    WorkerAnswer,
    WorkerLink,
    WorkerRequest,
    decode_answer,
    decode_request,
)
from crosstie_gateway.wire.frames import encode

KEY = "an-administrators-own-key"
SOCKET = "unix:/run/docker.sock"


@pytest.fixture(autouse=True)
def own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)


class Administered:
    def __init__(self, made: Running, door: AdminDoor):
        self.running, self.door, self.notices = made, door, made.notices
        self.origin = Origin(asyncio.get_running_loop(), Address(door.url))

    async def raw(
        self, method: str, path: str, body: bytes | None = None, headers: Headers | None = None, key: str | None = KEY
    ) -> Answer:
        lines = list(headers or [])
        if key is not None:
            lines.append((b"authorization", f"Bearer {key}".encode()))
        if body is not None and not any(name == b"content-type" for name, _ in lines):
            lines.append((b"content-type", b"application/json"))
        return await fetch(self.origin, method, path, headers=lines, body=body)

    async def get(self, name: str) -> dict[str, Any]:
        answer = await self.raw("GET", f"/admin/v1/{name}")
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def post(self, name: str, **body: Any) -> dict[str, Any]:
        answer = await self.raw("POST", f"/admin/v1/{name}", json.dumps(body).encode())
        assert answer.status == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    async def refused(self, name: str, **body: Any) -> str:
        answer = await self.raw("POST", f"/admin/v1/{name}", json.dumps(body).encode())
        assert answer.status == 400, answer.body
        assert any("refused" in line for line in self.notices), "refused changes are reported too"
        return str(json.loads(answer.body)["error"]["message"])

    async def states(self) -> dict[str, str]:
        return {row["backend"]: row["state"] for pool in (await self.get("pools"))["pools"] for row in pool["backends"]}


@asynccontextmanager
async def administered(fleet: Fleet, first: Sequence[Component] = (), **settings: Any) -> AsyncIterator[Administered]:
    door = AdminDoor("127.0.0.1", 0)
    async with running(fleet, components=[*first, door], **settings) as made:
        one = Administered(made, door)
        try:
            yield one
        finally:
            one.origin.close()
            await door.stop()


def two_pools(backends: list[Fake], **changes: Any) -> Fleet:
    return fleet_of(pool_of("one", backends[0].url, usd_per_gpu_hour=1.0), pool_of("two", backends[1].url), **changes)


# The door


def test_only_the_key_opens_it() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            for key in (None, "", KEY + "x", KEY[:-1], "wrong"):
                answer = await admin.raw("GET", "/admin/v1/pools", key=key)
                assert answer.status == 401
                assert answer.header(b"www-authenticate") == b"Bearer"
                assert KEY.encode() not in answer.body
            basic = [(b"authorization", b"Basic " + KEY.encode())]
            assert (await admin.raw("GET", "/admin/v1/pools", headers=basic, key=None)).status == 401
            lower = [(b"authorization", b"bearer " + KEY.encode())]
            assert (await admin.raw("GET", "/admin/v1/pools", headers=lower, key=None)).status == 200
            assert any("turned away at the door" in line for line in admin.notices)
            assert not any(KEY in line for line in admin.notices)
            assert await admin.running.metric("crosstie_admin_changes_total", action="enter", result="refused") == 6

    run_on_loop(scenario())


def test_the_port_of_the_api_is_no_way_in() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            assert (await admin.running.get("/admin/v1/pools")).status == 404

    run_on_loop(scenario())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"host", b"evil.example")], 403),
        ([(b"host", b"evil.example:8081")], 403),
        ([(b"host", b"127.0.0.1.evil.example")], 403),
        ([(b"host", b"127.0.0.1@evil.example")], 400),
        ([(b"host", b"10.0.0.1")], 403),
        ([(b"host", b"")], 403),
        ([(b"host", b"[::1")], 400),
        ([(b"host", b"localhost:99"), (b"origin", b"https://evil.example")], 403),
        ([(b"host", b"localhost:99"), (b"origin", b"null")], 403),
        ([(b"host", b"localhost:99"), (b"sec-fetch-site", b"cross-site")], 403),
        ([(b"host", b"localhost:99")], 200),
        ([(b"host", b"LOCALHOST"), (b"origin", b"http://localhost:99")], 200),
        ([(b"host", b"[::1]:99")], 200),
    ],
)
def test_pages_of_other_origins_are_not_let_in_even_with_the_key(headers: Headers, status: int) -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            lines = b"".join(b"%b: %b\r\n" % one for one in headers)
            said = b"GET /admin/v1/pools HTTP/1.1\r\n%bauthorization: Bearer %b\r\nconnection: close\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", admin.door.port)
            writer.write(said % (lines, KEY.encode()))
            answer = await reader.read()
            writer.close()
            assert int(answer.split(b" ")[1]) == status

    run_on_loop(scenario())


def test_what_changes_something_comes_as_json() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            body = b'{"pool": "one"}'
            for kind in (b"text/plain", b"application/x-www-form-urlencoded", b""):
                answer = await admin.raw("POST", "/admin/v1/drain", body, [(b"content-type", kind)])
                assert answer.status == 415
            for wrong in (b"{", b"[]", b'"pool"', b"\xff", b"[" * 100_000):
                answer = await admin.raw("POST", "/admin/v1/drain", wrong)
                assert answer.status == 400
            assert (await admin.raw("GET", "/admin/v1/drain")).status == 405
            assert (await admin.raw("POST", "/admin/v1/pools", b"{}")).status == 405
            assert (await admin.raw("GET", "/admin/v1/nothing")).status == 404
            assert (await admin.raw("GET", "/pools")).status == 404
            assert set((await admin.states()).values()) == {"up"}

    run_on_loop(scenario())


def test_it_stays_on_loopback_unless_told() -> None:
    with pytest.raises(BadInput, match="not loopback"):
        AdminDoor("0.0.0.0", 0)
    assert AdminDoor("0.0.0.0", 0, anywhere=True)
    assert AdminDoor("::1", 0).url == "http://[::1]:0"


@pytest.mark.parametrize("key", ["short", "with a space in its middle", "ümlauts-are-not-for-headers"])
def test_a_key_that_would_not_do_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", key)
    with pytest.raises(BadInput, match="CROSSTIE_ADMIN_KEY"):
        DoorKeys()


def test_a_key_is_made_up_for_its_owner_alone_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CROSSTIE_ADMIN_KEY")
    first, second = DoorKeys(), DoorKeys()
    assert first.file is not None
    assert second.file is not None
    assert stat.S_IMODE(first.file.stat().st_mode) == 0o600
    made = first.file.read_text().strip()
    assert first.opens(f"Bearer {made}".encode())
    assert not second.opens(f"Bearer {made}".encode())
    assert made not in first.fingerprint
    for one in (first, second):
        one.forget()
        assert one.file is not None
        assert not one.file.exists()


# Changes


def test_a_drained_pool_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            made[0].mode = "hang"
            stream = asyncio.create_task(admin.running.ask(stream=True, headers={"x-crosstie-pool": "one"}))
            await until(lambda: made[0].held)
            done = await admin.post("drain", pool="one")
            assert done["changed"]
            assert (await admin.states())[made[0].url] == "draining"
            answer = await admin.running.ask()
            assert answer.header(b"x-crosstie-pool") == b"two"
            made[0].let_go(stream=True)
            assert (await stream).body.endswith(b"data: [DONE]\n\n")
            assert (await admin.states())[made[0].url] == "drained"
            assert not (await admin.post("drain", pool="one"))["changed"]
            await admin.post("undrain", pool="one")
            assert (await admin.states())[made[0].url] == "up"
            pinned = await admin.running.ask(headers={"x-crosstie-pool": "one"})
            assert pinned.status == 200
            assert any("drain pool one: done" in line for line in admin.notices)
            assert await admin.running.metric("crosstie_admin_changes_total", action="drain", result="done") == 2

    run_on_loop(scenario())


def test_a_pool_that_its_file_has_drained_waits_to_be_let_in() -> None:
    async def scenario() -> None:
        async with fakes(2) as made:
            fleet = two_pools(made)
            first, second = fleet.pools
            waiting = msgspec.structs.replace(fleet, pools=(msgspec.structs.replace(first, drained=True), second))
            async with administered(waiting) as admin:
                assert (await admin.states())[made[0].url] == "drained"
                assert (await admin.running.ask()).header(b"x-crosstie-pool") == b"two"
                # Any other change leaves it as it is.
                await admin.post("weight", weights={"two": 2.0})
                assert (await admin.states())[made[0].url] == "drained"
                await admin.post("undrain", pool="one")
                assert (await admin.states())[made[0].url] == "up"
                assert (await admin.running.ask(headers={"x-crosstie-pool": "one"})).status == 200
                await admin.post("reset")
                assert (await admin.states())[made[0].url] == "drained"

    run_on_loop(scenario())


def test_one_backend_is_drained_and_the_last_of_a_model_is_warned_of() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(fleet_of(pool_of("one", *(f.url for f in made)))) as admin:
            done = await admin.post("drain", backend=made[0].url + "/")
            assert not done["warnings"]
            for _ in range(4):
                await admin.running.ask()
            assert not made[0].hit
            done = await admin.post("drain", backend=made[1].url)
            assert "no backend is left" in done["warnings"][0]
            assert (await admin.running.ask()).status == 503

    run_on_loop(scenario())


def test_backends_and_pools_are_added_and_removed_under_traffic() -> None:
    async def scenario() -> None:
        async with fakes(3) as made, administered(fleet_of(pool_of("one", made[0].url))) as admin:
            await admin.post("add", pool="one", backend=made[1].url)
            await admin.post("remove", backend=made[0].url)
            await admin.running.ask()
            assert (len(made[0].hit), len(made[1].hit)) == (0, 1)
            table = {"name": "other", "model": "another-model", "backends": [made[2].url]}
            await admin.post("add", pool=table)
            assert (await admin.running.ask(model="another-model")).status == 200
            said = await admin.get("pools")
            assert [(p["pool"], p["from"], [b["from"] for b in p["backends"]]) for p in said["pools"]] == [
                ("one", "file", ["admin"]),
                ("other", "admin", ["admin"]),
            ]
            assert said["changes"] == [
                f"add backend {made[1].url} to pool one", f"remove backend {made[0].url}", "add pool other",
            ]  # fmt: skip
            assert (await admin.post("reset"))["changed"]
            said = await admin.get("pools")
            assert [b["backend"] for p in said["pools"] for b in p["backends"]] == [made[0].url]
            assert (await admin.running.ask(model="another-model")).status == 404

    run_on_loop(scenario())


def test_what_a_removed_backend_has_in_flight_finishes_and_is_shown() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            made[0].mode = "hang"
            stream = asyncio.create_task(admin.running.ask(stream=True, headers={"x-crosstie-pool": "one"}))
            await until(lambda: made[0].held)
            await admin.post("remove", pool="one")
            said = await admin.get("pools")
            assert said["leaving"] == [{"pool": "one", "backend": made[0].url, "in_flight": 1}]
            made[0].let_go(stream=True)
            assert (await stream).body.endswith(b"data: [DONE]\n\n")
            assert (await admin.get("pools"))["leaving"] == []

    run_on_loop(scenario())


def test_what_the_reader_of_fleet_files_refuses_is_refused_in_its_words() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            table = {"name": "three", "model": "m", "backends": ["http://127.0.0.1:1/v1"]}
            runs = {
                "name": "four",
                "accelerator": "mi355x",
                "precision": "native",
                "stack": "sglang",
                "usd_per_gpu_hour": 2.5,
            }
            hosts = [
                {"model": name, "backends": [at]} for name, at in (("qwen3-8b", SOCKET), ("qwen3-32b", "http://x/v1"))
            ]
            hosting = {**runs, "stack": "vllm", "precision": "fp8", "loading": "vllm-sleep", "hosts": hosts}
            sides = {side: {"backends": [at]} for side, at in (("prefill", "http://x/v1"), ("decode", SOCKET))}
            led = {**runs, "model": "qwen3-8b", **sides, "kv": "fp8"}
            for body, why in (
                ({"pool": "nope"}, "address"),
                ({"pool": "nope", "backend": "http://127.0.0.1:1/v1"}, "no pool 'nope'"),
                ({"pool": "one", "backend": "ftp://x"}, "is no http or https address"),
                ({"pool": "one", "backend": "http://u:secret@x/v1"}, "api_key_env"),
                ({"pool": "one", "backend": made[1].url}, "twice its share"),
                ({"pool": {**table, "backend": []}}, "did you mean backends"),
                ({"pool": {**table, "name": "One"}}, "lower case"),
                ({"pool": {**table, "name": "one"}}, "is there twice"),
                ({"pool": {**table, "accelerator": "h900"}}, "pool.accelerator"),
                ({"pool": {**table, "api_key_env": "PATH"}}, "no pool of the fleet file names"),
                ({"pool": {**table, "load_hook": "rm"}}, "only the fleet file may name a command"),
                (
                    {"pool": {**table, "tokenizer": "/etc/shadow"}},
                    "pool.tokenizer: only the fleet file may name a file",
                ),
                ({"pool": {**table, "chat_template": "/etc/shadow"}}, "only the fleet file may name a file"),
                ({"pool": {**table, "backends": [SOCKET]}}, "only the fleet file may name a socket"),
                ({"pool": hosting}, "only the fleet file may name a socket"),
                ({"pool": led}, "only the fleet file may name a socket"),
                ({"pool": table, "backend": "http://x/v1"}, "leave `backend` out"),
                ({}, "give a pool's name"),
                ({"pool": 7, "backend": "http://x/v1"}, "is no text"),
            ):
                said = await admin.refused("add", **body)
                assert why in said, said
                assert "secret" not in said
            assert "unknown here" in await admin.refused("drain", pools="one")
            assert "name what to drain" in await admin.refused("drain", pool="one", backend=made[0].url)
            assert "only backend" in await admin.refused("remove", backend=made[0].url)
            for weights in ({}, {"one": "2"}, {"one": True}, {"one": -1}, {"nope": 1}, None):
                await admin.refused("weight", weights=weights)
            assert "without a fleet file" in await admin.refused("reload")
            after = await admin.get("pools")
            assert after["changes"] == []
            assert [pool["pool"] for pool in after["pools"]] == ["one", "two"]

    run_on_loop(scenario())


def test_reports_are_one_line_whatever_was_asked() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            await admin.refused("drain", pool="x\nadmin: key 00000000: reset: done\x1b[2J" + "y" * 10_000)
            (line,) = [line for line in admin.notices if "refused" in line]
            assert line.isprintable()
            assert len(line) < 1000

    run_on_loop(scenario())


def test_weights_move_traffic_under_the_weighted_policy() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made, policy="weighted")) as admin:
            await admin.post("weight", weights={"one": 0, "two": 1})
            for _ in range(5):
                await admin.running.ask()
            assert (len(made[0].hit), len(made[1].hit)) == (0, 5)
            for weight, why in ((10**400, "weights.one: is too large"), (True, "weights.one: is no number")):
                assert why in await admin.refused("weight", weights={"one": weight})

    run_on_loop(scenario())


def test_changes_outlive_a_reload_and_go_where_the_file_has_nothing_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fakes(3) as made:
            file = tmp_path / "fleet.toml"
            fleet = two_pools(made)
            file.write_text(fleet_text(fleet))
            async with administered(fleet, file=file) as admin:
                await admin.post("drain", pool="one")
                await admin.post("add", pool="two", backend=made[2].url)
                file.write_text(fleet_text(msgspec.structs.replace(fleet, name="renamed")))
                done = await admin.post("reload")
                assert not done["dropped"]
                said = await admin.get("pools")
                assert said["fleet"] == "renamed"
                assert [p["state"] for p in said["pools"]] == ["drained", "up"]
                assert len(said["pools"][1]["backends"]) == 2
                # The file's own pool has gone, and with it what was changed of it.
                file.write_text(fleet_text(msgspec.structs.replace(fleet, pools=fleet.pools[1:])))
                admin.running.process.reload()
                said = await admin.get("pools")
                assert said["changes"] == [f"add backend {made[2].url} to pool two"]
                assert said["dropped"][0]["change"] == "drain pool one"
                assert any("dropped: drain pool one" in line for line in admin.notices)
                # A file that is wrong changes nothing, and its reader's words come back.
                file.write_text("format = 2\n")
                assert "format" in await admin.refused("reload")
                assert (await admin.get("pools"))["changes"] == said["changes"]
                config = (await admin.raw("GET", "/admin/v1/config")).body.decode()
                assert f"# Changed by an administrator: add backend {made[2].url} to pool two" in config
                file.write_text(config)
                await admin.post("reset")
                await admin.post("reload")
                assert [b["backend"] for p in (await admin.get("pools"))["pools"] for b in p["backends"]] == [
                    made[1].url, made[2].url,
                ]  # fmt: skip

    run_on_loop(scenario())


class LinkedTo(WorkerLink):
    """To a second gateway of the same fleet, as workers reach each other."""

    def __init__(self, other: Administered):
        super().__init__(Path(), 0, 2, {})
        self.other = other

    async def ask(self, request: WorkerRequest) -> list[WorkerAnswer]:
        heard = decode_request(encode(request))
        return [decode_answer(encode(self.other.running.process.handlers[type(heard)](heard)))]

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield


def test_every_process_takes_a_change_and_they_are_shown_together() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as first, administered(two_pools(made)) as second:
            first.running.process.link = LinkedTo(second)
            second.running.process.link = LinkedTo(first)
            done = await first.post("drain", pool="one")
            assert done["processes"] == 2
            assert (await second.get("pools"))["changes"] == ["drain pool one"]
            assert (await second.running.ask()).header(b"x-crosstie-pool") == b"two"
            made[1].mode = "hang"
            one, two = (asyncio.create_task(g.running.ask(stream=True)) for g in (first, second))
            await until(lambda: len(made[1].held) == 2)
            said = await first.get("pools")
            assert (said["processes"], said["exchanges"], said["pools"][1]["in_flight"]) == (2, 2, 2)
            made[1].let_go(stream=True)
            await asyncio.gather(one, two)
            rows = (await first.get("decisions"))["decisions"]
            assert [row["pool"] for row in rows] == ["two"] * 3
            # What one process has missed it takes over before it changes anything itself.
            second.running.process.link = None
            await second.post("add", pool="two", backend="http://127.0.0.1:9/v1")
            done = await first.post("undrain", pool="one")
            assert done["refused_by"] == []
            for process in (first, second):
                assert (await process.get("pools"))["changes"] == ["add backend http://127.0.0.1:9/v1 to pool two"]
            # What it could not ask for is not overwritten unseen.
            second.door.admin.revision = 9
            second.running.process.on(ChangesRequest, lambda _: Failed("busy"))
            done = await first.post("drain", pool="one")
            assert done["refused_by"] == ["another change was made at the same moment"]

    run_on_loop(scenario())


def test_a_process_that_comes_back_takes_over_what_the_others_hold() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as first, administered(two_pools(made)) as second:
            await first.post("drain", pool="one")
            second.running.process.link = LinkedTo(first)
            await second.door.admin.join()
            assert (await second.running.ask()).header(b"x-crosstie-pool") == b"two"
            assert second.door.admin.revision == first.door.admin.revision

    run_on_loop(scenario())


# Decisions


def test_decisions_say_where_and_why_and_nothing_of_the_request_itself() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            made[0].mode = "error"
            await admin.running.ask(
                headers={"x-request-id": "mine", "authorization": "Bearer users-own-key"},
                messages=[{"role": "user", "content": "a secret prompt"}], user="somebody",
            )  # fmt: skip
            await admin.running.ask(max_tokens=100_000)
            answer = await admin.raw("GET", "/admin/v1/decisions?last=500")
            rows = json.loads(answer.body)["decisions"]
            assert [(row["request_id"], row["outcome"], row["attempt"]) for row in rows[:2]] == [
                ("mine", "send", 1),
                ("mine", "send", 2),
            ]
            assert {rows[0]["pool"], rows[1]["pool"]} == {"one", "two"}
            assert rows[0]["predicted"]["ttft_s"] > 0
            assert rows[0]["reason"]
            assert (rows[2]["outcome"], rows[2]["pool"]) == ("refuse", None)
            for word in (b"secret", b"users-own-key", b"somebody"):
                assert word not in answer.body
            assert len((await admin.get("decisions?last=1"))["decisions"]) == 1
            for wrong in ("0", "501", "x", "-1", "9" * 50):
                assert (await admin.raw("GET", f"/admin/v1/decisions?last={wrong}")).status == 400

    run_on_loop(scenario())


async def follow(admin: Administered, query: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.door.port)
    said = f"GET /admin/v1/decisions?{query} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {KEY}\r\n\r\n"
    writer.write(said.encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def test_decisions_are_followed_with_those_that_were_not_chosen() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            await admin.running.ask(headers={"x-request-id": "before"})
            reader, writer = await follow(admin, "follow=1&alternatives=1")
            await until(lambda: admin.door.admin.recent.is_followed)
            await admin.running.ask(headers={"x-request-id": "after"})
            seen = b""
            while b"\n\n" not in seen:
                seen += await asyncio.wait_for(reader.read(65536), 5)
            row = json.loads(payloads(seen[seen.index(b"event") :])[0])
            assert row["request_id"] == "after"
            assert {one["pool"] for one in row["considered"]} == {"one", "two"}
            writer.close()
            # Nobody follows: nothing is worked out for them any more.
            await until(lambda: not admin.door.admin.recent.is_followed and not admin.door._followers)

    run_on_loop(scenario())


def test_followers_are_bounded_and_end_with_the_door() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, administered(two_pools(made)) as admin:
            there = [await follow(admin, "follow=1") for _ in range(16)]
            assert (await admin.raw("GET", "/admin/v1/decisions?follow=1")).status == 503
            await admin.door.stop()
            for reader, writer in there:
                assert b"0\r\n\r\n" in await asyncio.wait_for(reader.read(), 5)
                writer.close()

    run_on_loop(scenario())


def test_a_gateway_without_the_door_keeps_no_decisions() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, running(two_pools(made)) as plain:
            await plain.ask()
            assert plain.gateway.context.on_decision is None
            assert plain.process.handlers == {}

    run_on_loop(scenario())
