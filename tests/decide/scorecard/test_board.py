"""The scorecard: every cell is the catalog's or the library's own answer, and says whose."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.present import present

from crosstie.catalog.export import export_class, read_export, shipped_export
from crosstie.catalog.library import Catalog
from crosstie.catalog.scenarios import Scenario, read_scenarios, shipped_scenarios
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.decide.cost.prices import quote
from crosstie.decide.scorecard.board import Axis, ScoreCell, export, money, silicon, software, speed
from crosstie.decide.scorecard.contest import contest
from crosstie.perf.estimate import estimate

SMALL = Scenario(name="small", model="llama-3.1-8b", precision="bf16", input=512, output=128, tpot_ms=30.0)


@pytest.fixture(scope="module")
def calibrated() -> Catalog:
    return Catalog()


@pytest.fixture(scope="module")
def chosen(calibrated: Catalog) -> list[Accelerator]:
    return [calibrated.accelerator(name) for name in ("mi300x", "h200", "mi355x")]


def cell(axes: Sequence[Axis], name: str, part: str) -> ScoreCell:
    return next(axis for axis in axes if axis.name == name).cells[part]


def test_silicon_is_the_catalog_s_with_source_and_date(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    axes = silicon(calibrated, chosen)
    for one in chosen:
        assert cell(axes, "memory", one.id).value == one.memory.capacity.si
        assert cell(axes, "bandwidth", one.id).value == one.memory.bandwidth.si
        assert cell(axes, "power", one.id).value == one.chip.tdp.si
        rate = one.dense["fp8"]
        got = cell(axes, "dense fp8, TFLOP/s", one.id)
        assert got.value == rate.si
        assert rate.source in got.source
        assert rate.date in got.source
    assert cell(axes, "dense fp4, TFLOP/s", "h200").value is None
    assert all(one.source for axis in axes for one in axis.cells.values())


def test_what_weights_a_gpu_holds_is_its_memorys_whatever_models_there_are(
    calibrated: Catalog, chosen: list[Accelerator]
) -> None:
    axes = silicon(calibrated, chosen)
    stack = calibrated.stack("vllm")
    for one in chosen:
        got = cell(axes, "bf16 weights it holds", one.id)
        room = stack.memory_fraction.value * one.memory_bytes - stack.reserved.si
        assert got.value == pytest.approx(room / 2.0)
        assert cell(axes, "fp8 weights it holds", one.id).value == pytest.approx(room)
        assert "vLLM" in got.source


def test_money_is_the_quotes_and_their_share_of_a_gb(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    axes = money(calibrated, chosen)
    asked = quote(calibrated.prices, "h200", "on-demand")
    assert asked
    assert cell(axes, "on-demand, $/h", "h200").value == asked.usd
    assert asked.provider in cell(axes, "on-demand, $/h", "h200").source
    gb = chosen[1].memory_bytes / 1e9
    assert cell(axes, "rent, $ a GB-month", "h200").value == pytest.approx(asked.usd * HOURS_PER_MONTH / gb)
    # Less than the whole memory is left for a cache, so a GB of it costs more.
    assert cell(axes, "KV cache, $ a GB-month", "h200").value > cell(axes, "rent, $ a GB-month", "h200").value  # type: ignore[operator]
    quoted = money(calibrated, [calibrated.accelerator("mi350x"), *chosen])
    assert cell(quoted, "on-demand, $/h", "mi350x").value is None
    # Nobody sells it by the hour: what somebody was quoted does not stand in for that.
    assert cell(quoted, "rent, $ a GB-month", "mi350x").value is None


@pytest.mark.parametrize(
    ("part", "published"),
    # H200: 15,832 (Ronghe's Wu Zihao, December 2025); A100: 4,992 (312 TFLOP/s x 16, the rule's own measure).
    [("h200", 15_832), ("a100-80gb", 4_992)],
)
def test_tpp_is_what_the_public_says(calibrated: Catalog, part: str, published: float) -> None:
    assert export_class(calibrated.accelerator(part), shipped_export()).tpp == pytest.approx(published, rel=1e-4)


def test_the_parts_that_the_rule_of_2026_was_written_for_are_reviewed_by_case(calibrated: Catalog) -> None:
    """Its preamble names the H200 and its equivalents; the press, the MI325X beside it. Blackwell is not."""
    review = {
        name: export_class(calibrated.accelerator(name), shipped_export()).case_by_case
        for name in ("h200", "mi325x", "b200", "mi355x", "rtx-3090")
    }
    assert review == {"h200": True, "mi325x": True, "b200": False, "mi355x": False, "rtx-3090": None}


def test_below_the_first_threshold_the_area_of_the_die_decides(calibrated: Catalog) -> None:
    got = cell(export([calibrated.accelerator("rtx-3090")]), "US threshold", "rtx-3090")
    assert got.text == "by density"
    assert "area of the die" in got.source


def test_every_part_of_the_catalog_has_a_class(calibrated: Catalog) -> None:
    found = {export_class(one, shipped_export()).threshold for one in calibrated.accelerators.values()}
    assert found == {"3A090.a", "by density"}


def test_a_rule_without_a_source_is_refused(tmp_path: Path) -> None:
    shipped = Path(read_export.__code__.co_filename).parent / "data" / "export.toml"
    file = tmp_path / "export.toml"
    file.write_text(shipped.read_text().replace('source = "eccn", note = "TPP a square', 'note = "TPP a square'))
    with pytest.raises(BadData, match=r"rule.density.source"):
        read_export(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "scenario"),
        ("[[scenario]]\nname = 'x'\n", r"scenario\[0\].model"),
        ("[[scenario]]\nname = 'x'\nmodel = 'm'\nprecision = 'p'\ninput = 0\noutput = 1\n", r"scenario\[0\].input"),
        ("[[scenario]]\nname='x'\nmodel='m'\nprecision='p'\ninput=1\noutput=1\n" * 2, "twice"),
    ],
)
def test_bad_scenarios_are_refused_with_their_key(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "scenarios.toml"
    file.write_text(text)
    with pytest.raises(BadData, match=said):
        read_scenarios(file)


def test_there_are_the_six_scenarios() -> None:
    names = [one.name for one in shipped_scenarios()]
    assert names == ["frontier inference", "mid-size fleet", "edge", "many fine-tunes", "long context", "batch"]


def test_a_contest_ranks_by_cost_and_says_how_surely(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    found = contest(calibrated, SMALL, chosen)
    costs = [one.usd_per_mtok for one in found.ranking]
    assert costs == sorted(costs)
    first, second = found.ranking[:2]
    own = estimate(first.deployment, concurrency=first.concurrency, input_tokens=512, output_tokens=128)
    assert first.estimate == own
    assert own.tpot_s <= 0.030
    assert first.usd_per_mtok == pytest.approx(first.quote.usd / 3600 / own.output_tokens_per_s_per_gpu * 1e6)
    assert found.ratio == pytest.approx(second.usd_per_mtok / first.usd_per_mtok)
    assert present(found.ratio_at_worst) <= present(found.ratio)
    assert 0.0 < present(found.confidence) <= 1.0
    axes = speed([found], chosen)
    assert cell(axes, "small, tokens/s", first.accelerator.id).value == first.tokens_per_s_per_gpu
    assert cell(axes, "  $/M tokens", first.accelerator.id).value == first.usd_per_mtok


def test_targets_that_nobody_keeps_leave_nobody(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    none = Scenario(name="x", model="llama-3.1-8b", precision="bf16", input=512, output=128, tpot_ms=0.001)
    found = contest(calibrated, none, chosen)
    assert found.ranking == ()
    assert set(found.problems.values()) == {"no layout keeps the targets"}
    assert found.ratio is None
    assert found.confidence is None


def test_prices_of_two_kinds_are_not_held_against_each_other(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    quoted = calibrated.accelerator("mi350x")
    found = contest(calibrated, SMALL, [*chosen, quoted])
    assert found.problems["mi350x"].startswith("no on-demand price (quoted $")
    assert {one.quote.kind for one in found.ranking} == {"on-demand"}
    bought = contest(calibrated, SMALL, [*chosen, quoted], "buy")
    assert {one.quote.kind for one in bought.ranking} == {"buy"}
    assert "mi350x" not in bought.problems


def test_a_price_that_sellers_do_not_agree_on_is_unsure(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    """MI355X at $2.59 and at $8.60: which of them one gets decides, so that nobody is sure."""
    price = present(quote(calibrated.prices, "mi355x", "on-demand"))
    assert price.is_open
    assert sorted(set(price.in_worlds.tolist())) == list(price.sellers)
    assert price.in_worlds.tolist() == price.in_worlds.tolist()
    found = contest(calibrated, SMALL, [one for one in chosen if one.id != "h200"])
    assert found.ranking[0].accelerator.id == "mi355x"
    assert found.ranking[0].quote.usd < present(found.flips_at) < price.sellers[-1]
    assert present(found.confidence) < 0.8
    exact = replace(price, sellers=())
    assert set(exact.in_worlds.tolist()) == {price.usd}


def test_adapters_cost_speed(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    tuned = Scenario(name="x", model="llama-3.1-8b", precision="bf16", input=512, output=128, tpot_ms=30.0, adapters=64)
    with_them, without = (contest(calibrated, one, chosen[1:2]).ranking[0] for one in (tuned, SMALL))
    assert with_them.deployment.adapters
    assert with_them.tokens_per_s_per_gpu < without.tokens_per_s_per_gpu


def test_software_is_what_preflight_says(calibrated: Catalog, chosen: list[Accelerator]) -> None:
    axes = software(calibrated, chosen)
    assert cell(axes, "tensorrt-llm", "mi300x").value in ("no", "will not run")
    assert "preflight" in cell(axes, "vllm", "h200").source
