import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.scorecard import Load, compare
from crosstie.decide.cost.frontier import contexts_priced, frontiers
from crosstie.decide.cost.prices import Quote


def price(accelerator: str, *sellers: float) -> dict[str, Quote]:
    return {accelerator: Quote(accelerator, sellers[0], min(sellers), max(sellers), "on-demand", "a seller", "2026-01-01",
                               len(sellers), sellers)}  # fmt: skip


def test_a_frontier_has_what_nothing_faster_undercuts_in_the_best_layout(catalog: Catalog) -> None:
    names = [catalog.accelerator(name) for name in ("mi300x", "h200")]
    card = compare(catalog, catalog.model("llama-3.1-70b"), names, Load(64, 4096, 1024), precision="fp8")
    # The other one has no price.
    (got,) = frontiers(catalog, card, price("mi300x", 2.0))
    assert got.accelerator == "mi300x"
    assert got.tpot_s == sorted(got.tpot_s)
    assert got.usd_per_mtok == sorted(got.usd_per_mtok, reverse=True)
    # Wide for speed, and as few GPUs as hold it where tokens are cheap.
    assert (got.layouts[0], got.layouts[-1]) == ("TP8", "TP1")
    (own, _) = card.entries
    assert own.estimate
    at = got.layouts.index("TP1")
    assert got.usd_per_mtok[at + got.concurrency[at:].index(64)] == pytest.approx(
        2.0 / 3600 / own.estimate.output_tokens_per_s_per_gpu * 1e6
    )
    asked = compare(catalog, card.model, names, card.load, precision="fp8", parallelism=Parallelism(tp=4))
    (one_layout,) = frontiers(catalog, asked, price("mi300x", 2.0))
    assert set(one_layout.layouts) == {"TP4"}
    assert len(got.usd_per_mtok_80) == len(got.usd_per_mtok)


def test_a_price_that_is_open_widens_the_interval_of_a_cost() -> None:
    shipped = Catalog()
    card = compare(shipped, shipped.model("llama-3.1-70b"), [shipped.accelerator("mi300x")], Load(64, 4096, 1024))

    def width(*sellers: float) -> float:
        (got,) = contexts_priced(card, price("mi300x", *sellers))
        assert got.input_tokens == sorted(got.input_tokens)
        assert got.usd_per_mtok == sorted(got.usd_per_mtok)
        for middle, (low, high) in zip(got.usd_per_mtok, got.usd_per_mtok_80, strict=True):
            assert low < middle < high
        return got.usd_per_mtok_80[0][1] / got.usd_per_mtok_80[0][0]

    # Twofold is a market, and its middle counts; fourfold is none.
    assert width(2.0, 4.0) == pytest.approx(width(2.0))
    assert width(2.0, 8.0) > 2.0 * width(2.0)
