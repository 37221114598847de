"""How far intervals hold, as a picture: at every level, and by group beside their width. Needs the `plot` extra."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from crosstie.core.errors import BadInput
from crosstie.core.worlds import LEVEL
from crosstie.prove.calibration.validate import INTERVAL_GROUPS, PredictedRow, intervals, reliability
from crosstie.web.chart import MARKERS, STYLES, Picture, colours, frame, in_percent, new_figure, plain_ticks

_NAMES = {"tpot": "TPOT", "ttft": "TTFT", "throughput": "throughput"}
_LOOKS = dict(zip(_NAMES, zip(colours(), MARKERS, STYLES, strict=False), strict=False))
# Groups of fewer rows hold whatever chance gives them.
_ENOUGH = 30
# Between which shares the intervals of a group are taken for right.
_RIGHT = (0.68, 0.92)
# Where the numbers of the worst stand beside their dots, in points.
_SIDES = ((9, 0), (-9, 0), (0, -10))
_NOTE = "measured rows, each predicted the way it was measured; tails, energy and power have no interval"


class _Dot(NamedTuple):
    group: str
    metric: str
    inside: float
    width: float


def reliability_picture(outcomes: Sequence[PredictedRow], title: str) -> Picture:
    """Left: shares inside over the level of the intervals. Right: shares inside over the width, a dot a group."""
    held = reliability(outcomes)
    if not held:
        raise BadInput("no row of TTFT, TPOT or throughput has an interval")
    rows = sum(outcome.has_interval and outcome.metric in _NAMES for outcome in outcomes)
    return Picture(lambda: _drawn(held, _dots(outcomes), title), f"{rows:,} {_NOTE}", title)


def _drawn(held: dict[str, Any], dots: Sequence[_Dot], title: str) -> Any:
    figure = new_figure(8.6, 4.7)
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    for metric, points in held.items():
        colour, marker, style = _LOOKS[metric]
        left.plot([row["level"] for row in points], [point["inside"] for point in points], color=colour, marker=marker,
                  markersize=4, linewidth=1.8, linestyle=style, label=_NAMES[metric])  # fmt: skip
    left.set_xlim(0, 1)
    title_of_left = "above the diagonal: too wide; below: too sure"
    frame(left, title_of_left, x="level of the interval", y="measurements inside", legend="upper left", fontsize=9)
    _by_group(right, dots)
    for axis in (left.xaxis, left.yaxis, right.yaxis):
        in_percent(axis)
    for axes in (left, right):
        axes.set_ylim(0, 1.02)
        axes.tick_params(labelsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _dots(outcomes: Sequence[PredictedRow]) -> list[_Dot]:
    """A group's metrics apart: TTFT is less sure than the others, and would hide among them."""
    groups = intervals(outcomes, INTERVAL_GROUPS["accelerator and engine"])
    return [
        _Dot(group, metric, told["inside"], told["width"])
        for group, table in groups.items()
        for metric, told in table.items()
        if told["n"] >= _ENOUGH
    ]


def _by_group(axes: Any, dots: Sequence[_Dot]) -> None:
    axes.set_xlabel(f"width of the {LEVEL:.0%} interval, high over low, median")
    axes.set_title(f"by accelerator, engine and metric ({_ENOUGH} rows or more)", loc="left", fontsize=9)
    for share, style in ((_RIGHT[0], ":"), (LEVEL, "-"), (_RIGHT[1], ":")):
        axes.axhline(share, color="black", linewidth=0.8, linestyle=style, zorder=1)
    axes.set_yticks([0.0, 0.2, 0.4, 0.6, *_RIGHT, LEVEL, 1.0])
    if not dots:
        axes.set_xticks([])
        axes.text(0.5, 0.3, f"no group has {_ENOUGH} rows", ha="center", transform=axes.transAxes, fontsize=9)
        return
    for dot in dots:
        colour, marker, _ = _LOOKS[dot.metric]
        axes.plot(dot.width, dot.inside, color=colour, marker=marker, markersize=5, linestyle="none", alpha=0.8)
    axes.set_xscale("log")
    plain_ticks(axes.xaxis, (1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
    widths = [drawn.width for drawn in dots]
    axes.set_xlim(min(widths) / 1.15, max(widths) * 1.15)
    worst = sorted(dots, key=lambda drawn: drawn.inside)
    # Numbers at the dots, each on a side of its own, and names where there is room: names at dots would overlap.
    for number, (dot, place) in enumerate(zip(worst, _SIDES, strict=False), 1):
        axes.annotate(f"{number}", (dot.width, dot.inside), xytext=place, textcoords="offset points", ha="center",
                      va="center", fontsize=9, fontweight="bold")  # fmt: skip
        axes.plot([], [], marker=f"${number}$", markersize=6, color="black", linestyle="none",
                  label=f"{dot.group}, {_NAMES[dot.metric]}: {dot.inside:.0%}")  # fmt: skip
    axes.legend(frameon=False, fontsize=8, loc="best", title="hold least", title_fontsize=8,
                alignment="left", handletextpad=0.3)  # fmt: skip
