"""A simulation as a picture: by pool, how busy it was, what it had in flight and how many waited, over time."""

from collections.abc import Sequence
from typing import Any

from crosstie.decide.plan.run_result import Outage, Run
from crosstie.web.chart import Picture, colours, new_figure

_NOTE = "simulated with predicted step times, not measured"


def course_picture(runs: Sequence[Run], outages: Sequence[Outage]) -> Picture:
    """The first seed of each fleet, policy and load."""
    says = f"over time, for each pool of {runs[0].label}: how busy it is, and the requests that run and wait"
    return Picture(lambda: _course(runs, outages), _NOTE, says)


def _course(runs: Sequence[Run], outages: Sequence[Outage]) -> Any:
    shown = [drawn for drawn in runs if drawn.seed == runs[0].seed][:4]
    figure = new_figure(2.6 + 6.0 * len(shown), 8)
    rows = figure.subplots(3, len(shown), squeeze=False, sharex="col")
    for column, run in enumerate(shown):
        _draw(rows[0][column], rows[1][column], rows[2][column], run, outages)
    return figure


def _draw(busy: Any, flying: Any, waiting: Any, run: Run, outages: Sequence[Outage]) -> None:
    at, scale, unit = _clock(run)
    for (name, pool), colour in zip(run.course.pools.items(), colours(), strict=False):
        busy.plot(at, pool.busy, color=colour, linewidth=1.4, label=name)
        flying.plot(at, pool.running, color=colour, linewidth=1.4)
        waiting.plot(at, pool.waiting, color=colour, linewidth=1.4)
    waiting.plot(at, run.course.queued, color="0.3", linewidth=1.4, linestyle=":", label="at the gateway")
    for axes in (busy, flying, waiting):
        for outage in outages:
            axes.axvspan(outage.at_s / scale, min(outage.until_s / scale, at[-1]), color="0.85", zorder=0)
        axes.set_ylim(bottom=0)
    busy.set_ylim(0, 1.05)
    busy.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    busy.set_ylabel("time with work to do")
    flying.set_ylabel("requests running")
    waiting.set_ylabel("requests waiting")
    waiting.set_xlabel(unit)
    load = f", {run.load:g} times the rate" if run.load != 1.0 else ""
    busy.set_title(f"{run.label}: {run.policy}{load}", loc="left", fontsize=11)
    busy.legend(frameon=False, fontsize=8, loc="lower right")
    waiting.legend(frameon=False, fontsize=8, loc="upper right")


def _clock(run: Run) -> tuple[list[float], float, str]:
    last = run.course.at_s[-1]
    scale, unit = (3600.0, "hours") if last > 3 * 3600 else (60.0, "minutes") if last > 600 else (1.0, "seconds")
    return [moment / scale for moment in run.course.at_s], scale, unit
