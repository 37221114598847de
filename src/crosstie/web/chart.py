"""Curves as a picture, SVG or PNG by the file's ending. Needs the `plot` extra (matplotlib)."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstie.catalog.writing import write_whole
from crosstie.core.errors import BadInput
from crosstie.decide.compare.curve import Curve
from crosstie.web.report import Figure

KINDS = (".svg", ".png", ".pdf")


_CURVES_NOTE = "numbers: requests in flight; predicted, not measured"


def draw_curves(curves: Sequence[Curve], title: str, file: Path) -> None:
    check_ending(file)
    save(_curves(curves, title), file, _CURVES_NOTE, which="both")


def curves_figure(curves: Sequence[Curve], title: str) -> dict[str, Figure]:
    if not curves:
        return {}
    says = f"{title}: tokens a second of a GPU over those of a user, for {', '.join(one.label for one in curves)}"
    return {"": Figure(inline(_curves(curves, title), _CURVES_NOTE, which="both"), says)}


def _curves(curves: Sequence[Curve], title: str) -> Any:
    """Tokens/s per GPU over tokens/s per user: up and to the right is better."""
    figure = new_figure(8, 5.2)
    axes = figure.subplots()
    for curve, colour in zip(curves, colours(), strict=False):
        x, y = curve.tokens_per_s_per_user, curve.output_tokens_per_s_per_gpu
        axes.plot(x, y, marker="o", markersize=4, linewidth=1.8, color=colour, label=curve.label)
        for at in (0, len(x) - 1):
            axes.annotate(
                f"{curve.concurrency[at]:,}", (x[at], y[at]), textcoords="offset points", xytext=(5, 5),
                fontsize=8, color=colour,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)
    axes.set_xlabel("tokens/s for each user (1 / TPOT)")
    axes.set_ylabel("output tokens/s a GPU")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    return figure


def plain_ticks(axis: Any) -> None:
    """Numbers of a logarithmic axis as people write them, 20 and not 2x10^1: at 1, 2 and 5 of every decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def check_ending(file: Path) -> None:
    if file.suffix.lower() not in KINDS:
        raise BadInput(f"--plot {file}: the name must end in {', '.join(KINDS)}")


def finish(figure: Any, note: str, **grid: str) -> None:
    """A grid, and the note below."""
    for axes in figure.axes:
        axes.grid(visible=True, linewidth=0.4, alpha=0.5, **grid)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7, color="0.4")


def save(figure: Any, file: Path, note: str, **grid: str) -> None:
    finish(figure, note, **grid)
    try:
        write_whole(file, lambda draft: figure.savefig(draft, dpi=150))
    except OSError as error:
        raise BadInput(f"--plot {file}: cannot be written: {error.strerror}") from None


def inline(figure: Any, note: str, **grid: str) -> str:
    """SVG to stand in a page: its words stay words, its ink is the page's, by day and by night."""
    from matplotlib import rc_context

    finish(figure, note, **grid)
    figure.patch.set_alpha(0.0)
    for axes in figure.axes:
        axes.patch.set_alpha(0.0)
    drawn = io.StringIO()
    # A fixed salt: the same plan gives the same file, byte by byte.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "crosstie"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :].replace("#000000", "currentColor").rstrip()


def new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("--plot needs matplotlib: pip install 'crosstie[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def colours() -> list[str]:
    """Told apart by people who see colours differently (Okabe and Ito)."""
    return ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31"] * 4
