"""What a plan says on the screen of how sure it is."""

import re
from dataclasses import replace

import pytest
from tests.decide.plan.workloads import one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.cli.plan_show import show_plan
from crosstie.decide.plan.answer import Alternative
from crosstie.decide.plan.plan import Plan, plan

CATALOG = Catalog([])
BIG = one_class("chat", 30.0, {"median": 800, "p95": 4000}, 250, model="llama-3.3-70b")


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(CATALOG, workload(BIG, accelerators=("mi300x", "h200"), sure=0.8))


def shown(one: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbose: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    show_plan(one, verbose)
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    return " ".join(said.split())


def test_the_width_of_intervals_does_not_decide_the_vendor_in_silence(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made.fleet is not None
    vendors = {item.id: item.vendor for item in made.market.items}
    used = {vendors[name] for name in made.fleet.gpus}
    other = next(name for name in vendors if {vendors[name]} != used)
    flipped = replace(made, by_estimates=Alternative({other: 3}, 12.0, -0.5))
    said = shown(flipped, monkeypatch, capsys)
    assert f"By the estimates themselves {vendors[other]} would win: 3 {other}, $12.00 an hour." in said
    same = replace(made, by_estimates=Alternative(dict(made.fleet.gpus), 12.0, -0.5))
    assert "By the estimates themselves" not in shown(same, monkeypatch, capsys)


def test_how_sure_engines_and_evidence_stand_in_the_answer(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown(made, monkeypatch, capsys, verbose=True)
    assert "Sized to be 80% sure; these replicas suffice in " in said
    assert "How sure, and what that costs an hour: 50% $" in said
    assert re.search(
        r"Engines, and what preflight says of them - llama-3.3-70b in \S+ on .* with .*?: (ready|not known)", said
    )
    assert "measured with layouts " in said or "no published result of " in said
