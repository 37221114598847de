"""`crosstie simulate`: a fleet, a plan or a workload under traffic, in virtual time."""

import re
from pathlib import Path
from typing import cast, get_args

import click
from msgspec import to_builtins

from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.assignments import amount, read_option
from crosstie.cli.options import FILE, file_option, flag_option, real_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.simulate_show import DETAILS, facts, simulation_parts
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy
from crosstie.core.question import assumptions
from crosstie.decide.plan.run_result import Outage
from crosstie.decide.plan.simulate import Simulation, simulate
from crosstie.decide.plan.subject import read_subject
from crosstie.decide.plan.sweep import RequestSource, ray_library
from crosstie.web.simulation_chart import course_picture, has_knee, knee_picture

_POLICIES = get_args(Policy)
_KILL = re.compile(r"(?P<pool>.+)@(?P<at>[^@+]+)(?:\+(?P<during>[^@+]+))?")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@click.command("simulate")
@click.argument("what", metavar="FLEET|PLAN|WORKLOAD", type=FILE)
@file_option("--workload", "Its classes and lengths, where WHAT brings none.")
@text_option("--trace", "TRACE", "Recorded requests, at their own times.")
@text_option("--class class_name", "NAME", "The class of all requests of a trace.")
@real_option("--rate", 1e-6, 1e9, "Requests/s. [default: peak, or the trace's]")
@whole_option("--sessions", 1, 1_000_000, "At work at once, each prompt a pause after the last answer. [default: the "
              "workload's]")  # fmt: skip
@text_option("--load loads", "X,Y,...", "Times that rate; several are compared.", default="1")
@text_option("--policy policies", "A,B,...", f"Of {', '.join(_POLICIES)}. [default: the fleet's]")
@file_option("--fleet fleets", "Another fleet or plan to compare.", multiple=True)
@whole_option("--seeds", 1, 10_000, "Runs of each.", default=3)
@whole_option("--requests", 1, 10**8, "Of each run. [default: of five minutes, or the trace's]")
@text_option("--kill", "POOL@TIME[+FOR]", "The pool dies then: mi300x@90s+60s, h200@12:00.", multiple=True)
@real_option("--sure", 50, 99, "Steps as slow as a plan counts with that is so sure. [default: as estimated]",
             metavar="PERCENT")  # fmt: skip
@flag_option("--clairvoyant", "Each policy also with answers' lengths known in advance.")
@whole_option("--processes", 1, 4096, "[default: one a core]")
@text_option("--ray", "ADDRESS", "Run on a Ray cluster; `local` starts one here. Needs the extra ray.")
@plot_option("Draw utilisation and queues over time, or sessions at several loads")
@answer_options(DETAILS, html=True)
def command(
    what: Path, workload: Path | None, trace: str | None, class_name: str | None, rate: float | None,
    sessions: int | None, loads: str,
    policies: str | None, fleets: tuple[Path, ...], seeds: int, requests: int | None, kill: tuple[str, ...],
    sure: float | None, clairvoyant: bool, processes: int | None, ray: str | None, plot: Drawing, wanted: Wanted,
) -> int:  # fmt: skip
    """Sends traffic through a fleet in virtual time: the gateway's own routing, engines that work in steps.

    \b
    crosstie simulate assistant
    crosstie simulate fleet.toml --workload work.toml --policy fastest,prefix
    crosstie simulate fleet.toml --trace azure-2023-conversation --load 0.5,1,2
    crosstie simulate plan.json --kill chat-mi300x@60s+60s --plot day.html
    crosstie simulate agents --load 0.5,1,2 --plot knee.svg

    WHAT is a fleet file, a plan (`plan --save`) or a workload, which is planned first. Requests come at random at the
    workload's peak, or as a trace has them (names and files as in `crosstie replay`); those of sessions a pause after
    the answer before them. Nothing is measured: replicas
    take the time that the performance model predicts.

    Exit status 1 where a class misses its targets or no steady state is reached. Ctrl-C ends a sweep with the runs
    that are done, and status 130.
    """
    if trace is not None and workload is not None:
        raise BadInput("--trace and --workload: requests come from one of them")
    if sessions is not None and rate is not None:
        raise BadInput("--rate and --sessions: requests come by the clock, or after the answers before them")
    if class_name is not None and trace is None:
        raise BadInput("--class is for a trace; a workload has its own")
    if ray is not None:
        ray_library()
    outages = [outage(text) for text in kill]
    catalog = Catalog()
    recorded = None if trace is None else read_trace(find_trace(trace, Path()))
    asked = None if workload is None else read_workload(catalog, find_workload(workload))
    with progress("planning") as on_progress:
        subjects = [read_subject(catalog, file, on_progress) for file in (what, *fleets)]
        simulation = simulate(
            catalog, subjects, RequestSource(asked, recorded, class_name, rate, requests, sessions),
            policies=_policies(policies), loads=_loads(loads), seeds=range(seeds), outages=outages,
            clairvoyant=clairvoyant, sure=None if sure is None else sure / 100.0, processes=processes, ray=ray,
            on_progress=on_progress,
        )  # fmt: skip
    knee = knee_picture(simulation.runs) if has_knee(simulation.runs) else None
    if simulation.runs:
        plot.draw(lambda: knee or course_picture(simulation.runs, outages))
    wanted.give(
        lambda: to_json(simulation),
        lambda details: simulation_parts(simulation, details),
        title=f"{what.name}, simulated",
        facts=lambda: facts(simulation),
        pictures=[knee or course_picture(simulation.runs[:1], outages)] if simulation.runs else [],
    )
    if len(simulation.runs) < simulation.asked:
        click.echo(f"crosstie: interrupted after {len(simulation.runs)} of {simulation.asked} runs", err=True)
        return 130
    return 0 if simulation.holds else 1


def to_json(simulation: Simulation) -> dict[str, object]:
    return {
        "asked": simulation.asked,
        "interrupted": len(simulation.runs) < simulation.asked,
        "holds": simulation.holds,
        "notes": simulation.notes,
        "mean_over_peak": simulation.mean_over_peak,
        **assumptions(simulation.question, simulation.reckoned),
        "bounds": [
            {"label": label, "load": load, **to_builtins(bound)} for (label, load), bound in simulation.bounds.items()
        ],
        "runs": [{**to_builtins(run), "holds": run.holds} for run in simulation.runs],
    }


def _policies(text: str | None) -> list[Policy]:
    names = names_in(text) if text is not None else []
    if text is not None and not names:
        raise BadInput("--policy names none")
    if len(set(names)) < len(names):
        raise BadInput(f"--policy {text}: one is named twice")
    return cast("list[Policy]", names)


def _loads(text: str) -> list[float]:
    names = names_in(text)
    if not names:
        raise BadInput("--load names none")
    loads = [read_option(f"--load {text}", name, amount) for name in names]
    if len(set(loads)) < len(loads):
        raise BadInput(f"--load {text}: one is named twice")
    return loads


def outage(text: str) -> Outage:
    read = _KILL.fullmatch(text)
    if read is None:
        raise BadInput(f"--kill {text}: write POOL@TIME or POOL@TIME+FOR, such as mi300x@90s+60s")
    during = read["during"]
    return Outage(read["pool"], _moment(text, read["at"]), None if during is None else _moment(text, during))


def _moment(whole: str, text: str) -> float:
    """Seconds: 90, 90s, 2m, 1.5h, 12:00 or 12:00:30 from the beginning of the traffic on."""
    parts = text.split(":")
    if 2 <= len(parts) <= 3 and all(part.isascii() and part.isdigit() for part in parts):
        hours, minutes, seconds = (*map(int, parts), 0)[:3]
        return 3600.0 * hours + 60.0 * minutes + seconds
    unit = text[-1:] if text[-1:] in _UNITS else ""
    try:
        value = amount(text.removesuffix(unit)) * _UNITS[unit]
    except BadInput:
        value = -1.0
    if value < 0.0:
        raise BadInput(f"--kill {whole}: '{text}' is no time; 90s, 2m, 1.5h and 12:00 are")
    return value
