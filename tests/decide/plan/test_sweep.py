"""Many runs: the same answers in one process, in several and on Ray, and an end that is asked for."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.decide.plan.workloads import CHAT, TWO, workload
from tests.present import present
from tests.waiting import LIMIT_S

import crosstie
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.decide.plan import sweep as module
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.run_result import Run, SimulatedCase
from crosstie.decide.plan.subject import of_plan
from crosstie.decide.plan.sweep import RequestSource, one_run, sweep
from crosstie.route.build import Tables

WORK = workload(CHAT, accelerators=TWO[:1], spare=0.2)
SOURCE = RequestSource(WORK, requests=100)


@pytest.fixture(scope="module")
def cases(catalog: Catalog) -> list[SimulatedCase]:
    fleet = of_plan(plan(catalog, WORK, today="2026-11-15")).fleet
    return [
        SimulatedCase(label="test", fleet=fleet, policy=policy, load=load, seed=seed)
        for policy in ("cheapest-meeting-target", "round-robin")
        for load, seed in ((0.5, 0), (1.0, 1))
    ]


@pytest.fixture(scope="module")
def one_by_one(catalog: Catalog, cases: list[SimulatedCase]) -> list[Run]:
    return [one_run(catalog, SOURCE, case) for case in cases]


def test_in_this_process(catalog: Catalog, cases: list[SimulatedCase], one_by_one: list[Run]) -> None:
    heard: list[tuple[int, int]] = []
    got = sweep(catalog, SOURCE, cases, processes=1, on_progress=lambda done, total, _: heard.append((done, total)))
    assert got.runs == one_by_one
    assert not got.interrupted
    assert heard == [(done, len(cases)) for done in range(len(cases) + 1)]


@pytest.mark.slow
def test_in_several_processes(catalog: Catalog, cases: list[SimulatedCase], one_by_one: list[Run]) -> None:
    assert sweep(catalog, SOURCE, cases, processes=2).runs == one_by_one


@pytest.mark.slow
def test_on_a_cluster(catalog: Catalog, cases: list[SimulatedCase], one_by_one: list[Run]) -> None:
    pytest.importorskip("ray")
    assert sweep(catalog, SOURCE, cases, ray="local").runs == one_by_one


@pytest.mark.slow
def test_where_no_cluster_answers(catalog: Catalog, cases: list[SimulatedCase]) -> None:
    pytest.importorskip("ray")
    with pytest.raises(BadInput, match=r"--ray 127\.0\.0\.1:1: no cluster answers there"):
        sweep(catalog, SOURCE, cases, ray="127.0.0.1:1")


def test_without_ray_it_is_said_what_to_install(
    catalog: Catalog, cases: list[SimulatedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install '\.\[ray\]'"):
        sweep(catalog, SOURCE, cases, ray="local")


def test_an_interrupted_sweep_has_what_was_done(
    catalog: Catalog, cases: list[SimulatedCase], one_by_one: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def until(number: int) -> None:
        left = [number]

        def run(catalog: Catalog, source: RequestSource, case: SimulatedCase, tables: Tables) -> Run:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return one_run(catalog, source, case, tables)

        monkeypatch.setattr(module, "one_run", run)

    until(3)
    got = sweep(catalog, SOURCE, cases, processes=1)
    assert got.interrupted
    assert got.runs == one_by_one[:3]
    until(0)
    with pytest.raises(KeyboardInterrupt):
        sweep(catalog, SOURCE, cases, processes=1)


SWEEP = """
import signal, sys
from contextlib import contextmanager
from crosstie.cli import main, simulate

@contextmanager
def told(what):
    yield lambda done, total, what: print(what, done, total, file=sys.stderr, flush=True)

if __name__ == "__main__":
    # A shell has what it starts in the background ignore the signal, tests and their children too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    simulate.progress = told
    sys.argv = ["crosstie", "simulate", sys.argv[1], "--requests", "200", "--seeds", "4000", "--processes", "2"]
    main.run()
"""


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to every process of the group."""
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    fleet = Path(crosstie.__file__).parent / "catalog" / "data" / "fleets" / "two-vendors.toml"
    started = subprocess.Popen(
        [sys.executable, str(script), str(fleet)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        for line in present(started.stderr):
            if line.startswith("simulating 3 "):
                break
        os.killpg(started.pid, signal.SIGINT)
        out, said = started.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 130, said
    assert "two-vendors: " in out
    assert "of 4000 runs" in said
    assert "Traceback" not in said
