"""The software tax over time as a picture: fractions of the roofline by date. Needs the `plot` extra."""

from collections.abc import Sequence
from datetime import date
from itertools import pairwise
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.prove.calibration.tax import UNSTATED, ReleaseTax, Series, common_points
from crosstie.web.chart import MARKERS, Picture, colours, frame, in_percent, new_figure

_TITLE = "What software delivers of the roofline, release by release"
HONEST = "AMD results were published by others: Crosstie has run nothing on AMD."
READ = "A dot is the median of a release's loads, hollow below five; dotted lines join releases that share no load."
# So few lines leave room for the names of releases.
_NAMED = 3
_MANY = 5
# There are more accelerators than the curves have colours.
_MORE_COLOURS = ["#332288", "#117733", "#882255", "#999933", "#44AA99", "#661100", "#6699CC", "#AA4499"]


def tax_picture(groups: Sequence[ReleaseTax]) -> Picture:
    """A line for each accelerator and engine: colour tells the accelerator, the sign the engine."""
    dated: dict[Series, list[ReleaseTax]] = {}
    for group in groups:
        if group.date and group.median is not None and group.release != UNSTATED:
            dated.setdefault(group.series, []).append(group)
    if not dated:
        raise BadInput("no result left has both a date and a release")
    # A release alone shows no course; where nothing else is there, it is drawn all the same.
    courses = {line: members for line, members in dated.items() if len(members) > 1} or dated
    hidden = len(groups) - sum(len(members) for members in courses.values())
    said = f"{hidden} of {len(groups)} releases not drawn: no date, no release, or the only one of their line"
    days = sorted(group.date for members in courses.values() for group in members)
    points = sum(group.points for members in courses.values() for group in members)
    note = f"{READ} {HONEST}\n{points:,} published points, {days[0]} to {days[-1]}"
    return Picture(lambda: _drawn(courses), f"{note}; {said}" if hidden else note, _TITLE)


def _drawn(courses: dict[Series, list[ReleaseTax]]) -> Any:
    colour = dict(
        zip(dict.fromkeys(line.accelerator for line in courses), colours()[:8] + _MORE_COLOURS * 4, strict=False)
    )
    engines = list(dict.fromkeys((line.engine, line.campaign) for line in courses))
    figure = new_figure(11, max(5.6, 1.6 + 0.24 * len(courses)))
    axes = figure.subplots()
    for line, members in sorted(courses.items()):
        own = colour[line.accelerator]
        marker = MARKERS[engines.index((line.engine, line.campaign)) % len(MARKERS)]
        for left, right in pairwise(members):
            style, width = ("-", 1.8) if common_points(left, right) else (":", 0.9)
            axes.plot(*_places((left, right)), color=own, linewidth=width, linestyle=style, zorder=1)
        for enough, fill in ((True, own), (False, "none")):
            some = [group for group in members if (group.points >= _MANY) is enough]
            axes.plot(*_places(some), color=own, markerfacecolor=fill, marker=marker, markersize=6, linestyle="none")
        axes.plot([], [], color=own, marker=marker, markersize=6, linewidth=1.8, label=str(line))
        if len(courses) <= _NAMED:
            for group in members:
                axes.annotate(
                    group.release, (_day(group.date), group.median), textcoords="offset points", xytext=(0, 8),
                    fontsize=8, rotation=90, ha="center", color=own,
                )  # fmt: skip
    axes.margins(x=0.06)
    # Room for the topmost name.
    axes.set_ylim(0.0, 1.2 * max(group.median or 0.0 for members in courses.values() for group in members))
    in_percent(axes.yaxis)
    frame(axes, _TITLE, y="of the roofline delivered (median); the rest is tax")
    axes.tick_params(axis="x", labelrotation=30)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper", title="accelerator, engine", alignment="left")
    return figure


def _places(groups: Sequence[ReleaseTax]) -> tuple[list[date], list[float | None]]:
    return [_day(group.date) for group in groups], [group.median for group in groups]


def _day(text: str) -> date:
    """A month alone counts from its first day."""
    return date.fromisoformat(text if len(text) > 7 else f"{text}-01")
