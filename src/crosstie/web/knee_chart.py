"""Sessions at work against what they get: where more of them no longer make more turns, and caches begin to thrash."""

from collections.abc import Callable, Sequence
from typing import Any

from crosstie.decide.plan.run_result import Run, SessionsResult
from crosstie.decide.plan.seeds import OverSeeds, over_seeds
from crosstie.web.chart import Picture, colours, new_figure, plain_ticks

_NOTE = "simulated with predicted step times, not measured; means over the seeds"


def has_knee(runs: Sequence[Run]) -> bool:
    """Whether there are sessions, at more than one load."""
    return any(run.sessions for run in runs) and len({run.load for run in runs}) > 1


def knee_picture(runs: Sequence[Run]) -> Picture:
    says = "over the sessions at work: turns a second, how long a turn takes, and prompt tokens found in a cache"
    return Picture(lambda: _knee(runs), _NOTE, says)


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
    hits.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
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
