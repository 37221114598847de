"""How numbers, tables and JSON look on a terminal: the one place where SI becomes GB and ms."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 160


def console() -> Console:
    """Colour only on terminals that want it; elsewhere plain text, wide enough not to fold tables."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH, no_color=True)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")(function)


def table(title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> Table:
    """Columns are (heading, "left" or "right")."""
    made = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for heading, side in columns:
        made.add_column(heading, justify="left" if side == "left" else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def names(text: str | None) -> list[str]:
    """A comma-separated option as a list without duplicates."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 or value == 0 else f"{value / 1e6:,.1f} MB"


def kibibytes(value: float) -> str:
    return f"{value / 1024:,.1f} KiB" if value >= 1024 else f"{value:,.0f} B"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 10:
        return f"{value * 1e3:,.3g} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"
    return f"{value:,.0f} s"


def count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def share(value: float) -> str:
    return f"{value:.0%}"


def parameters(value: float) -> str:
    return f"{value / 1e12:,.2f} T" if value >= 1e12 else f"{value / 1e9:,.2f} B"
