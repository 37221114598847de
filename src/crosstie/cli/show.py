"""How numbers, tables and JSON look on a terminal: the one place where SI becomes GB and ms."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosstie.core.progress import OnProgress
from crosstie.core.units import significant

PLAIN_WIDTH = 160
# Columns of prose, which may take several lines.
FOLDING = ("source", "title", "layers", "name", "stores linear layers as", "why", "claim", "computed")


class Output(Console):
    """Plain text, no markup: names come from files. A closed pipe is the caller's to handle."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Output:
    """Colour only on terminals that want it; elsewhere plain text, wide enough not to fold tables."""
    made = Output(highlight=False, markup=False, emoji=False)
    return (
        made
        if made.is_terminal
        else Output(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH, no_color=True)
    )


def print_table(out: Console, made: Table) -> None:
    """Never cuts a cell: a table that needs more than the terminal has is printed whole, and wraps there."""
    terminal = out.width
    # rich leaves the gaps between columns out of its minimum.
    gaps = 2 * len(made.columns)
    needed = out.measure(made, options=out.options.update_width(1000)).minimum + gaps
    out.width = max(terminal, needed)
    out.print(made)
    out.width = terminal


def say(out: Output, text: str | Text, style: str = "") -> None:
    """A line as long as it gets: the terminal wraps it, a file keeps it whole."""
    out.print(text, style=style, soft_wrap=True)


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: Any) -> None:
    click.echo(json_text(value))


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal's error stream, for work that may take a second; silent elsewhere."""
    progress = Console(stderr=True, highlight=False, markup=False)
    if not progress.is_terminal:
        yield lambda _: None
        return
    with progress.status("") as status:
        yield status.update


@contextmanager
def progress() -> Iterator[OnProgress]:
    """The same for calls that count: takes what they report as `on_progress`."""
    with spinner() as say:
        yield lambda done, total, what: say(f"{what}: {done:,} of {total:,}" if total else what)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")(function)


def table(title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> Table:
    """Columns are (heading, "left" or "right")."""
    made = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for heading, side in columns:
        folds = heading in FOLDING
        made.add_column(heading, justify="left" if side == "left" else "right", overflow="fold", no_wrap=not folds)
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def names(text: str | None) -> list[str]:
    """A comma-separated option as a list."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def number(value: object) -> str:
    """A cell of a list: numbers with separators, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return significant(value, 4)
    return f"{value:,}" if isinstance(value, int) else str(value)


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 or value == 0 else f"{value / 1e6:,.1f} MB"


def kibibytes(value: float) -> str:
    return f"{value / 1024:,.1f} KiB" if value >= 1024 else f"{value:,.0f} B"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    if value < 1e-3:
        return f"{value * 1e6:.3g} us" if value < 1e-5 else f"{value * 1e6:.0f} us"
    if value < 10:
        return f"{value * 1e3:,.3g} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"
    return f"{value:,.0f} s"


def count(value: float) -> str:
    return significant(value)


def bandwidth(value: float) -> str:
    """Bytes per second."""
    return f"{significant(value / 1e12)} TB/s" if value >= 1e12 else f"{significant(value / 1e9)} GB/s"


def arithmetic(value: float) -> str:
    """Floating-point operations per second."""
    return f"{significant(value / 1e12)} TFLOP/s"


def share(value: float) -> str:
    return f"{value:.0%}"


def parameters(value: float) -> str:
    return f"{value / 1e12:,.2f} T" if value >= 1e12 else f"{value / 1e9:,.2f} B"


def usd(value: float) -> str:
    """Dollars as a bill shows them."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.2f} M"
    return significant(value)


def many(value: float) -> str:
    """Counts that nobody counts."""
    if value >= 1e9:
        return f"{significant(value / 1e9)} billion"
    return f"{significant(value / 1e6)} million" if value >= 1e6 else f"{value:,.0f}"


def dollars(value: float) -> str:
    """With its sign, down to cents and below."""
    if value >= 1e6:
        return f"${value / 1e6:,.2f}M"
    if value >= 1e3:
        return f"${value:,.0f}"
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${significant(value, 2)}"
