"""Files and batches of several keys: limits, quotas, turns, and batches that always end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.lazily import Lazily
from tests.run.batch.test_batches import ENDPOINT, PLENTY, batch_of, begun, client, ended, file_of, hangs_at, service
from tests.run.gateway.fakes import in_folder, until
from tests.run.gateway.keyed import Keyed, keyed

from crosstie.core.fleet import Serving
from crosstie_gateway.batch.index import Batch
from crosstie_gateway.batch.lines import BatchLine
from crosstie_gateway.batch.runner import BatchRun, Turns
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.gateway.limits import Window
from crosstie_gateway.start.start import BatchService
from crosstie_gateway.wire.request import RequestLimits

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie_gateway.batch.runner._LOOK_S", 0.02)


@asynccontextmanager
async def tenants(folder: Path, in_flight: int = 4, **serving: Any) -> AsyncIterator[tuple[Keyed, BatchService]]:
    async with keyed(folder, serving=Serving(**serving)) as at:
        made = service(folder / "batches", in_flight)
        await made.start(at.at.process)
        made.runner.soonest_s = 0.01
        try:
            yield at, made
        finally:
            await made.stop()


def of(at: Keyed, key: str) -> openai.AsyncOpenAI:
    return client(at.at).copy(api_key=key)


@in_folder
async def test_files_and_batches_count_against_the_rate_of_a_key(folder: Path) -> None:
    async with tenants(folder) as (at, _), of(at, await at.key("alice", rpm=3)) as hers:
        await hers.files.create(file=file_of("a"), purpose="batch")
        await hers.files.list()
        await hers.batches.list()
        for asked in (hers.files.list, hers.batches.list):
            with pytest.raises(openai.RateLimitError, match="3 requests a minute"):
                await asked()
        with pytest.raises(openai.RateLimitError, match="3 requests a minute"):
            await hers.files.create(file=file_of("a"), purpose="batch")


@in_folder
async def test_nothing_new_is_taken_on_a_spent_budget_and_what_is_there_may_be_had(folder: Path) -> None:
    async with tenants(folder) as (at, _), of(at, await at.key("alice", usd_per_month=1.0)) as hers:
        file = await hers.files.create(file=file_of("a"), purpose="batch")
        guard = at.at.gateway.context.guard
        assert guard is not None
        guard._by_id[1].own_usd = 2.0
        with pytest.raises(openai.RateLimitError, match="budget of 1 USD a month"):
            await hers.files.create(file=file_of("a"), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="budget of 1 USD a month"):
            await hers.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
        assert (await hers.files.content(file.id)).text
        assert (await hers.files.delete(file.id)).deleted


@in_folder
async def test_lines_keep_to_the_rate_of_their_key_and_leave_some_of_it(folder: Path) -> None:
    async with tenants(folder) as (at, _), of(at, await at.key("alice", rpm=10)) as hers:
        batch = await begun(hers, file_of(*map(str, range(30))))
        guard = at.at.gateway.context.guard
        assert guard is not None
        await until(lambda: guard.refused["rate_limit_exceeded"])
        # Two for the file and the batch, and two that are left for others; one refusal a rest, not one a line.
        assert (len(at.fake.hit), guard.refused["rate_limit_exceeded"]) == (6, 1)
        assert (await hers.batches.retrieve(batch.id)).status == "in_progress"
        # Whoever runs it may have heard already.
        assert (await hers.batches.cancel(batch.id)).status in ("cancelling", "finalizing", "cancelled")


@in_folder
async def test_a_batch_ends_when_its_budget_is_spent_for_longer_than_its_window(folder: Path) -> None:
    async with tenants(folder, in_flight=1) as (at, _), of(at, await at.key("alice", usd_per_month=1.0)) as hers:
        hangs_at(at.fake, "b")
        batch = await begun(hers, file_of("a", "b", *map(str, range(50))), window="1m")
        await until(lambda: at.fake.held)
        guard = at.at.gateway.context.guard
        assert guard is not None
        guard._by_id[1].own_usd = 2.0
        at.fake.held.pop().send(200, b'{"choices": []}')
        done = await ended(hers, batch)
        assert (done.status, done.errors.data[0].code) == ("failed", "insufficient_quota")
        assert "budget of 1 USD a month" in done.errors.data[0].message
        assert (done.request_counts.completed, len(at.fake.hit)) == (2, 2)
        assert guard.refused["insufficient_quota"] == 1
        told = (await hers.files.content(done.error_file_id or "")).text.splitlines()
        assert {json.loads(one)["error"]["code"] for one in told} == {"insufficient_quota"}
        assert len(told) == 50


@in_folder
async def test_quotas_are_each_key_s_own_and_say_nothing_of_others(folder: Path) -> None:
    limits: dict[str, Any] = {"max_files_per_key": 3, "max_file_gib_per_key": 1000 / 2**30, "max_batches_per_key": 1}
    async with tenants(folder, **limits) as (at, _):
        hangs_at(at.fake, "hangs")
        async with of(at, await at.key("alice")) as hers, of(at, await at.key("bob")) as his:
            for _ in range(2):
                kept = await his.files.create(file=("x", b"x" * 300), purpose="batch")
            batch = await begun(hers, file_of("hangs"))
            with pytest.raises(
                openai.RateLimitError, match=r"1 batches of yours .* 1 may be at once \(serve.max_batches_per"
            ):
                await hers.batches.create(input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h")
            await hers.files.create(file=("x", b"x" * 300), purpose="batch")
            with pytest.raises(
                openai.RateLimitError, match=r"your files take \d{3} bytes, and may take 1,000 "
            ) as refused:
                await hers.files.create(file=("x", b"x" * 900), purpose="batch")
            assert refused.value.code == "quota_exceeded"
            assert refused.value.response.headers["x-should-retry"] == "false"
            await hers.files.create(file=("x", b"x"), purpose="batch")
            with pytest.raises(
                openai.RateLimitError, match=r"you have 3 files, and may have 3 \(serve.max_files_per_key\)"
            ):
                await hers.files.create(file=("x", b"x"), purpose="batch")
            # The other has room.
            await his.files.create(file=("x", b"x" * 300), purpose="batch")
            assert (await his.files.delete(kept.id)).deleted
            await hers.batches.cancel(batch.id)
            assert (await ended(hers, batch)).status == "cancelled"


@in_folder
async def test_a_batch_of_more_lines_than_may_be_fails(folder: Path) -> None:
    async with tenants(folder, max_batch_lines=2) as (at, _), of(at, await at.key("alice")) as hers:
        done = await ended(hers, await begun(hers, file_of("a", "b", "c")))
        assert (done.status, done.errors.data[0].code) == ("failed", "too_many_requests")


@in_folder
async def test_long_batches_of_one_key_keep_nobody_else_waiting(folder: Path) -> None:
    async with tenants(folder) as (at, _):
        hangs_at(at.fake, "hangs")
        async with of(at, await at.key("alice")) as hers, of(at, await at.key("bob")) as his:
            text = b"".join(file_of("hangs")[1].replace(b'"hangs"', b'"h%d"' % n, 1) for n in range(20))
            long = [await begun(hers, ("in.jsonl", text), window="30d") for _ in range(6)]
            await until(lambda: len(at.fake.held) == 3)
            done = await ended(his, await begun(his, file_of("a", "b", "c", "d", "e")))
            assert done.status == "completed"
            # A quarter was left for others.
            assert len(at.fake.held) == 3
            for batch in long:
                await hers.batches.cancel(batch.id)
            for batch in long:
                assert (await ended(hers, batch)).status == "cancelled"


def test_keys_take_turns_and_so_do_the_batches_of_one() -> None:
    async def run() -> list[tuple[int, int]]:
        turns, found = Turns(100), list[tuple[int, int]]()
        text = file_of("x")[1]
        for key_id, number in ((1, 1), (1, 2), (1, 3), (2, 4)):
            one = BatchRun(batch_of(key_id, "file", number, expires_at=2**40))
            one.read.extend(BatchLine(n, text, RequestLimits()) for n in range(3))
            turns.join(one)
        while (next_one := turns.next(0.0)) is not None:
            found.append((next_one[0].batch.key_id, int(next_one[0].batch.id[6:], 16)))
        return found

    found = asyncio.run(run())
    assert found[:6] == [(1, 1), (2, 4), (1, 2), (2, 4), (1, 3), (2, 4)]
    assert found[6:] == [(1, 1), (1, 2), (1, 3)] * 2


@in_folder
async def test_an_input_that_is_deleted_as_its_batch_is_made_leaves_no_batch_that_never_ends(folder: Path) -> None:
    async with tenants(folder) as (at, _), of(at, await at.key("alice")) as hers:
        made: list[Any] = []
        for _ in range(20):
            file = await hers.files.create(file=file_of("a"), purpose="batch")
            create = hers.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
            found = await asyncio.gather(create, hers.files.delete(file.id), return_exceptions=True)
            # One of them; or both, where the batch has ended in between.
            assert [one.status_code for one in found if isinstance(one, openai.APIStatusError)] in ([404], [409], [])
            made += [one for one in found[:1] if not isinstance(one, BaseException)]
        for batch in made:
            assert (await ended(hers, batch)).status == "completed"


@in_folder
async def test_a_batch_whose_input_has_vanished_fails_in_whatever_status_it_was(folder: Path) -> None:
    (folder / "batches").mkdir()
    store = BatchStore(folder / "batches", 10**6)
    for number, status in enumerate(("validating", "in_progress", "finalizing")):
        file = store.add(1, "in", file_of("a")[1], PLENTY)
        one = batch_of(1, file.id, number, expires_at=2**40)
        store.index.add_batch(one, PLENTY)
        one.total, one.outcome = 1, "expired"
        one.become(status)
        store.index.save([one])
        store.content_of(file.id).unlink()
    async with tenants(folder) as (at, _), of(at, await at.key("alice")) as hers:
        statuses = [(await ended(hers, batch_of(1, "", number))).status for number in range(3)]
        assert statuses == ["failed", "failed", "expired"]
        with pytest.raises(openai.NotFoundError):
            await hers.files.content(file.id)


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing"])
def test_a_cancelled_batch_ends_though_others_have_all_turns(tmp_path: Path, status: str) -> None:
    store = BatchStore(tmp_path, 10**6)
    file = store.add(1, "in", b"x", PLENTY)
    batches: list[Batch] = [batch_of(1, file.id, number, created_at=number, expires_at=2**40) for number in range(9)]
    for one in batches:
        store.index.add_batch(one, PLENTY)
    last = batches[-1]
    last.become(status)
    store.index.save([last])
    assert last.id not in dict(store.index.turns(0.0, 4, 99))
    store.index.cancel(2, last.id)
    assert last.id not in dict(store.index.turns(0.0, 4, 99))
    store.index.cancel(1, last.id)
    assert dict(store.index.turns(0.0, 4, 99))[last.id]
    # And so does one whose window is over.
    assert len(store.index.turns(2.0**41, 4, 99)) == 9


def test_a_share_of_a_limit_waits_for_its_share_alone() -> None:
    window = Window(10, 0, 8, 0.5)
    assert window.fits(1)
    assert not window.fits(1, 0.8)
    assert window.wait_s(1, 0.8) == pytest.approx(60.0 * (0.5 + 1.0 - 7 / 8))
    # What is more than the share is let in where nobody else is there.
    assert Window(10, 0, 0, 0.5).fits(9, 0.8)


def test_quotas_are_keys_of_the_fleet_file() -> None:
    quotas = {"max_files_per_key", "max_file_gib_per_key", "max_batches_per_key", "max_batch_lines", "batch_keep_days"}
    assert quotas <= {field.name for field in msgspec.structs.fields(Serving)}
