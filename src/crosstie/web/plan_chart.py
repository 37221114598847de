"""A plan as a picture: what the fleet costs beside its rivals, and which classes load which pool."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.core.figures import dollars, share
from crosstie.core.workload import RequestClass
from crosstie.decide.plan.answer import Alternative, PoolPlan, found_share
from crosstie.decide.plan.flips import Flip
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.reuse import found_by_memory, knee
from crosstie.web.chart import check_ending, colours, new_figure, save
from crosstie.web.parts import Bars, BarSpan, ChartBar, Parts

# AMD's accelerators and NVIDIA's, told apart by hue; kinds of one vendor by lightness.
_HUES = {"AMD": ("#b3202c", "#d9595f", "#ec9a9c", "#f6cfd0"), "NVIDIA": ("#3b6e00", "#6aa01f", "#a2c96b", "#d3e7b9")}
_DARK = ("#b3202c", "#3b6e00", "#5a5a5a")
_OTHER = ("#5a5a5a", "#8c8c8c")
# Tones of a page's bars; more boxes than this would be lines.
_KEY = {"amd": "AMD", "nvidia": "NVIDIA", "other": "another vendor"}
_MOST_BOXES = 64


def draw_plan(plan: Plan, target: Path) -> None:
    """Needs a plan with a fleet."""
    assert plan.fleet is not None, "there is nothing to draw without a fleet"
    check_ending(target)
    sessions = [request_class for request_class in plan.workload.classes if request_class.sessions]
    rows = 1 + bool(sessions)
    figure = new_figure(12, (1.8 + 0.45 * max(len(plan.fleet.pools), 4)) * rows)
    panels = figure.subplots(rows, 2, squeeze=False)
    _costs(panels[0, 0], plan)
    _pools(panels[0, 1], plan)
    for axes in panels[0]:
        axes.set_axisbelow(True)
    if sessions:
        _found(panels[1, 0], plan, sessions)
        _memory(panels[1, 1], plan, sessions[0])
    save(figure, target, "predicted, not measured", axis="x")


def _found(axes: Any, plan: Plan, sessions: list[RequestClass]) -> None:
    """What sessions find by the memory for each of them: the knee, and where the fleet stands."""
    assert plan.fleet is not None
    for colour, request_class in zip(colours(), sessions, strict=False):
        tokens, found = found_by_memory(request_class)
        at = knee(tokens, found)
        axes.plot(tokens / 1e3, 100 * found, color=colour, label=request_class.name)
        axes.plot(tokens[at] / 1e3, 100 * found[at], "o", color=colour, markerfacecolor="none")
        axes.annotate(f"knee: {tokens[at] / 1e3:,.0f}k tokens, {found[at]:.0%}", (tokens[at] / 1e3, 100 * found[at]),
                      textcoords="offset points", xytext=(8, -12), fontsize=8)  # fmt: skip
        now = found_share(plan.fleet, request_class)
        here = float(np.interp(now, found, tokens)) / 1e3
        axes.plot(here, 100 * now, "D", color=colour)
        axes.annotate(f"this fleet: {now:.0%}", (here, 100 * now), textcoords="offset points", xytext=(-8, 6),
                      fontsize=8, ha="right")  # fmt: skip
    axes.set_xlabel("cache for each live session, thousands of tokens")
    axes.set_ylabel("prompt tokens in a cache, %")
    axes.set_ylim(0, 102)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _memory(axes: Any, plan: Plan, request_class: RequestClass) -> None:
    """What half, the same and twice the memory for sessions costs."""
    assert plan.fleet is not None
    steps = [(step.what, step.fleet.usd_per_hour, step.found[request_class.name]) for step in plan.memory]
    steps.append(("as it is", plan.closed_form_usd_per_hour, found_share(plan.fleet, request_class)))
    steps.sort(key=lambda step: -step[1])
    names = [what for what, *_ in steps]
    axes.barh(names, [usd for _, usd, _ in steps], color=colours()[0])
    for row, (_, usd, found) in enumerate(steps):
        axes.annotate(f"{dollars(usd)} an hour, {found:.0%} found", (usd, row), textcoords="offset points",
                      xytext=(-6, -3), ha="right", fontsize=8, color="white")  # fmt: skip
    axes.set_xlabel("$ an hour, by closed forms")


def fleet_bars(plan: Plan) -> Parts:
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


def flip_bars(flips: Sequence[Flip]) -> Parts:
    """A row each: the prices that sources ask, the one planned with, and the one at which another fleet wins."""
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
    fleets += [(f"{vendor} alone", one) for vendor, one in plan.single_vendor.items() if one and not one.is_absurd]
    if plan.runner_up and not plan.runner_up.fleet.is_absurd:
        fleets.append((f"without {plan.runner_up.without}", plan.runner_up.fleet))
    return fleets


def _costs(axes: Any, plan: Plan) -> None:
    """One bar a fleet, stacked by accelerator."""
    assert plan.fleet is not None
    fleets = _fleets(plan)
    shades = _shades(plan, [name for _, fleet in fleets for name in fleet.gpus])
    widest = max(fleet.usd_per_hour for _, fleet in fleets)
    for row, (_, fleet) in enumerate(fleets):
        small = []
        for name, (begin, end) in _stacked(plan, fleet).items():
            axes.barh(row, end - begin, left=begin, color=shades[name], edgecolor="white", height=0.62)
            words = f"{fleet.gpus[name]} {name}"
            if end - begin > 0.16 * widest:
                ink = "white" if shades[name] in _DARK else "black"
                axes.text((begin + end) / 2, row, words, ha="center", va="center", fontsize=8, color=ink)
            else:
                small.append(words)
        # What has no room in its segment stands after the bar.
        beside = f"  ({', '.join(small)})" if small else ""
        axes.text(fleet.usd_per_hour, row, f"  ${fleet.usd_per_hour:,.2f}{beside}", va="center", fontsize=9)
    doubt, high = plan.uncertainty, 0.0
    if doubt and doubt.low_usd_per_hour is not None and doubt.high_usd_per_hour is not None:
        low, high = doubt.low_usd_per_hour, doubt.high_usd_per_hour
        axes.plot([low, high], [0.42, 0.42], color="black", linewidth=1.2, solid_capstyle="butt")
        axes.plot([low, high], [0.42, 0.42], "|", color="black", markersize=7)
    axes.set_yticks(range(len(fleets)), [name for name, _ in fleets])
    axes.invert_yaxis()
    # Room for the words after the longest bar, and for the whole interval.
    axes.set_xlim(0, max(1.3 * widest, 1.04 * high))
    axes.set_xlabel("USD an hour (line: 80% interval)")
    axes.set_title(f"{plan.workload.name}: what each fleet costs", loc="left", fontsize=11)


def _shades(plan: Plan, names: list[str]) -> dict[str, str]:
    vendor = {item.id: item.vendor for item in plan.market.items}
    found: dict[str, str] = {}
    for name in names:
        if name not in found:
            hues = _HUES.get(vendor[name], _OTHER)
            taken = sum(vendor[other] == vendor[name] for other in found)
            found[name] = hues[min(taken, len(hues) - 1)]
    return found


def _pools(axes: Any, plan: Plan) -> None:
    """One bar a pool: how much of its replicas each class keeps busy at the peak."""
    assert plan.fleet is not None
    colour = {request_class.name: hue for request_class, hue in zip(plan.workload.classes, colours() * 8, strict=False)}
    for row, pool in enumerate(plan.fleet.pools):
        start = 0.0
        for name in colour:
            load = sum(one.load for one in pool.carried if one.part.request_class.name == name) / pool.replicas
            axes.barh(row, load, left=start, color=colour[name], edgecolor="white", height=0.62)
            start += load
    labels = [f"{pool.name}\n{pool.replicas} x {pool.deployment.gpus} GPU" for pool in plan.fleet.pools]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("busy at the peak, by class")
    axes.set_title("what each pool does", loc="left", fontsize=11)
    handles = [axes.barh(0, 0, color=hue) for hue in colour.values()]
    axes.legend(
        handles, list(colour), loc="upper right", bbox_to_anchor=(1.0, 1.12), ncols=4, frameon=False, fontsize=8
    )
