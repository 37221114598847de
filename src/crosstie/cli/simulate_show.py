"""How a simulation looks on a terminal: the verdict, classes against targets, pools; then fleets and policies beside
each other, and what nothing could beat."""

from collections.abc import Sequence

from rich.text import Text

from crosstie.cli.show import Output, closing, heading, say, show_table
from crosstie.core.figures import dollars, percent, plural, seconds, share, significant
from crosstie.decide.plan.run_result import OutageResult
from crosstie.decide.plan.seeds import Seeded, SeededClass, SeededLatency, SeedSpread, over_seeds
from crosstie.decide.plan.simulate import Simulation

DETAILS = "all percentiles, which class went where, queues and preemptions, bounds by class"


def show_simulation(out: Output, found: Simulation, verbose: bool) -> None:
    groups = over_seeds(found.runs)
    first = groups[0]
    _show_answer(out, first, found.mean_over_peak)
    _show_classes(out, first)
    _show_pools(out, first, verbose)
    for number, one in enumerate(first.runs[0].outages):
        _show_outage(out, one, len(first.runs), number)
    if verbose:
        _show_percentiles(out, first)
        _show_ways(out, first)
    if len(groups) > 1:
        _show_side_by_side(out, groups)
    _show_bound(out, found, first, verbose)
    for note in found.notes:
        say(out, note, "dim")
    say(out, found.question.line, "dim")
    if not verbose:
        closing(out, DETAILS)


def _show_answer(out: Output, one: Seeded, mean: float | None) -> None:
    seeds = len(one.runs)
    verdict = "targets hold" if one.holding == seeds else f"targets hold in {one.holding} of {plural(seeds, 'seed')}"
    if one.holding == 0:
        verdict = "targets are MISSED"
    if one.worst == 0.0 and not any(kind.holding is not None for kind in one.classes):
        verdict = "no class has a target"
    traffic = f"{significant(one.requests_per_s)} requests/s for {seconds(one.measured_s)}, {plural(seeds, 'seed')}"
    say(out, Text.assemble((one.label, "bold"), f": {traffic}, {_policy(one)}: ", (verdict, "bold")))
    good = f"{percent(one.within.mean)} of requests within targets{_between(one.within, percent)}"
    refused = f", {percent(one.refused)} turned away" if one.refused else ""
    say(out, f"{good}{refused}: {significant(one.good_requests_per_s)} requests/s and "
             f"{one.good_output_tokens_per_s:,.0f} output tokens/s of goodput")  # fmt: skip
    price = f"{dollars(one.usd_per_hour)} an hour"
    if one.usd_per_million:
        price += f", {dollars(one.usd_per_million.mean)} per million tokens served, if traffic were always this"
        if mean is not None and mean < 1.0 and one.load == 1.0:
            price += f"; {dollars(one.usd_per_million.mean / mean)} at the mean, {share(mean)} of it, as plans count"
    if one.usd_per_million_good and one.within.mean < 0.9995:
        price += f", {dollars(one.usd_per_million_good.mean)} per million within targets"
    hits = f"; {share(one.prefix_hit_rate)} of prompt tokens were in a cache" if one.prefix_hit_rate else ""
    say(out, price + hits)
    for run in one.runs:
        if run.unsteady is not None:
            say(out, Text(run.unsteady, "bold"))
            break


def _policy(one: Seeded) -> str:
    return f"{one.policy}, lengths known" if one.knows_lengths else one.policy


def _between(found: SeedSpread, written: object) -> str:
    assert callable(written)
    low, high = written(found.low), written(found.high)
    return f" ({low} to {high})" if low != high else ""


def _show_classes(out: Output, one: Seeded) -> None:
    rows = [
        [kind.name, _against(kind.ttft_s), _against(kind.tpot_s), percent(kind.within), _held(kind, one)]
        for kind in one.classes
    ]
    show_table(out, ["class", "TTFT", "TPOT", ">within", "targets"], rows)


def _held(kind: SeededClass, one: Seeded) -> str:
    if kind.holding is None:
        return "none" if kind.requests else "no traffic"
    if kind.holding == len(one.runs):
        return "hold"
    return f"{kind.holding} of {len(one.runs)} seeds" if kind.holding else "MISSED"


def _against(found: SeededLatency) -> str:
    """At the target's percentile, beside it; without one, the middle and the end."""
    if found.target is None:
        return "-" if found.p50 is None else f"p50 {_seconds(found.p50)}, p95 {_seconds(found.p95)}"
    return f"p{found.target.percentile * 100:g} {_seconds(found.at_target)} of {seconds(found.target.seconds)}"


def _seconds(found: SeedSpread | None) -> str:
    return "never" if found is None else seconds(found.mean)


def _show_pools(out: Output, one: Seeded, verbose: bool) -> None:
    columns = ["pool", ">replicas", ">$/h", ">requests", ">busy", ">in flight each", ">waiting"]
    rows = [
        [
            pool.name, f"{pool.replicas:,}", f"{pool.usd_per_hour:,.2f}", share(pool.share), share(pool.busy),
            significant(pool.in_flight_a_replica), significant(pool.mean_waiting),
            *([f"{pool.most_waiting:,}", f"{pool.preemptions:,}"] if verbose else []),
        ]
        for pool in one.pools
    ]  # fmt: skip
    show_table(out, [*columns, *([">most", ">preempted"] if verbose else [])], rows)


def _show_outage(out: Output, one: OutageResult, seeds: int, number: int) -> None:
    until = "the end" if one.until_s is None else seconds(one.until_s)
    parts = [("before", one.before), ("meanwhile", one.during), ("after", one.after)]
    kept = ", ".join(f"{percent(value)} {when}" for when, value in parts if value is not None)
    of = " (first seed)" if seeds > 1 else ""
    handed = f"{plural(one.handed_over, 'request')} handed over, {one.refused:,} turned away"
    say(out, f"{one.pool} gone from {seconds(one.at_s)} to {until}{of}: {handed}; within targets {kept}")


def _show_percentiles(out: Output, one: Seeded) -> None:
    rows = []
    for kind in one.classes:
        for name, found in (("TTFT", kind.ttft_s), ("TPOT", kind.tpot_s), ("whole", kind.finish_s)):
            each = (found.p50, found.p90, found.p95, found.p99)
            rows.append([f"{kind.name} {name}", f"{kind.requests:,}", *map(_seconds, each)])
    columns = ["", ">requests", ">p50", ">p90", ">p95", ">p99"]
    show_table(out, columns, rows, "Percentiles, means over the seeds")


def _show_ways(out: Output, one: Seeded) -> None:
    rows = [
        [kind.name, pool.name, share(pool.by_class[kind.name])]
        for kind in one.classes
        for pool in sorted(one.pools, key=lambda pool: -pool.by_class.get(kind.name, 0.0))
        if kind.name in pool.by_class
    ]
    show_table(out, ["class", "went to", ">share"], rows, "Where requests went")


def _show_side_by_side(out: Output, groups: Sequence[Seeded]) -> None:
    several = {
        "fleet": len({one.label for one in groups}) > 1,
        ">load": len({one.load for one in groups}) > 1,
        "~policy": len({_policy(one) for one in groups}) > 1,
    }
    # What is the same for all, or nothing, stands above or need not stand at all.
    shown = {">$/h": several["fleet"], ">in cache": any(one.prefix_hit_rate for one in groups)}
    names = [name for name, differs in several.items() if differs]
    others = [">within", ">turned away", ">worst", *(name for name, is_shown in shown.items() if is_shown)]
    columns = [*names, *others, ">$/M good", ">hold"]
    rows = []
    for one in groups:
        cells = {
            "fleet": one.label,
            ">load": f"{one.load:g}",
            "~policy": _policy(one),
            ">within": percent(one.within.mean),
            ">turned away": percent(one.refused),
            ">worst": "-" if one.worst is None else f"{one.worst:.2f}",
            ">$/h": dollars(one.usd_per_hour),
            ">in cache": share(one.prefix_hit_rate),
            ">$/M good": dollars(one.usd_per_million_good.mean) if one.usd_per_million_good else "-",
            ">hold": f"{one.holding}/{len(one.runs)}",
        }
        rows.append([cells[column] for column in columns])
    show_table(out, columns, rows, "Side by side")
    say(out, "  worst: latency over its target, at the target's percentile, of the class that is farthest; $/M good: "
             "the fleet's bill over tokens within targets", "dim")  # fmt: skip


def _show_bound(out: Output, found: Simulation, one: Seeded, verbose: bool) -> None:
    bound = found.bounds[one.label, one.load]
    least = f"at least {dollars(bound.usd_per_hour)} of GPU time an hour, if all replicas were always full"
    say(out, f"no routing could beat {percent(bound.within)} within targets (each request alone on its fastest pool); "
             f"the traffic takes {least}")  # fmt: skip
    if verbose:
        heading(out, "Bounds by class: each request alone on an idle replica of its fastest pool")
        for kind in bound.classes:
            times = f"TTFT {seconds(kind.ttft_s)}, TPOT {seconds(kind.tpot_s)}"
            say(out, f"- {kind.name}: {times} at the targets' percentiles, {percent(kind.within)} within")
