"""`crosstie tax`: what software leaves of each roofline, release by release."""

from pathlib import Path

import click

from crosstie.catalog.library import Catalog, names_in
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.options import FILE, text_option
from crosstie.cli.progress import progress
from crosstie.core.document import picked
from crosstie.core.errors import BadInput
from crosstie.core.figures import share
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.tax import ReleaseTax, RooflineReading, Series, Tax, Trend, shipped_results, tax
from crosstie.web.parts import Parts, Table, closing, note
from crosstie.web.tax_chart import tax_picture

_DETAILS = "every release with its spread, all trends, and which models were measured"


@click.command("tax")
@click.argument("results", nargs=-1, type=FILE)
@text_option("--accelerator accelerators", "A,B,...", "Only these accelerators.")
@text_option("--model models", "M,...", "Only these models.")
@text_option("--engine engines", "E,...", "Only these engines.")
@plot_option("Draw it over time")
@answer_options(_DETAILS)
def command(
    results: tuple[Path, ...], accelerators: str | None, models: str | None, engines: str | None, plot: Drawing,
    wanted: Wanted,
) -> int:  # fmt: skip
    """The software tax over time, from measured RESULTS (by default those that Crosstie ships).

    A result's fraction is its ideal time, at the datasheet's peak rates with nothing in the way, over the time
    measured. The tax is the rest: kernels below peak, launches, host, network and scheduler of that release on that
    accelerator.

    \b
    crosstie tax --accelerator mi300x,h100-sxm
    crosstie tax mine.csv --engine vllm --plot tax.svg

    Trends compare only operating points that both releases have; others are marked as different. A fraction above 1
    means that the row, or the batch assumed for it, is wrong: such points are counted under "above", and --json
    lists them. AMD's results are published by others. Exit status 1 when no result is left.
    """
    catalog = Catalog()
    only = [
        {catalog.accelerator(name).id for name in _named("--accelerator", accelerators)},
        {catalog.model(name).id for name in _named("--model", models)},
        {catalog.stack(name).id for name in _named("--engine", engines)},
    ]
    with progress("measured points") as on_progress:
        measured = read_results(*(results or (shipped_results(),)))
        taxed = tax(catalog, measured, only[0], only[1], only[2], on_progress)
    if taxed.groups or wanted.as_json:
        wanted.give(lambda: to_json(taxed), lambda details: parts(taxed, details))
    if not taxed.groups:
        click.echo(f"none of the {taxed.rows:,} results is left: {_reasons(taxed, any(only))}", err=True)
        return 1
    plot.draw(lambda: tax_picture(taxed.groups))
    return 0


def _named(option: str, text: str | None) -> list[str]:
    if text is not None and not names_in(text):
        raise BadInput(f"{option} is empty")
    return names_in(text)


def _reasons(taxed: Tax, filtered: bool) -> str:
    if filtered:
        return "the options ask for an accelerator, model and engine that none was measured on together"
    first = next(iter(taxed.left_out.items()), None)
    return f"{first[0]} ({first[1]:,})" if first else "the files have no rows"


def parts(taxed: Tax, verbose: bool) -> Parts:
    if verbose:
        columns = ["release", "date", ">of roofline", ">10th-90th", ">points", ">above", "~models"]
        yield Table(columns, [_row(group) for group in taxed.groups])
        yield from (f"- {sentence(trend)}" for trend in taxed.trends)
    else:
        latest = {group.series: group for group in sorted(taxed.groups, key=lambda group: group.date)}
        rows = [[*_series(series), latest[series].release, _of_roofline(latest[series])] for series in sorted(latest)]
        yield Table(["accelerator", "engine", "latest release", ">of roofline"], rows)
        rows = [
            [*_series(trend.series), f"{trend.first.release} to {trend.last.release}", f"{trend.ratio:.2f}x"]
            for trend in taxed.trends if trend.common_points
        ]  # fmt: skip
        if rows:
            columns = ["accelerator", "engine", "releases", ">speed-up"]
            yield Table(columns, rows, "Speed-up, on operating points that both releases have")
    left_out = sum(taxed.left_out.values())
    yield note(f"{taxed.points:,} operating points of {taxed.rows:,} rows; {left_out:,} points or rows left out")
    if taxed.above_roofline:
        yield note(f"{len(taxed.above_roofline):,} points above their roofline, in no median: see --json")
    yield note("AMD results are published by others; Crosstie has run nothing on AMD")
    if not verbose:
        yield closing(_DETAILS)


def _of_roofline(group: ReleaseTax) -> str:
    return share(group.median) if group.median is not None else "-"


def _series(series: Series) -> list[str]:
    return [series.accelerator, f"{series.engine} {series.campaign}".strip()]


def _row(group: ReleaseTax) -> list[str]:
    spread = f"{share(group.p10)}-{share(group.p90)}" if group.p10 is not None and group.p90 is not None else "-"
    return [
        f"{group.series} {group.release}", group.date or "undated", _of_roofline(group), spread, f"{group.points:,}",
        f"{group.above_roofline:,}" if group.above_roofline else "", ", ".join(group.models),
    ]  # fmt: skip


def sentence(trend: Trend) -> str:
    what = f"{trend.series}, {trend.first.release} ({trend.first.date}) to {trend.last.release} ({trend.last.date})"
    if trend.common_points:
        points = "point" if trend.common_points == 1 else "points"
        return f"{what}: {trend.ratio:.2f}x, on {trend.common_points:,} operating {points} that both have"
    medians = f"median {share(trend.first.median or 0.0)} to {share(trend.last.median or 0.0)}"
    return f"{what}: {medians}, on different operating points, so no speed-up"


def to_json(taxed: Tax) -> dict[str, object]:
    points = [above_json(reading) for reading in taxed.above_roofline]
    return {
        **picked(taxed, "rows points"),
        "groups": [group_json(group) for group in taxed.groups],
        "trends": [trend_json(trend) for trend in taxed.trends],
        "above_roofline": {"count": len(points), "points": points},
        "left_out": taxed.left_out,
    }


def group_json(group: ReleaseTax) -> dict[str, object]:
    made = picked(group, "release date points median tax p10 p90 above_roofline models")
    return {**group.series._asdict(), **made, "date": group.date or None}


def trend_json(trend: Trend) -> dict[str, object]:
    return {
        **trend.series._asdict(),
        **picked(trend, "first=first.release last=last.release first_date=first.date last_date=last.date"),
        "same_operating_points": trend.common_points > 0,
        **picked(trend, "common_points ratio"),
    }


def above_json(reading: RooflineReading) -> dict[str, object]:
    case, point = reading.case, reading.case.point
    return {
        **picked(reading, "fraction file=row.file line=row.line"),
        **{name: point[name] for name in ("accelerator", "engine", "engine_version", "model", "precision")},
        "gpus": case.gpus,
        "layout": str(case.deployment.parallelism),
        **{name: point[name] for name in ("input_len", "output_len", "concurrency", "scenario")},
        **picked(reading, "kind likely"),
    }
