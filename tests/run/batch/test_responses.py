"""Responses that the gateway keeps: any replica goes on from one, each key has its own, and there is an end to them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import MODEL, Fake, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.keyed import code_of, keyed
from tests.run.gateway.test_responses import PATH, id_of, respond
from tests.waiting import LIMIT_S

from crosstie.core.fleet import Serving
from crosstie.wire.fetch import Answer, fetch
from crosstie_gateway.batch.responses import ResponseQuota, ResponseStore, Turn
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.start.start import ResponseService

PLENTY = ResponseQuota(1000, 10**9, 10**9, 1000.0)


@asynccontextmanager
async def kept(folder: Path, at: Running) -> AsyncIterator[Running]:
    service = ResponseService(folder / "responses.db")
    await service.start(at.process)
    try:
        yield at
    finally:
        await service.stop()


@asynccontextmanager
async def over(folder: Path, *made: Fake, **serving: Any) -> AsyncIterator[Running]:
    for fake in made:
        fake.mode = "responds"
    fleet = fleet_of(pool_of("p", *(fake.url for fake in made), max_context=10**6), policy="round-robin")
    if serving:
        fleet = msgspec.structs.replace(fleet, serving=msgspec.structs.replace(fleet.serving, **serving))
    async with running(fleet) as at, kept(folder, at):
        yield at


def asked(*words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": word} for word in words]


def said(number: int) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": f"answer {number}"}


async def of(at: Running, name: str, method: str = "GET", **headers: bytes) -> Answer:
    given = [(key.encode(), value) for key, value in headers.items()]
    return await fetch(at.origin, method, f"{PATH}/{name}", headers=given, timeout_s=LIMIT_S)


@pytest.mark.parametrize("stream", [True, False])
def test_any_replica_goes_on_with_a_conversation(stream: bool, tmp_path: Path) -> None:
    @in_folder
    async def test(folder: Path) -> None:
        async with fakes(2) as made, over(folder, *made) as at:
            first = await at.ask(PATH, input="a", stream=stream)
            second = await at.ask(PATH, input=asked("b"), stream=stream, previous_response_id=id_of(first))
            third = await at.ask(PATH, input="c", stream=stream, previous_response_id=id_of(second))
            assert third.status == 200
            bodies = [body for fake in made for _, body in fake.hit]
            assert all("previous_response_id" not in body and body["store"] is False for body in bodies)
            assert [len(fake.hit) for fake in made] == [2, 1]
            assert bodies[0]["input"] == asked("a")
            assert bodies[2]["input"] == [*asked("a"), said(1), *asked("b")]
            assert bodies[1]["input"] == [*asked("a"), said(1), *asked("b"), said(1), *asked("c")]

    test(tmp_path)


@in_folder
async def test_a_response_can_be_read_and_deleted(folder: Path) -> None:
    async with fakes(1) as [fake], over(folder, fake) as at:
        first = id_of(await respond(at))
        second = id_of(await respond(at, previous_response_id=first))
        shown = json.loads((await of(at, second)).body)
        assert (shown["id"], shown["previous_response_id"], shown["store"]) == (second, first, True)
        assert json.loads((await of(at, first)).body)["previous_response_id"] is None
        gone = await of(at, first, "DELETE")
        assert json.loads(gone.body) == {"id": first, "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            assert code_of(await of(at, first, method)) == (404, "response_not_found")
        # What came of it has lost its beginning.
        answer = await respond(at, previous_response_id=second)
        assert code_of(answer) == (400, "previous_response_not_found")
        assert code_of(await of(at, second, "POST")) == (404, "not_found")
        for odd in ("%00%ff", "%ed%a0%80", "x" * 7000, "..%2f..", "a'%20OR%201=1"):
            assert (await of(at, odd)).status == 404
            assert code_of(await respond(at, previous_response_id=odd)) == (400, "previous_response_not_found")


@in_folder
async def test_what_is_not_to_be_stored_is_not(folder: Path) -> None:
    async with fakes(1) as [fake], over(folder, fake) as at:
        name = id_of(await respond(at, store=False))
        assert (await of(at, name)).status == 404
        fake.mode = "ok"
        answer = await respond(at, background=True)
        assert code_of(answer) == (400, "bad_request")
        # No JSON is refused as ever.
        answer = await fetch(
            at.origin, "POST", PATH, body=b"{", headers=[(b"content-type", b"application/json")], timeout_s=LIMIT_S
        )
        assert code_of(answer) == (400, "bad_request")


@in_folder
async def test_nobody_has_another_keys_responses(folder: Path) -> None:
    async with keyed(folder) as whole, kept(folder, whole.at) as at:
        whole.fake.mode = "responds"
        hers, his = [(b"Bearer " + (await whole.key(name)).encode()) for name in ("alice", "bob")]

        async def ask(key: bytes, **more: Any) -> Answer:
            body = json.dumps({"model": MODEL, "input": "hi", **more}).encode()
            given = [(b"content-type", b"application/json"), (b"authorization", key)]
            return await fetch(at.origin, "POST", PATH, body=body, headers=given, timeout_s=LIMIT_S)

        name = id_of(await ask(hers))
        assert (await of(at, name, authorization=hers)).status == 200
        for method in ("GET", "DELETE"):
            assert code_of(await of(at, name, method, authorization=his)) == (404, "response_not_found")
        assert code_of(await of(at, name)) == (401, "missing_api_key")
        assert code_of(await ask(his, previous_response_id=name)) == (400, "previous_response_not_found")
        assert (await ask(hers, previous_response_id=name)).status == 200


@in_folder
async def test_what_is_kept_is_counted(folder: Path) -> None:
    async with fakes(1) as [fake], over(folder, fake, max_response_mib_per_key=0.001) as at:
        name = id_of(await respond(at))
        # Larger than all that a key may keep.
        big = id_of(await at.ask(PATH, input="x" * 2000))
        page = at.gateway.metrics_page
        await until(lambda: 'crosstie_responses_total{outcome="lost"} 1' in page())
        assert 'crosstie_responses_total{outcome="kept"} 1' in page()
        assert (await of(at, name)).status == 200
        assert (await of(at, big)).status == 404


@in_folder
async def test_a_conversation_is_no_longer_than_a_body(folder: Path) -> None:
    async with fakes(1) as [fake], over(folder, fake, max_body_mib=0.002) as at:
        name = id_of(await at.ask(PATH, input="x" * 1500))
        answer = await at.ask(PATH, input="y" * 1500, previous_response_id=name)
        assert code_of(answer) == (413, "conversation_too_long")


def record(name: str, size: int = 10) -> bytes:
    return json.dumps({"id": name, "output": [{"said": "x" * size}]}).encode()


def names(store: ResponseStore) -> list[tuple[int, str]]:
    return store.rows("SELECT key_id, id FROM responses ORDER BY rowid")


def test_the_oldest_of_a_key_make_room_for_its_own(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db")
    assert (tmp_path / "r.db").exists() is False
    for name in ("a", "b", "c"):
        assert store.add(1, name, Turn(b"{}", ""), record(name), PLENTY._replace(number=2))
    assert (tmp_path / "r.db").stat().st_mode & 0o777 == 0o600
    assert store.add(2, "theirs", Turn(b"{}", ""), record("theirs"), PLENTY)
    size = len(record("a")) + 2
    assert store.add(1, "d", Turn(b"{}", ""), record("d"), PLENTY._replace(bytes=2 * size))
    assert names(store) == [(1, "c"), (2, "theirs"), (1, "d")]
    # Of all together, who has most gives way.
    assert store.add(3, "e", Turn(b"{}", ""), record("e"), PLENTY._replace(bytes_of_all=3 * size + 10))
    assert names(store) == [(2, "theirs"), (1, "d"), (3, "e")]
    assert not store.add(3, "f", Turn(b"{}", ""), record("f", 500), PLENTY._replace(bytes=100))
    store.rows("UPDATE responses SET created_at = 0 WHERE id = 'd'")
    assert store.record(1, "d", since=1.0) is None
    store.add(3, "g", Turn(b"{}", ""), record("g"), PLENTY)
    assert names(store) == [(2, "theirs"), (3, "e"), (3, "g")]
    assert store.rows("SELECT key_id, number FROM held") == [(2, 1), (3, 2)]
    # The same id again is in the place of the first.
    store.add(3, "g", Turn(b"{}", ""), record("g"), PLENTY)
    assert store.rows("SELECT number FROM held WHERE key_id = 3") == [(2,)]
    store.close()


def test_a_circle_is_no_conversation(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db")
    store.add(1, "a", Turn(b"{}", "a"), record("a"), PLENTY)
    with pytest.raises(RequestRejected, match="more than 1,000 responses"):
        store.conversation(1, "a", 0.0, 10**9)
    for number in range(5):
        store.add(1, f"b{number}", Turn(b'{"n":%d}' % number, f"b{number - 1}" if number else ""), record("b"), PLENTY)
    items = json.loads(b"[%b]" % store.conversation(1, "b4", 0.0, 10**9))
    assert [item["n"] for item in items if "n" in item] == [0, 1, 2, 3, 4]
    # Another process reads what this one has written.
    assert ResponseStore(tmp_path / "r.db").conversation(1, "b0", 0.0, 10**9).startswith(b'{"n":0}')
    with pytest.raises(RequestRejected, match=r"serve\.max_body_mib"):
        store.conversation(1, "b4", 0.0, 100)
    store.close()


def test_serving_has_limits_for_responses() -> None:
    serving = Serving()
    assert serving.max_responses_per_key == 10_000
    assert serving.response_keep_days == 30.0


@in_folder
async def test_a_long_input_is_read_by_its_outline_and_one_of_no_kind_by_its_engine(folder: Path) -> None:
    async with fakes(1) as [fake], over(folder, fake) as at:
        long = [{"role": "user", "content": "é" * 200_000}]
        name = id_of(await at.ask(PATH, input=long))
        assert fake.hit[-1][1]["input"] == long
        assert (await at.ask(PATH, input="b", previous_response_id=name)).status == 200
        assert fake.hit[-1][1]["input"] == [*long, said(1), *asked("b")]
        await at.ask(PATH, input={"odd": 1}, store=True)
        assert fake.hit[-1][1]["input"] == {"odd": 1}
