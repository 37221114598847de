"""One workload, one answer, on processors whose exponentials and logarithms differ in their last bits.

Here such a processor is made by moving every other result of these functions by a bit. On real ones the same was seen:
docs/decisions/0042.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Deployment
from crosstie.decide.plan.capacity import EstimateScale
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.report import document, mark_of
from crosstie.decide.plan.survey import offers, surveys
from crosstie.decide.plan.traffic import drawn
from crosstie.perf.tabulated import StepTimes
from crosstie.route import corrections, lengths, load, modelled

HELPDESK = Path("examples/workloads/helpdesk.toml")


def moved(of: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with about half of its results a bit larger."""

    def function(*args: Any, **more: Any) -> Any:
        found = np.asarray(of(*args, **more))
        odd = (found.view(np.int64) >> 3) & 1
        found = np.where(odd & np.isfinite(found) & (found != 0.0), np.nextafter(found, np.inf), found)
        # A plain number of a plain number: NumPy warns where Python has infinities.
        return found if found.ndim else float(found)

    return function


def another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("exp", "log", "expm1", "log1p", "log2", "exp2"):
        monkeypatch.setattr(np, name, moved(getattr(np, name)))
    for module, name in itertools.product((corrections, lengths, load, modelled), ("exp", "log")):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, moved(getattr(math, name)))


def inputs(exponential: Callable[..., Any]) -> list[Any]:
    """What the search and the simulator are given: capacities of replicas, times of steps, arrivals."""
    catalog = Catalog([])
    work = read_workload(catalog, HELPDESK)
    surveyed = surveys(catalog, work, [catalog.accelerators["mi300x"]], gate=Gate(catalog, work))
    capacity = offers(surveyed, EstimateScale.none, peak=1.0).capacity
    replicas = [one for one in surveyed[0].deployments if isinstance(one, Deployment)]
    steps = [StepTimes(one, 2000.0).seconds(7, 14_000.0, 300.0, 300.0, 0.0) for one in replicas]
    chance = np.random.default_rng(1)
    drawing: Any = SimpleNamespace(exponential=exponential, choice=chance.choice, random=chance.random)
    slices = work.classes[0].slices
    arrivals = drawn(np.array([one.share for one in slices]), slices, 500, drawing)[0]
    return [capacity.requests_per_s, capacity.ttft_s, capacity.tpot_s, np.array(steps), arrivals]


def test_what_is_searched_and_simulated_is_the_same_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    here = inputs(np.random.default_rng(2).exponential)
    assert len(here[0]) >= 10
    another_processor(monkeypatch)
    there = inputs(moved(np.random.default_rng(2).exponential))
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def answer(confirm: bool) -> Any:
    """What `--json` says, with nine digits of every number."""
    catalog = Catalog([])
    made = plan(catalog, read_workload(catalog, HELPDESK), confirm=confirm)
    return rounded(document(made, mark_of(catalog.calibration)))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


@pytest.mark.slow
@pytest.mark.parametrize("confirm", [False, True])
def test_a_processor_whose_last_bits_differ_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch, confirm: bool) -> None:
    here = answer(confirm)
    another_processor(monkeypatch)
    assert np.exp(np.arange(1.0, 50.0)).tolist() != list(map(math.exp, range(1, 50)))
    there = answer(confirm)
    assert there == here
