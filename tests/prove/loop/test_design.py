"""Which points are measured: those after which the intervals of what is asked are narrowest, as learning makes them."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.own import learn_own, rows_told
from crosstie.prove.loop.design import METRICS, Budget, LoopPoint, asked_points, candidates, design, predicted

CATALOG = Catalog([])
CONDITIONS = {"accelerator": "mi300x", "model": "llama-3.1-8b", "precision": "bf16", "engine": "vllm", "tp": "1"}


@pytest.fixture(scope="module")
def replica() -> Deployment:
    return CATALOG.deployment(
        CATALOG.model("llama-3.1-8b"), CATALOG.accelerator("mi300x"), Parallelism(), "bf16", "bf16", "vllm"
    )


@pytest.fixture(scope="module")
def chosen(replica: Deployment) -> list[LoopPoint]:
    return design(CATALOG, CONDITIONS, asked_points(None, replica, 131_072), replica, 131_072, Budget(4, 1e6))


def width_after(points: Sequence[LoopPoint], asked: Sequence[LoopPoint]) -> float:
    """The mean log width of TTFT's and TPOT's intervals once these points are measured just as predicted."""
    cases: list[MeasuredCase] = []
    for one, known in zip(points, predicted(CATALOG, points, CONDITIONS), strict=True):
        at = one.operating_point(CONDITIONS)
        names = list(METRICS)
        at.rows = [replace(row, value=known[names[place]].value) for place, row in enumerate(at.rows)]
        cases.append(Cases(CATALOG).of(at))
    after = CATALOG.calibrated_by(learn_own(CATALOG, cases, [], []))
    found = predicted(after, asked, CONDITIONS)
    return float(np.mean([np.log(one[name].high / one[name].low) for one in found for name in ("ttft_s", "tpot_s")]))


@pytest.mark.slow
def test_each_further_point_narrows_and_none_is_taken_twice(chosen: list[LoopPoint]) -> None:
    left = [one.width_left for one in chosen]
    assert left == sorted(left, reverse=True)
    assert left[0] < 0.95
    assert len({one.name for one in chosen}) == len(chosen)


@pytest.mark.slow
def test_what_was_chosen_narrows_more_than_what_was_not(chosen: list[LoopPoint], replica: Deployment) -> None:
    """By learning itself, not by what the design says of itself."""
    asked = asked_points(None, replica, 131_072)
    others = [one for one in candidates(asked, replica, 131_072) if one.name not in {each.name for each in chosen}]
    draw = np.random.default_rng(1)
    some = [[others[i] for i in draw.choice(len(others), 2, replace=False)] for _ in range(3)]
    own = width_after(chosen[:2], asked)
    assert own < np.mean([width_after(one, asked) for one in some])


@pytest.mark.slow
def test_the_first_is_the_best_single_one(chosen: list[LoopPoint], replica: Deployment) -> None:
    asked = asked_points(None, replica, 131_072)
    every = candidates(asked, replica, 131_072)
    told, origin = rows_told(CATALOG, [one.operating_point(CONDITIONS) for one in (*every, *asked)])
    questions = np.flatnonzero(origin >= len(every)).tolist()
    sure = [
        float(told.after(np.flatnonzero(origin == place).tolist()).deviations(questions).sum())
        for place in range(len(every))
    ]
    ranked = [every[place].name for place in np.argsort(sure)]
    assert chosen[0].name in ranked[: len(ranked) // 5]


def test_no_point_takes_most_of_the_time(chosen: list[LoopPoint], replica: Deployment) -> None:
    """The design has all that were asked for: measuring drops them from the end, and more time goes on with them."""
    asked = asked_points(None, replica, 131_072)
    longest = max(one.expected_s for one in chosen)
    found = design(CATALOG, CONDITIONS, asked, replica, 131_072, Budget(5, 2 * longest))
    assert len(found) == 5
    assert max(one.expected_s for one in found) <= 0.5 * longest


def test_what_does_not_fit_at_once_is_not_asked(replica: Deployment) -> None:
    small = msgspec.structs.replace(replica, accelerator=CATALOG.accelerator("rtx-4090"))
    assert max(one.clients for one in candidates([], small, 131_072)) < max(
        one.clients for one in candidates([], replica, 131_072)
    )


def test_what_is_longer_than_the_replica_takes_is_not_asked(replica: Deployment) -> None:
    assert {one.input_tokens for one in candidates([], replica, 8192)} == {1024, 4096, 256}
    assert {one.input_tokens for one in asked_points(None, replica, 2000)} == {1024, 256}
    with pytest.raises(BadInput, match="more --context"):
        asked_points(None, replica, 100)
