"""What commands once said against each other, a test each, with the cause that was mended."""

import json
from math import inf, prod
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.present import present
from tests.route.fleets import chosen, live, pool
from tests.small_workload import constrained, small

from crosstie.catalog.library import Catalog
from crosstie.catalog.measured import measured_apart
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.figures import dollars
from crosstie.core.question import USUAL, BuyersQuestion
from crosstie.decide.plan.flips import sure_of_prices
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.pools import pool_of
from crosstie.route.decision import a_million

pytestmark = pytest.mark.slow
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def test_a_card_of_a_workstation_is_not_billed_a_server(crosstie: Command) -> None:
    """RX 7900 XTX: $0.03 a million by the scorecard, $0.78 by tco, which had put an $800 card into a rack."""
    got = json.loads(crosstie("tco", "qwen3-8b", "--on", "rx-7900-xtx", "--gpus", "1", "--input", "1024",
                              "--output", "256", "--concurrency", "16", "--json").out)  # fmt: skip
    (card,) = got["options"]
    assert card["usd"]["hosting"] == card["usd"]["network"] == 0.0
    assert card["usd"]["servers"] < 2 * card["usd"]["accelerators"]
    edge = next(one for one in json.loads(crosstie("scorecard", "--part", "scenarios", "--json").out)["scenarios"]
                if one["scenario"] == "edge")  # fmt: skip
    same = next(one for one in edge["ranking"] if one["accelerator"] == "rx-7900-xtx")
    assert same["usd_per_gpu_hour"] == pytest.approx(card["usd_per_gpu_hour"], rel=0.02)
    sold = got["assumptions"]["utilisation"]
    assert same["usd_per_million_tokens"] == pytest.approx(card["usd_per_mtok"] * sold, rel=0.02)


def test_a_model_that_preflight_refuses_is_not_compared(crosstie: Command, tmp_path: Path) -> None:
    """2.00x was said of a model that its engine's own project lists as unsupported there."""
    refused = ["compare", "gemma-4-26b-a4b", "--precision", "fp8", "--tp", "8", "--on", "mi300x", "--json"]
    (entry,) = json.loads(crosstie(*refused).out)["entries"]
    assert entry["estimate"] is None
    assert entry["problem"].startswith("preflight: will not run with vllm")
    unsupported = crosstie("compare", "deepseek-v4-flash", "--on", "mi300x,h200", "--tp", "8").out
    assert "mi300x: preflight: vllm's own recipes list deepseek-ai/DeepSeek-V4-Flash as unsupported" in unsupported
    assert "Of mi300x preflight says: vllm's own recipes list" in unsupported
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["NobodyKnowsForCausalLM"]}))
    unknown = crosstie("compare", str(tmp_path), "--on", "mi300x,h200").out
    assert "h200: preflight: not known whether it runs with vllm" in unknown
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert "h200: preflight" not in crosstie("compare", str(tmp_path), "--on", "mi300x,h200").out


def test_a_claim_counts_gpus_as_fit_does(crosstie: Command) -> None:
    """c36 said four H100; `fit --tp 2` holds the model, if only barely."""
    (claim,) = json.loads(crosstie("claims", "c36", "--json").out)["claims"]
    said = {one["name"]: one["said"] for one in claim["readings"]}
    fit = ["fit", "llama-3.1-70b", "--precision", "fp16", "--on", "h100-sxm", "--context", "4096", "--json"]
    fewest = json.loads(crosstie(*fit).out)["reckoned"][0]["gpus"]
    assert said["as `fit` recommends, 4,096 tokens"] == f"1 and {fewest}"
    (two,) = json.loads(crosstie(*fit, "--tp", "2").out)["placements"]
    assert two["fits"]
    assert said["where it fits at all, 4,096 tokens"] == "1 and 2"


def test_a_claim_of_ownership_is_what_tco_says(crosstie: Command) -> None:
    """c18 was called extrapolated where `tco` had five measured points, at a saving of its own."""
    (claim,) = json.loads(crosstie("claims", "c18", "--json").out)["claims"]
    said = {one["name"]: one["said"] for one in claim["readings"]}
    got = json.loads(crosstie("tco", "llama-3.1-70b", "--precision", "fp8", "--on", "mi325x,h200", "--gpus", "800",
                              "--purchase", "mi325x=22000", "--purchase", "h200=35000", "--discount",
                              "mi325x=0.14", "--discount", "h200=0.14",
                              "--json").out)  # fmt: skip
    usd = {one["accelerator"]: one["usd_per_mtok"] for one in got["options"]}
    saved = 100.0 * (1.0 - usd["mi325x"] / usd["h200"])
    assert said["by `tco`, fp8, 64 in flight on the fewest GPUs"].startswith(f"{saved:.1f} (")
    assert not claim["extrapolated"]
    assert any("5 measured points of this model" in rest["what"] for rest in claim["rests_on"])


def test_a_contract_asks_for_what_is_to_be_had_at_its_price(crosstie: Command, tmp_path: Path) -> None:
    """ "104 h100 at $3.33" was asked where 88 were to be rented at $3.85: GPUs on hand have no seller."""
    saved, changes = tmp_path / "plan.json", (("requests_per_s = 5\n", "requests_per_s = 200\n"),)
    work = small(tmp_path, *changes, ('["mi300x", "h200"]\n', '["h200"]\ninventory = { h200 = 2 }\n'))
    crosstie("plan", str(work), "--quick", "--save", str(saved))
    content = json.loads(saved.read_text())
    wanted, there = content["fleet"]["to_be_had"]["h200"], content["fleet"]["gpus"]["h200"]
    assert 0 < wanted < there
    demands = json.loads(crosstie("review", str(saved), "--checklist", "--json").out)["demands"]
    (asked,) = (one["ask"] for one in demands if one["topic"] == "Price")
    assert asked.startswith(f"{wanted} h200 at {dollars(content['prices']['h200']['usd'])} a GPU-hour")
    only = small(tmp_path, ('["mi300x", "h200"]\n', '["h200"]\ninventory = { h200 = 8 }\n'), name="held.toml")
    crosstie("plan", str(only), "--quick", "--save", str(saved))
    demands = json.loads(crosstie("review", str(saved), "--checklist", "--json").out)["demands"]
    assert not [one for one in demands if one["topic"] == "Price"]


def test_what_was_paid_once_does_not_turn_requests_away() -> None:
    """Bought GPUs stood idle beside rented ones, since the router charged them their whole price."""
    rented, bought = pool("rented", usd_per_gpu_hour=2.0), pool("bought", usd_per_gpu_hour=3.0)
    assert chosen(live(rented, bought)) == "rented"
    sunk = pool("bought", usd_per_gpu_hour=3.0, sunk_usd_per_gpu_hour=2.5)
    assert chosen(live(rented, sunk)) == "bought"
    # What a request is billed is its part of the whole price all the same.
    whole, part = (live(one).pools[0].request_usd(1000.0, 0.0, 200.0) for one in (bought, sunk))
    assert whole == part


def test_a_bought_pool_says_what_of_its_price_is_sunk(catalog: Catalog, tmp_path: Path) -> None:
    for kind, sunk in (("buy", True), ("on-demand", False)):
        work = read_workload(catalog, small(tmp_path, ("[constraints]", f'[prices]\nkind = "{kind}"\n[constraints]')))
        made = plan(catalog, work)
        one = pool_of(present(made.fleet).pools[0])
        assert (0.0 < one.sunk_usd_per_gpu_hour < one.usd_per_gpu_hour) == sunk


def test_sellers_that_differ_threefold_leave_a_plan_unsure(catalog: Catalog, tmp_path: Path) -> None:
    work = read_workload(catalog, small(tmp_path, ('"mi300x", "h200"', '"mi355x", "h200"')))
    made = plan(catalog, work)
    sure = present(sure_of_prices(made.flips, made.market))
    assert list(present(made.fleet).gpus) == ["mi355x"]
    assert 0.3 < sure < 0.7
    given = read_workload(
        catalog, small(tmp_path, constrained("[prices]\nusd_per_gpu_hour = { mi355x = 2.59, h200 = 4.45 }"))
    )
    assert sure_of_prices(plan(catalog, given).flips, plan(catalog, given).market) is None


@pytest.mark.parametrize(("model", "known"), [("llama-3.3-70b", False), ("deepseek-r1", True)])
def test_layouts_apart_that_nobody_measured_are_known_as_such(catalog: Catalog, model: str, known: bool) -> None:
    """A dense 70B apart on MI355X was the first answer, and no such run was ever published."""
    one = catalog.deployment(catalog.model(model), catalog.accelerator("mi355x"), Parallelism(tp=8))
    assert measured_apart(catalog, one) == known


def test_what_costs_little_does_not_cost_nothing() -> None:
    assert [a_million(usd) for usd in (30.4, 3.21, 0.042, 0.0)] == ["$30", "$3.2", "$0.042", "nothing"]
    digits = (9e-5, 0.0431, 0.0994, 0.0996, 0.124, 0.5, 0.994, 0.996, 1.26, 9.44)
    assert [a_million(usd) for usd in digits] == [f"${usd:.2g}" for usd in digits]


def test_no_price_is_no_infinite_sum() -> None:
    assert dollars(inf) == "no price"


def test_defaults_stand_in_one_place(crosstie: Command) -> None:
    said = crosstie("compare", "llama-3.1-8b", "--on", "mi300x", "--json")
    got = json.loads(said.out)["assumptions"]
    assert (got["input_tokens"], got["output_tokens"], got["in_flight"]) == (4096, 1024, 64)
    assert BuyersQuestion(**{name: getattr(USUAL, name) for name in USUAL.__struct_fields__}) == USUAL
    for command in ("compare", "tco"):
        shown = crosstie(command, "llama-3.1-8b", "--on", "mi300x").out
        assert "assumes 4,096 tokens in, 1,024 out, 64 in flight a replica" in shown
    assert "assumes 8,192 tokens a sequence" in crosstie("fit", "llama-3.1-8b", "--on", "mi300x").out


def test_parts_of_a_difference_make_all_of_it(crosstie: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    ask = ["tco", "llama-3.1-8b", "--on", "mi300x", "--json"]
    first.write_text(crosstie(*ask).out)
    second.write_text(crosstie(*ask, "--precision", "fp8", "--input", "512", "--concurrency", "16",
                               "--set", "utilisation=40%", "--years", "5").out)  # fmt: skip
    (one,) = json.loads(crosstie("reconcile", str(first), str(second), "--json").out)["differences"]
    assert {part["name"] for part in one["parts"]} == {"price", "share sold", "lengths", "replica", "load", "left"}
    assert prod(part["factor"] for part in one["parts"]) == pytest.approx(one["second"] / one["first"])
    assert one["left"] == pytest.approx(1.0, abs=0.01)
    shown = crosstie("reconcile", str(first), str(second))
    assert shown.status == 0
    assert "assumptions that differ: input tokens, in flight, precision, horizon years, utilisation" in shown.out
    same = crosstie("reconcile", str(first), str(first))
    assert "assumptions that differ: none" in same.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "assumptions: missing: ask again"),
        ("[1]", "is no answer that --json printed"),
        ('{"assumptions": {"sure": "very"}, "reckoned": []}', "is no answer that --json printed"),
        ('{"assumptions": {}, "reckoned": []}', "nothing in common"),
    ],
)
def test_what_is_no_answer_is_not_reconciled(crosstie: Command, tmp_path: Path, text: str, said: str) -> None:
    file, good = tmp_path / "bad.json", tmp_path / "good.json"
    file.write_text(text)
    good.write_text(crosstie("compare", "llama-3.1-8b", "--on", "mi300x", "--json").out)
    got = crosstie("reconcile", str(good), str(file))
    assert got.status == 2
    assert said in got.err
    assert crosstie("reconcile", str(good), str(tmp_path / "none.json")).status == 2
