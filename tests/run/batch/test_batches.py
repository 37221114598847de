"""OpenAI's client with files and batches: kept, run after everybody else, gone on with, and nobody else's business."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.lazily import Lazily
from tests.run.gateway.fakes import CALM, MODEL, Fake, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.keyed import keyed
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.core.errors import BadInput
from crosstie_gateway.batch.index import ENDED, Batch, Quota
from crosstie_gateway.batch.lines import check_lines
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.start.start import BatchService
from crosstie_gateway.wire.multipart import read_form
from crosstie_gateway.wire.request import RequestLimits

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")

ENDPOINT: Any = "/v1/chat/completions"
PLENTY = Quota(10**6, 10**12, 10**6)


def line(custom_id: str, **changes: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], **changes.pop("body", {})}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body, **changes}) + "\n"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """How often it looks for batches, which every test waits for."""
    monkeypatch.setattr("crosstie_gateway.batch.runner._LOOK_S", 0.02)


def file_of(*ids: str) -> tuple[str, bytes]:
    return ("in.jsonl", "".join(line(one) for one in ids).encode())


def service(folder: Path, in_flight: int = 2) -> BatchService:
    return BatchService(folder, in_flight=in_flight, most_gib=0.001)


@asynccontextmanager
async def batching(
    folder: Path, fake: Fake, *, in_flight: int = 2
) -> AsyncIterator[tuple[Running, openai.AsyncOpenAI]]:
    made = service(folder, in_flight)
    async with running(fleet_of(pool_of("one", fake.url)), components=[made]) as at, client(at) as ours:
        made.runner.soonest_s = 0.01
        try:
            yield at, ours
        finally:
            await made.stop()


def client(at: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key="none", max_retries=0, timeout=LIMIT_S)


def hangs_at(fake: Fake, content: str) -> None:
    """From now on it answers all but one request."""

    def answer(body: dict[str, Any], reply: Any) -> None:
        (fake._hang if body["messages"][0]["content"] == content else Fake._ok.__get__(fake))(body, reply)

    fake._ok = answer  # type: ignore[method-assign]


async def begun(ours: openai.AsyncOpenAI, file: tuple[str, bytes], window: Any = "24h") -> Any:
    made = await ours.files.create(file=file, purpose="batch")
    return await ours.batches.create(input_file_id=made.id, endpoint=ENDPOINT, completion_window=window)


def batch_of(key_id: int, file_id: str, number: int = 0, **fields: Any) -> Batch:
    given = {"created_at": 1, "expires_at": 2, "completion_window": "1m", **fields}
    return Batch(id=f"batch-{number:024x}", key_id=key_id, endpoint=ENDPOINT, input_file_id=file_id, **given)


async def ended(ours: openai.AsyncOpenAI, batch: Any) -> Any:
    async with asyncio.timeout(LIMIT_S):
        while (latest := await ours.batches.retrieve(batch.id)).status not in ENDED:
            await asyncio.sleep(0.05)
    return latest


async def lines_of(ours: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await ours.files.content(file_id)).text
    return {one["custom_id"]: one for one in map(json.loads, text.splitlines())}


@in_folder
async def test_a_batch_from_file_to_file(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (at, ours):
        records: list[RequestRecord] = []
        at.gateway.listeners.append(records.append)
        batch = await begun(ours, file_of("a", "b", "c", "d", "e"))
        assert (batch.object, batch.endpoint, batch.completion_window) == ("batch", ENDPOINT, "24h")
        done = await ended(ours, batch)
        assert done.status == "completed"
        assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (5, 5, 0)
        assert done.error_file_id is None
        got = await lines_of(ours, done.output_file_id)
        assert sorted(got) == ["a", "b", "c", "d", "e"]
        assert got["a"]["response"]["status_code"] == 200
        assert got["a"]["response"]["body"]["served_by"] == "fake-0"
        assert sorted(one["messages"][0]["content"] for _, one in fake.hit) == ["a", "b", "c", "d", "e"]
        assert {(one.how, one.path) for one in records} == {("served", ENDPOINT)}
        listed = [one.id async for one in await ours.batches.list()]
        assert listed == [batch.id]
        names = {one.filename async for one in await ours.files.list()}
        assert names == {"in.jsonl", f"{batch.id}_output.jsonl"}
        assert (await ours.files.delete(done.output_file_id)).deleted
        with pytest.raises(openai.NotFoundError):
            await ours.files.retrieve(done.output_file_id)


@in_folder
async def test_what_engines_refuse_is_in_a_file_of_its_own_and_what_they_fail_at_is_tried_again(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (_, ours):
        fails = {"b": 2}
        ok = fake._ok

        def answer(body: dict[str, Any], reply: Any) -> None:
            said = body["messages"][0]["content"]
            if said == "a":
                fake._bad(body, reply)
            elif fails.get(said, 0):
                fails[said] -= 1
                fake._full(body, reply)
            else:
                ok(body, reply)

        fake._ok = answer  # type: ignore[method-assign]
        done = await ended(ours, await begun(ours, file_of("a", "b", "c")))
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
        assert sorted(await lines_of(ours, done.output_file_id)) == ["b", "c"]
        (failed,) = (await lines_of(ours, done.error_file_id)).values()
        assert failed["response"]["status_code"] == 400
        assert failed["response"]["body"]["error"]["message"] == "temperature must be positive"
        assert not fails["b"]


@in_folder
async def test_after_a_restart_only_what_is_left_is_asked(folder: Path) -> None:
    async with fakes() as [fake]:
        async with batching(folder, fake, in_flight=1) as (_, ours):
            hangs_at(fake, "b")
            batch = await begun(ours, file_of("a", "b", "c"))
            await until(lambda: fake.held)
        # A crash in the middle of a line.
        with (folder / f"{batch.id}.output").open("ab") as file:
            file.write(b'{"custom_id": "')
        hangs_at(fake, "")
        async with batching(folder, fake) as (_, ours):
            done = await ended(ours, batch)
            got = await lines_of(ours, done.output_file_id)
        assert (done.status, sorted(got)) == ("completed", ["a", "b", "c"])
        # The one that was under way is asked once more, the one before it is not.
        assert sorted(one["messages"][0]["content"] for _, one in fake.hit) == ["a", "b", "b", "c"]


@in_folder
async def test_a_cancelled_batch_stops_and_keeps_what_it_has(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake, in_flight=1) as (_, ours):
        hangs_at(fake, "b")
        batch = await begun(ours, file_of("a", "b", "c"))
        await until(lambda: fake.held)
        # Whoever runs it may have heard already.
        assert (await ours.batches.cancel(batch.id)).status in ("cancelling", "finalizing", "cancelled")
        done = await ended(ours, batch)
        assert done.status == "cancelled"
        assert list(await lines_of(ours, done.output_file_id)) == ["a"]
        await until(lambda: fake.gone)
        with pytest.raises(openai.APIStatusError, match="has ended: cancelled"):
            await ours.batches.cancel(batch.id)


@in_folder
async def test_what_was_not_run_when_the_window_closed_is_said_to_have_expired(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (_, ours):
        made = await ours.files.create(file=file_of("a", "b"), purpose="batch")
        late = batch_of(0, made.id)
        BatchStore(folder, 10**6).index.add_batch(late, PLENTY)
        done = await ended(ours, late)
        assert done.status == "expired"
        got = await lines_of(ours, done.error_file_id)
        assert {one["error"]["code"] for one in got.values()} == {"batch_expired"}
        assert not fake.hit


@in_folder
async def test_a_file_that_is_none_of_requests_fails_with_its_lines(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (_, ours):
        text = line("a") + "{\n" + line("a") + line("b", url="/v1/embeddings") + line("c", body={"stream": True})
        done = await ended(ours, await begun(ours, ("in.jsonl", text.encode())))
        assert done.status == "failed"
        assert [(one.line, one.code) for one in done.errors.data] == [
            (2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "mismatched_endpoint"), (5, "invalid_request"),
        ]  # fmt: skip
        assert not fake.hit


@in_folder
async def test_bad_questions_are_refused(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (at, ours):
        made = await ours.files.create(file=file_of("a"), purpose="batch")
        asked: Any = {"input_file_id": made.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        for change, said in (
            ({"endpoint": "/v1/audio"}, "endpoint '/v1/audio'"),
            ({"completion_window": "soon"}, "completion_window 'soon'"),
            ({"completion_window": "31d"}, "at most 30d"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                await ours.batches.create(**{**asked, **change})
        with pytest.raises(openai.NotFoundError, match="no file 'file-none'"):
            await ours.batches.create(**{**asked, "input_file_id": "file-none"})
        with pytest.raises(openai.NotFoundError):
            await ours.files.retrieve("../../etc/passwd")
        with pytest.raises(openai.BadRequestError, match="purpose 'assistants'"):
            await ours.files.create(file=file_of("a"), purpose="assistants")
        with pytest.raises(openai.APIStatusError, match="no room for more files here now") as full:
            await ours.files.create(file=("big", b"x" * 2_000_000), purpose="batch")
        assert full.value.status_code == 503
        assert (await at.get("/v1/batches/x/y")).status == 404


@on_loop
async def test_without_a_folder_there_are_no_batches() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        answer = await at.get("/v1/batches")
        assert answer.status == 404
        assert b"--batches" in answer.body


@in_folder
async def test_a_batch_goes_after_a_client_and_has_no_targets(folder: Path) -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1), serving=CALM)
        made = service(folder)
        async with running(fleet, components=[made]) as at, client(at) as ours:
            decided: list[tuple[int, float | None]] = []
            at.gateway.context.on_decision = lambda _id, _n, ask, _d: decided.append((ask.priority, ask.ttft_s))
            await begun(ours, file_of("a", "b"))
            await until(lambda: decided)
            assert set(decided) == {(0, None)}
            await until(lambda: len(fake.hit) == 2)
            await made.stop()


@in_folder
async def test_a_batch_is_its_key_s_and_ends_with_it(folder: Path) -> None:
    async with keyed(folder) as at:
        made = service(folder / "batches", in_flight=1)
        await made.start(at.at.process)
        made.runner.soonest_s = 0.01
        records: list[RequestRecord] = []
        at.at.gateway.listeners.append(records.append)
        alice, bob = await at.key("alice"), await at.key("bob")
        async with client(at.at) as nobody, client(at.at).copy(api_key=alice) as hers:
            with pytest.raises(openai.AuthenticationError):
                await nobody.batches.list()
            batch = await begun(hers, file_of("a"))
            assert (await ended(hers, batch)).status == "completed"
            async with client(at.at).copy(api_key=bob) as his:
                for asked in (his.batches.retrieve(batch.id), his.files.retrieve(batch.input_file_id)):
                    with pytest.raises(openai.NotFoundError):
                        await asked
            assert {(one.key_id, one.how) for one in records} >= {(1, "served")}
            hangs_at(at.fake, "b")
            second = await begun(hers, file_of("b", "c"))
            await until(lambda: at.fake.held)
            await at.change("alice", revoked_at=1.0)
            at.fake.held.pop().send(200, b'{"choices": []}')
            store = BatchStore(folder / "batches", 10**6)
            await until(lambda: (found := store.index.batch(1, second.id)) is not None and found.status == "failed")
            last = store.index.batch(1, second.id)
            assert last is not None
            assert [(one["code"], one["line"]) for one in last.errors] == [("api_key_revoked", None)]
            assert (last.completed, last.failed) == (1, 0)
            (untold,) = store.content_of(last.error_file_id or "").read_bytes().splitlines()
            assert json.loads(untold)["error"]["code"] == "api_key_revoked"
        await made.stop()


def test_nobody_sees_what_is_another_key_s(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "new" / "folder", 10**6)
    file = store.add(1, "in.jsonl", b"x", PLENTY)
    assert store.index.file(1, file.id) == file
    assert store.index.file(2, file.id) is None
    assert store.index.files(2, "", 9) == []
    batch = batch_of(1, file.id)
    assert not store.index.add_batch(batch_of(2, file.id), PLENTY)
    assert store.index.add_batch(batch, PLENTY)
    assert store.index.batch(1, batch.id) is not None
    assert store.index.batch(2, batch.id) is None
    assert store.index.batches(2, "", 9) == []


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"--batches .*file"):
        BatchStore(tmp_path / "file", 1)


def test_files_are_moved_once_though_their_batch_is_ended_twice(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10**6)
    batch = batch_of(0, store.add(0, "in", line("a").encode(), PLENTY).id)
    store.index.add_batch(batch, PLENTY)
    (tmp_path / f"{batch.id}.output").write_text('{"custom_id":"a"}\n')
    for _ in range(2):
        store.finalise(batch, "completed", RequestLimits())
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert {one.id for one in store.index.files(0, "", 9)} == {batch.output_file_id, batch.input_file_id}
    assert len(store.index.files(0, "", 9)) == 2


def test_an_empty_and_a_long_file(tmp_path: Path) -> None:
    file = tmp_path / "in"
    file.write_text("\n")
    assert [one["code"] for one in check_lines(file, ENDPOINT, 9, RequestLimits())[1]] == ["empty_file"]
    file.write_text("".join(line(str(number)) for number in range(9)))
    count, errors = check_lines(file, ENDPOINT, 1, RequestLimits())
    # The rest is not looked at.
    assert (count, [one["code"] for one in errors]) == (2, ["too_many_requests"])


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (b"application/json", b"{}", "multipart/form-data"),
        (b"multipart/form-data", b"", "boundary"),
        (b"multipart/form-data; boundary=x", b"--x\r\n", "no end"),
        (b"multipart/form-data; boundary=x", b"abcd--", "no end"),
        (b"multipart/form-data; boundary=x", b"--x\r\n\r\nabc\r\n--x--", "no name"),
        (
            b"multipart/form-data; boundary=x",
            b'--x\r\ncontent-disposition: form-data; name="same"\r\n\r\n\r\n' * 1001 + b"--x--",
            "more than 1000 parts",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(kind: bytes, body: bytes, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_form(kind, body)


def test_content_that_looks_like_a_boundary_in_part_is_kept() -> None:
    content = b"--x\n\r\n--y\r\n-"
    body = b'--xy\r\ncontent-disposition: form-data; name="f"; filename="n"\r\n\r\n' + content + b"\r\n--xy--\r\n"
    form = read_form(b'multipart/form-data; boundary="xy"', body)
    assert {name: (part.file, part.content(body)) for name, part in form.items()} == {"f": ("n", content)}
