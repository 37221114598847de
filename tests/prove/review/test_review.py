"""Plans against recordings: what agrees is told as that, and each kind of damage as what it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.conftest import Command
from tests.prove.review.recordings import Line, each, served, thinned, written

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import Catalog
from crosstie.core.estimate import SERVING
from crosstie.core.histogram import exposition
from crosstie.decide.plan.subject import read_subject
from crosstie.perf.estimate import estimate
from crosstie.prove.review.again import _moved, _scaled
from crosstie.route.ask import Ask
from crosstie.route.build import deployment_of
from crosstie.route.live import ServedRequest
from crosstie_gateway.gateway.metrics import Metrics
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.usage import UsageBatch, UsageCounts

CATALOG = Catalog([])
DAY = "2026-11-16"


@pytest.fixture
def reviewed(crosstie: Command, made: Path, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    def review(lines: list[Line], *options: str) -> tuple[int, dict[str, Any]]:
        file = written(tmp_path / "trace.jsonl", lines)
        got = crosstie("review", str(made), str(file), "--json", "--quick", "--today", DAY, *options)
        assert got.status in (0, 1), got.err
        return got.status, json.loads(got.out)

    return review


def verdicts(said: dict[str, Any], check: str) -> dict[str, str]:
    return {f"{one['of']} {one['what']}": one["verdict"] for one in said["figures"] if one["check"] == check}


def beyond(said: dict[str, Any]) -> set[str]:
    return {one["check"] for one in said["figures"] if one["verdict"] == "beyond"}


Reviewed = Callable[..., tuple[int, dict[str, Any]]]


def test_a_fleet_that_serves_as_planned_is_told_as_that(reviewed: Reviewed, lines: list[Line]) -> None:
    status, said = reviewed(lines)
    assert (status, said["holds"], said["age_days"]) == (0, True, 90)
    assert {one["verdict"] for one in said["figures"]} == {"holds", "told"}
    checks = {one["check"] for one in said["figures"]} - {None}
    assert checks == {"traffic", "mix", "lengths", "throughput", "latency", "targets", "cost"}
    (speed,) = [one for one in said["figures"] if one["check"] == "throughput"]
    assert abs(speed["difference"]) < 0.02
    # Nothing is learnt from chance.
    assert [one["what"] for one in said["again"]["steps"]] == ["as saved", "with today's prices and catalog"]
    assert said["again"]["learnt"][0].startswith("nothing was seen that is surely other than planned")
    assert all(one["usd_per_hour"] for one in said["again"]["steps"])


def slowed(made: Path, by: float) -> Calibration:
    """Everything on the plan's accelerators takes `by` times as long."""
    shipped = CATALOG.calibration
    (pool,) = read_subject(CATALOG, made).fleet.pools
    part = tuple(_moved(name, -np.log(by)) if name in SERVING else 0.0 for name in shipped.constants)
    scope = pool.accelerator or ""
    before = shipped.scopes.get(scope, (0.0,) * len(part))
    added = tuple(a + b for a, b in zip(before, part, strict=True))
    return msgspec.structs.replace(shipped, scopes={**shipped.scopes, scope: added})


def projected(calibration: Calibration, made: Path, speed: dict[str, Any]) -> float:
    (pool,) = read_subject(CATALOG, made).fleet.pools
    one = deployment_of(Catalog([], calibration=calibration), pool)
    assert one is not None
    in_flight = round(float(speed["note"].split()[0]))
    return estimate(one, concurrency=in_flight, input_tokens=1330, output_tokens=175).output_tokens_per_s


@pytest.mark.slow
def test_a_calibration_that_learnt_a_speed_has_it(made: Path) -> None:
    shipped = CATALOG
    (pool,) = read_subject(shipped, made).fleet.pools
    for ratio in (0.6, 0.9, 1.1):
        found = _scaled(shipped, shipped.calibration, pool, ratio, 40, (1330, 175))
        assert found is not None
        speed = {"note": "40 in flight"}
        now = projected(found, made, speed) / projected(shipped.calibration, made, speed)
        assert now == pytest.approx(ratio, rel=0.01)


@pytest.mark.slow
def test_a_slow_fleet_is_told_as_slow_by_as_much_as_it_is(reviewed: Reviewed, made: Path) -> None:
    lines = served(Catalog([], calibration=slowed(made, 1.25)), made, 600)
    status, said = reviewed(lines)
    assert status == 1
    assert beyond(said) <= {"throughput", "latency"}
    (speed,) = [one for one in said["figures"] if one["check"] == "throughput"]
    # As much less as the model itself says of such a fleet at as many in flight, though all that came was served.
    assert speed["verdict"] == "beyond"
    true = projected(slowed(made, 1.25), made, speed) / projected(CATALOG.calibration, made, speed)
    assert true < 0.9
    assert 1.0 + speed["difference"] == pytest.approx(true, abs=0.015)
    assert set(verdicts(said, "traffic").values()) == set(verdicts(said, "lengths").values()) == {"holds"}
    last = said["again"]["steps"][-1]
    assert last["what"] == "with the speed seen"
    assert any("slower than estimated" in one for one in said["again"]["learnt"])
    # Who can live with that says so.
    status, said = reviewed(lines, "--no-plan", "--within", "throughput=40%", "--within", "latency=500%")
    assert (status, said["again"]) == (0, None)


@pytest.mark.slow
def test_longer_prompts_are_told_as_that_and_the_fleet_is_not_blamed(
    reviewed: Reviewed, made: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    longer = json.loads(json.dumps(content))
    for one in longer["workload"]["classes"][0]["slices"]:
        one["sample"] = [[round(1.5 * inputs), outputs] for inputs, outputs in one["sample"]]
        one["input_tokens"] *= 1.5
    other = tmp_path / "longer.json"
    other.write_text(json.dumps(longer))
    status, said = reviewed(served(CATALOG, other, 600))
    assert status == 1
    steps = said["again"]["steps"]
    assert steps[-1]["what"] == "with the traffic seen"
    assert steps[-1]["usd_per_hour"] >= steps[0]["usd_per_hour"]
    assert verdicts(said, "lengths") == {
        "chat prompt tokens, mean": "beyond", "chat answer tokens, mean": "holds",
        "batch prompt tokens, mean": "holds", "batch answer tokens, mean": "holds",
    }  # fmt: skip
    # It answers such prompts as its model does.
    assert set(verdicts(said, "throughput").values()) == set(verdicts(said, "latency").values()) == {"holds"}
    assert set(verdicts(said, "traffic").values()) == {"holds"}


def test_another_mix_is_told_as_that(reviewed: Reviewed, lines: list[Line]) -> None:
    chats = thinned([line for line in lines if line["class"] == "chat"], 0.3)
    mixed = sorted([*chats, *(line for line in lines if line["class"] == "batch")], key=lambda line: line["timestamp"])
    status, said = reviewed(mixed, "--no-plan")
    assert status == 1
    assert beyond(said) >= {"mix", "traffic"}
    assert verdicts(said, "traffic")["chat requests/s"] == "beyond"
    assert verdicts(said, "traffic")["batch requests/s"] == "holds"
    assert set(verdicts(said, "lengths").values()) == {"holds"}


def test_a_class_that_the_plan_has_not_is_named(reviewed: Reviewed, lines: list[Line]) -> None:
    status, said = reviewed(
        [{**line, "class": "agents"} if line["class"] == "batch" else line for line in lines], "--no-plan"
    )
    assert status == 1
    assert verdicts(said, "traffic")["agents requests/s"] == "beyond"
    assert any("classes that the plan has not: agents" in note for note in said["notes"])


@pytest.mark.slow
def test_few_requests_are_said_to_be_few_and_prove_nothing(reviewed: Reviewed, lines: list[Line]) -> None:
    status, said = reviewed(lines[:15])
    assert status == 0
    assert any("15 requests are few" in note for note in said["notes"])
    assert any("too few to plan by" in one for one in said["again"]["learnt"])
    rate = next(one for one in said["figures"] if one["check"] == "traffic")
    low, high = rate["interval"]
    assert rate["few"]
    assert high - low > 0.5 * rate["seen"]


def test_growth_is_expected_by_the_day_of_the_review(
    reviewed: Reviewed, crosstie: Command, content: dict[str, Any], lines: list[Line], tmp_path: Path
) -> None:
    grown = {**content, "workload": {**content["workload"], "growth_per_year": 1.0}}
    plan = tmp_path / "grown.json"
    plan.write_text(json.dumps(grown))
    file = written(tmp_path / "trace.jsonl", lines)
    got = crosstie("review", str(plan), str(file), "--json", "--no-plan", "--today", "2027-08-18")
    rate = next(one for one in json.loads(got.out)["figures"] if one["check"] == "traffic")
    assert rate["predicted"] == pytest.approx(30.0, rel=0.01)


def test_hits_that_engines_tell_are_held_against_the_plan(reviewed: Reviewed, lines: list[Line]) -> None:
    cached = each(lines, lambda line: {**line, "cached_length": line["input_length"] // 2})
    _, said = reviewed(cached, "--no-plan")
    hits = {one["of"]: one for one in said["figures"] if one["check"] == "hit-rate"}
    assert hits["chat"]["seen"] == pytest.approx(0.5, abs=0.01)
    # More than was planned with is no fault.
    assert (hits["chat"]["predicted"], hits["chat"]["verdict"]) == (0.0, "holds")


def test_a_hit_rate_that_does_not_come_is_beyond(
    reviewed: Reviewed, crosstie: Command, content: dict[str, Any], lines: list[Line], tmp_path: Path
) -> None:
    hoped = json.loads(json.dumps(content))
    for pool in hoped["fleet"]["pools"]:
        for one in pool["carries"]:
            one["hit_rate"] = 0.4
    plan = tmp_path / "hoped.json"
    plan.write_text(json.dumps(hoped))
    # Engines tell of some requests, so that the others had nothing.
    some = [{**line, "cached_length": 100} if row % 10 == 0 else line for row, line in enumerate(lines)]
    file = written(tmp_path / "trace.jsonl", some)
    said = json.loads(crosstie("review", str(plan), str(file), "--json", "--no-plan").out)
    assert set(verdicts(said, "hit-rate").values()) == {"beyond"}
    # Nobody tells: that is said, with what would.
    file = written(tmp_path / "trace.jsonl", lines)
    said = json.loads(crosstie("review", str(plan), str(file), "--json", "--no-plan").out)
    assert not verdicts(said, "hit-rate")
    assert any("--enable-prompt-tokens-details" in note for note in said["notes"])
    page = tmp_path / "engine.txt"
    page.write_text('vllm:prefix_cache_queries_total{engine="0"} 1000\nvllm:prefix_cache_hits_total{engine="0"} 390\n')
    got = crosstie("review", str(plan), str(file), "--json", "--no-plan", "--metrics", str(page))
    (one,) = [one for one in json.loads(got.out)["figures"] if one["check"] == "hit-rate"]
    assert (one["seen"], one["verdict"]) == (pytest.approx(0.39), "holds")


def page(lines: list[Line], factor: float = 1.0) -> str:
    """The gateway's own, of the same requests."""
    metrics = Metrics()
    for line in lines:
        record = RequestRecord(b"1", "/v1/chat/completions", 0.0, "served", 200)
        record.pool, record.model, record.class_name = line["pool"], line["model"], line["class"]
        record.input_tokens, record.output_tokens = line["input_length"], line["output_length"]
        wanted = (1.0, 0.05) if line["class"] == "chat" else (None, None)
        ask = Ask(model=line["model"], class_name=line["class"], input_tokens=1.0, output_tokens=1.0,
                  ttft_s=wanted[0], tpot_s=wanted[1])  # fmt: skip
        ttft_s, tpot_s = (line[name] / 1e3 * factor for name in ("ttft_ms", "tpot_ms"))
        metrics.observe(record, ask, ServedRequest(ttft_s, tpot_s, 1.0, 1, 0.0), 0.0)
        metrics.count_request(record)
    return metrics.page([])


def test_metrics_tell_targets_and_failures_where_no_latencies_were_recorded(
    reviewed: Reviewed, lines: list[Line], tmp_path: Path
) -> None:
    bare = each(lines, lambda line: {name: line[name] for name in line if name not in ("ttft_ms", "tpot_ms", "pool")})
    status, said = reviewed(bare, "--no-plan")
    assert status == 0
    assert not verdicts(said, "latency")
    assert any("the recording has no latencies" in note for note in said["notes"])
    (tmp_path / "metrics.txt").write_text(page(lines))
    status, said = reviewed(bare, "--no-plan", "--metrics", str(tmp_path / "metrics.txt"))
    assert status == 0
    kept = verdicts(said, "targets")
    assert set(kept) == {"chat TTFT within 1,000 ms", "chat TPOT within 50 ms"}
    assert verdicts(said, "failures") == {"None turned away or failed": "holds"}
    # Two gateways, or two workers' pages, are one.
    half = len(lines) // 2
    for name, part in (("one.txt", lines[:half]), ("two.txt", lines[half:])):
        (tmp_path / name).write_text(page(part))
    pages = [option for name in ("one.txt", "two.txt") for option in ("--metrics", str(tmp_path / name))]
    assert reviewed(bare, "--no-plan", *pages)[1]["figures"] == said["figures"]
    # Ten times as slow, the targets are missed.
    (tmp_path / "metrics.txt").write_text(page(lines, 10.0))
    status, said = reviewed(bare, "--no-plan", "--metrics", str(tmp_path / "metrics.txt"))
    assert status == 1
    assert verdicts(said, "targets")["chat TPOT within 50 ms"] == "beyond"


def test_requests_that_fail_are_beyond(reviewed: Reviewed, lines: list[Line], tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.requests["p", "m", "chat", "served", 200] = 900
    metrics.requests["p", "m", "chat", "refused", 429] = 80
    metrics.requests["p", "m", "chat", "client gone", 499] = 20
    (tmp_path / "metrics.txt").write_text(exposition(metrics._families()))
    status, said = reviewed(lines, "--no-plan", "--metrics", str(tmp_path / "metrics.txt"))
    assert status == 1
    (one,) = [one for one in said["figures"] if one["check"] == "failures"]
    assert (one["seen"], one["verdict"]) == (pytest.approx(0.08), "beyond")


def test_usage_tells_what_a_day_s_tokens_cost(
    reviewed: Reviewed, lines: list[Line], content: dict[str, Any], tmp_path: Path
) -> None:
    """At half of the tokens that were planned with, a million costs twice as much."""
    fleet = content["fleet"]
    predicted = fleet["usd_per_million_tokens"]["usd_per_million"]
    an_hour = fleet["usd_per_hour"] / predicted * 1e6 / 2
    store = open_store(str(tmp_path / "usage.db"), create=True)
    began = 1_762_000_000 // 86_400 * 86_400
    used = {
        (began + hour * 3600, 0, "m", "chat", "p", "served", ""): UsageCounts(
            100, 100, int(an_hour * 0.8), int(an_hour * 0.2), 1.5
        )
        for hour in range(48)
    }
    store.write(UsageBatch("here", 1, used))
    store.close()
    status, said = reviewed(lines, "--no-plan", "--store", str(tmp_path / "usage.db"))
    assert status == 1
    (cost,) = [one for one in said["figures"] if one["check"] == "cost"]
    assert cost["seen"] == pytest.approx(2 * predicted, rel=0.01)
    assert cost["verdict"] == "beyond"
    (charged,) = [one for one in said["figures"] if one["what"] == "$/M tokens, charged"]
    assert charged["seen"] == pytest.approx(1.5 / an_hour * 1e6, rel=0.01)


@pytest.mark.slow
def test_a_day_that_was_recorded_has_a_mean_and_a_busiest_hour(
    reviewed: Reviewed, content: dict[str, Any], lines: list[Line]
) -> None:
    """Twelve busy hours at twice the rate of twelve quiet ones."""
    chance = np.random.default_rng(1)
    hours = [(hour, 40 if hour < 12 else 20) for hour in range(24)]
    at = np.sort(np.concatenate([hour * 3600.0 + chance.uniform(0, 3600, count) for hour, count in hours]))
    day = [{**line, "timestamp": int(1e3 * when)} for line, when in zip((lines * 2)[: len(at)], at, strict=True)]
    _, said = reviewed(day)
    (mean,) = [one for one in said["figures"] if one["what"] == "mean over busiest hour"]
    assert 0.4 < mean["seen"] < 0.8
    assert any("mean of" in one for one in said["again"]["learnt"])
    assert not any("not a day" in note for note in said["notes"])


def test_the_files_of_one_recording_are_read_together(
    crosstie: Command, made: Path, lines: list[Line], tmp_path: Path
) -> None:
    whole = written(tmp_path / "whole.jsonl", lines)
    parts = [written(tmp_path / "trace.jsonl", lines[300:]), written(tmp_path / "trace.jsonl.1", lines[:300])]
    one, other = (
        json.loads(crosstie("review", str(made), *map(str, files), "--json", "--no-plan").out)
        for files in ([whole], parts)
    )
    assert one["figures"] == other["figures"]


def test_what_is_shown_begins_with_the_answer(crosstie: Command, made: Path, lines: list[Line], tmp_path: Path) -> None:
    file = written(tmp_path / "trace.jsonl", lines)
    got = crosstie("review", str(made), str(file), "--no-plan", "--today", DAY)
    first, second, *_ = got.out.splitlines()
    assert first.startswith("small: plan of 2026-08-18, 90 days old, against 600 requests over ")
    assert second.startswith("Production is as planned")


@pytest.mark.slow
def test_as_markdown_it_says_what_would_be_planned_now(
    crosstie: Command, made: Path, lines: list[Line], tmp_path: Path
) -> None:
    file = written(tmp_path / "trace.jsonl", lines)
    got = crosstie("review", str(made), str(file), "--quick", "--markdown", "--within", "lengths=0.1%", "-v")
    assert got.out.startswith("# small: plan against production")
    assert "| as saved |" in got.out


def test_bad_input_is_one_line(
    crosstie: Command, made: Path, content: dict[str, Any], lines: list[Line], tmp_path: Path
) -> None:
    good = written(tmp_path / "trace.jsonl", lines[:50])
    bare = written(tmp_path / "bare.jsonl", each(lines[:50], lambda line: {**line, "class": None}))
    foreign = written(tmp_path / "foreign.jsonl", each(lines[:50], lambda line: {**line, "class": "voice"}))
    at_once = written(tmp_path / "once.jsonl", each(lines[:5], lambda line: {**line, "timestamp": 7}))
    empty = written(tmp_path / "empty.jsonl", [])
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**content, "format": "crosstie plan 9"}))
    none = tmp_path / "none.json"
    none.write_text(json.dumps({**content, "fleet": None}))
    cut = tmp_path / "cut.json"
    fleet = {name: value for name, value in content["fleet"].items() if name != "pools"}
    cut.write_text(json.dumps({**content, "fleet": fleet}))
    pages = tmp_path / "pages.txt"
    pages.write_text("hello\n")
    for arguments, words in (
        ((made,), "name the recordings"),
        (
            (made, bare),
            "bare.jsonl: class: 50 of 50 requests say none, and the plan has chat, batch; --class NAME does",
        ),
        ((made, bare, "--class", "voice"), "--class voice: the plan has chat, batch"),
        ((made, foreign), "has voice, the plan chat, batch: it is of another fleet"),
        ((made, at_once), "has 5 requests at one moment"),
        ((made, empty), "empty.jsonl: is empty"),
        ((made, tmp_path / "gone.jsonl"), "gone.jsonl: cannot be read"),
        ((newer, good), "format: is 'crosstie plan 9'; this version reads 'crosstie plan 1'"),
        ((none, good), "none.json: fleet: there is none"),
        ((cut, good), "cut.json: is no saved plan"),
        ((good, good), "is no saved plan"),
        ((made, good, "--within", "speed=8%"), "--within speed: no such figure"),
        ((made, good, "--within", "cost"), "--within cost: write NAME=VALUE"),
        ((made, good, "--metrics", pages), "pages.txt: has no metric"),
        ((made, good, "--metrics", tmp_path / "gone.txt"), "gone.txt: cannot be read"),
        ((made, good, "--metrics", "http://127.0.0.1:1"), "--metrics http://127.0.0.1:1: cannot be asked"),
        ((made, good, "--today", "tomorrow"), "--today: 'tomorrow' is no day"),
        ((made, good, "--since", "2026-11-01"), "--since is of the usage in --store"),
        ((made, good, "--json", "--markdown"), "give one of them"),
        ((made, good, "--checklist"), "--checklist is of the plan alone"),
    ):
        got = crosstie("review", *map(str, arguments))
        assert (got.status, got.out) == (2, ""), arguments
        assert words in got.err, got.err
        assert got.err.count("\n") == 1


def test_requests_without_a_class_belong_to_the_one_that_is_named(
    crosstie: Command, made: Path, lines: list[Line], tmp_path: Path
) -> None:
    bare = written(tmp_path / "bare.jsonl", each(lines, lambda line: {**line, "class": None}))
    said = json.loads(crosstie("review", str(made), str(bare), "--class", "chat", "--no-plan", "--json").out)
    assert said["recorded"]["requests"] == 600
    rate = {one["of"]: one["seen"] for one in said["figures"] if one["check"] == "traffic"}
    assert rate["batch"] == 0.0 < rate["chat"]
