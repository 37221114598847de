import random
import re

import msgspec
import pytest
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.decide.compare.scorecard import Load, Scorecard, compare
from crosstie.perf.estimate import estimate


def card(catalog: Catalog, model: str, names: str, load: Load, **choices: object) -> Scorecard:
    return compare(catalog, catalog.model(model), [catalog.accelerator(n) for n in names.split()], load, **choices)  # type: ignore[arg-type]


def test_the_best_is_held_against_each_other_one(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h200 h100-sxm", Load(64, 4096, 1024))
    assert len(got.verdicts) == 2
    rates = {e.accelerator.id: e.estimate.output_tokens_per_s_per_gpu for e in got.entries if e.estimate}
    for sentence in got.verdicts:
        names = [name for name in rates if name in sentence.split(":")[0]]
        best = max(rates, key=lambda n: rates[n])
        assert sentence.startswith(best)
        ratio = rates[best] / min(rates[n] for n in names)
        assert f"{ratio:.2f}x" in sentence or (ratio < 1.03 and "within 3%" in sentence)


def test_without_a_layout_the_fewest_gpus_that_hold_the_load_are_taken(catalog: Catalog) -> None:
    few, many = (card(catalog, "llama-3.1-70b", "mi300x", Load(c, 4096, 1024)).entries[0] for c in (8, 64))
    assert few.deployment
    assert many.deployment
    assert few.deployment.parallelism == Parallelism(tp=1)
    assert many.deployment.parallelism == Parallelism(tp=2)


def test_where_agents_runs_were_far_slower_than_the_model_that_is_said(catalog: Catalog) -> None:
    long, short = (
        card(catalog, "llama-3.1-70b", "mi300x mi355x h200", Load(4, length, 512)).entries for length in (100_000, 8000)
    )
    said = {entry.accelerator.id: entry.at_length for entry in long}
    assert "prompts of 108,000 tokens took 3.5 times as long a token as the model says" in said["mi300x"]
    assert " 1.4 times " in said["mi355x"]
    assert said["h200"] == ""
    assert [entry.at_length for entry in short] == ["", "", ""]


def test_memory_is_named_where_it_decides(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h100-sxm", Load(27, 4096, 1024), parallelism=None)
    assert "hold model and load on" in got.verdicts[0]
    full = card(catalog, "llama-3.1-70b", "h200 h100-sxm", Load(64, 4096, 1024), parallelism=Parallelism(tp=2))
    assert "h100-sxm has room for 4 of the 64 requests" in full.verdicts[0]
    assert full.entries[1].estimate
    assert full.entries[1].estimate.decode_bound == "memory capacity"


def test_links_are_named_where_they_decide(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h200", Load(64, 4096, 128), parallelism=Parallelism(tp=2))
    assert "prefill communication" in got.verdicts[0]
    assert "against 64 over the mesh" in got.verdicts[0]


@pytest.mark.slow
def test_sentences_are_true_over_many_pairs(catalog: Catalog) -> None:
    """Each reason must favour the winner, and what is said of room and peaks must be so."""
    draw = random.Random(7)
    checked = 0
    for _ in range(150):
        model = draw.choice(sorted(catalog.models))
        names = draw.sample(sorted(catalog.accelerators), 2)
        longest = min(catalog.models[model].max_context or 4000, 4000) - 90
        load = Load(draw.choice([1, 8, 64, 400, 2000]), draw.choice([16, 512, longest]), draw.choice([4, 64, 90]))
        got = card(catalog, model, " ".join(names), load, precision=draw.choice(["native", "fp8", "q4_k_m"]))
        by_name = {e.accelerator.id: e for e in got.entries}
        for sentence in got.verdicts:
            checked += 1
            if "within 3%" in sentence:
                continue
            first = by_name[sentence.split(" ")[0]].estimate
            second = next(e.estimate for n, e in by_name.items() if n != sentence.split(" ")[0])
            assert first
            assert second
            assert first.output_tokens_per_s_per_gpu > second.output_tokens_per_s_per_gpu
            if "has room for" in sentence:
                assert first.concurrency_that_fits > second.concurrency_that_fits
            if "model and load" in sentence:
                assert first.concurrency_that_fits >= load.concurrency
            for clause in sentence.rstrip(".").split("; "):
                numbers = re.search(r"takes ([\d.e+-]+) against ([\d.e+-]+) GPU-ms", clause)
                if numbers:
                    assert (float(numbers[1]) <= float(numbers[2])) != ("even though" in clause), sentence
                    peaks = re.search(r"\(([\d,.e+-]+) against ([\d,.e+-]+) ", clause)
                    if peaks:
                        a, b = (float(p.replace(",", "")) for p in peaks.groups())
                        assert (a > b) != ("even though" in clause), sentence
    assert checked > 80


def test_what_cannot_run_is_kept_with_its_reason(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h100-sxm", Load(1, 128, 128), parallelism=Parallelism(tp=1))
    assert [bool(e.estimate) for e in got.entries] == [True, False]
    assert got.entries[1].problem == "1 GPU cannot hold it"
    assert got.verdicts == []


def test_emulation_is_said(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x mi355x h200", Load(8, 128, 128), precision="mxfp4")
    assert got.entries[0].emulated == ("mxfp4 runs as bf16, written out first",)
    assert got.entries[1].emulated == ()
    assert got.entries[2].emulated == ("mxfp4 runs as bf16, unpacked in the kernel",)


def test_equals_are_called_equal(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-8b", "mi350x mi355x", Load(1, 128, 512))
    assert "within 3%" in got.verdicts[0]


def test_estimates_say_what_they_rest_on(catalog: Catalog) -> None:
    for entry in card(catalog, "llama-3.1-8b", "mi300x h200", Load(1, 128, 128)).entries:
        assert entry.estimate
        assert "uncalibrated" in entry.estimate.basis
        assert entry.estimate.interval is None
        assert entry.estimate.extrapolated


def test_calibrated_estimates_have_intervals_that_widen_with_distance() -> None:
    shipped = Catalog([])
    entries = card(shipped, "llama-3.1-70b", "h200 mi350x rtx-4090", Load(4, 512, 128), precision="fp8").entries
    widths = []
    for entry in entries:
        assert entry.estimate
        interval = present(entry.estimate.interval)
        assert interval.level == 0.8
        low, high = interval.tpot_s
        assert low < entry.estimate.tpot_s < high
        widths.append(high / low)
    measured, other_models, nothing = (entry.estimate for entry in entries)
    assert measured
    assert other_models
    assert nothing
    assert not measured.extrapolated
    assert "measured points of this model in 8-bit weights on h200" in measured.basis
    assert "extrapolated to this model" in other_models.basis
    assert "extrapolated" in nothing.basis
    assert widths[0] < widths[1]
    assert widths[0] < widths[2]


def test_a_verdict_whose_intervals_overlap_says_so() -> None:
    shipped = Catalog([])
    near, far = (
        card(shipped, "llama-3.1-70b", names, Load(64, 4096, 1024), precision="fp8").verdicts[0]
        for names in ("h200 mi325x", "b200 l40s")
    )
    assert "Their 80% intervals overlap." in near
    assert "overlap" not in far


def test_the_layout_is_in_the_answer_and_a_flip_by_another_is_said() -> None:
    """70B in FP8 at 64 in flight: B200 wins on one GPU each, MI350X against B200 on two."""
    shipped = Catalog([])
    load = Load(64, 1024, 1024)
    found = card(shipped, "llama-3.1-70b", "mi350x b200", load, precision="fp8")
    assert found.layouts == "fp8 on mi350x TP1, b200 TP1 (the fewest GPUs that hold model and load)"
    assert found.verdicts[0].startswith("b200 gives 1.")
    assert "The layout decides: with b200 on 2 GPUs mi350x gives 1." in found.verdicts[0]
    asked = card(shipped, "llama-3.1-70b", "mi350x b200", load, precision="fp8", parallelism=Parallelism(tp=2))
    assert "as asked" in asked.layouts
    assert "The layout decides" not in asked.verdicts[0]


def test_the_layout_chosen_is_the_one_whose_requests_fit_by_the_estimate(catalog: Catalog) -> None:
    """One meaning of "fits": the fewest GPUs on which the estimate finds room for the load."""
    model = catalog.model("llama-3.1-70b")
    for concurrency in (16, 64, 100, 200):
        for name in ("b200", "h200", "mi300x", "mi325x"):
            load = Load(concurrency, 4096, 1024)
            (one,) = compare(catalog, model, [catalog.accelerator(name)], load, precision="fp8").entries
            assert present(one.estimate).concurrency_that_fits >= concurrency
            gpus = present(one.deployment).parallelism.gpus
            if gpus > 1:
                fewer = Parallelism(tp=gpus // 2)
                (half,) = compare(
                    catalog, model, [catalog.accelerator(name)], load, precision="fp8", parallelism=fewer
                ).entries
                assert half.estimate is None or half.estimate.concurrency_that_fits < concurrency


@pytest.mark.parametrize(
    ("load", "reason"), [((0, 1, 1), "concurrency 0"), ((1, -5, 1), "input -5"), ((1, 1, 0), "output 0")]
)
def test_loads_are_checked(load: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        Load(*load)


def test_context_is_checked(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="beyond the 40960"):
        card(catalog, "qwen3-8b", "h200", Load(1, 40000, 1000))


def test_speculation_is_weighed_against_none(catalog: Catalog) -> None:
    """It pays for few requests and not for many, and less where fewer drafts are kept."""
    model = catalog.model("llama-3.3-70b")
    drafts = catalog.speculation(model, "eagle3:3", length=1.9)
    load = {"parallelism": Parallelism(tp=4), "precision": "fp8", "speculation": drafts}
    few, many = (card(catalog, "llama-3.3-70b", "h200", Load(n, 200, 1000), **load).entries[0] for n in (4, 900))
    assert few.payoff
    assert many.payoff
    assert few.payoff.gain > few.payoff.gain_if_fewer > 1.0
    assert many.payoff.gain < 1.0
    below = present(few.payoff.pays_below)
    assert below == many.payoff.pays_below
    assert 4 < below < 900
    assert 1.0 <= present(few.payoff.breaks_even) < 1.9
    # There it is as good as none, and not much before.
    at, before = (card(catalog, "llama-3.3-70b", "h200", Load(n, 200, 1000), **load).entries[0] for n in (below, 8))
    assert at.payoff
    assert before.payoff
    assert at.payoff.gain == pytest.approx(1.0, abs=0.05)
    assert before.payoff.gain > 1.1
    assert card(catalog, "llama-3.3-70b", "h200", Load(4, 200, 1000)).entries[0].payoff is None


def test_an_interval_knows_how_unsure_acceptance_is() -> None:
    catalog = Catalog([])
    model, h200 = catalog.model("llama-3.3-70b"), catalog.accelerator("h200")
    sure = catalog.speculation(model, "eagle3:3", length=2.4)
    unsure = msgspec.structs.replace(sure, range=(1.2, 3.4))
    ends = []
    for drafts in (sure, unsure):
        one = catalog.deployment(model, h200, Parallelism(tp=4), speculation=drafts)
        found = estimate(one, concurrency=16, input_tokens=1000, output_tokens=1000).interval
        assert found
        ends.append((found.tpot_s, found.output_tokens_per_s, found.ttft_s))
    (tpot, rate, ttft), (wide_tpot, wide_rate, same_ttft) = ends
    assert wide_tpot[0] < tpot[0] < tpot[1] < wide_tpot[1]
    assert wide_rate[0] < rate[0] < rate[1] < wide_rate[1]
    # Prompts hardly feel how long the answers of others take.
    assert same_ttft == pytest.approx(ttft, rel=0.03)
