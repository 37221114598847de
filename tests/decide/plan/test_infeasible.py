"""Why no fleet will do: each limit is named with what it would have to be, and exactly that lets a fleet exist."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.small_workload import ALLOWED, Change, constrained, small, tables

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.workload import Constraints, Target, Workload
from crosstie.decide.plan.answer import NO_FLEET
from crosstie.decide.plan.infeasible import Obstacle, steps_up_to, two_digits
from crosstie.decide.plan.plan import Plan, plan as make_plan

TTFT, TPOT = "ttft_ms = { p95 = 1000 }\n", "tpot_ms = { p90 = 50 }\n"
LENGTHS = "input = 1000\noutput = 200\n"
SPREAD = "input = { median = 1500, p95 = 6000 }\noutput = { mean = 400, p95 = 1000 }\n"


@pytest.fixture(scope="module")
def calibrated() -> Catalog:
    """The slow end of estimates is only there with a calibration."""
    return Catalog([])


def relaxed(workload: Workload, obstacle: Obstacle, times: float = 1.0) -> Workload:
    """The workload with what the obstacle says would be needed, or so many times of it, and nothing else changed."""
    limits = workload.constraints
    if found := re.fullmatch(r"class '(.+)' (ttft|tpot)_ms", obstacle.key):
        percent, milliseconds = re.fullmatch(r"p([\d.]+) = (\S+)", obstacle.needs).groups()  # type: ignore[union-attr]
        target = Target(seconds=float(milliseconds) * times / 1e3, percentile=float(percent) / 100)
        classes = tuple(
            msgspec.structs.replace(one, **{found[2]: target}) if one.name == found[1] else one
            for one in workload.classes
        )
        return msgspec.structs.replace(workload, classes=classes)
    if obstacle.key == "constraints.at_most":
        needed = dict(one.split(" = ") for one in obstacle.needs.split(", "))
        return _limited(workload, at_most={**limits.at_most, **{name: int(n) for name, n in needed.items()}})
    figure = float(obstacle.needs.replace(",", "")) * times
    if obstacle.key.startswith("constraints.vendor_share."):
        vendor = obstacle.key.rpartition(".")[2]
        return _limited(workload, vendor_share={**limits.vendor_share, vendor: figure})
    return _limited(workload, **{obstacle.key.removeprefix("constraints."): figure})


def _limited(workload: Workload, **changes: object) -> Workload:
    constraints: Constraints = msgspec.structs.replace(workload.constraints, **changes)
    return msgspec.structs.replace(workload, constraints=constraints)


def refused(catalog: Catalog, folder: Path, *changes: Change) -> Plan:
    plan = make_plan(catalog, read_workload(catalog, small(folder, *changes)))
    assert plan.fleet is None
    assert plan.obstacles
    return plan


def all_relaxed(plan: Plan, obstacles: Sequence[Obstacle]) -> Workload:
    workload = plan.workload
    for one in obstacles:
        workload = relaxed(workload, one)
    return workload


TARGETS: dict[str, tuple[list[Change], list[str]]] = {
    "TTFT": ([(TTFT, "ttft_ms = { p95 = 5 }\n")], ["ttft"]),
    "TTFT alone": ([(TTFT, "ttft_ms = { p99 = 5 }\n"), (TPOT, "")], ["ttft"]),
    "TPOT": ([(TPOT, "tpot_ms = { p90 = 0.5 }\n")], ["tpot"]),
    "TPOT alone": ([(TTFT, ""), (TPOT, "tpot_ms = { p50 = 0.5 }\n")], ["tpot"]),
    "both": ([(TTFT, "ttft_ms = { p95 = 5 }\n"), (TPOT, "tpot_ms = { p90 = 0.5 }\n")], ["ttft", "tpot"]),
    "TTFT of several slices": ([(LENGTHS, SPREAD), (TTFT, "ttft_ms = { p95 = 20 }\n")], ["ttft"]),
    "TTFT in whole pools": (
        [(LENGTHS, SPREAD), (TTFT, "ttft_ms = { p90 = 20 }\n"), (ALLOWED, 'accelerators = ["l40s"]\n')],
        ["ttft"],
    ),
}


# Of a quick run.
FEW = (("TPOT alone", "safe"),)


@pytest.mark.parametrize(
    ("changes", "keys", "sizing"),
    [
        pytest.param(*case, sizing, id=f"{name}-{sizing}", marks=[] if (name, sizing) in FEW else pytest.mark.slow)
        for name, case in TARGETS.items()
        for sizing in ("safe", "likely")
    ],
)
def test_targets_that_nothing_keeps(
    calibrated: Catalog, tmp_path: Path, changes: list[Change], keys: list[str], sizing: str
) -> None:
    plan = refused(calibrated, tmp_path, *changes, ('name = "small"', f'name = "small"\nsizing = "{sizing}"'))
    assert [one.key for one in plan.obstacles] == [f"class 'chat' {key}_ms" for key in keys]
    assert all(one.alone == (len(keys) == 1) for one in plan.obstacles)
    assert make_plan(calibrated, all_relaxed(plan, plan.obstacles)).fleet is not None
    # And no less would do.
    for one in plan.obstacles:
        others = [other for other in plan.obstacles if other is not one]
        nearly = relaxed(all_relaxed(plan, others), one, times=0.9)
        less = make_plan(calibrated, nearly)
        # Or none that is as sure as asked: then the estimates have the answer.
        assert less.fleet is None or (sizing == "safe" and less.too_dear == NO_FLEET), one


@pytest.mark.slow
def test_each_class_that_nothing_serves_is_named(catalog: Catalog, tmp_path: Path) -> None:
    second = (
        '[[class]]\nname = "code"\nmodel = "qwen3-8b"\nshare = 0.5\ninput = 4000\noutput = 50\nttft_ms = { p90 = 3 }\n'
    )
    plan = refused(
        catalog, tmp_path, ("share = 1\n", "share = 0.5\n"), (TTFT, "ttft_ms = { p95 = 2 }\n"), tables(second)
    )
    assert [(one.key, one.alone) for one in plan.obstacles] == [
        ("class 'chat' ttft_ms", False), ("class 'code' ttft_ms", False),
    ]  # fmt: skip
    assert make_plan(catalog, relaxed(plan.workload, plan.obstacles[0])).fleet is None
    assert make_plan(catalog, all_relaxed(plan, plan.obstacles)).fleet is not None


BUSY = ("requests_per_s = 5\n", "requests_per_s = 300\n")
LIMITS: dict[str, tuple[str, list[str]]] = {
    "a tight budget": ("budget_usd_per_month = 7000", ["budget_usd_per_month"]),
    "little power": ("power_kw = 9", ["power_kw"]),
    "few GPUs": ("at_most = { mi300x = 3, h200 = 2 }", ["at_most"]),
    "a vendor without GPUs": ("at_most = { h200 = 0 }\nvendor_share = { NVIDIA = 0.3 }", ["at_most", "vendor_share.NVIDIA"]),
    "a vendor beyond the budget": (
        "budget_usd_per_month = 25000\nvendor_share = { NVIDIA = 0.8 }", ["budget_usd_per_month", "vendor_share.NVIDIA"],
    ),
    "nothing to spend": ("budget_usd_per_month = 0", ["budget_usd_per_month"]),
    "no power": ("power_kw = 0", ["power_kw"]),
    "no GPUs": ("at_most = { mi300x = 0, h200 = 0 }", ["at_most"]),
}  # fmt: skip
OF_A_QUICK_RUN = ["a tight budget"]


@pytest.mark.parametrize(
    ("limits", "keys"),
    [
        pytest.param(*case, id=name, marks=[] if name in OF_A_QUICK_RUN else pytest.mark.slow)
        for name, case in LIMITS.items()
    ],
)
def test_each_limit_with_what_it_would_have_to_be(
    catalog: Catalog, tmp_path: Path, limits: str, keys: list[str]
) -> None:
    plan = refused(catalog, tmp_path, BUSY, constrained(limits))
    assert [one.key for one in plan.obstacles] == [f"constraints.{key}" for key in keys]
    for one in plan.obstacles:
        assert one.alone
        found = make_plan(catalog, relaxed(plan.workload, one)).fleet
        assert found is not None, one
        if one.key in ("constraints.budget_usd_per_month", "constraints.power_kw"):
            assert make_plan(catalog, relaxed(plan.workload, one, times=0.9)).fleet is None, one


def test_least_power_is_not_the_cheapest_fleets(catalog: Catalog, tmp_path: Path) -> None:
    """One H200 takes less power than one MI300X, which is cheaper."""
    plan = refused(catalog, tmp_path, constrained("power_kw = 1"))
    relieved = make_plan(catalog, relaxed(plan.workload, plan.obstacles[0]))
    assert relieved.accelerators == ["h200"]


def test_limits_that_only_give_together(catalog: Catalog, tmp_path: Path) -> None:
    plan = make_plan(
        catalog, read_workload(catalog, small(tmp_path, BUSY, constrained("budget_usd_per_month = 1\npower_kw = 0.1")))
    )
    assert plan.fleet is None
    assert plan.obstacles == []


@pytest.mark.slow
def test_memory_says_how_long_a_request_may_be(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 Scout takes ten million tokens; RTX 4090 hold as many in ten stages, and not in two."""

    def plan(tokens: int) -> Plan:
        long = f'[[class]]\nname = "long"\nmodel = "llama-4-scout"\nshare = 0.5\ninput = {tokens - 500}\noutput = 500\n'
        changes = ("share = 1\n", "share = 0.5\n"), ('"llama-3.1-8b"', '"llama-4-scout"'), (TTFT, ""), (TPOT, "")
        file = small(tmp_path, *changes, (ALLOWED, f'accelerators = ["rtx-4090"]\n{long}'))
        return make_plan(catalog, read_workload(catalog, file))

    assert plan(9_000_000).fleet is not None
    monkeypatch.setattr("crosstie.perf.fit._MOST_STAGES", 2)
    refusal = plan(9_000_000)
    assert refusal.fleet is None
    (one,) = refusal.obstacles
    assert (one.key, one.now) == ("class 'long'", "9,000,000 tokens in one request")
    held = re.match(r"at most ([\d,]+), or more memory", one.needs)
    assert held, one.needs
    most = int(held[1].replace(",", ""))
    assert plan(most).fleet is not None
    assert plan(round(most * 1.15)).fleet is None


def test_a_model_that_nothing_holds_is_named_beside_one_that_fits(catalog: Catalog, tmp_path: Path) -> None:
    huge = '[models."kimi-k3"]\nprecisions = ["bf16"]\n[[class]]\nname = "huge"\nmodel = "kimi-k3"\nshare = 0.5\ninput = 100\noutput = 10\n'
    plan = refused(catalog, tmp_path, ("share = 1\n", "share = 0.5\n"), (ALLOWED, f'accelerators = ["l40s"]\n{huge}'))
    (one,) = plan.obstacles
    assert one.key == "class 'huge'"
    assert one.needs == "more memory: other accelerators, precisions or kv formats"


def test_a_stack_that_runs_nowhere_is_named_too(catalog: Catalog, tmp_path: Path) -> None:
    second = '[[class]]\nname = "other"\nmodel = "qwen3-8b"\nshare = 0.5\ninput = 100\noutput = 10\n'
    stacks = '[models."qwen3-8b"]\nstacks = ["tensorrt-llm"]\n'
    plan = refused(
        catalog, tmp_path, ("share = 1\n", "share = 0.5\n"), (ALLOWED, f'accelerators = ["mi300x"]\n{stacks}{second}')
    )
    assert [one.key for one in plan.obstacles] == ["class 'other'"]
    assert "other stacks than tensorrt-llm" in plan.obstacles[0].needs


def test_nothing_holds_the_only_model(catalog: Catalog, tmp_path: Path) -> None:
    only = (ALLOWED, 'accelerators = ["l40s"]\n[models."kimi-k3"]\nprecisions = ["bf16"]\n')
    plan = refused(catalog, tmp_path, ('"llama-3.1-8b"', '"kimi-k3"'), only)
    assert [one.key for one in plan.obstacles] == ["class 'chat'"]


def test_two_digits_upwards() -> None:
    assert [two_digits(step) for step in (0, 1, 89, 90, 91, 180)] == [1.0, 1.1, 9.9, 10.0, 11.0, 100.0]
    for value in (1.0, 1.04, 9.91, 10.0, 24.2, 99.5, 12_345.0):
        found = two_digits(steps_up_to(value))
        assert value <= found <= value * 1.1
        assert steps_up_to(found) == steps_up_to(value)
