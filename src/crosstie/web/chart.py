"""Curves as a picture, SVG or PNG by the file's ending. Needs the `plot` extra (matplotlib)."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from itertools import accumulate, pairwise
from pathlib import Path
from textwrap import wrap
from types import MappingProxyType
from typing import Any, NamedTuple

from crosstie import __version__
from crosstie.catalog.benchmarks import at_length
from crosstie.catalog.writing import in_words, write_text, write_whole
from crosstie.core.errors import BadInput, MissingExtra
from crosstie.decide.cost.curves import Curve
from crosstie.decide.cost.prices import Quote
from crosstie.perf.fit import Placement
from crosstie.prove.calibration.published import PublishedPoint
from crosstie.web.parts import Bars, BarSpan, ChartBar, Figure
from crosstie.web.report import report_of, write_report

_PAGE = ".html"
KINDS = (".svg", ".png", ".pdf", _PAGE)


# Told apart without colours: a style and a sign each.
STYLES, MARKERS = ("-", "--", "-.", ":"), "osD^vPX*"


class Picture(NamedTuple):
    """Drawn when it is wanted: into a file by itself, or on a page."""

    make: Callable[[], Any]
    note: str
    # For those who do not see it.
    says: str
    # Which lines of the grid there are.
    grid: Mapping[str, str] = MappingProxyType({})

    def draw(self, file: Path, *, dark: bool = False) -> None:
        save(self.make(), file, self.note, dark=dark, **self.grid)

    def on_page(self) -> Figure:
        return on_page(self.make(), self.note, self.says, **self.grid)


def curves_picture(curves: Sequence[Curve], title: str, published: Sequence[PublishedPoint] = ()) -> Picture:
    says = f"{title}: tokens a second of a GPU over those of a user, for {', '.join(curve.label for curve in curves)}"
    return Picture(lambda: _curves(curves, title, published), _curves_note(published), says, {"which": "both"})


def _curves_note(published: Sequence[PublishedPoint]) -> str:
    note = "lines: predicted, not measured; numbers: requests in flight"
    if not published:
        return note
    days = sorted(point.date for point in published if point.date)
    who = ", ".join(sorted({point.publisher for point in published}))
    return f"{note}\nhollow: {len(published)} published ({who}{f', {days[0]} to {days[-1]}' if days else ''})"


def _curves(curves: Sequence[Curve], title: str, published: Sequence[PublishedPoint]) -> Any:
    """Tokens/s per GPU over tokens/s per user: up and to the right is better."""
    figure = new_figure(8, 5.2)
    axes = figure.subplots()
    for index, (curve, colour) in enumerate(zip(curves, colours(), strict=False)):
        x, y = curve.tokens_per_s_per_user, curve.output_tokens_per_s_per_gpu
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(x, y, marker=marker, markersize=4, linewidth=1.8, color=colour, label=curve.label,
                  linestyle=STYLES[index % len(STYLES)])  # fmt: skip
        own = [point for point in published if point.accelerator == curve.accelerator]
        if own:
            axes.plot(
                [point.tokens_per_s_per_user for point in own], [point.output_tokens_per_s_per_gpu for point in own],
                linestyle="none", marker=marker, markersize=8, markerfacecolor="none", color=colour,
                label=f"{curve.accelerator}, published, {_span([point.gpus for point in own])} GPUs",
            )  # fmt: skip
        for at in (0, len(x) - 1):
            axes.annotate(
                f"{curve.concurrency[at]:,}", (x[at], y[at]), textcoords="offset points",
                xytext=(5, 5 - 17 * (index % 2)), fontsize=8, color=colour,
            )  # fmt: skip
    logarithmic(axes)
    frame(axes, title, x="tokens/s for each user (1 / TPOT)", y="output tokens/s a GPU", legend="lower left")
    return figure


def frame(
    axes: Any, title: str = "", *, x: str = "", y: str = "", legend: str = "", fontsize: float = 8, **more: Any
) -> None:
    """Title, names of the axes and legend as all pictures have them; `more` is the legend's."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        axes.legend(frameon=False, fontsize=fontsize, loc=legend, **more)


def in_percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"


def logarithmic(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)


def costs_picture(
    curves: Sequence[Curve], prices: Mapping[str, Quote], title: str, *, of: Sequence[str], by_context: bool
) -> Picture | None:
    """Dollars a million output tokens over the time of a token, or over the length of prompts: down is better. `of`:
    all that are compared, with a price or without, so that each has its colour in every picture."""
    priced = [curve for curve in curves if curve.usd_per_mtok]
    names = [curve.accelerator for curve in priced]

    def made() -> Any:
        figure = new_figure(8, 5.2)
        axes = figure.subplots()
        for curve in priced:
            index = of.index(curve.accelerator)
            x = curve.input_tokens if by_context else [1e3 / each for each in curve.tokens_per_s_per_user]
            label = f"{curve.accelerator}, {' '.join(dict.fromkeys(curve.layouts))}, "
            axes.plot(x, curve.usd_per_mtok, color=colours()[index], marker=MARKERS[index % len(MARKERS)],
                      linestyle=STYLES[index % len(STYLES)], markersize=4, linewidth=1.8,
                      label=f"{label}${prices[curve.accelerator].usd:.2f}/h")  # fmt: skip
            ends = zip(*curve.usd_per_mtok_80, strict=True)
            axes.fill_between(x, *ends, color=colours()[index], alpha=0.08, linewidth=0)
        logarithmic(axes)
        below, corner = ("tokens of a prompt", "upper left") if by_context else ("TPOT, ms", "upper right")
        frame(axes, title, x=below, y="$ a million output tokens, prompts included", legend=corner)
        return figure

    shaded = "shaded: 80% intervals, by what is not known of the throughput, and of the price where sellers differ"
    said = "; ".join(f"{name}: {prices[name].origin}" for name in names)
    slow = {curve.accelerator: at_length(curve.accelerator, max(curve.input_tokens)) for curve in priced}
    said += "".join(f"\n{name}: {words}" for name, words in slow.items() if words)
    note = f"{shaded} threefold; predicted, not measured\n{said}"
    return Picture(made, note, f"{title}: {', '.join(names)}", {"which": "both"}) if priced else None


def memory_picture(placements: Sequence[Placement], title: str) -> Picture:
    """The fullest GPU of each replica: weights, KV cache, what the engine works with, and what it leaves free."""
    bars = []
    for placement in placements:
        plan = placement.plan
        free = max(plan.engine_bytes - placement.deployment.stack.reserved.si, 0.0)
        sizes = (plan.weight_bytes, plan.cache_bytes, plan.engine_bytes - free, free)
        ends = [0.0, *(end / 1e9 for end in accumulate(sizes))]
        spans = [BarSpan(*each, tone) for each, tone in zip(pairwise(ends), _MEMORY, strict=True)]
        capacity = plan.capacity_bytes / 1e9
        words = " + ".join(f"{size / 1e9:,.{0 if size >= 1e10 else 1}f}" for size in sizes)
        holds = f"{placement.sequences:,} x {placement.context:,} tokens" if placement.fits else "does not fit"
        end = BarSpan(capacity, capacity + 0.01 * max(ends[-1], capacity), "edge")
        bars.append(ChartBar(placement.deployment.label, [*spans, end], f"{words} GB: {holds}"))
    chart = Bars(title, bars, list(_MEMORY.items()), unit="GB of one GPU; the bar at the end: its capacity")

    def made() -> Any:
        figure = new_figure(9, 2.4 + 0.6 * len(placements))
        draw_bars(figure.subplots(), chart)
        return figure

    stacks = {shown.deployment.stack.name: shown.deployment.stack.reserved for shown in placements}
    said = "; ".join(f"{name} keeps {fact} a GPU ({fact.basis}, {fact.date})" for name, fact in stacks.items())
    return Picture(made, f"computed from weights and layouts; {said}", title, {"axis": "x"})


_MEMORY = {
    "weights": "weights", "cache": "KV cache", "engine": "engine and activations", "idle": "left free by the engine",
}  # fmt: skip


# Colours of bars by their tones, as report.css has them by day.
_TONES = {
    "amd": "#b3202c", "nvidia": "#3b6e00", "other": "#5a5a5a", "idle": "#c9d1d9", "range": "#c9d1d9", "now": "#0b5cad",
    "flips": "#8a5300", "edge": "#8a5300", "weights": "#0072b2", "cache": "#e69f00", "engine": "#cc79a7",
}  # fmt: skip


def draw_bars(axes: Any, chart: Bars) -> None:
    """A page's chart of bars: names beside them, and their numbers over them."""
    for row, bar in enumerate(chart.bars):
        for span in bar.spans:
            axes.barh(row, span.end - span.begin, left=span.begin, height=0.15 if span.thin else 0.5,
                      color=_TONES[span.tone], edgecolor="white", linewidth=0.7)  # fmt: skip
        # A dollar begins no formula here, and words that are too long for a phone leave the bars their room.
        axes.text(0.0, row - 0.3, bar.words, fontsize=8, va="bottom", parse_math=False, wrap=True, in_layout=False)
    axes.set_yticks(range(len(chart.bars)), [bar.name for bar in chart.bars], fontsize=8)
    axes.set_ylim(len(chart.bars) - 0.6, -0.8)
    axes.set_xlim(0.0, chart.most)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(", ".join(filter(None, [chart.unit, chart.note])), fontsize=8)
    axes.set_title(chart.title, loc="left", fontsize=10)
    if chart.key:
        handles = [axes.barh(0, 0, color=_TONES[tone]) for tone, _ in chart.key]
        _legend_below(axes, handles, [name for _, name in chart.key], handlelength=1.0)


def _legend_below(axes: Any, handles: Sequence[Any], names: Sequence[str], **more: Any) -> None:
    """Under a panel, clear of its axis' numbers and name."""
    from matplotlib.transforms import ScaledTranslation

    down = ScaledTranslation(0.0, -_UNDER_LABELS, axes.figure.dpi_scale_trans)
    axes.legend(handles, names, loc="upper left", bbox_to_anchor=(0.0, 0.0), bbox_transform=axes.transAxes + down,
                borderaxespad=0.0, borderpad=0.0, frameon=False, fontsize=8, **more)  # fmt: skip


def plain_ticks(axis: Any, at: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Numbers of a logarithmic axis as people write them, 20 and not 2x10^1: at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=at))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def check_ending(file: Path) -> None:
    if file.suffix.lower() not in KINDS:
        raise BadInput(f"--plot {file}: the name must end in {', '.join(KINDS)}")


def check_picture(file: Path) -> None:
    """Before the work: the name has an ending of KINDS, the folder is there, and what draws is installed."""
    check_ending(file)
    with in_words(f"--plot {file}: cannot be written"):
        file.parent.stat()
    _figure_class()


def finish(figure: Any, note: str, **grid: str) -> None:
    """A grid, and the note below."""
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.grid(visible=True, linewidth=0.4, alpha=0.5, **grid)
        axes.spines[["top", "right"]].set_visible(False)
    # A dollar would begin a formula; a line that is too long would leave the picture.
    lines = _wrapped(note.replace("$", r"\$"), 17 * figure.get_figwidth())
    figure.supxlabel(lines, x=0.01, ha="left", fontsize=7, color="0.4")
    # Titles as wide as what is under them, which is known once everything else has its place.
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    for axes in figure.axes:
        axes.set_title("", loc="left")
    figure.draw_without_rendering()
    for axes, title in zip(figure.axes, titles, strict=True):
        inches = axes.get_window_extent().width / figure.dpi
        axes.set_title(_wrapped(title, 11 * inches), loc="left")
        axes.set_xlabel(_wrapped(axes.get_xlabel().replace("\n", " "), 13 * inches))
        _thin_out(axes.get_xticklabels())


def _thin_out(labels: Sequence[Any]) -> None:
    """Numbers of an axis that would run into the one before them are left out; slanted ones do not."""
    reached = -math.inf
    for label in sorted(labels, key=lambda label: label.get_window_extent().x0):
        box = label.get_window_extent()
        label.set_visible(bool(label.get_rotation()) or box.x0 > reached)
        reached = box.x1 + _APART if label.get_visible() else reached


# Dots between two numbers of an axis.
_APART = 4.0


def _wrapped(text: str, width: float) -> str:
    return "\n".join(line for each in text.split("\n") for line in wrap(each, round(width), break_on_hyphens=False))


def save(figure: Any, file: Path, note: str, *, dark: bool = False, **grid: str) -> None:
    """By itself it must say where it is from: `note`, and who drew it when. A page is by day and by night."""
    check_ending(file)
    if file.suffix.lower() == _PAGE:
        title, _, beside = (figure.get_suptitle() or figure.axes[0].get_title(loc="left")).partition("\n")
        # The page has it above.
        if figure.get_suptitle():
            figure.suptitle(beside)
        else:
            figure.axes[0].set_title(beside, loc="left")
        write_text(file, write_report(report_of(title, [on_page(figure, note, title, **grid)])))
        return
    drawn = f"drawn by crosstie {__version__}, {date.today().isoformat()}"
    finish(figure, f"{note}\n{drawn}" if note else drawn, **grid)
    if dark:
        _by_night(figure)
    with in_words(f"--plot {file}: cannot be written"):
        write_whole(file, lambda draft: figure.savefig(draft, dpi=150))


def _by_night(figure: Any) -> None:
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    for artist in figure.findobj(lambda artist: isinstance(artist, Text | Line2D | Patch | Collection)):
        if isinstance(artist, Text | Line2D):
            artist.set_color(_turned(artist.get_color()))
        else:
            face, edge = _turned(artist.get_facecolor()), _turned(artist.get_edgecolor())
            artist.set_facecolor(face)
            artist.set_edgecolor(edge)
        if isinstance(artist, Line2D):
            artist.set_markerfacecolor(_turned(artist.get_markerfacecolor()))
    for axes in figure.axes:
        axes.tick_params(which="both", colors=_turned("black"), grid_color=_turned("0.7"))


def _turned(colour: Any) -> Any:
    """By night ink is paper and paper ink; what has a colour is lightened until it is told from the paper."""
    from matplotlib.colors import to_rgba

    if isinstance(colour, str) and colour.casefold() in ("none", "auto"):
        return colour
    if getattr(colour, "ndim", 1) > 1:
        return [_turned(tuple(each)) for each in colour]
    *parts, alpha = to_rgba(colour)
    if max(parts) - min(parts) < _GREY:
        return (*(0.93 - 0.87 * part for part in parts), alpha)
    while _luminance(parts) < _SEEN_AT_NIGHT:
        parts = [0.95 * part + 0.05 for part in parts]
    return (*parts, alpha)


# Parts of a colour that differ by less make a grey.
_GREY = 0.05
# WCAG: words stand out 4.5 times from their paper, which by night has a luminance of 0.006.
_SEEN_AT_NIGHT = 4.5 * (0.006 + 0.05) - 0.05


def _luminance(parts: Sequence[float]) -> float:
    """WCAG's relative luminance."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# Inches: what a phone shows without making words smaller, and how much higher what has less width is drawn.
_PHONE, _HIGHER = 4.2, 1.25
# Inches: numbers and name of the axis that a legend under its panel keeps clear of.
_UNDER_LABELS = 0.55


def on_page(figure: Any, note: str, says: str, **grid: str) -> Figure:
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    finish(figure, note, **grid)
    figure.patch.set_alpha(0.0)
    for axes in figure.axes:
        axes.patch.set_alpha(0.0)
    wide = _inline(figure, "wide")
    for axes, title in zip(figure.axes, titles, strict=True):
        axes.set_title(title, loc="left")
    _narrow(figure)
    finish(figure, note, **grid)
    return Figure(wide, _inline(figure, "narrow"), says)


def _narrow(figure: Any) -> None:
    """As wide as a phone: panels that stand beside each other one under another, and legends under their panels."""
    from matplotlib.gridspec import GridSpec

    width, height = figure.get_size_inches()
    places = [axes.get_subplotspec() for axes in figure.axes]
    rows, columns = places[0].get_gridspec().get_geometry()
    stacked = GridSpec(rows * columns, 1, figure=figure)
    for axes, place in zip(figure.axes, places, strict=True):
        legend = axes.get_legend()
        beside = legend and legend.get_window_extent().x0 >= axes.get_window_extent().x1
        if beside or (legend and legend.get_window_extent().width > (_PHONE - 1.0) * figure.dpi):
            names = [text.get_text() for text in legend.get_texts()]
            _legend_below(axes, legend.legend_handles, names, title=legend.get_title().get_text() or None,
                          alignment="left", title_fontsize=8)  # fmt: skip
        axes.set_subplotspec(stacked[place.colspan.start * rows + place.rowspan.start])
    for legend in figure.legends:
        legend.set_loc("outside lower left")
    figure.set_size_inches(_PHONE, height * columns * (_HIGHER if width > _PHONE else 1.0))


def _inline(figure: Any, salt: str) -> str:
    """SVG to stand in a page: its words stay words, its ink is the page's, by day and by night."""
    from matplotlib import rc_context
    from matplotlib.colors import to_hex

    drawn = io.StringIO()
    # A fixed salt: the same plan gives the same file, byte by byte.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :].rstrip()
    names = {colour: f"var(--c{at})" for at, colour in enumerate(sorted(set(_COLOUR.findall(text))))}
    pairs = ";".join(f"{name[4:-1]}:light-dark({colour},{to_hex(_turned(colour))})" for colour, name in names.items())
    text = _COLOUR.sub(lambda match: names[match[0]], text)
    return text.replace("<svg ", f'<svg class="{salt}" style="{pairs}" ', 1)


# As matplotlib writes them into styles.
_COLOUR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("pictures need matplotlib", "plot") from None
    return Figure


def new_figure(width: float, height: float) -> Any:
    return _figure_class()(figsize=(width, height), layout="constrained")


def colours() -> list[str]:
    """Told apart by people who see colours differently (Okabe and Ito)."""
    return ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31"] * 4
