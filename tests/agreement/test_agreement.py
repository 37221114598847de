"""One question, one answer: every command that can answer a buyer gives the same figure within its interval, or names
the assumption that makes the difference.

Two answers are held against each other as `crosstie reconcile` does it. What no assumption explains must be small.
"""

import json
import tomllib
from itertools import combinations
from math import log
from pathlib import Path
from typing import Any

import pytest
from tests.agreement.buyers import BUYERS, Buyer
from tests.conftest import Command
from tests.needs import one_in
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.catalog.scenarios import Scenario
from crosstie.cli.mcp_tools import TOOLS
from crosstie.cli.scorecard import contest_json
from crosstie.cli.ui import answered
from crosstie.core.progress import no_progress
from crosstie.decide.cost.reconcile import Reconciled, chosen, read_answers, reconcile
from crosstie.decide.scorecard.contest import contest

# What may be left unexplained: the simulator waits and mixes, and the model of a whole replica does not.
_LEFT = log(1.15)
_NAMES = {one.name: one for one in BUYERS}


def asked(crosstie: Command, buyer: Buyer, folder: Path) -> dict[str, dict[str, Any]]:
    """What each command says, by its name."""
    catalog = Catalog()
    load = ["--input", str(buyer.input), "--output", str(buyer.output), "--concurrency", str(buyer.in_flight)]
    replica = [buyer.model, "--on", buyer.on, *load, "--precision", buyer.precision, "--json"]
    (folder / "work.toml").write_text(buyer.workload)
    scenario = Scenario(
        name="asked", model=buyer.model, precision=buyer.precision, input=buyer.input, output=buyer.output,
        ttft_ms=buyer.ttft_ms or None, tpot_ms=buyer.tpot_ms or None,
    )  # fmt: skip
    held = contest(catalog, scenario, catalog.accelerators_named(buyer.on), buyer.prices)
    found = {
        "compare": json.loads(crosstie("compare", *replica).out),
        "scorecard": {"scenarios": [contest_json(held)]},
        "plan": json.loads(crosstie("plan", str(folder / "work.toml"), "--quick", "--json").out),
    }
    if buyer.prices == "buy":
        found["tco"] = json.loads(crosstie("tco", *replica).out)
    return found


def held_against(catalog: Catalog, folder: Path, one: dict[str, Any], other: dict[str, Any]) -> Reconciled | None:
    """None where they have nothing in common: a plan buys one accelerator, and the other's table has none of it."""
    files = folder / "one.json", folder / "other.json"
    for file, content in zip(files, (one, other), strict=True):
        file.write_text(json.dumps(content))
    pair = chosen(*map(read_answers, files))
    rows = [{(row.model, row.accelerator) for row in answer.reckoned} for answer in pair]
    return reconcile(catalog, *pair) if rows[0] & rows[1] else None


def explained(found: Reconciled, said: str) -> None:
    for one in found.differences:
        parts = {part.name: round(part.factor, 3) for part in one.parts}
        assert one.agree or abs(log(one.left)) < _LEFT, f"{said} {one.accelerator}: {one.first} {one.second} {parts}"
        if not one.agree:
            assert found.assumptions, f"{said} differ and assume the same"
            assert len(one.parts) > 1, f"{said} differ and name no assumption"


@pytest.mark.parametrize("name", one_in(10, _NAMES))
def test_commands_agree_or_name_what_differs(name: str, crosstie: Command, tmp_path: Path) -> None:
    catalog, answers = Catalog(), asked(crosstie, _NAMES[name], tmp_path)
    compared = 0
    for (first, one), (second, other) in combinations(answers.items(), 2):
        found = held_against(catalog, tmp_path, one, other)
        if found is not None:
            explained(found, f"{first} and {second}")
            compared += len(found.differences)
    assert compared


@pytest.mark.parametrize("name", one_in(40, list(_NAMES)[:20:5]))
def test_the_page_and_the_assistant_give_the_command_s_answer(name: str, crosstie: Command, tmp_path: Path) -> None:
    buyer = _NAMES[name]
    (tmp_path / "work.toml").write_text(buyer.workload)
    printed = json.loads(crosstie("plan", str(tmp_path / "work.toml"), "--quick", "--json").out)
    toml = TOOLS["plan"].answer({"workload_toml": buyer.workload, "quick": True, "full": True}, "", no_progress)
    page = answered(tomllib.loads(buyer.workload), str(tmp_path), confirm=False)["document"]
    for other in (toml, page):
        for key in ("fleet", "single_vendor", "assumptions", "reckoned", "sure_of_prices"):
            assert json.loads(json.dumps(other[key])) == printed[key], key
    question = {
        "model": buyer.model, "on": buyer.on.split(","), "precision": buyer.precision, "input": buyer.input,
        "output": buyer.output, "concurrency": buyer.in_flight,
    }  # fmt: skip
    told = TOOLS["compare"].answer(question, "", no_progress)
    words = ["--input", str(buyer.input), "--output", str(buyer.output), "--concurrency", str(buyer.in_flight)]
    typed = crosstie("compare", buyer.model, "--on", buyer.on, "--precision", buyer.precision, *words, "--json")
    assert json.loads(json.dumps(told)) == json.loads(typed.out)


@pytest.mark.parametrize("name", one_in(40, list(_NAMES)[:20:6]))
def test_a_plan_and_its_simulation_differ_by_mean_and_peak(name: str, crosstie: Command, tmp_path: Path) -> None:
    saved, buyer = tmp_path / "plan.json", _NAMES[name]
    (tmp_path / "work.toml").write_text(buyer.workload)
    crosstie("plan", str(tmp_path / "work.toml"), "--quick", "--save", str(saved))
    run = json.loads(crosstie("simulate", str(saved), "--requests", "1500", "--seeds", "1", "--json").out)
    found = present(held_against(Catalog(), tmp_path, json.loads(saved.read_text()), run))
    explained(found, "plan and simulate")
    assert "utilisation" in found.assumptions
    sold = [part.factor for one in found.differences for part in one.parts if part.name == "share sold"]
    assert sold == pytest.approx([0.5] * len(found.differences))
    shown = crosstie("simulate", str(saved), "--requests", "1500", "--seeds", "1").out
    assert "if traffic were always this" in shown
    assert "at the mean, 50% of it, as plans count" in shown
