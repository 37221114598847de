"""`crosstie scorecard`: accelerators by axis and by scenario, every cell with its source."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import click

from crosstie.catalog.library import Catalog
from crosstie.catalog.scenarios import shipped_scenarios
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.fit import deployment_json
from crosstie.cli.options import on_option, text_option
from crosstie.cli.progress import progress
from crosstie.core.deployment import Accelerator
from crosstie.core.document import picked
from crosstie.core.figures import dollars, share, significant
from crosstie.core.progress import OnProgress
from crosstie.core.question import USUAL as QUESTION, assumptions
from crosstie.decide.cost.prices import BUY
from crosstie.decide.plan.market import RENTS
from crosstie.decide.scorecard import board
from crosstie.decide.scorecard.contest import Contender, Contest, contest
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.tax import UNSTATED, Series, Tax, shipped_results, tax
from crosstie.web.parts import Heading, Parts, Section, Table, across, closing, note

USUAL = "mi300x,mi325x,mi350x,mi355x,h100-sxm,h200,b200,b300"
_SCENARIOS = "scenarios"
# Where the shades of the heat map end, in times of the cheapest.
_HEAT = (1.005, 1.5, 2.5, 4.0)
_VERDICTS = "The cheapest, the second, and what would turn them"
_CHOICES = (*board.PARTS, _SCENARIOS)
_DETAILS = "every axis, and each scenario's ranking"
_TITLES = {
    board.SILICON: "Silicon",
    board.MONEY: "Money",
    board.SPEED: "Speed and cost, at the load of each scenario",
    board.SOFTWARE: f"Software: engines for {board.REFERENCE} {board.PRECISION}, and what they leave of the roofline",
    board.EXPORT: "Export: the US rule's figures",
}
_LEGEND = (
    "times: the second's cost over the first's; flips at: the first's price an hour at which the second is as cheap; "
    "at worst: with the first's dearest seller and the second's cheapest; below 1x the seller decides, not the "
    "silicon; sure: the share of worlds in which it is; where sellers differ threefold, each world draws one of them"
)
_EXPORT_LEGEND = (
    "TPP: dense TFLOP/s x bits, the largest over formats. by density: the area of the die decides, which the catalog "
    "lacks. by case: licences for China and Macau are reviewed one by one, under conditions; denial: it is presumed. "
    "No legal advice."
)
_HONEST = "Predicted, from published results; Crosstie has run nothing on AMD."
# What a first look wants of each.
_BRIEF = ("memory", "bandwidth", "dense fp8, TFLOP/s", "power", "on-demand, $/h", "rent, $ a GB-month", "TPP")


@click.command("scorecard")
@on_option(f"Accelerators. [default: {USUAL.replace(',', ', ')}]")
@click.option("--part", "only", multiple=True, type=click.Choice(_CHOICES), help="Only this part; may be given again.")
@text_option("--prices kind", "KIND", f"Prices of the scenarios, one kind for all: {', '.join([*RENTS, BUY])}.",
             type=click.Choice([*RENTS, BUY]), default=QUESTION.price, show_default=True)  # fmt: skip
@answer_options(_DETAILS, html=True)
def command(accelerators: str | None, only: tuple[str, ...], kind: str, wanted: Wanted) -> int:
    """Accelerators beside each other: silicon, money, speed, software, export, and who wins which scenario.

    \b
    crosstie scorecard
    crosstie scorecard --on mi355x,b300,gb300 -v
    crosstie scorecard --part export --part money
    crosstie scorecard --html scorecard.html

    Every cell has its source: a link in the page, `source` in --json. Scenarios are examples
    (src/crosstie/catalog/data/scenarios.toml): each accelerator runs in its best layout at the highest load within
    the targets, at the median seller's price. `sure` is the share of worlds, draws of what the model does not know,
    in which the first is cheaper than the second; where sellers differ threefold each world draws a price. For your
    own load: `crosstie plan`.
    """
    catalog = Catalog()
    chosen = catalog.accelerators_named(accelerators or USUAL)
    asked: Sequence[str] = only or _CHOICES
    if not (only or wanted.verbose or wanted.as_json or wanted.html):
        # The longest to find, and only shown among details.
        asked = [part for part in asked if part != board.SOFTWARE]
    contests = []
    with progress("scorecard") as on_progress:
        if _SCENARIOS in asked or board.SPEED in asked:
            scenarios = shipped_scenarios()
            for at, scenario in enumerate(scenarios):
                on_progress(at, len(scenarios), scenario.name)
                contests.append(contest(catalog, scenario, chosen, kind))
        axes = _axes(catalog, chosen, contests, asked, on_progress)
    shown = contests if _SCENARIOS in asked else []

    def document() -> dict[str, object]:
        return {
            "accelerators": [accelerator.id for accelerator in chosen],
            "axes": [asdict(axis) for axis in axes],
            "scenarios": [contest_json(contest_held) for contest_held in shown],
        }

    wanted.give(
        document,
        lambda details: parts(chosen, axes, shown, details or bool(only)),
        title="Scorecard of accelerators",
        leading=("Who wins", _VERDICTS),
    )
    return 0


def _axes(
    catalog: Catalog, chosen: Sequence[Accelerator], contests: Sequence[Contest], wanted: Sequence[str],
    on_progress: OnProgress,
) -> list[board.Axis]:  # fmt: skip
    names = [accelerator.id for accelerator in chosen]
    made: dict[str, Callable[[], list[board.Axis]]] = {
        board.SILICON: lambda: board.silicon(catalog, chosen),
        board.MONEY: lambda: board.money(catalog, chosen),
        board.SPEED: lambda: board.speed(contests, chosen),
        board.SOFTWARE: lambda: (
            board.software(catalog, chosen)
            + delivered(tax(catalog, read_results(shipped_results()), names, on_progress=on_progress), names)
        ),
        board.EXPORT: lambda: board.export(chosen),
    }
    return [axis for part, axes in made.items() if part in wanted for axis in axes()]


def delivered(taxed: Tax, names: Sequence[str]) -> list[board.Axis]:
    """What `crosstie tax` has: of the newest release its share of the roofline, and the speed-up that got it there."""
    latest = {group.series: group for group in sorted(taxed.groups, key=lambda group: group.date)
              if group.median is not None and UNSTATED not in (group.release, group.series.engine)}  # fmt: skip
    faster = {trend.series: trend for trend in taxed.trends if trend.common_points}
    axes = []
    for engine, campaign in sorted({(series.engine, series.campaign) for series in latest}):
        fractions, trends = dict.fromkeys(names, board.NOTHING), dict.fromkeys(names, board.NOTHING)
        for name in names:
            series = Series(name, engine, campaign)
            if (group := latest.get(series)) and group.median is not None:
                said = f"median of {group.points:,} published points of {group.release} ({group.date}), `crosstie tax`"
                fractions[name] = board.ScoreCell(f"{share(group.median)} {group.release}", group.median, said)
            if trend := faster.get(series):
                span = f"{trend.first.release} ({trend.first.date}) to {trend.last.release} ({trend.last.date})"
                said = f"{span}, on {trend.common_points:,} operating points that both have, `crosstie tax`"
                trends[name] = board.ScoreCell(f"{trend.ratio:.2f}x", trend.ratio, said)
        label = f"{engine} {campaign}".strip()
        axes.append(board.Axis(board.SOFTWARE, f"{label}, of roofline", "fraction", fractions))
        if any(cell.value is not None for cell in trends.values()):
            axes.append(board.Axis(board.SOFTWARE, "  speed-up", "ratio", trends))
    return axes


def parts(
    chosen: Sequence[Accelerator], axes: Sequence[board.Axis], contests: Sequence[Contest], details: bool
) -> Parts:
    names = [accelerator.id for accelerator in chosen]
    if contests and details:
        yield from _heat(names, contests)
    if contests:
        yield Section(_VERDICTS)
        columns = ["scenario", "cheapest", ">$/M tokens", "second", ">times", ">flips at", ">at worst", ">sure"]
        yield Table(
            columns, [_verdict(held) for held in contests], sources=[_verdict_sources(held) for held in contests]
        )
        yield note(_LEGEND)
    if not details:
        brief = [axis for axis in axes if axis.name in _BRIEF]
        rows = [[name, *(axis.cells[name].text for axis in brief)] for name in names]
        if brief:
            yield Table(["accelerator", *(f">{axis.name}" for axis in brief)], rows)
        yield note(_HONEST)
        yield closing(_DETAILS)
        return
    for part, title in _TITLES.items():
        own = [axis for axis in axes if axis.part == part]
        if own:
            yield Heading(title)
            rows = [[axis.name, *(axis.cells[name].text for name in names)] for axis in own]
            yield across(names, rows, [["", *(axis.cells[name].source for name in names)] for axis in own])
            if part == board.EXPORT:
                yield note(_EXPORT_LEGEND)
    for held in contests:
        yield Heading(f"{held.scenario.name}: {held.scenario.words}")
        columns = ["accelerator", "layout", ">in flight", ">tokens/s a GPU", ">$/h", ">$/M tokens", ">80% interval"]
        rows = [_place(entry) for entry in held.ranking]
        yield Table(columns, rows, sources=[_place_sources(entry) for entry in held.ranking])
        yield from (f"  {name}: {problem}" for name, problem in held.problems.items())
        yield note(f"  {held.question.line}")
    if contests or any(axis.part in (board.SPEED, board.SOFTWARE) for axis in axes):
        yield note(_HONEST)


def _heat(names: Sequence[str], contests: Sequence[Contest]) -> Parts:
    """What each accelerator costs in each scenario: a row a scenario. One that has parts of its own is a line."""
    rows, tones, sources = [], [], []
    ranked = {held.scenario.name: {entry.accelerator.id: entry for entry in held.ranking} for held in contests}
    shown = [name for name in names if any(name in entries for entries in ranked.values())]
    apart = []
    for held in contests:
        usual = ranked[held.scenario.name]
        least = held.ranking[0].usd_per_mtok if held.ranking else 1.0
        times = {name: entry.usd_per_mtok / least for name, entry in usual.items()}
        if held.scenario.accelerators:
            told = ", ".join(f"{name} {_times(ratio)}" for name, ratio in times.items())
            apart.append(note(f"{held.scenario.name}, which has parts of its own: {told}"))
            continue
        rows.append([held.scenario.name, *(_times(times.get(name)) for name in shown)])
        heats = (sum(times[name] >= end for end in _HEAT) if name in times else None for name in shown)
        tones.append(["", *("" if heat is None else f"heat-{heat}" for heat in heats)])
        sources.append(["", *(_predicted(usual[name]) if name in usual else "" for name in shown)])
    columns = ["scenario", *(f">{name}" for name in shown)]
    yield Table(columns, rows, "Who wins which scenario: $ a million tokens", sources, tones)
    yield note("times the cheapest of the scenario; -: no price of this kind, or no layout keeps its targets")
    if lacking := [name for name in names if name not in shown]:
        yield note(f"in none of them: {', '.join(lacking)}")
    yield from apart


def _verdict(held: Contest) -> list[str]:
    names = [entry.accelerator.id for entry in held.ranking[:2]] + ["-", "-"]
    return [
        held.scenario.name, names[0], dollars(held.ranking[0].usd_per_mtok) if held.ranking else "-", names[1],
        _times(held.ratio), dollars(held.flips_at) if held.flips_at is not None else "-", _times(held.ratio_at_worst),
        share(held.confidence) if held.confidence is not None else "-",
    ]  # fmt: skip


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio is not None else "-"


def _verdict_sources(held: Contest) -> list[str]:
    said = [_predicted(entry) for entry in held.ranking[:2]] + ["", ""]
    return ["", "", said[0], "", said[1], "", "", ""]


def _predicted(contender: Contender) -> str:
    return f"{contender.accelerator.id}: {contender.reckoned.price}; predicted, {contender.estimate.basis}"


def _place(contender: Contender) -> list[str]:
    between = contender.usd_interval
    return [
        contender.accelerator.id, f"{contender.deployment.parallelism}", f"{contender.concurrency:,}",
        significant(contender.tokens_per_s_per_gpu), dollars(contender.quote.usd), dollars(contender.usd_per_mtok),
        f"{dollars(between[0])} to {dollars(between[1])}" if between else "-",
    ]  # fmt: skip


def _place_sources(contender: Contender) -> list[str]:
    basis = f"predicted, {contender.estimate.basis}"
    return ["", "", "", basis, contender.reckoned.price, _predicted(contender), basis]


def contest_json(held: Contest) -> dict[str, object]:
    return {
        **picked(held, "scenario=scenario.name load=scenario.words"),
        "winner": held.ranking[0].accelerator.id if held.ranking else None,
        **picked(held, "ratio flips_at_usd_per_gpu_hour=flips_at ratio_at_worst_prices=ratio_at_worst confidence"),
        "ranking": [
            {
                **deployment_json(entry.deployment),
                **picked(entry, "concurrency output_tokens_per_s_per_gpu=tokens_per_s_per_gpu"),
                **picked(entry, "usd_per_gpu_hour=quote.usd usd_per_million_tokens=usd_per_mtok interval=usd_interval"),
                "source": _predicted(entry),
            }
            for entry in held.ranking
        ],
        "problems": held.problems,
        **assumptions(held.question, [entry.reckoned for entry in held.ranking]),
    }
