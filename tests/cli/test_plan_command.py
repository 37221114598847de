"""`crosstie plan` as a user meets it: the answer, its JSON, its files, and one line for every mistake."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command, Outcome
from tests.needs import one_in
from tests.small_workload import ALLOWED, Change, constrained, small, tables

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.decide.plan.market import PLANNED_BY
from crosstie.decide.plan.plan import plan

pytestmark = pytest.mark.usefixtures("planned_once")
TTFT = "ttft_ms = { p95 = 1000 }"
# Half the candidates, for tests that ask something else of a plan.
ONE_FORMAT = tables('[models."llama-3.1-8b"]\nprecisions = ["fp8"]')


@pytest.fixture
def quick_plan(crosstie: Command) -> Command:
    """`crosstie plan FILE --quick` with these options."""
    return lambda file, *options: crosstie("plan", str(file), "--quick", *options)


@pytest.fixture
def quick_document(quick_plan: Command) -> Callable[..., Any]:
    """What it says as JSON, of a fleet."""

    def document(file: str | Path, *options: str) -> Any:
        got = quick_plan(file, *options, "--json")
        assert got.status == 0, got.err
        return json.loads(got.out)

    return document


def one_line(got: Outcome, *words: str) -> None:
    """Status 2, nothing but one line, and these words in it."""
    assert (got.status, got.out) == (2, "")
    assert got.err.startswith("crosstie: ")
    assert got.err.count("\n") == 1
    for word in words:
        assert word in got.err


def test_the_answer_comes_first(crosstie: Command, tmp_path: Path) -> None:
    got = crosstie("plan", str(small(tmp_path)))
    assert got.status == 0
    lines = got.out.splitlines()
    assert lines[0] == "small: 1 request class, 5 requests/s at the peak"
    assert lines[1].startswith("Cheapest fleet: 1 mi300x, $2.59 an hour ($1,891 a month")
    assert lines[2].split() == ["pool", "model", "replicas", "replica", "$/h", "util"]
    for part in ("Alternatives", "What would change it", "- NVIDIA alone: 1 h200"):
        assert part in got.out
    assert lines[-1].startswith("-v for routing")
    assert got.err == ""


@pytest.mark.slow
def test_a_fleet_that_no_simulation_confirms_is_no_answer(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown and written as the one that comes nearest; scripts that buy by the exit status do not."""
    monkeypatch.setattr("crosstie.decide.plan.confirm.Confirming.confirmed", lambda *args, **options: None)
    # Anew: what is planned once is for all tests.
    monkeypatch.setattr("crosstie.cli.plan.plan", plan)
    file = small(tmp_path)
    got = crosstie("plan", str(file), "--json", "--fleet", str(tmp_path / "fleet.toml"))
    assert got.status == 1
    made = json.loads(got.out)
    assert (made["feasible"], made["targets_hold"], made["confirmed"]) == (True, False, None)
    assert (tmp_path / "fleet.toml").exists()
    quick = crosstie("plan", str(file), "--json", "--quick")
    assert (quick.status, json.loads(quick.out)["targets_hold"]) == (0, None)


def test_what_the_answer_leaves_out_is_there_on_request(quick_plan: Command, tmp_path: Path) -> None:
    got = quick_plan(small(tmp_path), "-v").out
    for part in ("Routing", "Cost by class", "80% intervals", "prices on-demand: mi300x", "limited by"):
        assert part in got
    assert "-v for" not in got


KEYS = {"confirmed", "targets_hold", "target_prices", "worth_measuring", "fleet_file", "sureness", "passed_over_unmeasured", "will_not_run", "mixture", "lighter_formats", "together", "apart", "apart_looked_at", "guide",
    "format", "made", "calibration", "feasible", "workload", "prices", "price_kinds", "left_out", "replicas_considered", "obstacles",
    "fleet", "shared", "single_vendor", "runner_up", "flips", "prompt_lengths", "years", "simulated", "by_estimates", "too_dear_to_be_sure",
    "assumptions", "reckoned", "memory", "sure_of_prices", "binding_limits", "cheaper_but_less_simple", "closed_form_usd_per_hour", "with_unmeasured_stacks",
}  # fmt: skip
FLEET = {
    "usd_per_hour", "uncertainty", "usd_per_month", "usd_over_horizon", "watts", "gpus", "on_hand", "to_be_had", "optimality_gap",
    "usd_per_million_tokens", "by_class", "pools", "speculation", "power",
}  # fmt: skip
POOL = {
    "usd_per_gb_month_of_memory", "usd_per_gb_month_of_cache","apart", "preflight", "release", "measured",
    "name", "model", "accelerator", "vendor", "parallelism", "precision", "kv_format", "stack", "replicas", "gpus",
    "usd_per_gpu_hour", "usd_per_hour", "utilisation", "limited_by", "in_flight_a_replica", "most_in_flight_a_replica",
    "estimate", "carries",
}  # fmt: skip


def test_the_answer_as_json(crosstie: Command, tmp_path: Path) -> None:
    got = json.loads(crosstie("plan", str(small(tmp_path)), "--json").out)
    assert set(got) == KEYS
    assert set(got["fleet"]) == FLEET
    assert (got["format"], got["feasible"], got["obstacles"]) == ("crosstie plan 1", True, [])
    assert set(got["calibration"]) == {"by", "date", "digest"}
    (pool,) = got["fleet"]["pools"]
    assert set(pool) == POOL
    assert (pool["accelerator"], pool["vendor"], pool["gpus"]) == ("mi300x", "AMD", 1)
    assert got["fleet"]["usd_per_hour"] == pytest.approx(pool["usd_per_hour"])
    assert sum(one["share"] for one in pool["carries"]) == pytest.approx(1.0)
    assert sum(one["usd_per_hour"] for one in pool["carries"]) == pytest.approx(pool["usd_per_hour"])
    assert set(got["prices"]) == {"mi300x", "h200"}
    assert set(got["prices"]["h200"]) == {
        "accelerator", "usd", "low", "high", "kind", "prices", "provider", "date", "discount", "sellers",
    }  # fmt: skip
    assert [year["year"] for year in got["years"]] == [1, 2, 3]
    assert got["workload"]["classes"][0]["ttft"] == {"seconds": 1.0, "percentile": 0.95}


def test_no_fleet_will_do(crosstie: Command, quick_plan: Command, tmp_path: Path) -> None:
    file = str(small(tmp_path, (TTFT, "ttft_ms = { p95 = 1 }")))
    target = tmp_path / "fleet.toml"
    target.write_text("the fleet of last week")
    got = quick_plan(file, "--fleet", str(target), "--save", str(tmp_path / "plan.json"))
    assert got.status == 1
    assert "No fleet will do." in got.out
    assert "- class 'chat' ttft_ms: p95 = 1 would have to be p95 = " in got.out
    assert f"{target} not written: there is no fleet" in got.err
    assert target.read_text() == "the fleet of last week"
    # The plan is kept all the same, and holds.
    assert crosstie("plan", "--watch", str(tmp_path / "plan.json")).status == 0
    as_json = quick_plan(file, "--json")
    document = json.loads(as_json.out)
    assert as_json.status == 1
    assert (document["feasible"], document["fleet"]) == (False, None)
    assert set(document["obstacles"][0]) == {"key", "now", "needs", "why", "alone"}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("budget_usd_per_month = 0\nat_most = { mi300x = 0 }", "- constraints.budget_usd_per_month: 0 would have to be 3,300;"),
        ("at_most = { mi300x = 0, h200 = 0 }", "- constraints.at_most: mi300x = 0 would have to be mi300x = 1;"),
        ("power_kw = 0", "- constraints.power_kw: 0 would have to be 1.4;"),
        ("at_most = { h200 = 0 }\nvendor_share = { NVIDIA = 0.2 }", "Any one of these would be enough:"),
        ("budget_usd_per_month = 1\npower_kw = 0.1", "several limits together"),
    ],
)  # fmt: skip
def test_limits_in_the_way(quick_plan: Command, tmp_path: Path, limits: str, words: str) -> None:
    got = quick_plan(small(tmp_path, constrained(limits)))
    assert got.status == 1
    assert words in got.out


def test_targets_that_both_are_in_the_way(quick_plan: Command, tmp_path: Path) -> None:
    got = quick_plan(small(tmp_path, (TTFT, "ttft_ms = { p95 = 1 }"), ("{ p90 = 50 }", "{ p90 = 0.5 }"), ONE_FORMAT))
    assert got.status == 1
    assert "All of these are in the way:" in got.out
    assert got.out.count("\n- class 'chat'") == 2


@pytest.mark.parametrize("name", one_in(2, ["чат 🚂", "chat", "Über_uns 2.0", "x" * 60]))
def test_the_fleet_file_reads_back(quick_plan: Command, catalog: Catalog, tmp_path: Path, name: str) -> None:
    target = tmp_path / "fleet.toml"
    got = quick_plan(
        small(tmp_path, ('name = "chat"', f'name = "{name}"'), ONE_FORMAT), "--fleet", str(target), "--json"
    )
    assert got.status == 0
    assert got.err == f"fleet written to {target}\n"
    fleet, document = read_fleet(catalog, target), json.loads(got.out)
    (pool,), (planned,) = fleet.pools, document["fleet"]["pools"]
    assert (pool.name, pool.replicas, pool.gpus) == (planned["name"], planned["replicas"], planned["gpus"])
    assert fleet.usd_per_hour == pytest.approx(document["fleet"]["usd_per_hour"], rel=1e-5)
    assert [one.name for one in fleet.classes] == [name]
    assert sum(route.share for route in fleet.classes[0].routes) == pytest.approx(1.0)
    assert pool.max_context >= 1200
    assert fleet.planned == document["made"]


def test_prices_of_ones_own(quick_plan: Command, quick_document: Callable[..., Any], tmp_path: Path) -> None:
    file = str(small(tmp_path, ONE_FORMAT))
    dear = quick_document(file, "--price", "MI300X=5.5")
    assert dear["fleet"]["gpus"] == {"h200": 1}
    assert (dear["prices"]["mi300x"]["usd"], dear["prices"]["mi300x"]["kind"]) == (5.5, "given")
    discounts = ("--price", "mi300x=5.5", "--discount", "amd=50%", "--discount", "h200=0.1")
    cheap = quick_document(file, *discounts)
    assert cheap["fleet"]["gpus"] == {"mi300x": 1}
    assert (cheap["prices"]["mi300x"]["usd"], cheap["prices"]["mi300x"]["discount"]) == (2.75, 0.5)
    assert cheap["prices"]["h200"]["usd"] == pytest.approx(0.9 * dear["prices"]["h200"]["usd"])
    assert "mi300x $2.75 (given, 50% off)" in quick_plan(file, *discounts, "-v").out


def test_the_command_line_goes_before_the_file(quick_document: Callable[..., Any], tmp_path: Path) -> None:
    prices = tables("[prices]\nkind = 'spot'\nusd_per_gpu_hour = { mi300x = 9 }\ndiscount = { AMD = 0.5 }")
    file = str(small(tmp_path, prices, ONE_FORMAT))
    assert quick_document(file)["prices"]["mi300x"]["usd"] == 4.5
    got = quick_document(file, "--price", "mi300x=2", "--discount", "AMD=0%", "--prices", "modelled-3-years")
    assert got["prices"]["mi300x"]["usd"] == 2
    assert got["prices"]["h200"]["kind"] == "modelled-3-years"


def test_only_these_accelerators(quick_document: Callable[..., Any], tmp_path: Path) -> None:
    got = quick_document(str(small(tmp_path, ONE_FORMAT)), "--on", "H200,b200,h200")
    assert set(got["prices"]) == {"h200", "b200"}
    assert set(got["single_vendor"]) == {"NVIDIA"}


@pytest.mark.parametrize("kind", one_in(5, PLANNED_BY))
def test_every_kind_of_price_works_or_says_what_is_missing(
    quick_plan: Command, quick_document: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    """One kind for all, whichever it is: what has no such price is left out and named."""
    file = str(small(tmp_path, ONE_FORMAT))
    document = quick_document(file, "--prices", kind, "--on", "mi300x,h200,rtx-4090", "--price", "rtx-4090=1")
    assert document["price_kinds"] == [kind]
    assert set(document["prices"]) | set(document["left_out"]) == {"mi300x", "h200", "rtx-4090"}
    assert {price["kind"] for price in document["prices"].values()} <= {kind, "given"}
    for name, reason in document["left_out"].items():
        assert reason["why"] == f"no price of kind {kind}"
        one_line(
            quick_plan(file, "--prices", kind, "--on", name),
            f"has a price of kind {kind}; give one with",
        )


@pytest.mark.slow
def test_a_second_kind_stands_in_and_is_marked(quick_plan: Command, tmp_path: Path) -> None:
    file = str(small(tmp_path, ONE_FORMAT))
    alone = quick_plan(file, "--on", "mi325x,h200").out
    assert "left out, no on-demand price: mi325x (quoted $2.00)" in alone
    assert "1 h200" in alone
    marked = quick_plan(file, "--on", "mi325x,h200", "--prices", "on-demand,quoted").out
    assert "prices on-demand: mi325x $2.00 (quoted, Vultr, 2026-02)" in marked
    assert "left out" not in marked


@pytest.mark.slow
def test_buying_costs_what_owning_assumes(quick_document: Callable[..., Any], tmp_path: Path) -> None:
    file = str(small(tmp_path, ONE_FORMAT))
    full = quick_document(file, "--on", "mi300x", "--prices", "buy")["prices"]["mi300x"]
    half = quick_document(file, "--on", "mi300x", "--prices", "buy", "--discount", "AMD=50%")["prices"]["mi300x"]
    assert full["kind"] == "buy"
    # The discount is off the purchase, and running costs stay.
    assert 0.5 * full["usd"] < half["usd"] < full["usd"]


def test_what_is_on_hand_needs_a_price(quick_plan: Command, tmp_path: Path) -> None:
    limits = (ALLOWED, 'accelerators = ["mi300x", "rx-7900-xtx"]\ninventory = { rx-7900-xtx = 8 }\n')
    file = str(small(tmp_path, ONE_FORMAT, limits))
    one_line(quick_plan(file), "constraints.inventory.rx-7900-xtx", "--price rx-7900-xtx=USD")
    assert quick_plan(file, "--price", "rx-7900-xtx=0.3").status == 0


@pytest.mark.slow
def test_the_example_plans(crosstie: Command, tmp_path: Path) -> None:
    example = crosstie("plan", "--example")
    assert example.status == 0
    file = tmp_path / "mine.toml"
    file.write_text(example.out)
    got = crosstie("plan", str(file), "--on", "mi300x,h200")
    assert got.status == 0
    assert got.out.startswith("assistant: 4 request classes, 60 requests/s at the peak, growing 25% a year")


def test_traffic_may_shrink(quick_plan: Command, tmp_path: Path) -> None:
    file = small(tmp_path, ("requests_per_s = 5\n", "requests_per_s = 5\ngrowth_per_year = -0.3\n"), ONE_FORMAT)
    assert ", shrinking 30% a year" in quick_plan(file).out


FLAGS = [
    (("--price", "x"), "--price x: write NAME=VALUE"),
    (("--price", "mi300x="), "--price mi300x=: write NAME=VALUE"),
    (("--price", "mi300x=abc"), "--price mi300x=abc: 'abc' is not a number"),
    (("--price", "mi300x=nan"), "--price mi300x=nan: 'nan' is not a finite number"),
    (("--price", "mi300x=0"), "--price mi300x=0: a GPU-hour costs from 0.001"),
    (("--price", "mi999=1"), "--price mi999: unknown accelerator"),
    (("--price", "mi300x=1", "--price", "MI300X=2"), "--price: mi300x is given twice"),
    (("--discount", "AMD=120%"), "--discount AMD=120%: a discount is from 0% to 99%"),
    (("--discount", "AMD=100%"), "--discount AMD=100%: a discount is from 0% to 99%"),
    (("--discount", "AMD=-1%"), "--discount AMD=-1%"),
    (("--discount", "Intel=5%"), "--discount Intel: unknown accelerator"),
    (("--discount", "AMD=5%", "--discount", "amd=6%"), "--discount: AMD is given twice"),
    (("--on", "mi999"), "--on mi999: unknown accelerator"),
    (("--on", ","), "--on names no accelerator"),
    (("--prices", "barter"), "--prices: 'barter' is not one of"),
]


@pytest.mark.parametrize(("options", "words"), FLAGS, ids=[words for _, words in FLAGS])
def test_mistakes_on_the_command_line(crosstie: Command, tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    one_line(crosstie("plan", str(small(tmp_path)), *options), words)
    one_line(crosstie("plan", str(small(tmp_path)), *options, "--json"), words)


PLANLESS = [
    (tables("[prices]\nkind = 'barter'"), "prices.kind: 'barter' is not one of on-demand, reserved"),
    (
        constrained("vendors = ['amd']\nvendor_share = { nvidia = 0.2 }"),
        "constraints.vendor_share.NVIDIA: no accelerator of NVIDIA",
    ),
    (
        (ALLOWED, "accelerators = ['mi300x']\nvendors = ['NVIDIA']\n"),
        "constraints.vendors: nothing that may be used (mi300x) is of NVIDIA",
    ),
]


@pytest.mark.parametrize(("change", "words"), PLANLESS, ids=[words for _, words in PLANLESS])
def test_contradictions_name_file_and_key(quick_plan: Command, tmp_path: Path, change: Change, words: str) -> None:
    file = small(tmp_path, change)
    one_line(quick_plan(file), f"{file}: {words}")


def test_workloads_that_are_none(crosstie: Command, tmp_path: Path) -> None:
    one_line(crosstie("plan"), "name one workload file")
    one_line(crosstie("plan", "a", "b"), "name one workload file")
    one_line(crosstie("plan", str(tmp_path)), f"{tmp_path}: is a folder")
    one_line(crosstie("plan", str(tmp_path / "none.toml")), "no such workload file")


@pytest.mark.parametrize("option", ["--fleet", "--save", "--plot"])
def test_outputs_that_cannot_be_written(crosstie: Command, tmp_path: Path, option: str) -> None:
    """Told before anything is planned or written; what is no plain file is not replaced by one."""
    file = str(small(tmp_path))
    (tmp_path / "folder.svg").mkdir()
    os.mkfifo(tmp_path / "pipe.svg")
    before = sorted(tmp_path.rglob("*"))
    one_line(crosstie("plan", file, option, str(tmp_path / "none" / "x.svg")), f"{option} ", "there is no folder")
    one_line(crosstie("plan", file, option, str(tmp_path / "folder.svg")), f"{option} ", "is a folder")
    one_line(crosstie("plan", file, option, str(tmp_path / "pipe.svg")), f"{option} ", "is no plain file")
    one_line(crosstie("plan", file, option, file), f"{option} {file}: is the workload already")
    one_line(crosstie("plan", file, option, "x" * 300 + ".svg"), f"{option} ", "File name too long")
    assert sorted(tmp_path.rglob("*")) == before


def test_one_bad_output_keeps_the_others_from_being_written(crosstie: Command, tmp_path: Path) -> None:
    file, fleet, saved = str(small(tmp_path)), tmp_path / "fleet.toml", tmp_path / "plan.json"
    one_line(crosstie("plan", file, "--fleet", str(fleet), "--save", str(tmp_path / "none" / "x")), "--save ")
    one_line(crosstie("plan", file, "--fleet", str(fleet), "--plot", str(tmp_path / "x.gif")), "--plot ", ".svg")
    one_line(crosstie("plan", file, "--save", str(saved), "--fleet", str(saved)), "is what --fleet writes already")
    assert not fleet.exists()
    assert not saved.exists()


def test_a_disk_that_fills_leaves_nothing_half_written(
    quick_plan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been written by then is said, so that nobody takes it for all."""
    file, fleet, saved = str(small(tmp_path)), tmp_path / "fleet.toml", tmp_path / "plan.json"
    replace = os.replace

    def full(source: str, target: Path) -> None:
        if target == fleet:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    got = quick_plan(file, "--fleet", str(fleet), "--save", str(saved))
    assert got.status == 2
    assert got.err.splitlines() == [
        f"plan written to {saved}", f"crosstie: {fleet}: cannot be written: No space left on device",
    ]  # fmt: skip
    assert saved.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "small.toml"]


@pytest.mark.slow
def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """The files are written all the same."""
    saved = tmp_path / "plan.json"
    command = f'"{sys.executable}" -m crosstie plan "{small(tmp_path)}" --quick --save "{saved}" | true; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "CROSSTIE_CATALOG": str(tmp_path / "none")}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert json.loads(saved.read_text())["feasible"]


def test_the_picture_of_a_plan(quick_plan: Command, tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    got = quick_plan(small(tmp_path), "--plot", str(target))
    assert got.status == 0
    drawn = target.read_text()
    assert "<svg" in drawn
    assert f"plot written to {target}" in got.err


def test_quick_says_that_nothing_was_confirmed(crosstie: Command, quick_plan: Command, tmp_path: Path) -> None:
    file = str(small(tmp_path))
    assert "not confirmed by simulation" in quick_plan(file).out
    assert "Simulated: confirmed by" in crosstie("plan", file).out
