"""What is counted of requests, and what the gateway does without its store."""

import sqlite3
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tests.run.gateway.fakes import CATALOG, MODEL, fakes, fleet_of, pool_of, until
from tests.run.gateway.keyed import OTHER, keyed, on_loop

from crosstie.core.errors import BadInput, CrosstieError, StoreFailed
from crosstie.core.fleet import SharedState
from crosstie.core.usage import total
from crosstie_gateway.ledger.usage import UsageBatch
from crosstie_gateway.service import ledger as ledger_module
from crosstie_gateway.service.ledger import Ledger
from crosstie_gateway.service.process import GatewayProcess


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
