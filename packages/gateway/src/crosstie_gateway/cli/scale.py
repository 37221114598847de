"""`crosstie scale`: how many replicas of each pool there should be now, by cost; once, or as a service."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import click
from msgspec import to_builtins
from rich.console import Console

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import in_words
from crosstie.cli.assignments import amount, assigned
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import FILE, json_option, real_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import console, print_json, say, show_table
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, number
from crosstie.decide.plan.subject import read_subject
from crosstie.wire.address import Address
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.scale.act import Drainer, Kubernetes, ScaleHook, actors
from crosstie_gateway.scale.keda import serve_keda
from crosstie_gateway.scale.service import CounterWatch, ScaleService, read_gateways, read_state
from crosstie_gateway.scaler.capacities import capacities, check_inventory, rules_of
from crosstie_gateway.scaler.rules import ReadRules, ScaleRules, read_rules, time_of_day_s
from crosstie_gateway.scaler.scaler import FleetObservation, ScaleDecision, Scaler, ScalerState, clock
from crosstie_gateway.wire.server import Server

# Between the two looks of a dry run at a gateway, and what rates that are given are taken to be counted over.
_LOOK_S, _GIVEN_S = 10.0, 600.0
_GROUPS = {
    "Nothing is done": "--dry-run --rate --replicas --at",
    "What is done": "--patch --namespace --token-file --hook --keda --port --admin --key-file",
}
_KEY = "CROSSTIE_ADMIN_KEY"


@click.command("scale", cls=GroupedCommand, groups=_GROUPS)
@click.argument("what", metavar="FLEET|PLAN|WORKLOAD", type=FILE)
@click.option(
    "--rules", type=FILE, metavar="FILE", help="Supplies, limits, budgets, the day. [default: a supply a pool]"
)
@click.option("--gateway", "gateways", multiple=True, metavar="URL", help="Whose metrics say what comes; several.")
@click.option("--state", type=FILE, metavar="FILE", help="Keeps what is learnt, over restarts.")
@click.option("--dry-run", is_flag=True, help="Decide once, say why, change nothing.")
@click.option("--rate", "rates", multiple=True, metavar="CLASS=X", help="Requests/s, in place of a gateway's.")
@click.option("--replicas", multiple=True, metavar="SUPPLY=N", help="That serve now. [default: as planned]")
@click.option("--at", metavar="HH:MM", help="The time of day. [default: now]")
@click.option("--patch", metavar="URL|pod", help="Patch scale subresources of this API server, or of the pod's own.")
@click.option("--namespace", default="default", show_default=True, metavar="NAME", help="Of what is patched.")
@click.option("--token-file", type=FILE, metavar="FILE", help="The token for --patch URL.")
@click.option("--hook", metavar="COMMAND", help="Run for each change; $CROSSTIE_SUPPLY and _REPLICAS say which.")
@click.option("--keda", metavar="HOST:PORT", help="KEDA's external scaler over gRPC.")
@whole_option("--port", 0, 65535, "/metrics for an HPA, and /decision.")
@click.option("--admin", "admins", multiple=True, metavar="URL", help="Gateways' --admin-port: empty before removal.")
@click.option("--key-file", type=FILE, metavar="FILE", help=f"The key for --admin, if not in {_KEY}.")
@real_option("--speed", 0.01, 1000, "Over replicas that are emulated X times as fast: seconds are theirs.", default=1.0)
@json_option
def command(
    what: Path, rules: Path | None, gateways: tuple[str, ...], state: Path | None, dry_run: bool,
    rates: tuple[str, ...], replicas: tuple[str, ...], at: str | None, patch: str | None, namespace: str,
    token_file: Path | None, hook: str | None, keda: str | None, port: int | None, admins: tuple[str, ...],
    key_file: Path | None, speed: float, as_json: bool,
) -> int:  # fmt: skip
    """Decides how many replicas each pool should have: the cheapest that carry what is forecast until new ones serve.

    \b
    crosstie scale plan.json --dry-run --rate chat=9
    crosstie scale fleet.toml --gateway http://gateway:8080 --dry-run
    crosstie scale fleet.toml --gateway http://gateway:8080 --keda 0.0.0.0:9090
    crosstie scale fleet.toml --gateway http://gateway:8080 --patch pod

    Capacities and prices are the plan's, start-up times the catalog's; both are corrected by what is seen. --rules
    says what may be scaled and how far. Without --dry-run it runs until it is ended, and needs a gateway
    and something to do (--patch, --hook, --keda or --port). docs/scaling.md has the rest.

    Exit status 1 where replicas that can be had do not carry what is needed.
    """
    if not dry_run and (rates or replicas or at):
        raise BadInput("--rate, --replicas and --at are for --dry-run")
    if speed != 1.0 and dry_run:
        raise BadInput("--speed is for a scaler that runs")
    catalog = Catalog()
    with progress("planning") as on_progress:
        subject = read_subject(catalog, what, on_progress)
    pools = [pool.name for pool in subject.fleet.pools]
    planned_day = subject.workload.day if subject.workload else ()
    read = read_rules(rules, pools) if rules is not None else ReadRules(rules_of(subject), planned_day)
    check_inventory(read.rules, subject)
    known = capacities(catalog, subject)
    days = {part.class_name: read.of(part.class_name) for part in known.parts}
    planned = {supply.name: 0 for supply in read.rules.supplies}
    for pool in subject.fleet.pools:
        first = next((supply for supply in read.rules.supplies if supply.pool == pool.name), None)
        if first is not None:
            planned[first.name] = min(pool.replicas, first.most)
    scaler = Scaler(read.rules, known, days, ScalerState() if state is None else read_state(state))
    if dry_run:
        seen = _given(scaler, rates, _counted(scaler, replicas, planned), _moment(at), gateways)
        decision = scaler.decide(seen)
        document = {"seen": to_builtins(seen), "decision": to_builtins(decision)}
        print_json(document) if as_json else show_decision(console(), subject.label, scaler, seen, decision)
        return 1 if decision.short else 0
    if not gateways:
        raise BadInput("--gateway URL: whose traffic is to be followed; or --dry-run with --rate CLASS=X")
    if patch is None and hook is None and keda is None and port is None:
        raise BadInput("nothing would be done: --patch, --hook, --keda or --port; or --dry-run")
    cluster = None if patch is None else _cluster(patch, namespace, token_file)
    doing = actors(read.rules, cluster, None if hook is None else ScaleHook(hook, _say))
    drainer = _drainer(admins, key_file, read.rules, by_platform=patch is not None) if admins else None
    began = time.time()
    service = ScaleService(
        scaler, gateways, lambda: began + (time.time() - began) * speed, _say, doing, planned, state, drainer
    )
    return run_on_loop(_serve(service, keda, port, speed))


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


def _cluster(patch: str, namespace: str, token_file: Path | None) -> Kubernetes:
    if patch == "pod":
        return Kubernetes.in_pod()
    with in_words(f"--token-file {token_file}: cannot be read"):
        token = token_file.read_text().strip() if token_file else ""
    return Kubernetes(patch.rstrip("/"), namespace, token)


def _drainer(urls: tuple[str, ...], key_file: Path | None, rules: ScaleRules, *, by_platform: bool) -> Drainer:
    try:
        key = key_file.read_text(encoding="ascii").strip() if key_file else os.environ.get(_KEY, "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--key-file {key_file}: cannot be read: {error}") from None
    if not key:
        raise BadInput(f"--admin needs the gateway's key: set {_KEY}, or give --key-file")
    for url in urls:
        Address(url)
    shared = Counter(supply.pool for supply in rules.supplies if not supply.backends)
    for supply in rules.supplies:
        if shared[supply.pool] > 1 and not by_platform:
            others = f"others are of pool {supply.pool} too"
            raise BadInput(f"supply {supply.name}: {others}; say which `backends` are its own")
    return Drainer(urls, key)


def _counted(scaler: Scaler, given: tuple[str, ...], planned: dict[str, int]) -> dict[str, int]:
    counts = assigned("--replicas", given, amount)
    most = {supply.name: supply.most for supply in scaler.rules.supplies}
    for name, count in counts.items():
        if name not in most:
            raise BadInput(f"--replicas {name}: no such supply; there are {', '.join(most)}")
        if count != int(count) or not 0 <= count <= most[name]:
            raise BadInput(f"--replicas {name}={count:g}: a whole number up to {most[name]}, its most")
    return {**planned, **{name: int(count) for name, count in counts.items()}}


def _moment(at: str | None) -> float:
    now = time.time()
    if at is None:
        return now
    seconds = time_of_day_s(at)
    if seconds is None:
        raise BadInput(f"--at {at}: write a time of day such as 20:30")
    return now - now % 86_400.0 + seconds


def _given(
    scaler: Scaler, rates: tuple[str, ...], there: dict[str, int], at_s: float, gateways: tuple[str, ...]
) -> FleetObservation:
    at_s -= 3600.0 * scaler.rules.utc_offset_hours
    if rates:
        asked = assigned("--rate", rates, amount)
        for name, rate in asked.items():
            if name not in scaler.state.forecasts:
                raise BadInput(f"--rate {name}: no such class; there are {', '.join(scaler.state.forecasts)}")
            if rate < 0:
                raise BadInput(f"--rate {name}={rate:g}: must not be below 0")
        return FleetObservation(at_s=at_s, requests_per_s=asked, over_s=_GIVEN_S, ready=dict(there), wanted=dict(there))
    if not gateways:
        raise BadInput("--dry-run needs what comes: --gateway URL, or --rate CLASS=X")
    return run_on_loop(_looked(scaler, gateways, there))


async def _looked(scaler: Scaler, gateways: tuple[str, ...], there: dict[str, int]) -> FleetObservation:
    watch = CounterWatch(scaler.rules)
    try:
        watch.observe(time.time(), await read_gateways(gateways), there)
        await asyncio.sleep(_LOOK_S)
        seen = watch.observe(time.time(), await read_gateways(gateways), there)
    except OSError as error:
        raise BadInput(f"--gateway: {error}") from None
    assert seen is not None
    return seen


async def _serve(service: ScaleService, keda: str | None, port: int | None, speed: float) -> int:
    loop = asyncio.get_running_loop()
    page = Server(loop, service.answer) if port is not None else None
    server = None
    try:
        if page is not None and port is not None:
            with in_words(f"--port {port}"):
                _say(f"/metrics on port {await page.listen('0.0.0.0', port)}")
        if keda is not None:
            server, bound = await serve_keda(service, keda)
            _say(f"KEDA's external scaler on port {bound}")
        await service.run(speed)
    finally:
        if page is not None:
            page.close()
        if server is not None:
            await server.stop(1.0)
    return 0


def show_decision(out: Console, label: str, scaler: Scaler, seen: FleetObservation, decision: ScaleDecision) -> None:
    say(out, f"{label} at {clock(decision.at_s, scaler.rules)}: what would be done; nothing was")
    show_table(
        out,
        ("class", "requests/s now", "at most", "until", "margin", "provided for"),
        [
            (
                name, number(need.now), number(need.peak), clock(need.until_s, scaler.rules),
                f"{need.margin - 1.0:.0%}", number(need.provided),
            )
            for name, need in decision.needs.items()
        ],
    )  # fmt: skip
    state = scaler.state.supplies
    show_table(
        out,
        ("supply", "price", "$/h each", "starts in", "serving", "to have", "of them to empty"),
        [
            (
                supply.name, supply.kind, dollars(scaler.known.usd_per_hour(supply)),
                f"{state[supply.name].start.likely_s / 60:.0f} min", str(seen.ready.get(supply.name, 0)),
                str(decision.orders[supply.name].replicas), str(decision.orders[supply.name].draining),
            )
            for supply in scaler.rules.supplies
        ],
    )  # fmt: skip
    for supply in scaler.rules.supplies:
        say(out, f"- {supply.name}: {decision.orders[supply.name].why}")
    say(out, f"Together {dollars(decision.usd_per_hour)} an hour")
    if decision.short:
        say(out, f"Short: {decision.short}")
    learnt = [f"{name} {reach.factor:.2f}" for name, reach in scaler.state.reach.items() if reach.factor != 1.0]
    if learnt:
        say(out, f"Learnt: replicas take so many times what the plan says: {', '.join(learnt)}")
