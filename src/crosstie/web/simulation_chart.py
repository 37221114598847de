"""Pictures of a simulation: what sessions at work get, up to where more of them make no more turns and caches thrash;
or, over time and by pool, how busy it was, what it had in flight and how many waited."""

from collections.abc import Callable, Sequence
from typing import Any

from crosstie.decide.plan.run_result import Outage, OverSeeds, Run, SessionsResult, over_seeds
from crosstie.web.chart import Picture, colours, in_percent, new_figure, plain_ticks

_NOTE = "simulated with predicted step times, not measured"
_MEANS = f"{_NOTE}; means over the seeds"


def has_knee(runs: Sequence[Run]) -> bool:
    """Whether there are sessions, at more than one load."""
    return any(run.sessions for run in runs) and len({run.load for run in runs}) > 1


def knee_picture(runs: Sequence[Run]) -> Picture:
    says = "over the sessions at work: turns a second, how long a turn takes, and prompt tokens found in a cache"
    return Picture(lambda: _knee(runs), _MEANS, says)


def _knee(runs: Sequence[Run]) -> Any:
    lines: dict[str, list[tuple[int, OverSeeds[Run]]]] = {}
    for group in over_seeds(runs):
        live = sum(session.live for session in group.first.sessions)
        lines.setdefault(f"{group.first.label}: {group.first.policy}", []).append((live, group))
    figure = new_figure(8.6, 8)
    throughput, latency, hits = figure.subplots(3, 1, sharex=True)
    for (name, points), colour in zip(lines.items(), colours(), strict=False):
        points.sort(key=lambda point: point[0])
        at = [live for live, _ in points]
        groups = [group for _, group in points]
        throughput.plot(at, [_mean(group, lambda each: each.turns_per_s, total=True) for group in groups], marker="o",
                        color=colour, linewidth=1.4, label=name)  # fmt: skip
        latency.plot(at, [_mean(group, lambda each: each.mean_turn_s) for group in groups], marker="o", color=colour)
        hits.plot(at, [_mean(group, lambda each: each.hit_rate) for group in groups], marker="o", color=colour)
    throughput.set_ylabel("turns a second")
    latency.set_ylabel("seconds a turn takes, mean")
    hits.set_ylabel("prompt tokens in a cache")
    in_percent(hits.yaxis)
    hits.set_xscale("log")
    plain_ticks(hits.xaxis)
    hits.set_xlabel("sessions at work")
    for axes in (throughput, latency, hits):
        axes.set_ylim(bottom=0)
    throughput.legend(frameon=False, fontsize=8, loc="best")
    return figure


def _mean(group: OverSeeds[Run], of: Callable[[SessionsResult], float], *, total: bool = False) -> float:
    """Over the seeds; of several classes their sum, or their mean by turns."""

    def one_run(run: Run) -> float:
        if total:
            return sum(map(of, run.sessions))
        turns = sum(session.turns_per_s for session in run.sessions)
        return sum(of(session) * session.turns_per_s for session in run.sessions) / turns if turns else 0.0

    return group.mean(one_run)


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
    in_percent(busy.yaxis)
    busy.set_ylabel("time with work to do")
    flying.set_ylabel("requests running")
    waiting.set_ylabel("requests waiting")
    waiting.set_xlabel(unit)
    load = f", {run.load:g} times the rate" if run.load != 1.0 else ""
    busy.set_title(f"{run.label}: {run.policy}{load}", loc="left", fontsize=11)
    for axes in (busy, waiting):
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _clock(run: Run) -> tuple[list[float], float, str]:
    last = run.course.at_s[-1]
    scale, unit = (3600.0, "hours") if last > 3 * 3600 else (60.0, "minutes") if last > 600 else (1.0, "seconds")
    return [moment / scale for moment in run.course.at_s], scale, unit
