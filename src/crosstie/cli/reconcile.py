"""`crosstie reconcile`: why two saved answers differ."""

from pathlib import Path

import click

from crosstie.catalog.library import Catalog
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import FILE
from crosstie.core.document import picked, plain
from crosstie.core.figures import dollars, significant
from crosstie.decide.cost.reconcile import (
    LEFT,
    USD,
    DifferencePart,
    FigureDifference,
    Reconciled,
    chosen,
    read_answers,
    reconcile,
)
from crosstie.web.parts import Heading, Parts, Table, note

_LEFT = "left: lengths that vary, what waits in a simulation, and whatever else no assumption above says"


@click.command("reconcile")
@click.argument("first", type=FILE, metavar="A.json")
@click.argument("second", type=FILE, metavar="B.json")
@answer_options()
def command(first: Path, second: Path, wanted: Wanted) -> int:
    """Two saved answers, and which assumption makes which part of their difference.

    \b
    crosstie tco llama-3.3-70b --on mi300x,h200 --json > a.json
    crosstie plan work.toml --save b.json
    crosstie reconcile a.json b.json

    Answers are what compare, scorecard, tco, plan, simulate and fit print with --json. Price and share sold are
    factors; lengths, replica and load are swapped in the performance model in every order, and each gets the mean
    of its effects. Exit status 1 if intervals do not overlap and more than a tenth stays unexplained.
    """
    both = reconcile(Catalog(), *chosen(read_answers(first), read_answers(second)))
    wanted.give(lambda: to_json(both), lambda _: parts(both))
    return 0 if all(difference.agree or 0.9 < difference.left < 1.1 for difference in both.differences) else 1


def parts(both: Reconciled) -> Parts:
    for label, answer in (("A", both.first), ("B", both.second)):
        yield f"{label} {answer.name}: {answer.question.line}"
    differing = ", ".join(name.replace("_", " ") for name in both.assumptions)
    yield f"assumptions that differ: {differing or 'none'}"
    for difference in both.differences:
        yield Heading(f"{difference.model} on {difference.accelerator}: {_said(difference)}")
        rows = [[part.name, part.first, part.second, _times(part)] for part in difference.parts]
        yield Table(["assumption", "~A", "~B", ">B over A"], rows)
    if not both.differences:
        yield "no figure in both: what differs is named above"
    if any(abs(figure_difference.left - 1.0) > 0.01 for figure_difference in both.differences):
        yield note(_LEFT)
    if both.alone:
        yield note(f"in one of them only: {', '.join(both.alone)}")


def _said(gap: FigureDifference) -> str:
    written = dollars if gap.unit == USD else significant
    what = "per million output tokens" if gap.unit == USD else gap.unit
    agree = "their 80% intervals overlap" if gap.agree else "their 80% intervals are apart"
    return f"{written(gap.first)} against {written(gap.second)} {what}, {gap.second / gap.first:.2f}x; {agree}"


def _times(part: DifferencePart) -> str:
    return f"{part.factor:.2f}x" if part.name != LEFT or abs(part.factor - 1.0) >= 0.005 else "nothing"


def to_json(both: Reconciled) -> dict[str, object]:
    return {
        **picked(both, "first=first.name second=second.name assumptions_that_differ=assumptions"),
        "differences": [{**plain(difference), **picked(difference, "left agree")} for difference in both.differences],
        "in_one_only": both.alone,
    }
