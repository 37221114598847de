"""A plan as a picture and on its page: the fleet, what it costs beside its rivals, and the prices that flip it."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from crosstie.core.figures import dollars, share
from crosstie.core.workload import RequestClass
from crosstie.decide.plan.answer import Alternative, PoolPlan, found_share
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.reuse import found_by_memory, knee
from crosstie.web.chart import Picture, colours, draw_bars, frame, new_figure
from crosstie.web.parts import Bars, BarSpan, ChartBar

# Tones of a page's bars; more boxes than this would be lines.
_KEY = {"amd": "AMD", "nvidia": "NVIDIA", "other": "another vendor"}
_MOST_BOXES = 64


def plan_picture(plan: Plan) -> Picture:
    """Needs a plan with a fleet: the bars of its page, and what sessions find in the caches."""
    title = f"{plan.workload.name}: the cheapest fleet"
    return Picture(lambda: _drawn(plan, title), "predicted, not measured", title, {"axis": "x"})


def _drawn(plan: Plan, title: str) -> Any:
    panels = [*fleet_bars(plan), *flip_bars(plan), *memory_bars(plan)]
    sessions = [request_class for request_class in plan.workload.classes if request_class.sessions]
    heights = [1.0 + 0.5 * len(bars.bars) + 0.25 * len(bars.key) for bars in panels] + [3.5] * bool(sessions)
    figure = new_figure(9, sum(heights))
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for each, bars in zip(axes, panels, strict=False):
        draw_bars(each, bars)
    if sessions:
        _found(axes[-1], plan, sessions)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure


def _found(axes: Any, plan: Plan, sessions: list[RequestClass]) -> None:
    """What sessions find by the memory for each of them: the knee, and where the fleet stands."""
    assert plan.fleet is not None
    for colour, request_class in zip(colours(), sessions, strict=False):
        tokens, shares = found_by_memory(request_class)
        at = knee(tokens, shares)
        axes.plot(tokens / 1e3, 100 * shares, color=colour, label=request_class.name)
        axes.plot(tokens[at] / 1e3, 100 * shares[at], "o", color=colour, markerfacecolor="none")
        axes.annotate(f"knee: {tokens[at] / 1e3:,.0f}k tokens, {shares[at]:.0%}", (tokens[at] / 1e3, 100 * shares[at]),
                      textcoords="offset points", xytext=(8, -12), fontsize=8)  # fmt: skip
        now = found_share(plan.fleet, request_class)
        here = float(np.interp(now, shares, tokens)) / 1e3
        axes.plot(here, 100 * now, "D", color=colour)
        axes.annotate(f"this fleet: {now:.0%}", (here, 100 * now), textcoords="offset points", xytext=(-8, 6),
                      fontsize=8, ha="right")  # fmt: skip
    axes.set_ylim(0, 102)
    x, y = "cache for each live session, thousands of tokens", "prompt tokens in a cache, %"
    frame(axes, x=x, y=y, legend="lower right")


def memory_bars(plan: Plan) -> Iterator[Bars]:
    """What this, half, twice and a rival's memory for sessions costs."""
    request_class = next((wanted for wanted in plan.workload.classes if wanted.sessions), None)
    if request_class is None or plan.fleet is None:
        return
    steps = [(step.what, step.fleet.usd_per_hour, step.found[request_class.name]) for step in plan.memory]
    steps.append(("as it is", plan.closed_form_usd_per_hour, found_share(plan.fleet, request_class)))
    bars = [
        ChartBar(what, [BarSpan(0.0, usd, "now")], f"{dollars(usd)}, {step_found:.0%} found")
        for what, usd, step_found in sorted(steps, key=lambda step: step[1])
    ]
    yield Bars("What memory for sessions costs an hour", bars, note="by closed forms")


def fleet_bars(plan: Plan) -> Iterator[Bars]:
    """The fleet, a box a replica; and what it costs beside others."""
    assert plan.fleet is not None, "there is nothing to draw without a fleet"
    vendors = {item.id: item.vendor for item in plan.market.items}
    pools = [_pool_bar(pool, _tone(vendors[pool.deployment.accelerator.id])) for pool in plan.fleet.pools]
    key = [(tone, word) for tone, word in _KEY.items() if any(span.tone == tone for bar in pools for span in bar.spans)]
    yield Bars(
        "The fleet: pools, as long as what they cost an hour",
        pools,
        [*key, ("idle", "idle at the peak")],
        f"a box a replica, up to {_MOST_BOXES} of them",
    )
    bars = [
        ChartBar(name, [BarSpan(*ends, _tone(vendors[gpu])) for gpu, ends in _stacked(plan, alternative).items()],
            f"{dollars(alternative.usd_per_hour)}: {alternative.label}")
        for name, alternative in _fleets(plan)
    ]  # fmt: skip
    doubt = plan.uncertainty
    if doubt and doubt.low_usd_per_hour is not None and doubt.high_usd_per_hour is not None:
        low, high = doubt.low_usd_per_hour, doubt.high_usd_per_hour
        words = f"{dollars(low)} to {dollars(high)}"
        if dollars(low) != dollars(high):
            bars.insert(1, ChartBar("the same pools, 80%", [BarSpan(low, high, "range", thin=True)], words))
    yield Bars("What each fleet costs an hour", bars, note="predicted, not measured")


def _pool_bar(pool: PoolPlan, tone: str) -> ChartBar:
    boxes = pool.replicas if pool.replicas <= _MOST_BOXES else 1
    each = pool.usd_per_hour / boxes
    spans = []
    for at in range(boxes):
        busy = (at + min(pool.utilisation, 1.0)) * each
        spans += [BarSpan(at * each, busy, tone), BarSpan(busy, (at + 1) * each, "idle")]
    d = pool.deployment
    what = f"{pool.replicas:,} x {d.accelerator.id} {d.layout}, {dollars(pool.usd_per_hour)}"
    return ChartBar(pool.name, spans, f"{what}, {share(pool.utilisation)} busy")


def _stacked(plan: Plan, fleet: Alternative) -> dict[str, tuple[float, float]]:
    """What each accelerator costs of a fleet, one after another; in whole nodes some are paid for and not counted."""
    prices = {item.id: item.quote.usd for item in plan.market.items}
    worth = {name: count * prices[name] for name, count in fleet.gpus.items()}
    scale, ends, begin = fleet.usd_per_hour / sum(worth.values()), {}, 0.0
    for name, usd in worth.items():
        ends[name] = (begin, begin + usd * scale)
        begin = ends[name][1]
    return ends


def _tone(vendor: str) -> str:
    return vendor.casefold() if vendor.casefold() in _KEY else "other"


def flip_bars(plan: Plan) -> Iterator[Bars]:
    """A row each: the prices that sources ask, the one planned with, and the one at which another fleet wins."""
    flips = [flip for flip in plan.flips if flip.kind == "price" or flip.at_usd_per_gpu_hour > 0]
    if not flips:
        return
    prices = [(flip.usd_per_gpu_hour, flip.at_usd_per_gpu_hour, flip.high_usd) for flip in flips]
    mark = max(max(row) for row in prices) / 150.0
    bars = []
    for flip in flips:
        now, at = flip.usd_per_gpu_hour, flip.at_usd_per_gpu_hour
        asked = BarSpan(min(flip.low_usd, now), max(flip.high_usd, now), "range", thin=True)
        marks = [BarSpan(max(usd - mark, 0.0), usd + mark, tone) for usd, tone in ((now, "now"), (at, "flips"))]
        bars.append(
            ChartBar(flip.accelerator, [asked, *marks], f"{dollars(now)} now, {dollars(at)}: {flip.becomes.label}")
        )
    key = [("range", "what sellers ask"), ("now", "planned with"), ("flips", "another fleet wins")]
    yield Bars("Prices a GPU-hour at which the answer flips", bars, key)


def _fleets(plan: Plan) -> list[tuple[str, Alternative]]:
    """A bar of many times the length would leave nothing to see of the others."""
    assert plan.fleet is not None
    fleets = [("this plan", Alternative(plan.fleet.gpus, plan.fleet.usd_per_hour, 0.0))]
    fleets += [(f"{vendor} alone", alt) for vendor, alt in plan.single_vendor.items() if alt and not alt.is_absurd]
    if plan.runner_up and not plan.runner_up.fleet.is_absurd:
        fleets.append((f"without {plan.runner_up.without}", plan.runner_up.fleet))
    return fleets
