"""A model's operations under the roofline of each accelerator. Needs the `plot` extra."""

import math
from collections.abc import Sequence
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.core.figures import seconds, significant
from crosstie.perf.roofline import Roof, Roofline, StepSpots
from crosstie.web.chart import Picture, frame, logarithmic, new_figure, plain_ticks

# More would be too small to read.
_MOST = 4
_COLOURS = {"prefill": "#D55E00", "decode": "#0072B2"}
_SHAPES = "osD^vPX*<>phd8"
_NOTE = (
    "lines: peaks of the datasheets, dashed what the performance model has dense products reach; signs: an operation "
    "of all layers on one GPU, larger for more of the step; bytes: weights and KV cache, each read once; predicted, "
    "not measured"
)


def roofline_picture(rooflines: Sequence[Roofline], title: str) -> Picture:
    """FLOP/s over FLOPs a byte: a sign below the roof leaves as much undone as it lies lower."""
    if not rooflines:
        raise BadInput("none of these accelerators runs it at this load")
    if len(rooflines) > _MOST:
        raise BadInput(f"a picture holds {_MOST} accelerators, not {len(rooflines)}")
    sources = "; ".join(dict.fromkeys(_sources(line) for line in rooflines))
    return Picture(lambda: _drawn(rooflines, title), f"{_NOTE}\n{sources}", title, {"which": "both"})


def _drawn(rooflines: Sequence[Roofline], title: str) -> Any:
    figure = new_figure(10.5, 0.9 + 5.0 * len(rooflines))
    spots = [spot for line in rooflines for step in line.steps for spot in step.spots]
    x_ends = _room([spot.flop_per_byte for spot in spots] + [_ridge(line) for line in rooflines], 2.5, 5.0)
    highest = max(roof.peak_flop_per_s for line in rooflines for roof in line.roofs)
    y_ends = _room([spot.flop_per_s / 1e12 for spot in spots] + [highest / 1e12], 2.0, 1.6)
    for axes, roofline in zip(figure.subplots(len(rooflines), squeeze=False)[:, 0], rooflines, strict=True):
        logarithmic(axes)
        plain_ticks(axes.xaxis, (1.0, 5.0))
        axes.tick_params(labelsize=8)
        axes.set_xlim(*x_ends)
        axes.set_ylim(*y_ends)
        _roofs(axes, roofline)
        _operations(axes, roofline.steps)
        said = "\n".join([roofline.deployment.label, *map(_said, roofline.steps)])
        frame(axes, said, x="FLOPs a byte of weights and cache", y="TFLOP/s of one GPU")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _room(values: Sequence[float], below: float, above: float) -> tuple[float, float]:
    return min(values) / below, max(values) * above


def _ridge(roofline: Roofline) -> float:
    """Where the highest roof begins."""
    return max(roof.peak_flop_per_s for roof in roofline.roofs) / roofline.memory_bytes_per_s


def _roofs(axes: Any, roofline: Roofline) -> None:
    left, right = axes.get_xlim()
    memory = roofline.memory_bytes_per_s / 1e12
    used = {spot.format for step in roofline.steps for spot in step.spots}
    lowest = min(roof.peak_flop_per_s for roof in roofline.roofs if roof.format in used)
    # Formats of one rate share a line. Those that the model does not use are thin, and only there if they are faster.
    by_rate: dict[float, list[Roof]] = {}
    for roof in roofline.roofs:
        if roof.format in used or (roof.peak_flop_per_s > lowest and roof.format.startswith("fp")):
            by_rate.setdefault(roof.peak_flop_per_s / 1e12, []).append(roof)
    for peak, roofs in by_rate.items():
        own = any(roof.format in used for roof in roofs)
        names = ", ".join(roof.format for roof in roofs if roof.format in used or not own)
        axes.plot([peak / memory, right], [peak] * 2, color="black", linewidth=1.6 if own else 0.6, zorder=1)
        for reached in {roof.reached_flop_per_s / 1e12 for roof in roofs if own} - {0.0}:
            axes.plot([reached / memory, right], [reached] * 2, color="black", linewidth=0.9, linestyle="--", zorder=1)
        axes.annotate(f"{names} {significant(peak)} TFLOP/s", (right, peak), textcoords="offset points",
                      xytext=(-3, 3), ha="right", fontsize=7, color="black" if own else "0.4")  # fmt: skip
    top = max(by_rate)
    bottom = max(left, axes.get_ylim()[0] / memory)
    axes.plot([bottom, top / memory], [bottom * memory, top], color="black", linewidth=1.6, zorder=1)
    middle = math.sqrt(bottom * top / memory)
    axes.annotate(f"memory {memory:.3g} TB/s", (middle, middle * memory), textcoords="offset points", xytext=(-6, 6),
                  ha="right", fontsize=7)  # fmt: skip


def _operations(axes: Any, steps: Sequence[StepSpots]) -> None:
    """A shape an operation; filled at prefill, hollow at decode. What stands beside the picture has the shares."""
    names = list(dict.fromkeys(spot.name for step in steps for spot in step.spots))
    shares: dict[str, list[str]] = {name: [] for name in names}
    for step in steps:
        own = {spot.name: spot for spot in step.spots}
        for name, shape in zip(names, _SHAPES * 2, strict=False):
            shares[name].append(_percent(own[name].share_of_step) if name in own else "-")
            if name in own:
                colour, hollow = _COLOURS[step.kind], step.kind == "decode"
                axes.plot(
                    own[name].flop_per_byte, own[name].flop_per_s / 1e12, marker=shape, linestyle="none",
                    markersize=6 + 10 * math.sqrt(own[name].share_of_step), color=colour,
                    markerfacecolor="none" if hollow else colour, markeredgecolor=colour if hollow else "white",
                    # Small ones upon large ones.
                    markeredgewidth=1.2 if hollow else 0.7, zorder=4.0 - own[name].share_of_step,
                )  # fmt: skip
    for name, shape in zip(names, _SHAPES * 2, strict=False):
        axes.plot([], [], marker=shape, color="black", markerfacecolor="none", linestyle="none", markersize=6,
                  label=f"{name}: {', '.join(shares[name])}")  # fmt: skip
    axes.legend(
        frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), title_fontsize=8, alignment="left",
        title="share of the step:\nprefill (filled, orange),\ndecode (hollow, blue)",
    )  # fmt: skip


def _said(step: StepSpots) -> str:
    what = f"{step.size:,.0f} tokens of a prompt" if step.kind == "prefill" else f"{step.size:,.0f} sequences"
    at = f" of {step.context:,.0f} tokens" if step.kind == "decode" else ""
    rest = ", ".join(f"{name} {_percent(part)}" for name, part in step.elsewhere.items() if part >= 0.005)
    return f"{step.kind}: {what}{at}, {seconds(step.seconds)}" + (f"; not on the axes: {rest}" if rest else "")


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.01 else "<1%"


def _sources(roofline: Roofline) -> str:
    accelerator = roofline.deployment.accelerator
    used = {spot.format for step in roofline.steps for spot in step.spots}
    facts = [accelerator.memory.bandwidth, *(accelerator.dense[name] for name in sorted(used))]
    return f"{accelerator.id}: " + ", ".join(dict.fromkeys(f"{fact.source} ({fact.date})" for fact in facts))
