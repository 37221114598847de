"""`tco` from Python: a scorecard and a request in, the assessment and what is held against it out."""

import pytest
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.decide.compare.scorecard import Load, Scorecard, compare
from crosstie.decide.cost.choices import Successor
from crosstie.decide.cost.tco import TcoRequest, tco
from crosstie.perf.memory import memory_plan


def card(catalog: Catalog, *names: str, gpus: int | None = None) -> Scorecard:
    split = None if gpus is None else Parallelism(tp=gpus)
    chosen = [catalog.accelerator(name) for name in names]
    return compare(
        catalog, catalog.model("llama-3.1-70b"), chosen, Load(64, 4096, 1024), precision="fp8", parallelism=split
    )


def test_the_bill_of_each_and_what_was_asked_beside_it(catalog: Catalog) -> None:
    successor = Successor(catalog.accelerator("b200"), months=6, mean_slip_months=3, speedup=2, purchase_usd=40_000)
    request = TcoRequest(gpus=64, discount={"h200": 0.1}, samples=200, rent=True, api=True, successor=successor)
    got = tco(catalog, card(catalog, "mi300x", "h200"), request)
    assert set(got.assessed.bills) == {"mi300x", "h200"}
    assert got.assessed.bills["h200"].option.discount == 0.1
    assert {one.name for one in got.rented} == {"mi300x", "h200"}
    assert got.apis is not None
    assert present(got.waiting).option.name == got.assessed.ranking[0]
    plain = tco(catalog, got.card, TcoRequest(gpus=64, samples=200))
    assert not plain.rented
    assert plain.apis is None
    assert plain.waiting is None


def test_what_is_asked_wrongly_is_refused_with_its_name(catalog: Catalog) -> None:
    both = card(catalog, "mi300x", "h200")
    with pytest.raises(BadInput, match="engineers: b200 is not on the scorecard, which has mi300x, h200"):
        tco(catalog, both, TcoRequest(engineers={"b200": 1.0}))
    with pytest.raises(BadInput, match="rents change nothing"):
        tco(catalog, both, TcoRequest(rent_usd_per_hour={"h200": 2.0}))
    with pytest.raises(DoesNotFit, match="none can run it: rtx-4090"):
        tco(catalog, card(catalog, "rtx-4090", gpus=1))


def test_a_gigabyte_has_its_price(catalog: Catalog) -> None:
    scored = card(catalog, "h200")
    found = tco(catalog, scored, TcoRequest(samples=100))
    hour = found.assessed.bills["h200"].usd_per_gpu_hour
    memory = catalog.accelerator("h200").memory_bytes / 1e9
    assert found.usd_per_gb_month("h200") == pytest.approx(hour * 730 / memory)
    # The cache has only what the weights leave, so it is dearer by that.
    (entry,) = scored.entries
    room = memory_plan(present(entry.deployment)).cache_bytes / 1e9
    assert found.usd_per_cache_gb_month("h200") * room == pytest.approx(found.usd_per_gb_month("h200") * memory)
