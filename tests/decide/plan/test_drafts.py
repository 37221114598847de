"""Speculation in a plan: chosen where it pays, left where it does not, and what hangs on how many drafts are kept."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.decide.plan.candidates import candidates
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.plan import Plan, plan

CATALOG = Catalog([])
TEXT = """\
name = "reasoning"

[[class]]
name = "coding"
model = "deepseek-r1"
requests_per_s = 40
input = 2000
output = 1500
tpot_ms = { p90 = 40 }

[constraints]
accelerators = ["b200"]

[models."deepseek-r1"]
kv = ["fp8"]
stacks = ["vllm"]
precisions = ["native"]
"""


def planned(folder: Path, more: str = "", text: str = TEXT) -> Plan:
    file = folder / "reasoning.toml"
    file.write_text(text + more)
    return plan(CATALOG, read_workload(CATALOG, file))


@pytest.mark.slow
def test_a_model_with_a_measured_prediction_layer_speculates_where_it_pays(tmp_path: Path) -> None:
    drafting = planned(tmp_path)
    assert drafting.fleet
    (one,) = drafting.drafts
    assert str(one.speculation).startswith("mtp:")
    assert one.payoff.gain > 1.0
    assert one.payoff.gain_if_fewer < one.payoff.gain
    assert one.replicas_if_fewer is not None
    assert one.replicas_if_fewer >= drafting.fleet.pools[0].replicas
    assert one.more_usd_per_hour == pytest.approx(
        (one.replicas_if_fewer / drafting.fleet.pools[0].replicas - 1) * drafting.fleet.usd_per_hour
    )


@pytest.mark.slow
def test_without_drafts_it_is_dearer(tmp_path: Path) -> None:
    drafting, plain = planned(tmp_path), planned(tmp_path, 'speculation = ["none"]\n')
    assert drafting.fleet
    assert plain.fleet
    assert drafting.fleet.usd_per_hour < plain.fleet.usd_per_hour
    assert plain.drafts == []


@pytest.mark.slow
def test_drafts_that_are_seldom_kept_are_not_chosen(tmp_path: Path) -> None:
    found = planned(tmp_path, 'speculation = ["mtp:3", "none"]\nacceptance = 1.02\n')
    assert found.fleet
    assert found.drafts == []
    only = planned(tmp_path, 'speculation = ["mtp:3"]\nacceptance = 1.02\n')
    assert only.fleet
    assert only.fleet.usd_per_hour > found.fleet.usd_per_hour


@pytest.mark.slow
def test_the_fleet_file_says_how_its_pools_draft(tmp_path: Path) -> None:
    found = planned(tmp_path, 'speculation = ["mtp:2"]\ntext = "coding"\nacceptance = 2.4\n')
    fleet = fleet_of(found)
    (pool,) = fleet.pools
    assert (pool.speculation, pool.text) == ("mtp:2", "coding")
    assert pool.acceptance == pytest.approx(2.4)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, file).pools[0].speculation == "mtp:2"


@pytest.mark.slow
def test_ordinary_models_are_not_made_to_speculate(tmp_path: Path) -> None:
    """A head that somebody trained is one more thing to get and to trust: it is taken when it is asked for."""
    llama = TEXT.replace("deepseek-r1", "llama-3.3-70b")
    found = planned(tmp_path, text=llama)
    assert found.drafts == []
    asked = planned(tmp_path, 'speculation = ["eagle3:3"]\n', llama)
    assert [str(one.speculation) for one in asked.drafts] == ["eagle3:3"]


def test_preflight_is_asked_about_drafting(tmp_path: Path) -> None:
    """SGLang 0.5.15 to 0.5.18 answers greedily on ROCm where it speculates, and the plan says so."""
    text = TEXT.replace('"b200"', '"mi355x"').replace('"vllm"', '"sglang==0.5.18"')
    file = tmp_path / "reasoning.toml"
    file.write_text(text + 'speculation = ["mtp:3"]\n')
    workload = read_workload(CATALOG, file)
    gate = Gate(CATALOG, workload)
    model, on = CATALOG.model("deepseek-r1"), [CATALOG.accelerator("mi355x")]
    tried = candidates(CATALOG, model, on, workload.choice("deepseek-r1"), 3500, 3500, gate)
    findings = gate.readiness(tried[0]).findings
    assert any("verified by argmax" in finding.what for finding in findings)


@pytest.mark.slow
def test_the_answer_says_what_hangs_on_it(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "reasoning.toml"
    file.write_text(TEXT)
    got = crosstie("plan", str(file), "--quick", "--save", str(tmp_path / "plan.json"))
    assert got.status == 0
    said = " ".join(got.out.split())
    assert "the tokens/s of none" in said
    assert "if 20% fewer drafts are kept" in said
    (one,) = json.loads((tmp_path / "plan.json").read_text())["fleet"]["speculation"]
    assert one["speculation"].startswith("mtp:")
    assert one["replicas_if_fewer_kept"] >= 1
