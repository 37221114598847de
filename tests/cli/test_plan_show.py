"""What a plan says on the screen of how sure it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.decide.plan.test_memory import AGENTS
from tests.decide.plan.workloads import one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.cli.plan_show import plan_parts
from crosstie.cli.show import show
from crosstie.core.workload import Target
from crosstie.decide.plan.answer import Alternative
from crosstie.decide.plan.lighter import Unmeasured
from crosstie.decide.plan.plan import Confirmation, Plan, Sureness, plan
from crosstie.decide.plan.run_result import SimulatedClass

CATALOG = Catalog([])
BIG = one_class("chat", 30.0, {"median": 800, "p95": 4000}, 250, model="llama-3.3-70b")


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(CATALOG, workload(BIG, accelerators=("mi300x", "h200"), sure=0.8))


def shown(one: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verbose: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    show(plan_parts(one, verbose))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    return " ".join(said.split())


def test_a_solved_task_costs_a_session_over_the_share_that_solves_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = read_workload(CATALOG, Path("w.toml"), AGENTS.replace("turns = 20\n", "turns = 20\nsuccess_rate = 0.25\n"))
    said = shown(plan(CATALOG, asked, confirm=False), monkeypatch, capsys)
    found = re.search(r"\$([\d.]+) a session of 20 turns, \$([\d.]+) a solved task, idle hours", said)
    assert found
    assert float(found[2]) == pytest.approx(4 * float(found[1]), rel=0.05)


@pytest.mark.slow
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
    assert "80% sure" in said
    assert "; these replicas suffice in " in said
    assert "How sure, and what that costs an hour: 50% $" in said
    assert re.search(
        r"Engines, and what preflight says of them - llama-3.3-70b in \S+ on .* with .*?: (ready|not known)", said
    )
    assert "measured with layouts " in said or "no published result of " in said


def test_an_absurd_alternative_is_named_with_its_reason(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many times the price is no alternative; what holds it back is what there is to know."""
    far = Alternative({"gb300": 2144}, 38592.0, 23.8, limit="chat's TPOT p90 of 25 ms")
    near = Alternative({"h200": 8}, 36.0, 0.2, confirmed=True)
    assert made.fleet is not None
    odd = replace(
        made,
        single_vendor={"AMD": near, "NVIDIA": far},
        too_dear=far,
        sureness=[Sureness(0.5, near), Sureness(0.95, far)],
        unmeasured=Unmeasured(("vLLM",), Alternative({"b300": 16}, 30.0, -0.4)),
        confirmed=Confirmation(3),
        simulated=[],
        closed_form_usd_per_hour=0.9 * made.fleet.usd_per_hour,
    )
    said = shown(odd, monkeypatch, capsys)
    assert "NVIDIA alone: 25 times the price (2144 gb300): chat's TPOT p90 of 25 ms leaves its" in said
    assert "AMD alone: 8 h200, $36.00 an hour (+20.0%), simulated" in said
    assert "those not simulated are by closed forms, by which the answer's accelerators would cost $" in said
    assert "with vLLM, not measured there (--evidence any): 16 b300, $30.00 an hour (-40.0%)" in said
    assert "95% over 5 times that" in said
    assert "would cost 25 times what the estimates do" in said
    assert "38,592" not in said


def test_flips_to_absurd_fleets_are_none() -> None:
    assert Alternative({"gb300": 1}, 6.0, 5.0).is_absurd
    assert not Alternative({"gb300": 1}, 4.0, 3.0).is_absurd


def test_a_fleet_that_misses_when_simulated_is_not_called_confirmed(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(seconds=2.0, percentile=0.9)
    for seen_s, verdict in ((1.5, "Simulated: confirmed by 3"), (2.5, "Simulated, NOT confirmed: no fleet within")):
        one = SimulatedClass("chat", 900, seen_s, None, target, None)
        said = shown(replace(made, simulated=[one], confirmed=Confirmation(3)), monkeypatch, capsys)
        assert verdict in said
        assert ("MISSES its targets" in said) == (seen_s > 2.0)


def test_a_class_without_targets_is_served_or_not(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = SimulatedClass("batch", 900, None, None, None, None)
    for changed, said in (
        (one, "- batch: no targets, 900 requests served"),
        (replace(one, refused=0.05, parked=0.05), "- batch: no targets, 900 requests, 5% turned away: NOT served"),
        (replace(one, parked=0.05), "- batch: no targets, 900 requests, 5% wait for longer than 60 s: NOT served"),
    ):
        found = replace(made, simulated=[changed], confirmed=Confirmation(3))
        assert said in shown(found, monkeypatch, capsys)
        assert found.holds == (changed is one)


def test_a_search_that_found_nothing_says_so(
    made: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = replace(made, search_failed=True)
    assert not failed.holds
    assert "NOT confirmed: simulation found no fleet that holds" in shown(failed, monkeypatch, capsys)
    assert "NOT confirmed" not in shown(made, monkeypatch, capsys)
