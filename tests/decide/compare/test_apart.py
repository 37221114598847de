"""Disaggregated prefill and decode beside both together: layouts as people write them, and what cannot be."""

import json

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.decide.compare.apart import compare_apart
from crosstie.decide.compare.scorecard import Load
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.perf.estimate import estimate
from crosstie.perf.service_layouts import SideLayout, matched, parse_layout


def test_layouts_are_read_as_they_are_shown() -> None:
    prefill, decode = parse_layout("1xTP4:2xTP8EP8")
    assert (prefill, decode) == (SideLayout(1, Parallelism(tp=4)), SideLayout(2, Parallelism(tp=8, ep=8)))
    assert parse_layout("10xDP4·EP4:1xTP16·EP16")[0] == SideLayout(10, Parallelism(dp=4, ep=4))
    assert parse_layout("1xTP8@h100-sxm:1xTP8@h200")[1] == SideLayout(1, Parallelism(tp=8), "h200")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("1xTP4", "a prefill pool alone answers nobody"),
        (":1xTP4", "a decode pool alone answers nobody"),
        ("1xTP4:1xTP4:1xTP4", "has 3 sides"),
        ("TP4:1xTP4", "'TP4' of 'TP4:1xTP4' is no number of replicas and their split"),
        ("1xTP4PP2:1xTP4", "is no number of replicas"),
        ("1xTP4TP2:1xTP4", "has TP twice"),
        ("1xTP8:0xTP8", "a prefill pool alone answers nobody"),
    ],
)
def test_layouts_that_are_none_are_refused_in_one_line(catalog: Catalog, layout: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        compare_apart(catalog, catalog.model("llama-3.1-8b"), [catalog.accelerator("h200")], Load(8, 1000, 100), layout)
    assert "\n" not in str(refused.value)


def test_an_estimate_is_the_steady_state_over_all_gpus(catalog: Catalog) -> None:
    (one,) = compare_apart(
        catalog, catalog.model("llama-3.1-8b"), [catalog.accelerator("h200")], Load(64, 4000, 400), "1xTP1:2xTP1"
    )
    assert one.service is not None
    assert one.estimate is not None
    assert (one.service.gpus, one.service.link) == (3, "fabric")
    state = disaggregated_state(Sides([one.service]), 64, 4000, 400)
    assert one.estimate.ttft_s == float(state.ttft_s[0, 0])
    assert one.estimate.output_tokens_per_s_per_gpu == pytest.approx(one.estimate.output_tokens_per_s / 3)
    spent = sum(one.estimate.gpu_s_per_token.values()) * one.estimate.output_tokens_per_s
    # Both sides work, and no more than all of their GPUs all the time.
    assert 1.0 < spent <= 3.0
    assert "over the fabric" in one.verdict


def test_two_accelerators_of_one_vendor_are_joined_over_the_network_and_two_vendors_are_not(catalog: Catalog) -> None:
    model, load = catalog.model("llama-3.1-8b"), Load(16, 2000, 200)
    (one,) = compare_apart(catalog, model, [catalog.accelerator("h200")], load, "1xTP1@h100-sxm:1xTP1")
    assert one.service is not None
    assert (one.service.prefill.accelerator.id, one.service.decode.accelerator.id) == ("h100-sxm", "h200")
    assert (one.service.link, one.service.layout) == ("network", "1xTP1@h100-sxm:1xTP1@h200")
    with pytest.raises(BadInput, match="no engine is known to hand a cache from one vendor to the other"):
        compare_apart(catalog, model, [catalog.accelerator("h200")], load, "1xTP1@mi300x:1xTP1")


def test_what_does_not_fit_is_said_beside_what_does(catalog: Catalog) -> None:
    accelerators = [catalog.accelerator(name) for name in ("h100-sxm", "mi355x")]
    small, large = compare_apart(
        catalog, catalog.model("llama-3.1-405b"), accelerators, Load(4, 1000, 100), "1xTP4:1xTP4", precision="fp8"
    )
    assert "cannot hold it" in small.problem
    assert large.estimate is not None


def test_numbers_of_both_sides_match_the_load(catalog: Catalog) -> None:
    """Longer prompts ask for more prefill replicas for each that decodes."""
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), stack="sglang")
    way = catalog.connector("sglang-mooncake")

    def prefill_share(inputs: int) -> float:
        found = matched([(one, one)], way, input_tokens=inputs, output_tokens=300, most_gpus=12, sequences=(64,))
        assert all(service.gpus <= 12 for service in found)
        return max(service.prefill_gpus / service.gpus for service in found)

    assert prefill_share(20_000) > prefill_share(500)
    (service,) = matched([(one, one)], way, input_tokens=4000, output_tokens=300, most_gpus=12, sequences=(64,))
    busy = disaggregated_state(Sides([service]), 64 * service.decode_replicas, 4000, 300).prefill_busy[0, 0]
    assert 0.4 < busy <= 1.0
    assert estimate(service, concurrency=64, input_tokens=4000, output_tokens=300).output_tokens_per_s > 0


def test_the_command_shows_and_tells_it(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare", "llama-3.1-8b", "--on", "h200", "--disaggregated", "1xTP1:1xTP1"]
    monkeypatch.setenv("COLUMNS", "80")
    shown = crosstie(*arguments)
    assert shown.status == 0
    assert "disaggregated prefill and decode" in shown.out
    assert all(len(line) <= 80 for line in shown.out.splitlines())
    told = json.loads(crosstie(*arguments, "--json").out)["apart"]
    assert [(one["layout"], one["gpus"], one["connector"]) for one in told] == [("1xTP1:1xTP1", 2, "vllm-nixl")]
    refused = crosstie("compare", "llama-3.1-8b", "--on", "h200", "--disaggregated", "1xTP1")
    assert (refused.status, refused.out) == (2, "")
    assert "a prefill pool alone answers nobody" in refused.err
