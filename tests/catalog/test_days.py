"""Shapes of a day: shipped by name, given as hours, bent to a mean."""

from pathlib import Path
from statistics import fmean

import pytest
from tests.small_workload import small

from crosstie.catalog.days import HOURS, bent, shipped_days
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData

FLAT = "[" + ", ".join(["10"] * 23 + ["20"]) + "]"


def test_shipped_days_have_a_busiest_hour_of_one() -> None:
    assert len(shipped_days()) >= 2
    for hours in shipped_days().values():
        assert len(hours) == HOURS
        assert max(hours) == 1.0
        assert min(hours) > 0.0


@pytest.mark.parametrize("mean", [0.1, 0.45, 0.9])
def test_a_bent_day_has_the_mean_and_keeps_its_order(mean: float) -> None:
    hours = shipped_days()["servegen-language"]
    found = bent(hours, mean)
    assert fmean(found) == pytest.approx(mean, abs=1e-6)
    assert max(found) == 1.0
    assert sorted(range(HOURS), key=hours.__getitem__) == sorted(range(HOURS), key=found.__getitem__)


def with_traffic(folder: Path, catalog: Catalog, more: str) -> tuple[float, tuple[float, ...]]:
    found = read_workload(catalog, small(folder, ("requests_per_s = 5\n", f"requests_per_s = 5\n{more}\n")))
    return found.mean_over_peak, found.day


def test_a_workload_has_a_day(tmp_path: Path, catalog: Catalog) -> None:
    mean, day = with_traffic(tmp_path, catalog, "")
    assert [mean, fmean(day)] == pytest.approx([0.5, 0.5], abs=1e-6)
    mean, day = with_traffic(tmp_path, catalog, f"day = {FLAT}")
    assert mean == pytest.approx((23 * 0.5 + 1) / 24)
    assert day[-1] == 1.0
    mean, day = with_traffic(tmp_path, catalog, 'day = "servegen-reasoning"')
    assert day == shipped_days()["servegen-reasoning"]
    assert mean == pytest.approx(fmean(day))
    mean, day = with_traffic(tmp_path, catalog, 'day = "servegen-reasoning"\nmean_over_peak = 0.3')
    assert [mean, fmean(day)] == pytest.approx([0.3, 0.3], abs=1e-6)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('day = "servegen-langage"', "Did you mean servegen-language"),
        ("day = [1, 2, 3]", "24 numbers"),
        (f"day = {FLAT.replace('20', '-1')}", r"traffic.day\[23\]"),
        (f"day = {FLAT}\nmean_over_peak = 0.9", "mean_over_peak says 0.9"),
        (f"day = [{', '.join(['0'] * 24)}]", "no traffic at all"),
    ],
)
def test_days_that_are_none(tmp_path: Path, catalog: Catalog, more: str, words: str) -> None:
    with pytest.raises(BadData, match=words):
        with_traffic(tmp_path, catalog, more)
