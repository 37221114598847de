"""What the page looks back on: counted by pool and class in slots of time, added up over workers, told as percentiles,
with a few decisions of each slot."""

import json
import random
from math import exp

import numpy as np
import pytest
from tests.run.gateway.fakes import fakes
from tests.run.service.test_admin import two_pools
from tests.run.service.test_dashboard import OPERATOR, PINNED, own_keys, shown

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service import history
from crosstie_gateway.service.history import (
    BINS,
    COLUMNS,
    GAUGES,
    LONG_S,
    ROWS,
    SHORT_S,
    SeriesRows,
    history_document,
    last_minute,
    percentiles,
    seen_times,
)
from crosstie_gateway.service.worker_link import HistoryAnswer, HistoryRequest

__all__ = ["own_keys"]
NOON = 1_800_000_000 // LONG_S * LONG_S


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.at = float(NOON)
        for module in ("history", "admin_view", "dashboard"):
            monkeypatch.setattr(f"crosstie_gateway.service.{module}.time", lambda: self.at)


def _record(pool: str, name: str, *, ttft_s: float = 0.4, how: str = "served") -> RequestRecord:
    record = RequestRecord(b"one", "/v1/chat/completions", float(NOON), how, 200)
    record.pool, record.class_name, record.ttft_s, record.streamed = pool, name, ttft_s, True
    record.input_tokens, record.output_tokens, record.cached_tokens = 1000, 11, 250
    record.seconds, record.charged_usd = ttft_s + 0.2, 0.01
    return record


@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.95])
def test_a_percentile_is_told_from_bins_within_a_few_percent(percentile: float) -> None:
    spread = random.Random(7)
    values = [exp(spread.gauss(-1.0, 0.8)) for _ in range(5000)]
    bins = np.zeros((2, BINS), np.float32)
    for value in values:
        bins[0, history._bin(value)] += 1
    told, nothing = percentiles(bins, percentile)
    assert told == pytest.approx(float(np.quantile(values, percentile)), rel=0.07)
    assert nothing is None


def test_slots_end_by_the_clock_and_older_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            kept = gateway.door.admin.history

            def requests(width_s: int, count: int) -> list[float]:
                end = int(clock.at) // width_s
                found = {(one.pool, one.class_name): one.rows for one in kept.requests(width_s, end, count)}
                rows = np.frombuffer(found.get(("one", "chat"), b""), np.float32).reshape(-1, COLUMNS)
                return [float(value) for value in rows[:, 0]]

            for late in range(3):
                for _ in range(late + 1):
                    kept._on_record(_record("one", "chat"))
                clock.at += SHORT_S
                kept.turn()
            assert requests(SHORT_S, 3) == [1.0, 2.0, 3.0]
            # Slots in which nothing came to an end are empty, not left out; nor is a long one told before its end.
            clock.at += 2 * SHORT_S
            kept.turn()
            assert requests(SHORT_S, 5) == [1.0, 2.0, 3.0, 0.0, 0.0]
            assert requests(LONG_S, 1) == []
            clock.at = NOON + LONG_S
            kept.turn()
            assert requests(LONG_S, 1) == [6.0]
            # The process stood still for longer than the short ring reaches.
            clock.at += ROWS * SHORT_S
            kept.turn()
            assert requests(SHORT_S, ROWS) == []
            assert sum(requests(LONG_S, ROWS)) == 6.0
            clock.at += ROWS * LONG_S
            kept.turn()
            assert requests(LONG_S, ROWS) == []

    run_on_loop(scenario())


def test_memory_does_not_grow_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_SERIES", 4)

    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            kept = gateway.door.admin.history
            for n in range(50):
                kept._on_record(_record("one", f"class-{n}"))
            clock.at += SHORT_S
            kept.turn()
            found = {one.class_name: one.rows for one in kept.requests(SHORT_S, int(clock.at) // SHORT_S, 1)}
            assert len(found) == 5
            assert np.frombuffer(found[""], np.float32)[0] == 46.0

    run_on_loop(scenario())


def _answer(requests: float, in_flight: float) -> HistoryAnswer:
    counts = np.zeros((1, COLUMNS), np.float32)
    counts[0, :3] = (requests, 0.0, 100.0 * requests)
    gauges = np.array([[in_flight, 2.0, 0.5, 1.0]], np.float32)
    assert gauges.shape[1] == len(GAUGES)
    return HistoryAnswer([SeriesRows("one", "", counts.tobytes())], [SeriesRows("one", "", gauges.tobytes())])


def test_workers_add_up_and_the_fleet_is_paid_once() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            first, then = _answer(1.0, 3.0), _answer(4.0, 5.0)
            said = last_minute(first.requests + then.requests, first.pools + then.pools, gateway.running.gateway)
            (series,), (pool,) = said["series"], said["pools"]
            assert (series["requests"], series["input_tokens"]) == (5.0, 500.0)
            assert (pool["in_flight"], pool["queued"], pool["usd"]) == (8.0, 4.0, 0.5)
            # One look of each worker: the gateway has been there for a single slot.
            assert said["seconds"] == SHORT_S * gateway.running.gateway.speed

    run_on_loop(scenario())


def test_what_was_served_is_looked_back_on_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            for path in ("history?window=5m", "moment?from=0&to=1"):
                assert (await visitor.ask("GET", f"/crosstie/{path}")).status == 401
            await visitor.sign_in(OPERATOR)
            for n in range(6):
                await gateway.running.ask(stream=True, headers=PINNED | {"x-request-id": f"r-{n}"})
            assert not gateway.running.gateway.explaining
            clock.at += SHORT_S
            said = json.loads((await visitor.ask("GET", "/crosstie/history?window=5m")).body)
            (series,) = said["series"]
            assert (series["pool"], series["requests"][-1], sum(series["requests"])) == ("one", 6.0, 6.0)
            assert series["ttft_s"][-1] > 0.0
            assert series["ttft_s"][:-1] == [None] * (said["points"] - 1)
            assert said["ends_at"] == clock.at
            assert said["minute"]["series"][0]["requests"] == 6.0
            assert {pool["pool"]: pool["usd"][-1] > 0.0 for pool in said["pools"]} == {
                "": False, "one": True, "two": True,
            }  # fmt: skip
            moment = f"/crosstie/moment?from={clock.at - SHORT_S}&to={clock.at}"
            rows = json.loads((await visitor.ask("GET", moment)).body)["decisions"]
            # The first few, with every pool as it was scored then, and with what came of them.
            assert [row["request_id"] for row in rows] == ["r-0", "r-1", "r-2", "r-3"]
            assert all({one["pool"] for one in row["considered"]} == {"one", "two"} for row in rows)
            assert all(row["ended"]["how"] == "served" and row["ended"]["ttft_s"] > 0.0 for row in rows)
            later = f"/crosstie/moment?from={clock.at}&to={clock.at + SHORT_S}"
            assert json.loads((await visitor.ask("GET", later)).body)["decisions"] == []
            await gateway.running.ask(headers={"x-request-id": "next"})
            rows = json.loads((await visitor.ask("GET", later)).body)["decisions"]
            assert [row["request_id"] for row in rows] == ["next"]
            for wrong in ("history?window=1y", "moment?from=x&to=1", "moment?from=nan&to=1"):
                assert (await visitor.ask("GET", f"/crosstie/{wrong}")).status == 400

    run_on_loop(scenario())


def test_a_worker_that_has_not_looked_at_the_clock_does_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock = Clock(monkeypatch)
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            admin = gateway.door.admin
            admin.history._on_record(_record("one", "chat"))
            clock.at += SHORT_S
            answer = admin._look_back(HistoryRequest(SHORT_S, int(clock.at) // SHORT_S, 60))
            document = history_document(
                answer.requests, answer.pools, "5m", int(clock.at) // SHORT_S, gateway.running.gateway
            )
            assert sum(document["series"][0]["requests"]) == 1.0

    run_on_loop(scenario())


def test_times_are_the_fleets_and_only_of_what_was_served() -> None:
    ttft_s, tpot_s = seen_times(_record("one", "chat"), 10.0)
    assert ttft_s == pytest.approx(4.0)
    assert tpot_s == pytest.approx(0.2)
    assert seen_times(_record("one", "chat", how="cut"), 10.0) == (None, None)


def test_the_address_itself_says_where_things_are() -> None:
    async def scenario() -> None:
        async with fakes(2) as made, shown(two_pools(made)) as gateway:
            visitor = gateway.visitor()
            answer = await visitor.ask("GET", "/")
            assert json.loads(answer.body)["dashboard"] == "/crosstie/"
            by_browser = await visitor.ask("GET", "/", headers=[(b"accept", b"text/html,*/*;q=0.8")])
            assert (by_browser.status, by_browser.header(b"location")) == (303, b"/crosstie/")
            gateway.running.gateway.context.own_pages = None
            assert "--dashboard" in json.loads((await visitor.ask("GET", "/")).body)["dashboard"]

    run_on_loop(scenario())
