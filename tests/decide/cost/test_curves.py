import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.compare.scorecard import Load, compare
from crosstie.decide.cost.curves import context_curves, curve, curves, doublings, frontiers
from crosstie.decide.cost.prices import Quote


def test_a_curve_trades_speed_for_throughput(catalog: Catalog) -> None:
    one = catalog.deployment(catalog.model("llama-3.1-70b"), catalog.accelerator("mi300x"), Parallelism(tp=8))
    got = curve(one, 4096, 1024)
    assert got.concurrency[0] == 1
    assert got.output_tokens_per_s_per_gpu == sorted(got.output_tokens_per_s_per_gpu)
    assert got.tokens_per_s_per_user == sorted(got.tokens_per_s_per_user, reverse=True)
    # Up to what fits: 164.7 GB over 8 GPUs at 320 KiB a token and a mean length of 4,608.
    assert got.concurrency[-1] == pytest.approx(8 * 164.7e9 / 327680 / 4608, rel=0.01)


def test_only_what_runs_gets_a_curve(catalog: Catalog) -> None:
    both = [catalog.accelerator(name) for name in ("mi300x", "h100-sxm")]
    card = compare(catalog, catalog.model("llama-3.1-70b"), both, Load(1, 100, 100), parallelism=Parallelism(tp=1))
    assert [c.accelerator for c in curves(card)] == ["mi300x"]


def test_long_prompts_cost_speed_and_room(catalog: Catalog) -> None:
    card = compare(catalog, catalog.model("llama-3.1-70b"), [catalog.accelerator("mi300x")], Load(64, 4096, 1024))
    (got,) = context_curves(card, {})
    assert got.input_tokens[0] == 1024
    assert got.input_tokens == sorted(got.input_tokens)
    # As far as the model reaches, or memory.
    assert got.input_tokens[-1] <= 131072 - 1024
    assert got.output_tokens_per_s_per_gpu == sorted(got.output_tokens_per_s_per_gpu, reverse=True)
    assert got.running == sorted(got.running, reverse=True)
    assert got.running[0] == 64
    (entry,) = card.entries
    assert entry.estimate
    at = got.input_tokens.index(4096)
    assert got.output_tokens_per_s_per_gpu[at] == pytest.approx(entry.estimate.output_tokens_per_s_per_gpu, rel=0.01)


@pytest.mark.parametrize(("most", "steps"), [(0, [1]), (1, [1]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11])])
def test_batches_double_up_to_the_largest(most: int, steps: list[int]) -> None:
    assert doublings(most) == steps


def price(accelerator: str, *sellers: float) -> dict[str, Quote]:
    return {accelerator: Quote(accelerator, sellers[0], min(sellers), max(sellers), "on-demand", "a seller", "2026-01-01",
                               len(sellers), sellers)}  # fmt: skip


def test_a_frontier_has_what_nothing_faster_undercuts_in_the_best_layout(catalog: Catalog) -> None:
    names = [catalog.accelerator(name) for name in ("mi300x", "h200")]
    card = compare(catalog, catalog.model("llama-3.1-70b"), names, Load(64, 4096, 1024), precision="fp8")
    got, other = frontiers(catalog, card, price("mi300x", 2.0))
    assert other.usd_per_mtok == [], "it has no price"
    assert got.accelerator == "mi300x"
    assert got.tokens_per_s_per_user == sorted(got.tokens_per_s_per_user, reverse=True)
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
    one_layout, _ = frontiers(catalog, asked, price("mi300x", 2.0))
    assert set(one_layout.layouts) == {"TP4"}
    assert len(got.usd_per_mtok_80) == len(got.usd_per_mtok)


def test_a_price_that_is_open_widens_the_interval_of_a_cost() -> None:
    shipped = Catalog()
    card = compare(shipped, shipped.model("llama-3.1-70b"), [shipped.accelerator("mi300x")], Load(64, 4096, 1024))

    def width(*sellers: float) -> float:
        (got,) = context_curves(card, price("mi300x", *sellers))
        assert got.input_tokens == sorted(got.input_tokens)
        assert got.usd_per_mtok == sorted(got.usd_per_mtok)
        for middle, (low, high) in zip(got.usd_per_mtok, got.usd_per_mtok_80, strict=True):
            assert low < middle < high
        return got.usd_per_mtok_80[0][1] / got.usd_per_mtok_80[0][0]

    # Twofold is a market, and its middle counts; fourfold is none.
    assert width(2.0, 4.0) == pytest.approx(width(2.0))
    assert width(2.0, 8.0) > 2.0 * width(2.0)
