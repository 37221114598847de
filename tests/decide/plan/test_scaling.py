"""Estimates as slow as one of so many is: quantiles of worlds, and nothing where even odds are asked."""

import numpy as np
import pytest
from tests.decide.plan.workloads import CHAT, one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.worlds import WORLDS
from crosstie.decide.plan.scaling import WorldScaling

CATALOG = Catalog([])
MODEL = CHAT.model
SEVERAL = [
    CATALOG.deployment(CATALOG.model(MODEL), CATALOG.accelerator(name), Parallelism(tp=tp), "fp8", "bf16", "vllm")
    for name, tp in (("mi300x", 1), ("h200", 2))
]


def test_the_scale_is_a_quantile_of_the_worlds() -> None:
    work = workload(CHAT)
    for sure in (0.8, 0.9):
        scaling = WorldScaling(work, sure)
        found = scaling(SEVERAL)
        for row, one in enumerate(SEVERAL):
            worlds = scaling.in_worlds(one)
            assert worlds.tpot.shape == (WORLDS,)
            assert found.tpot[row] == pytest.approx(np.quantile(worlds.tpot, sure), rel=1e-3)
            assert found.ttft[row] == pytest.approx(np.quantile(worlds.ttft, sure), rel=1e-3)
            assert found.rate[row] == pytest.approx(np.quantile(worlds.rate, 1.0 - sure), rel=1e-3)
            assert found.tpot[row] > 1.0 > found.rate[row]


def test_even_odds_are_the_estimates_and_the_surer_the_slower() -> None:
    work = workload(CHAT)
    even, sure, surer = (WorldScaling(work, share)(SEVERAL) for share in (0.5, 0.8, 0.95))
    assert even.tpot.tolist() == even.ttft.tolist() == even.rate.tolist() == [1.0, 1.0]
    assert (surer.tpot > sure.tpot).all()
    assert (surer.rate < sure.rate).all()


def test_without_calibration_nothing_is_scaled(uncalibrated: Catalog) -> None:
    one = uncalibrated.deployment(uncalibrated.model(MODEL), uncalibrated.accelerator("mi300x"), stack="vllm")
    assert WorldScaling(workload(CHAT), 0.9)([one]).tpot.tolist() == [1.0]


def test_a_replica_reads_the_same_alone_and_among_others() -> None:
    """Whoever asks first, and for what."""
    work = workload(one_class("chat", 2.0, 700, 90, model=MODEL))
    together, backwards = WorldScaling(work, 0.9)(SEVERAL), WorldScaling(work, 0.9)(SEVERAL[::-1])
    alone = WorldScaling(workload(one_class("chat", 2.0, 701, 90, model=MODEL)), 0.9)
    assert together.tpot.tolist() == backwards.tpot[::-1].tolist()
    assert alone(SEVERAL[:1]).tpot.tolist() == alone(SEVERAL).tpot[:1].tolist()
