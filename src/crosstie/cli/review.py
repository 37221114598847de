"""`crosstie review`: a saved plan against what its gateway recorded, and what to demand in a contract."""

from datetime import UTC, datetime
from pathlib import Path

import click

from crosstie.catalog.library import Catalog
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.assignments import assigned, fraction
from crosstie.cli.lazy import SOURCES, brought
from crosstie.cli.options import FILE, file_option, flag_option, text_option
from crosstie.cli.progress import progress
from crosstie.cli.review_show import DETAILS, checklist_document, checklist_parts, review_document, review_parts
from crosstie.cli.times import moment
from crosstie.core.errors import BadInput
from crosstie.core.usage import Used, hour_of
from crosstie.prove.review.again import again
from crosstie.prove.review.checklist import checklist
from crosstie.prove.review.figures import changed, thresholds
from crosstie.prove.review.planned import read_planned
from crosstie.prove.review.production import Usage, read_metrics, read_recordings
from crosstie.prove.review.review import review
from crosstie.web.report import write_markdown


@click.command("review")
@click.argument("plan", type=FILE, metavar="PLAN")
@click.argument("recordings", nargs=-1, type=FILE, metavar="[RECORDING...]")
@text_option("--metrics", "FILE|URL", "The gateway's metrics, or an engine's; repeatable.", multiple=True)
@text_option("--store", "FILE|URL", "The gateway's store, whose usage the cost is taken from.")
@text_option("--since", "WHEN", "Usage from this day or hour on (UTC).")
@file_option("--fleet", "What runs, where it is not the plan's own fleet.", metavar="FLEET.toml")
@text_option("--class class_name", "NAME", "The class of all requests, where they do not say it.")
@click.option(
    "--within", multiple=True, metavar="NAME=SHARE",
    help=f"How far a figure may be off: throughput=8%. Of {', '.join(thresholds())}.",
)  # fmt: skip
@text_option("--today", "DAY", "Review it as of this day. [default: today]")
@flag_option("--no-plan", "Do not plan again with what was learnt.")
@flag_option("--quick", "Plan again by closed forms alone.")
@flag_option("--checklist as_checklist", "What to demand in a contract, in its numbers.")
@flag_option("--markdown as_markdown", "Print the answer as Markdown.")
@answer_options(DETAILS, html=True)
def command(
    plan: Path, recordings: tuple[Path, ...], metrics: tuple[str, ...], store: str | None, since: str | None,
    fleet: Path | None, class_name: str | None, within: tuple[str, ...], today: str | None, no_plan: bool,
    quick: bool, as_checklist: bool, as_markdown: bool, wanted: Wanted,
) -> int:  # fmt: skip
    """A saved PLAN against production: each figure predicted and seen, how sure that is, and what it would cost
    planned again with what was learnt.

    \b
    crosstie plan workload.toml --fleet fleet.toml --save plan.json
    crosstie serve fleet.toml --record trace.jsonl
    crosstie review plan.json trace.jsonl --metrics http://localhost:8080
    crosstie review plan.json trace.jsonl trace.jsonl.1 --store crosstie.db
    crosstie review plan.json --checklist --markdown > contract.md

    RECORDING: all files that `serve --record` wrote. The planned fleet is simulated under the recorded requests,
    which separates changed traffic from a slow fleet. Exit status 1 if a figure is beyond its limit with its whole
    95% interval, else 0.
    """
    if wanted.as_json and as_markdown:
        raise BadInput("--json and --markdown: give one of them")
    catalog = Catalog()
    limits = changed(assigned("--within", within, fraction))
    planned = read_planned(catalog, plan, fleet)
    if as_checklist:
        if recordings:
            raise BadInput("--checklist is of the plan alone: leave the recordings out")
        items = checklist(catalog, planned, limits)
        wanted.give(
            lambda: checklist_document(planned, items),
            lambda _: checklist_parts(planned, items),
            title=f"{planned.workload.name}: what to demand",
            markdown=(lambda: write_markdown(checklist_parts(planned, items, boxes=True))) if as_markdown else None,
        )
        return 0
    if not recordings:
        raise BadInput("name the recordings: `crosstie serve FLEET --record trace.jsonl` writes them")
    if since is not None and store is None:
        raise BadInput("--since is of the usage in --store")
    day = _day(today)
    production = read_recordings(recordings, tuple(planned.classes), class_name)
    pages = read_metrics(metrics) if metrics else None
    usage = _usage(store, since)
    with progress("reviewing") as on_progress:
        made = review(catalog, planned, production, limits, day, metrics=pages, usage=usage, on_progress=on_progress)
        learnt = None if no_plan else again(catalog, made, quick=quick, on_progress=on_progress)
    title = f"{planned.workload.name}: plan against production"
    wanted.give(
        lambda: review_document(made, learnt),
        lambda details: review_parts(made, learnt, details),
        title=title,
        markdown=(lambda: write_markdown([title, *review_parts(made, learnt, verbose=True)])) if as_markdown else None,
    )
    return 0 if made.holds else 1


def _day(text: str | None) -> str:
    if text is None:
        return datetime.now(UTC).strftime("%Y-%m-%d")
    try:
        return datetime.strptime(text, "%Y-%m-%d").strftime("%Y-%m-%d")
    except ValueError:
        raise BadInput(f"--today: '{text}' is no day such as 2026-11-30") from None


def _usage(store: str | None, since: str | None) -> Usage | None:
    if store is None:
        return None
    begins = None if since is None else hour_of(moment("--since", since))
    usage_by_hour = brought(SOURCES, "usage", "`crosstie review --store`", "crosstie-gateway")
    hours: list[Used] = usage_by_hour(store, begins)
    if not hours:
        raise BadInput(f"--store {store}: nothing was used{f' since {since}' if since else ''}")
    return Usage(hours)
