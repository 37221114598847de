"""`crosstie demo`: the whole loop on one machine without an accelerator."""

from contextlib import ExitStack

import click

from crosstie.catalog.library import Catalog
from crosstie.cli.bench_show import kept, latency, promised
from crosstie.cli.options import json_option, real_option
from crosstie.cli.progress import progress
from crosstie.cli.show import Output, console, print_json, say, show_table
from crosstie.core.figures import dollars, share, significant
from crosstie.core.workload import Target
from crosstie.prove.replay.outcomes import Percentiles, ReplayedClass
from crosstie_gateway.demo.demo import (
    Demo,
    PolicyRun,
    dashboard_address,
    demo_document,
    run_demo,
    send_on,
)

_EMULATED = (
    "EMULATED: no AMD or NVIDIA GPU ran. Replicas answer in the time that the performance model predicts, so this "
    "shows the planner, the gateway and the routing at work, and nothing about hardware."
)


@click.command("demo", epilog="Example: crosstie demo --speed 20 --seconds 100 --keep")
@real_option("--speed", 0.1, 100, "Emulated seconds to each second.", default=10.0)
@real_option("--seconds", 5, 3600, "Emulated seconds of traffic.", metavar="S", default=150.0)
@click.option("--keep", is_flag=True, help="Leave the gateway and its dashboard running, under traffic, until Ctrl-C.")
@json_option
def command(speed: float, seconds: float, keep: bool, as_json: bool) -> int:
    """Plans a small fleet of MI300X, H200 and GH200, emulates and serves it, and replays recorded requests through it.

    Twice the same requests: routed by the fleet's own policy, then round-robin. No GPU is needed and none runs. Where
    this machine is too slow for the speed, they are sent again at half of it.
    Exit status 1 if any request failed that was not turned away for want of room (status 429).
    """
    with ExitStack() as held:
        with progress() as on_progress:
            demo, url = run_demo(Catalog(), held, speed=speed, seconds=seconds, on_progress=on_progress)
        print_json(demo_document(demo)) if as_json else _show(console(), demo, url if keep else None)
        if keep:
            _wait_at(url, demo)
    return 1 if any(run.result.failed > run.result.turned_away for run in demo.runs) else 0


def _wait_at(url: str, demo: Demo) -> None:
    model = demo.fleet.classes[0].model
    body = f'{{"model":"{model}","stream":true,"max_tokens":40,"messages":[{{"role":"user","content":"Hello"}}]}}'
    click.echo(
        f"still serving at {url}/v1, {significant(demo.speed)} times as fast as the clock; Ctrl-C ends it", err=True
    )
    click.echo(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", err=True)
    click.echo(f"  crosstie explain --url {url} --model {model} --input 3000 --output 200", err=True)
    click.echo(f"  {dashboard_address(url)}", err=True)
    try:
        send_on(url, demo)
    except KeyboardInterrupt:
        click.echo("", err=True)


def _show(out: Output, demo: Demo, kept_at: str | None) -> None:
    own, rival = demo.runs
    say(out, _EMULATED)
    _show_fleet(out, demo)
    page = dashboard_address(kept_at) if kept_at else "`crosstie demo --keep` leaves it open, under traffic"
    # An address on one line can be clicked.
    say(out, f"Dashboard: {page}")
    _show_outcomes(out, demo)
    rate = f"{significant(demo.seconds)} emulated seconds, {significant(demo.speed)} to each second"
    say(out, f"{demo.requests:,} recorded requests over {rate}, at the rate that the fleet was planned for")
    _show_latencies(out, demo)
    for run in demo.runs:
        for why, times in run.result.faults:
            say(out, f"- {run.policy}: {times:,} x {why}")
    late = " and ".join(latency(run.result.client.latest_s) for run in (own, rival))
    say(out, f"the client itself sent no request later than {late} after its time", "dim")
    if own.result.disturbed or rival.result.disturbed:
        say(out, "this machine stood still meanwhile, and emulated time did not: run it again, slower (--speed)")


def _show_fleet(out: Output, demo: Demo) -> None:
    plan = demo.plan
    if plan.fleet is None:
        return
    asked = " and ".join(f"{each.name} ({significant(each.requests_per_s)} a second)" for each in demo.fleet.classes)
    say(out, f"Wanted: {demo.fleet.classes[0].model} for {asked}, each within its latency targets")
    gpus = " and ".join(f"{number} {name}" for name, number in plan.fleet.gpus.items())
    offered = ", ".join(item.id for item in plan.market.items)
    say(out, f"Cheapest fleet, planned from {offered}: {gpus}, {dollars(demo.fleet.usd_per_hour)} an hour")
    for vendor, alone in plan.single_vendor.items():
        if alone is not None:
            cost = f"{dollars(alone.usd_per_hour)} an hour ({alone.dearer:+.0%})"
            how = "simulated" if alone.confirmed else "by closed forms alone"
            say(out, f"- {vendor} alone: {alone.label}, {cost}, {how}")
    vendors = {pool.deployment.accelerator.vendor for pool in demo.plan.fleet.pools} if demo.plan.fleet else set()
    if len(vendors) == 1:
        say(out, f"{min(vendors)} alone is the cheapest for this traffic: no mixture that was simulated costs less")
    own, rival = demo.runs
    worth = 1.0 - _good_usd(own) / _good_usd(rival) if _good_usd(rival) else 0.0
    kept_by = f"{kept(own.result.kept)} of requests, {rival.policy} {kept(rival.result.kept)}"
    say(
        out,
        f"Crosstie's routing keeps the targets of {kept_by}: a million tokens within targets cost {share(abs(worth))} "
        f"{'less' if worth >= 0 else 'more'}",
    )


def _show_latencies(out: Output, demo: Demo) -> None:
    own, rival = demo.runs
    columns = ["class", "latency", ">target", ">plan", ">seen", ">kept", f">{rival.policy} seen"]
    rows = []
    for expected, mine, theirs in zip(demo.expected, _in_order(demo, own), _in_order(demo, rival), strict=True):
        for name, target, simulated in (
            ("TTFT", expected.ttft, expected.ttft_s), ("TPOT", expected.tpot, expected.tpot_s),
        ):  # fmt: skip
            if target is not None and simulated is not None:
                rows.append(
                    (expected.name, name, promised(target), latency(simulated), *_row(name, target, mine, theirs))
                )
    show_table(out, columns, rows, "Latencies at the target's percentile")
    say(out, "  plan: simulated; seen: from when a request was due", "dim")


def _row(name: str, target: Target, mine: ReplayedClass, theirs: ReplayedClass) -> tuple[str, ...]:
    if name == "TTFT":
        return _at(mine.seen.ttft_s, target), kept(mine.ttft_kept), _at(theirs.seen.ttft_s, target)
    return _at(mine.seen.tpot_s, target), kept(mine.tpot_kept), _at(theirs.seen.tpot_s, target)


def _at(spread: Percentiles, target: Target) -> str:
    return latency(spread.at(target.percentile))


def _good_usd(run: PolicyRun) -> float:
    return run.result.fleet_usd_per_million_tokens_within_target or 0.0


def _in_order(demo: Demo, run: PolicyRun) -> list[ReplayedClass]:
    by_name = {replayed.seen.name: replayed for replayed in run.result.classes}
    return [by_name[expected.name] for expected in demo.expected]


def _show_outcomes(out: Output, demo: Demo) -> None:
    """What requests cost at their pools' design loads tells little of a fleet that is paid for busy or not."""
    columns = ["policy", *(f">{expected.name}" for expected in demo.expected), ">all", ">failed", ">$/M tokens"]
    rows = []
    for run in demo.runs:
        row = [run.policy, *(kept(replayed.kept) for replayed in _in_order(demo, run)), kept(run.result.kept)]
        rows.append([*row, f"{run.result.failed:,}", dollars(_good_usd(run))])
    show_table(
        out, columns, rows, "Requests within their targets, and the fleet's cost of a million tokens within them"
    )
