"""`crosstie simulate`: a fleet, a plan or a workload under traffic, in virtual time; the verdict, classes against
targets, pools, then fleets and policies beside each other, and what nothing could beat."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import cast, get_args

import click
from msgspec import to_builtins
from rich.text import Text

from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.assignments import amount, read_option
from crosstie.cli.options import FILE, file_option, flag_option, real_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, percent, plural, seconds, share, significant
from crosstie.core.fleet import Policy
from crosstie.core.question import assumptions
from crosstie.decide.plan.run_result import (
    ClassResult,
    Latency,
    Outage,
    OutageResult,
    OverSeeds,
    Run,
    SeedSpread,
    SessionsResult,
    TurnResult,
    at_target,
    classes_of,
    holding,
    over_seeds,
    worst,
)
from crosstie.decide.plan.simulate import Simulation, simulate
from crosstie.decide.plan.subject import read_subject
from crosstie.decide.plan.sweep import RequestSource, ray_library
from crosstie.web.parts import Heading, Parts, Table, closing, note
from crosstie.web.report import KeyNumber
from crosstie.web.simulation_chart import course_picture, has_knee, knee_picture

_TIER_WORDS = {"host": "the host", "nvme": "its drives", "remote": "what replicas share"}
DETAILS = "all percentiles, which class went where, queues and preemptions, bounds by class"
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


def simulation_parts(simulation: Simulation, verbose: bool) -> Parts:
    groups = over_seeds(simulation.runs)
    first = groups[0]
    yield from _answer(first, simulation.mean_over_peak)
    yield from _classes(first)
    for kinds in zip(*(run.sessions for run in first.each), strict=True):
        yield from _sessions(OverSeeds(kinds))
    yield from _pools(first, verbose)
    for outage in first.first.outages:
        yield from _outage(outage, len(first.each))
    if verbose:
        yield from _percentiles(first)
        yield from _ways(first)
    if len(groups) > 1:
        yield from _side_by_side(groups)
    yield from _bound(simulation, first.first, verbose)
    yield from map(note, simulation.notes)
    yield note(simulation.question.line)
    if not verbose:
        yield closing(DETAILS)


def facts(simulation: Simulation) -> list[KeyNumber]:
    runs = over_seeds(simulation.runs)[0]
    within = runs.spread(lambda run: run.within)
    good, all_of_them = runs.mean(lambda run: run.good_requests_per_s), runs.mean(lambda run: run.requests_per_s)
    return [
        KeyNumber("verdict", _verdict(runs)),
        KeyNumber("within targets", percent(runs.mean(lambda run: run.within)), _between(within).strip(" ()")),
        KeyNumber("goodput", f"{significant(good)} requests/s", f"of {significant(all_of_them)}"),
        KeyNumber("an hour", dollars(runs.first.usd_per_hour)),
    ]


def _verdict(runs: OverSeeds[Run]) -> str:
    seeds, held = len(runs.each), holding(runs)
    if worst(runs) == 0.0 and not any(_has_targets(kind) for kind in classes_of(runs)):
        return "no class has a target"
    if held == 0:
        return "targets are MISSED"
    return "targets hold" if held == seeds else f"targets hold in {held} of {plural(seeds, 'seed')}"


def _answer(runs: OverSeeds[Run], mean: float | None) -> Parts:
    first, seeds = runs.first, len(runs.each)
    rate, measured_s = runs.mean(lambda run: run.requests_per_s), runs.mean(lambda run: run.measured_s)
    traffic = f"{significant(rate)} requests/s for {seconds(measured_s)}, {plural(seeds, 'seed')}"
    yield Text.assemble((first.label, "bold"), f": {traffic}, {_policy(first)}: ", (_verdict(runs), "bold"))
    within = runs.mean(lambda run: run.within)
    good = f"{percent(within)} of requests within targets{_between(runs.spread(lambda run: run.within))}"
    turned_away = _turned_away(runs)
    refused = f", {percent(turned_away)} turned away" if turned_away else ""
    yield (
        f"{good}{refused}: {significant(runs.mean(lambda run: run.good_requests_per_s))} requests/s and "
        f"{runs.mean(lambda run: run.good_output_tokens_per_s):,.0f} output tokens/s of goodput"
    )
    price = f"{dollars(first.usd_per_hour)} an hour"
    if served := runs.spread(lambda run: run.usd_per_million_tokens):
        price += f", {dollars(served.mean)} per million tokens served, if traffic were always this"
        if mean is not None and mean < 1.0 and first.load == 1.0:
            price += f"; {dollars(served.mean / mean)} at the mean, {share(mean)} of it, as plans count"
    usd_good = runs.spread(lambda run: run.usd_per_million_good_tokens)
    if usd_good and within < 0.9995:
        price += f", {dollars(usd_good.mean)} per million within targets"
    hit_rate = runs.mean(lambda run: run.prefix_hit_rate)
    places = {name: fmean(run.loaded_shares[name] for run in runs.each) for name in first.loaded_shares}
    beside = ", ".join(f"{share(part)} loaded from {_TIER_WORDS[name]}" for name, part in places.items())
    yield price + (
        f"; {share(hit_rate)} of prompt tokens were in a cache{f' ({beside})' if beside else ''}" if hit_rate else ""
    )
    for run in runs.each:
        if run.unsteady is not None:
            yield Text(run.unsteady, "bold")
            break


def _has_targets(kind: OverSeeds[ClassResult]) -> bool:
    return any(class_result.holds is not None for class_result in kind.each)


def _turned_away(runs: OverSeeds[Run]) -> float:
    return runs.total(lambda run: run.refused) / max(runs.total(lambda run: run.requests), 1)


def _policy(run: Run) -> str:
    return f"{run.policy}, lengths known" if run.knows_lengths else run.policy


def _between(within: SeedSpread | None) -> str:
    assert within is not None, "every run has a share"
    low, high = percent(within.low), percent(within.high)
    return f" ({low} to {high})" if low != high else ""


def _classes(runs: OverSeeds[Run]) -> Parts:
    rows = [
        [
            _name(kind), _against(kind.part(lambda each: each.ttft_s)), _against(kind.part(lambda each: each.tpot_s)),
            percent(kind.mean(lambda class_result: class_result.within)), _held(kind),
        ]
        for kind in classes_of(runs)
    ]  # fmt: skip
    yield Table(["class", "TTFT", "TPOT", ">within", "targets"], rows)


def _name(kind: OverSeeds[ClassResult]) -> str:
    return str(kind.first.name or "no class")


def _held(kind: OverSeeds[ClassResult]) -> str:
    if not _has_targets(kind):
        return "none" if kind.total(lambda class_result: class_result.requests) else "no traffic"
    held = holding(kind)
    if held == len(kind.each):
        return "hold"
    return f"{held} of {len(kind.each)} seeds" if held else "MISSED"


def _against(latency: OverSeeds[Latency]) -> str:
    """At the target's percentile, beside it; without one, the middle and the end."""
    target = latency.first.target
    if target is None:
        middle, end = latency.spread(lambda each: each.p50), latency.spread(lambda each: each.p95)
        return "-" if middle is None else f"p50 {_seconds(middle)}, p95 {_seconds(end)}"
    return f"p{target.percentile * 100:g} {_seconds(at_target(latency))} of {seconds(target.seconds)}"


def _seconds(spread: SeedSpread | None) -> str:
    return "never" if spread is None else seconds(spread.mean)


def _sessions(kind: OverSeeds[SessionsResult]) -> Parts:
    own = kind.first
    took = kind.part(lambda each: each.turn_s).spread(lambda each: each.p95)
    mean_s, turns_per_s = kind.mean(lambda each: each.mean_turn_s), kind.mean(lambda each: each.turns_per_s)
    waiting = significant(kind.mean(lambda each: each.waiting))
    cost = kind.spread(lambda each: each.usd_per_session)
    solved = kind.spread(lambda each: each.usd_per_solved)
    yield (
        f"{own.name or 'sessions'}: {own.live:,} sessions at work, {significant(turns_per_s)} turns/s; a turn takes "
        f"{seconds(mean_s)} on average, p95 {_seconds(took)}; {waiting} wait for an answer at a time"
    )
    yield (
        f"{share(kind.mean(lambda each: each.hit_rate))} of prompt tokens were in a cache; "
        f"{percent(kind.mean(lambda each: each.evicted))} of turns found most of theirs gone"
        + (f"; {dollars(cost.mean)} a session" if cost else "")
        + (f", {dollars(solved.mean)} a solved task" if solved else "")
    )
    rows = []
    for turns in zip(*(each.by_turn for each in kind.each), strict=False):
        of = OverSeeds(turns)
        rows.append([
            _numbers(of.first),
            f"{of.total(lambda each: each.turns):,}", seconds(of.mean(lambda each: each.ttft_p50_s)),
            seconds(of.mean(lambda each: each.ttft_p95_s)), share(of.mean(lambda each: each.hit_rate)),
        ])  # fmt: skip
    yield Table(["turn", ">turns", ">TTFT p50", ">p95", ">in cache"], rows)


def _numbers(turns: TurnResult) -> str:
    if turns.last is None:
        return f"{turns.first} on"
    return f"{turns.first}" if turns.last == turns.first else f"{turns.first} to {turns.last}"


def _pools(runs: OverSeeds[Run], verbose: bool) -> Parts:
    columns = ["pool", ">replicas", ">$/h", ">requests", ">busy", ">in flight each", ">waiting"]
    sent = max(runs.total(lambda run: run.requests), 1)
    rows = []
    for pools in zip(*(run.pools for run in runs.each), strict=True):
        pool = OverSeeds(pools)
        served = pool.total(lambda each: sum(each.requests.values()))
        in_flight = pool.mean(lambda each: each.mean_in_flight) / max(pool.first.replicas, 1)
        row = [
            pool.first.name, f"{pool.first.replicas:,}", f"{pool.first.usd_per_hour:,.2f}", share(served / sent),
            share(pool.mean(lambda each: each.utilisation)), significant(in_flight),
            significant(pool.mean(lambda each: each.mean_waiting)),
        ]  # fmt: skip
        if verbose:
            row += [f"{max(each.most_waiting for each in pools):,}", f"{pool.total(lambda each: each.preemptions):,}"]
        rows.append(row)
    yield Table([*columns, *([">most", ">preempted"] if verbose else [])], rows)


def _outage(outage: OutageResult, seeds: int) -> Parts:
    until = "the end" if outage.until_s is None else seconds(outage.until_s)
    parts = [("before", outage.before), ("meanwhile", outage.during), ("after", outage.after)]
    kept = ", ".join(f"{percent(value)} {when}" for when, value in parts if value is not None)
    of = " (first seed)" if seeds > 1 else ""
    handed = f"{plural(outage.handed_over, 'request')} handed over, {outage.refused:,} turned away"
    yield f"{outage.pool} gone from {seconds(outage.at_s)} to {until}{of}: {handed}; within targets {kept}"


def _percentiles(runs: OverSeeds[Run]) -> Parts:
    rows = []
    for kind in classes_of(runs):
        latencies = {
            "TTFT": kind.part(lambda class_result: class_result.ttft_s),
            "TPOT": kind.part(lambda class_result: class_result.tpot_s),
            "whole": kind.part(lambda class_result: class_result.finish_s),
        }
        for name, latency in latencies.items():
            ends = [latency.spread(lambda each, end=end: getattr(each, end)) for end in ("p50", "p90", "p95", "p99")]  # type: ignore[misc]
            rows.append([f"{_name(kind)} {name}", f"{kind.total(lambda each: each.requests):,}", *map(_seconds, ends)])
    columns = ["", ">requests", ">p50", ">p90", ">p95", ">p99"]
    yield Table(columns, rows, "Percentiles, means over the seeds")


def _ways(runs: OverSeeds[Run]) -> Parts:
    rows = []
    for kind in classes_of(runs):
        sent = max(kind.total(lambda class_result: class_result.requests), 1)
        served: dict[str, int] = {}
        for run in runs.each:
            for pool in run.pools:
                served[pool.name] = served.get(pool.name, 0) + pool.requests.get(str(kind.first.name), 0)
        ways = sorted(((name, count) for name, count in served.items() if count), key=lambda pair: -pair[1])
        rows += [[_name(kind), name, share(count / sent)] for name, count in ways]
    yield Table(["class", "went to", ">share"], rows, "Where requests went")


def _side_by_side(groups: Sequence[OverSeeds[Run]]) -> Parts:
    several = {
        "fleet": len({group.first.label for group in groups}) > 1,
        ">load": len({group.first.load for group in groups}) > 1,
        "~policy": len({_policy(group.first) for group in groups}) > 1,
    }
    # What is the same for all, or nothing, stands above or need not stand at all.
    shown = {">$/h": several["fleet"], ">in cache": any(run.prefix_hit_rate for group in groups for run in group.each)}
    names = [name for name, differs in several.items() if differs]
    others = [">within", ">turned away", ">worst", *(name for name, is_shown in shown.items() if is_shown)]
    columns = [*names, *others, ">$/M good", ">hold"]
    rows = []
    for runs in groups:
        first, farthest = runs.first, worst(runs)
        usd_good = runs.spread(lambda run: run.usd_per_million_good_tokens)
        cells = {
            "fleet": first.label,
            ">load": f"{first.load:g}",
            "~policy": _policy(first),
            ">within": percent(runs.mean(lambda run: run.within)),
            ">turned away": percent(_turned_away(runs)),
            ">worst": "-" if farthest is None else f"{farthest:.2f}",
            ">$/h": dollars(first.usd_per_hour),
            ">in cache": share(runs.mean(lambda run: run.prefix_hit_rate)),
            ">$/M good": dollars(usd_good.mean) if usd_good else "-",
            ">hold": f"{holding(runs)}/{len(runs.each)}",
        }
        rows.append([cells[column] for column in columns])
    yield Table(columns, rows, "Side by side")
    yield note(
        "  worst: latency over its target, at the target's percentile, of the class that is farthest; $/M good: "
        "the fleet's bill over tokens within targets"
    )


def _bound(simulation: Simulation, run: Run, verbose: bool) -> Parts:
    bound = simulation.bounds.get((run.label, run.load))
    if bound is None:
        return
    least = f"at least {dollars(bound.usd_per_hour)} of GPU time an hour, if all replicas were always full"
    yield (
        f"no routing could beat {percent(bound.within)} within targets (each request alone on its fastest pool); "
        f"the traffic takes {least}"
    )
    if verbose:
        yield Heading("Bounds by class: each request alone on an idle replica of its fastest pool")
        for kind in bound.classes:
            times = f"TTFT {seconds(kind.ttft_s)}, TPOT {seconds(kind.tpot_s)}"
            yield f"- {kind.name}: {times} at the targets' percentiles, {percent(kind.within)} within"
