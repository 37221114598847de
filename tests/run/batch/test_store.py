"""Batches on a disk that is full, that others can read, and that has a great many of them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.lazily import Lazily
from tests.run.batch.test_batches import (
    ENDPOINT,
    PLENTY,
    batch_of,
    batching,
    begun,
    client,
    ended,
    file_of,
    hangs_at,
    line,
    lines_of,
    service,
)
from tests.run.gateway.fakes import CALM, fakes, fleet_of, in_folder, pool_of, running, until
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie_gateway.batch import index as index_module, lines as lines_module
from crosstie_gateway.batch.lines import BatchLine, LineReader, check_lines
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.wire.request import RequestLimits

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")

LIMITS = RequestLimits()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie_gateway.batch.runner._LOOK_S", 0.02)
    monkeypatch.setattr("crosstie_gateway.batch.runner._STILL_S", 0.02)


def seen_by(patch: pytest.MonkeyPatch, module: Any) -> list[bytes]:
    """All that a module decodes from now on."""
    seen: list[bytes] = []
    decode = module._decode

    def decoded(text: bytes) -> Any:
        seen.append(text)
        return decode(text)

    patch.setattr(module, "_decode", decoded)
    return seen


class FullDisk:
    """Takes half of what is written to answers, and no more, until there is room again."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.full, self.refused = False, 0
        self._write = os.write
        patch.setattr("crosstie_gateway.batch.store.os.write", self.write)

    def write(self, handle: int, data: Any) -> int:
        if not self.full:
            return self._write(handle, data)
        if len(data) > 1:
            return self._write(handle, data[: len(data) // 2])
        self.refused += 1
        raise OSError(errno.ENOSPC, "No space left on device")


@in_folder
async def test_on_a_full_disk_nothing_is_asked_twice_and_no_answer_is_lost(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk, ids = FullDisk(patch), [str(number) for number in range(40)]
        async with fakes() as [fake], batching(folder, fake) as (_, ours):
            hangs_at(fake, "5")
            batch = await begun(ours, file_of(*ids))
            await until(lambda: fake.held)
            disk.full = True
            hangs_at(fake, "")
            fake.held.pop().send(200, b'{"choices": []}')
            await until(lambda: disk.refused > 3)
            # Those that were handed out before may still be on their way.
            asked = -1
            while asked != len(fake.hit):
                asked, refused = len(fake.hit), disk.refused
                await until(lambda before=refused: disk.refused > before + 5)  # type: ignore[misc]
            # Nobody is charged for what could not be kept.
            assert asked < 40
            disk.full = False
            done = await ended(ours, batch)
            assert (done.status, done.request_counts.completed) == ("completed", 40)
            assert sorted(await lines_of(ours, done.output_file_id)) == sorted(ids)
            assert len(fake.hit) == 40


@in_folder
async def test_an_answer_that_was_lost_on_a_full_disk_is_told_and_not_asked_for_again(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = FullDisk(patch)
        async with fakes() as [fake]:
            async with batching(folder, fake, in_flight=1) as (_, ours):
                hangs_at(fake, "b")
                batch = await begun(ours, file_of("a", "b", "c"))
                await until(lambda: fake.held)
                disk.full = True
                fake.held.pop().send(200, b'{"choices": []}')
                await until(lambda: disk.refused)
            disk.full = False
            hangs_at(fake, "")
            async with batching(folder, fake) as (_, ours):
                done = await ended(ours, batch)
                assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 2, 1)
                (lost,) = (await lines_of(ours, done.error_file_id)).values()
                assert (lost["custom_id"], lost["error"]["code"]) == ("b", "answer_lost")
            assert sorted(one["messages"][0]["content"] for _, one in fake.hit) == ["a", "b", "c"]


@in_folder
async def test_nothing_is_asked_while_there_is_hardly_room_for_answers(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        looks: list[int] = []

        def hardly_any(store: BatchStore) -> int:
            looks.append(1)
            return 10_000

        async with fakes() as [fake], batching(folder, fake) as (at, ours):
            notices: list[Any] = []
            at.gateway.notify = notices.append
            patch.setattr(BatchStore, "free_bytes", hardly_any)
            await until(lambda: looks)
            batch = await begun(ours, file_of("a"))
            await until(lambda: (folder / f"{batch.id}.asked").exists())
            seen = len(looks)
            await until(lambda: len(looks) > seen + 5)
            assert not fake.hit
            assert [one.event for one in notices] == ["batches_stopped"]
            patch.setattr(BatchStore, "free_bytes", lambda self: 10**9)
            assert (await ended(ours, batch)).status == "completed"


@in_folder
async def test_a_gateway_that_leaves_waits_for_the_answers_under_way(folder: Path) -> None:
    async with fakes() as [fake]:
        made = service(folder, in_flight=1)
        async with running(fleet_of(pool_of("one", fake.url), serving=CALM), components=[made]) as at:
            async with client(at) as ours:
                hangs_at(fake, "a")
                batch = await begun(ours, file_of("a", "b"))
                await until(lambda: fake.held)
            drained = asyncio.Event()

            async def drain(*given: Any, **more: Any) -> bool:
                drained.set()
                return True

            # No client is waited for.
            at.process.server.drain = drain  # type: ignore[method-assign]
            leaving = asyncio.ensure_future(at.process.stop())
            await drained.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            fake.held.pop().send(200, b'{"choices": []}')
            await leaving
        assert len(fake.hit) == 1
        assert json.loads((folder / f"{batch.id}.output").read_text())["custom_id"] == "a"


@in_folder
async def test_a_gateway_that_is_told_twice_to_leave_waits_for_no_answer(folder: Path) -> None:
    async with fakes() as [fake]:
        made = service(folder, in_flight=1)
        patient = msgspec.structs.replace(CALM, drain_s=86_400.0)
        async with running(fleet_of(pool_of("one", fake.url), serving=patient), components=[made]) as at:
            async with client(at) as ours:
                hangs_at(fake, "a")
                await begun(ours, file_of("a", "b"))
                await until(lambda: fake.held)
            for _ in range(2):
                at.process.end()
            async with asyncio.timeout(LIMIT_S):
                await at.process.stop()


@in_folder
async def test_a_runner_that_is_woken_as_it_is_stopped_stops(folder: Path) -> None:
    async with fakes() as [fake]:
        made = service(folder)
        async with running(fleet_of(pool_of("one", fake.url)), components=[made]):
            await until(lambda: made.runner._wake._waiters)
            made.runner._wake.set()
            async with asyncio.timeout(LIMIT_S):
                await made.stop()


@in_folder
async def test_what_is_kept_is_for_its_owner_alone_in_a_folder_that_others_could_read(folder: Path) -> None:
    place, mask = folder / "there", os.umask(0)
    try:
        place.mkdir(0o755)
        async with fakes() as [fake], batching(place, fake) as (_, ours):
            hangs_at(fake, "b")
            await begun(ours, file_of("a", "b"))
            await until(lambda: list(place.glob("*.output")) and fake.held)
            assert place.stat().st_mode & 0o777 == 0o700
            assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}
            assert {path.suffix for path in place.iterdir()} >= {".content", ".output", ".asked", ".db"}
    finally:
        os.umask(mask)


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(BadInput, match=r"has other things in it \('letters.txt'\)"):
        BatchStore(tmp_path, 10**6)
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_an_index_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "index.db").write_text("no database, but a text that is long enough to be seen as none" * 20)
    with pytest.raises(BadInput, match=r"index\.db: file is not a database"):
        BatchStore(tmp_path, 10**6).index.known()


def test_a_line_has_the_limits_of_a_body_and_is_not_decoded_beyond_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = seen_by(monkeypatch, lines_module)
    file = tmp_path / "in"
    many = ",".join(f'"k{number}":{number}' for number in range(200_000))
    texts = "x" * 3_000_000
    file.write_text(line("a")[:-3] + "," + many + "}}\n" + line("b", body={"user": texts}) + line("c"))
    count, errors = check_lines(file, ENDPOINT, 9, LIMITS)
    assert (count, [(one["line"], one["code"]) for one in errors]) == (3, [(1, "line_too_large")])
    assert max(map(len, decoded)) < 1000
    # And it is read by its outline when it is run.
    reader = LineReader(file, bytearray([1, 0, 0]), LIMITS)
    long, short = reader.more() + reader.more()
    assert (long.custom_id, short.custom_id, max(map(len, decoded)) < 1000) == ("b", "c", True)
    assert json.loads(long.body)["user"] == texts
    assert long.outline is not None
    assert long.outline.utf8
    assert texts.encode() not in long.outline.text


def test_a_custom_id_that_is_long_is_refused_however_long_its_line_is(tmp_path: Path) -> None:
    file = tmp_path / "in"
    for body in ({}, {"user": "x" * 100_000}):
        file.write_text(line("a" * 129, body=body) + line("b" * 128, body=body))
        assert [(one["line"], one["code"]) for one in check_lines(file, ENDPOINT, 9, LIMITS)[1]] == [
            (1, "invalid_custom_id")
        ]


def test_a_look_reads_only_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path, 10**9)
    file = store.add(1, "in", b"x", PLENTY)
    for number in range(300):
        one = batch_of(1, file.id, number, created_at=number, expires_at=2**40)
        store.index.add_batch(one, PLENTY)
        if number != 7:
            one.become("completed")
        store.index.save([one])
    read = seen_by(monkeypatch, index_module)
    assert [name for name, _ in store.index.turns(0.0, 4, 99)] == [batch_of(1, "", 7).id]
    assert not read
    first = store.index.batches(1, "", 20)
    then = store.index.batches(1, first[-1].id, 20)
    assert [int(one.id[6:], 16) for one in first + then] == list(range(299, 259, -1))
    assert len(read) == 40
    assert store.index.batches(1, "batch-of-nobody", 20) == []


def test_what_is_old_is_deleted_unless_a_batch_needs_it(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10**9)
    names = [store.add(1, "in", b"x", PLENTY).id for _ in range(3)]
    running, over = batch_of(1, names[0], 1, expires_at=2**40), batch_of(1, names[1], 2)
    for one in (running, over):
        store.index.add_batch(one, PLENTY)
    over.become("completed")
    store.index.save([over])
    store.delete_old(3600.0)
    assert len(store.index.files(1, "", 9)) == 3
    store.delete_old(-10.0)
    assert [one.id for one in store.index.files(1, "", 9)] == [names[0]]
    assert [one.id for one in store.index.batches(1, "", 9)] == [running.id]
    assert [path.name for path in tmp_path.glob("*.content")] == [f"{names[0]}.content"]


def test_what_a_process_that_died_has_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10**9)
    file = store.add(1, "in", b"x", PLENTY)
    batch = batch_of(1, file.id, 0xABC0, expires_at=2**40)
    store.index.add_batch(batch, PLENTY)
    wanted = [f"{file.id}.content", f"{batch.id}.output", f"file-{0xABC1:024x}.content", "README"]
    orphans = [f"file-{1:024x}.content", f"file-{2:024x}.content.part", f"batch-{3:024x}.asked"]
    for name in (*wanted, *orphans):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time() - 7200, time() - 7200))
    (tmp_path / f"file-{9:024x}.content").touch()
    store.delete_orphans()
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {*wanted, f"file-{9:024x}.content"}
    assert not left & set(orphans)


@in_folder
async def test_questions_that_are_too_large_are_refused(folder: Path) -> None:
    async with fakes() as [fake], batching(folder, fake) as (_, ours):
        made = await ours.files.create(file=(f"{'n' * 300}.jsonl", file_of("a")[1]), purpose="batch")
        assert len(made.filename) == 255
        assert made.expires_at == made.created_at + 30 * 86400
        asked: Any = {"input_file_id": made.id, "endpoint": ENDPOINT, "completion_window": "24h"}
        for metadata in ({str(number): "" for number in range(17)}, {"n" * 65: ""}, {"n": "x" * 513}):
            with pytest.raises(openai.BadRequestError, match="metadata: at most 16 names"):
                await ours.batches.create(**asked, metadata=metadata)
        with pytest.raises(openai.BadRequestError, match="more than 65536 bytes"):
            await ours.batches.create(**asked, metadata={"n": "x" * 70_000})
        with pytest.raises(openai.BadRequestError, match="limit '10001'"):
            await ours.files.list(limit=10_001)


@in_folder
async def test_what_a_key_sends_at_once_is_bounded(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosstie_gateway.batch.desk._WAITING_BYTES", 3 * 2**12)
        async with fakes() as [fake], batching(folder, fake) as (_, ours):
            found = await asyncio.gather(*(ours.files.list() for _ in range(40)), return_exceptions=True)
            refused = [one for one in found if isinstance(one, openai.APIStatusError)]
            assert {one.code for one in refused} == {"too_many_open_requests"}
            assert len(refused) < 40
            # Nothing of it stays.
            assert (await ours.files.list()).data == []


def test_a_line_that_was_told_is_whole(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, 10**9)
    batch = batch_of(1, store.add(1, "in", file_of("a", "b", "c")[1], PLENTY).id, expires_at=2**40)
    store.index.add_batch(batch, PLENTY)
    store.check(batch, 9, LIMITS)
    first, second, _ = LineReader(store.content_of(batch.input_file_id), bytearray(3), LIMITS).more()
    assert store.keep(batch, first, 200, "r", b'{"a":\n [1,\r\n2]}') == "output"
    assert store.keep(batch, second, 404, "r", b"\xff no JSON") == "error"
    with (tmp_path / f"{batch.id}.output").open("ab") as file:
        file.write(b"\0" * 100)
    assert store.resume(batch, LIMITS) == bytearray([1, 1, 0])
    (told,) = (tmp_path / f"{batch.id}.output").read_bytes().splitlines()
    assert json.loads(told)["response"]["body"] == {"a": [1, 2]}
    assert BatchLine(0, file_of("z")[1], LIMITS).custom_id == "z"
