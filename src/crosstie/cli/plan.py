"""`crosstie plan`: the cheapest fleet for a workload, or saved plans against today's catalog."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.text import Text

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.workloads import example_text, find_workload, read_workload
from crosstie.catalog.writing import write_folder, write_text
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.assignments import amount, assigned, fraction
from crosstie.cli.options import FILE, file_option, flag_option, gathered, on_option, real_option
from crosstie.cli.plan_page import pools_csv, write_page
from crosstie.cli.plan_show import DETAILS, plan_parts
from crosstie.cli.progress import caller, progress
from crosstie.cli.show import json_text, print_json, show
from crosstie.cli.this_machine import ON_THIS, stock_on
from crosstie.core.document import picked, plain
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.figures import dollars, plural
from crosstie.core.workload import EVIDENCE, Workload
from crosstie.decide.cost.prices import BUY
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import PLANNED_BY, adjusted, checked_discount, checked_gpu_hour, held
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import document, mark_of
from crosstie.decide.plan.watch import PriceMove, Watched, watched
from crosstie.port.recipe.build import RecipeBook, RecipeOptions, fleet_recipes
from crosstie.port.recipe.forms.cluster import manifests as cluster_manifests
from crosstie.port.recipe.names import with_names
from crosstie.port.recipe.nodes import Node, check_room, read_nodes
from crosstie.web.chart import check_picture
from crosstie.web.parts import Parts, note
from crosstie.web.plan_chart import plan_picture


class Overrides(NamedTuple):
    """Options that override the workload file, as typed."""

    price: tuple[str, ...] = ()
    discount: tuple[str, ...] = ()
    kinds: str | None = None
    reserved: tuple[str, ...] = ()
    accelerators: str | None = None
    single_gpus: bool = False
    sure: float | None = None
    evidence: str | None = None
    only_known: bool = False

    @property
    def flags(self) -> list[str]:
        """Those that were given."""
        names = {"kinds": "--prices", "accelerators": "--on"}
        return [names.get(name, f"--{name.replace('_', '-')}") for name, value in self._asdict().items() if value]


_overriding = gathered(
    "given",
    Overrides,
    click.option("--price", multiple=True, metavar="A=USD", help="Your own price of a GPU-hour, such as mi300x=1.99."),
    click.option(
        "--discount", multiple=True, metavar="A=SHARE", help="Off the price, by accelerator or vendor: AMD=15%."
    ),
    click.option(
        "--prices",
        "kinds",
        metavar="KIND[,KIND]",
        help=f"Which prices to plan by: {', '.join(PLANNED_BY)}; a second stands in where the first is lacking. "
        "[default: on-demand]",
    ),
    click.option(
        "--reserved", multiple=True, metavar="A=USD", help="Your price under contract, for the base of a day."
    ),
    on_option(f"Only these accelerators; {ON_THIS}."),
    click.option("--single-gpus", is_flag=True, help="GPUs one by one, not in whole nodes."),
    real_option("--sure", 50, 99, "How sure it should be. [default: 80]", metavar="PERCENT"),
    click.option(
        "--evidence", type=click.Choice(EVIDENCE), help="What must be measured to be preferred. [default: stack]"
    ),
    click.option("--only-known", is_flag=True, help="Only what preflight knows to run, or what was measured."),
)


@click.command("plan")
@click.argument("workload", nargs=-1, metavar="WORKLOAD | --watch PLAN...", type=FILE)
@file_option("--fleet", "Write the fleet that `serve` takes.")
@file_option("--manifests", "Write the fleet as Kubernetes manifests.", metavar="DIR")
@file_option("--nodes", "With --manifests: `kubectl get nodes -o json`, to refuse what has no room.")
@file_option("--save", "Keep the plan, for --watch.")
@flag_option("--watch", "Make saved plans (files or folders) again and say which have flipped.")
@_overriding
@flag_option("--quick", "By closed forms alone: the fleet is not confirmed by simulation.")
@file_option("--plot", "Draw the fleets (.svg, .png, .pdf).")
@file_option("--csv table", "Write the pools as a table for spreadsheets.")
@click.option("--example", is_flag=False, flag_value="assistant", metavar="[NAME|TRACE]",
              help="Print a workload to start from: assistant, agents, or the sessions of a recording.")  # fmt: skip
@answer_options(DETAILS, html=True)
def command(
    workload: tuple[Path, ...], fleet: Path | None, manifests: Path | None, nodes: Path | None, save: Path | None,
    watch: bool, given: Overrides, quick: bool, plot: Path | None,
    table: Path | None, example: str | None, wanted: Wanted,
) -> int:  # fmt: skip
    """The cheapest fleet for a WORKLOAD: which accelerators, how many, who goes where, and what would change it.

    \b
    crosstie plan --example > workload.toml
    crosstie plan --example agents > workload.toml
    crosstie plan --example recording.jsonl > workload.toml
    crosstie plan workload.toml --fleet fleet.toml --save plan.json
    crosstie plan workload.toml --price mi300x=1.99 --discount NVIDIA=10%
    crosstie plan workload.toml --on this
    crosstie plan --watch plan.json

    WORKLOAD is a TOML file of models, classes of requests with their lengths, rates and latency targets, and
    constraints; docs/plan.md has every key. "assistant" is a shipped example. Exit status 1 when no fleet will
    do (the answer says which limit is in the way), when simulation confirms none (the answer says so, and has
    the fleet of the closed forms), or when --watch finds a decision that has flipped.
    """
    if example:
        click.echo(example_text(example), nl=False)
        return 0
    catalog = Catalog()
    outputs = {"--fleet": fleet, "--save": save, "--plot": plot, "--html": wanted.html, "--csv": table}
    if watch:
        others = {**outputs, "--manifests": manifests, "--nodes": nodes, "--quick": quick}
        named = [*(flag for flag, value in others.items() if value), *given.flags]
        if named:
            raise BadInput(f"--watch makes plans again as they were saved; {', '.join(named)} cannot go with it")
        return _watch(catalog, workload, wanted)
    if len(workload) != 1:
        raise BadInput("name one workload file; `crosstie plan --example > workload.toml` makes one")
    if nodes and not manifests:
        raise BadInput("--nodes is about --manifests, which is not given")
    if manifests and manifests.is_file():
        raise BadInput(f"--manifests {manifests}: is a file, and manifests are a folder of them")
    there = read_nodes(catalog, nodes) if nodes else None
    asking = caller()
    typed = asking.workload if asking else None
    file = find_workload(workload[0]) if typed is None else Path("workload_toml")
    _check_outputs(file, {flag: target for flag, target in outputs.items() if target})
    asked = overridden(catalog, read_workload(catalog, file, typed), given)
    with progress("planning") as on_progress:
        made = plan(catalog, asked, confirm=not quick, on_progress=on_progress)
    content = document(made, mark_of(catalog.calibration))
    # Files before the answer, which may be read no further than its first lines.
    files: tuple[tuple[str, Path | None, bool, Callable[[Path], object]], ...] = (
        ("plan", save, True, lambda file: write_text(file, json_text(content) + "\n")),
        ("fleet", fleet, made.answered, lambda file: write_text(file, fleet_text(with_names(fleet_of(made))))),
        ("manifests", manifests, made.answered, lambda folder: _write_manifests(catalog, made, folder, nodes, there)),
        ("plot", plot, made.fleet is not None, lambda file: plan_picture(made).draw(file)),
        ("pools", table, made.fleet is not None, lambda file: write_text(file, pools_csv(content))),
    )
    for what, target, is_there, write in files:
        if target and is_there:
            write(target)
            click.echo(f"{what} written to {target}", err=True)
        elif target:
            why = "models that share replicas are not drawn" if made.answered else "there is no fleet"
            click.echo(f"{target} not written: {why}", err=True)
    if wanted.html:
        write_page(wanted.html, catalog, made, content)
    if wanted.as_json:
        print_json(content)
    else:
        show(plan_parts(made, wanted.verbose))
    return 0 if made.answered and made.holds else 1


def _write_manifests(catalog: Catalog, made: Plan, folder: Path, nodes: Path | None, there: list[Node] | None) -> None:
    chosen = with_names(fleet_of(made))
    recipes, left_out = fleet_recipes(RecipeBook(catalog, RecipeOptions(chosen="the plan")), chosen)
    if nodes and there is not None:
        check_room(recipes, there, nodes)
    write_folder("--manifests", folder, cluster_manifests(chosen, recipes))
    for left in left_out:
        click.echo(f"{left['pool']} left out of {folder}: {left['why']}", err=True)


def _check_outputs(workload: Path, targets: dict[str, Path]) -> None:
    """What can be told before the work: a plan must not fail at its end for a name."""
    taken = {workload.resolve(): "the workload"}
    for flag, target in targets.items():
        try:
            if target.exists() and not target.is_file():
                # A device would be replaced by a file, not written to.
                raise BadInput(f"{flag} {target}: is {'a folder' if target.is_dir() else 'no plain file'}")
            if not target.parent.is_dir():
                raise BadInput(f"{flag} {target}: cannot be written: there is no folder {target.parent}")
            if not os.access(target.parent, os.W_OK):
                raise BadInput(f"{flag} {target}: cannot be written: Permission denied")
        except OSError as error:
            raise BadInput(f"{flag} {str(target)[:200]}: cannot be written: {error.strerror}") from None
        if target.resolve() in taken:
            raise BadInput(f"{flag} {target}: is {taken[target.resolve()]} already")
        taken[target.resolve()] = f"what {flag} writes"
    if "--plot" in targets:
        check_picture(targets["--plot"])


def overridden(catalog: Catalog, workload: Workload, given: Overrides) -> Workload:
    """The command line overrides the file."""
    vendors = {a.vendor.casefold(): a.vendor for a in catalog.accelerators.values()}

    def accelerator(name: str) -> str:
        return catalog.accelerator(name).id

    def accelerator_or_vendor(name: str) -> str:
        return vendors.get(name.casefold()) or accelerator(name)

    on, kinds, single_gpus = given.accelerators, given.kinds, given.single_gpus
    here = {stock.accelerator.id: stock.count for stock in stock_on(catalog, on)}
    if here:
        workload, on, single_gpus = held(workload, here), None, True
        kinds = kinds or ",".join(dict.fromkeys((*workload.prices.kinds, BUY)))
    chosen = None if on is None else [_looked_up("--on", name, accelerator) for name in names_in(on)]
    if chosen == []:
        raise BadInput("--on names no accelerator")

    def usd(text: str) -> float:
        return checked_gpu_hour(amount(text))

    return adjusted(
        workload,
        kinds=_kinds(kinds),
        usd_per_gpu_hour=_by_name("--price", given.price, usd, accelerator),
        discount=_by_name(
            "--discount", given.discount, lambda text: checked_discount(fraction(text)), accelerator_or_vendor
        ),
        reserved_usd_per_gpu_hour=_by_name("--reserved", given.reserved, usd, accelerator),
        accelerators=chosen,
        single_gpus=single_gpus,
        sure=None if given.sure is None else given.sure / 100.0,
        only_known=given.only_known,
        evidence=given.evidence,
    )


def _kinds(text: str | None) -> list[str] | None:
    if text is None:
        return None
    kinds = names_in(text)
    for kind in kinds or [text]:
        if kind not in PLANNED_BY:
            raise BadInput(f"--prices: '{kind}' is not one of {', '.join(PLANNED_BY)}")
    return kinds


def _by_name(
    option: str, texts: tuple[str, ...], read: Callable[[str], float], look_up: Callable[[str], str]
) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, value in assigned(option, texts, read).items():
        whose = _looked_up(option, name, look_up)
        if whose in values:
            raise BadInput(f"{option}: {whose} is given twice")
        values[whose] = value
    return values


def _looked_up(option: str, name: str, look_up: Callable[[str], str]) -> str:
    try:
        return look_up(name)
    except CrosstieError as error:
        raise BadInput(f"{option} {name}: {error}") from None


def _watch(catalog: Catalog, files: tuple[Path, ...], wanted: Wanted) -> int:
    if not files:
        raise BadInput("--watch needs saved plans; `crosstie plan WORKLOAD --save plan.json` makes one")
    with progress("watch") as on_progress:
        plans = watched(catalog, files, on_progress=on_progress)
    wanted.give(lambda: [watched_json(plan_now) for plan_now in plans], lambda _: watched_parts(plans))
    return 1 if any(plan_now.flipped for plan_now in plans) else 0


def watched_parts(plans: list[Watched]) -> Parts:
    """Saved plans beside what would be planned today."""
    for old in plans:
        word = f"FLIPPED by {old.because}" if old.flipped else "holds"
        yield Text.assemble((old.then.workload.name, "bold"), f"  {old.file}, made {old.then.made}: ", (word, "bold"))
        now = old.now.usd_per_hour if old.now.answered else None
        yield f"  then {_fleet(old.then.gpus, old.then.usd_per_hour)}; now {_fleet(old.now.gpus, now)}"
        yield from (f"  {_move(move, newer=move in old.newer_prices)}" for move in old.moves)
        if old.recalibrated:
            yield "  the calibration is another than it was"
        for names, what in ((old.appeared, "priced now and not then"), (old.gone, "priced then and not now")):
            if names:
                yield f"  {what}: {', '.join(names)}"
        for sign in old.signs:
            # Prices that moved stand above.
            if sign.state == "changed" and sign.signal.kind != "price":
                yield f"  signal {sign.signal.id}: {sign.now}; it changes {sign.signal.changes}"
        quiet, by_hand = (sum(sign.state == state for sign in old.signs) for state in ("quiet", "by hand"))
        if quiet or by_hand:
            yield note(f"  watched and unchanged: {plural(quiet, 'signal')}; by hand: {by_hand} (--json has them)")


def _fleet(gpus: dict[str, int], usd_per_hour: float | None) -> str:
    if usd_per_hour is None:
        return "no fleet"
    return f"{', '.join(f'{n} {name}' for name, n in gpus.items())}, {dollars(usd_per_hour)} an hour"


def _move(move: PriceMove, newer: bool) -> str:
    age = f", of {move.dated}: the plan is older than this price" if newer else ""
    return f"{move.accelerator}: {dollars(move.then)} then, {dollars(move.now)} now ({move.change:+.0%}){age}"


def watched_json(plan: Watched) -> dict[str, Any]:
    return {
        **picked(plan, "file name=then.workload.name made=then.made flipped because"),
        "then": picked(plan.then, "gpus usd_per_hour"),
        "now": {"gpus": plan.now.gpus, "usd_per_hour": plan.now.usd_per_hour if plan.now.answered else None},
        "prices": [{**plain(move), "newer_than_plan": move in plan.newer_prices} for move in plan.moves],
        **picked(plan, "appeared gone recalibrated"),
        "signals": [{**plain(sign.signal), **picked(sign, "state now")} for sign in plan.signs],
    }
