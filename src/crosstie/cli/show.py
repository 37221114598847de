"""The screen: prose, tables and JSON. Nothing is cut at any width: the terminal's, that of COLUMNS, or 80 in a pipe."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import wrap
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosstie.web.report import Heading, Line, ReportPart, Table as Kept, TableColumn, Tone

_GAP = 2
# Between values of a block, which have their names in front.
_BETWEEN = 3
# A column of prose is not made narrower than this: the table becomes blocks instead.
_NARROWEST = 20
# What stands so far in is a command to type.
_COMMAND = 4


_TONES: dict[str, Tone] = {"dim": "note", "yellow": "caution", "red": "bad", "green": "good"}
_parts: ContextVar[list[ReportPart] | None] = ContextVar("parts", default=None)


class Output(Console):
    """Plain text, no markup: names come from files. A closed pipe is the caller's to handle."""

    # A report's, where what is shown goes into one in the place of being printed.
    parts: list[ReportPart] | None = None

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Output:
    """Colour only on terminals that want it."""
    made = Output(highlight=False, markup=False, emoji=False)
    made.parts = _parts.get()
    return made


@contextmanager
def taken_down() -> Iterator[list[ReportPart]]:
    """What is shown meanwhile becomes parts of a report, and is not printed."""
    parts: list[ReportPart] = []
    mark = _parts.set(parts)
    try:
        yield parts
    finally:
        _parts.reset(mark)


def _taking_down(out: Console) -> list[ReportPart] | None:
    return out.parts if isinstance(out, Output) else None


def say(out: Console, text: str | Text, style: str = "", *, hang: int | None = None) -> None:
    """A line, wrapped on words under its own indentation, or `hang` columns in. A word that is too long for the width,
    such as a path, stays whole."""
    whole = Text(text) if isinstance(text, str) else text
    plain = whole.plain
    if (parts := _taking_down(out)) is not None:
        begun = plain.lstrip(" ")
        item, verbatim = begun.startswith("- "), hang is None and len(plain) - len(begun) >= _COMMAND
        styles = [style, *(str(span.style) for span in whole.spans if span.style in ("red", "yellow", "green"))]
        tone: Tone = next((_TONES[one] for one in styles if one in _TONES), "")
        if begun:
            parts.append(Line(begun.removeprefix("- ").rstrip(), tone, item=item, verbatim=verbatim))
        return
    indent = len(plain) - len(plain.lstrip(" ").removeprefix("- ")) if hang is None else hang
    first, at = whole[:indent], indent
    room = max(out.width - indent, 1)
    for line in wrap(plain[indent:], room, break_long_words=False, break_on_hyphens=False) or [""]:
        begin = plain.index(line, at)
        at = begin + len(line)
        out.print(first + whole[begin:at], style=style, soft_wrap=True)
        first = Text(" " * indent)


def heading(out: Console, text: str) -> None:
    if (parts := _taking_down(out)) is not None:
        parts.append(Heading(text))
        return
    say(out, Text(text, "bold"))


def closing(out: Console, details: str) -> None:
    """The last line of an answer that has more to say; a report has said it."""
    if _taking_down(out) is None:
        say(out, f"-v for {details}", "dim")


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: Any) -> None:
    click.echo(json_text(value))


def show_table(
    out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "",
    sources: Sequence[Sequence[str]] = (),
) -> None:  # fmt: skip
    """A table where it fits, else a block for each row. Headings begin with ">" where cells stand to the right, and
    with "~" where they are prose that may wrap. A page's cells open their `sources`."""
    cells = [list(row) for row in rows]
    if title:
        heading(out, title)
    if (parts := _taking_down(out)) is not None:
        named = [TableColumn(_name(c), right=c.startswith(">"), prose=c.startswith("~")) for c in columns]
        parts.append(Kept(named, cells, sources))
        return
    widths = _widths(columns, cells, out.width)
    if widths is None:
        _show_blocks(out, columns, cells)
        return
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        made.add_column(
            Text(_name(column)), justify="right" if column.startswith(">") else "left", width=width, overflow="fold"
        )
    for row in cells:
        made.add_row(*map(Text, row))
    out.print(made)


def _name(column: str) -> str:
    return column.lstrip("~>")


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Of each column; None where they do not fit. Headings wrap on words before a table is given up."""
    room -= _GAP * (len(columns) - 1)
    whole, found = [], []
    for i, column in enumerate(columns):
        held = [row[i] for row in rows]
        whole.append(_widest([_name(column), *held]))
        least = _widest(_name(column).split())
        if column.startswith("~"):
            words = _widest(word for cell in held for word in cell.split())
            found.append(min(whole[i], max(least, words, _NARROWEST)))
        else:
            found.append(max(least, _widest(held)))
    left = room - sum(found)
    if left < 0:
        return None
    # What is left goes to headings that then take one line, and to prose.
    for i in sorted(range(len(columns)), key=lambda i: (columns[i].startswith("~"), whole[i] - found[i])):
        more = whole[i] - found[i]
        if columns[i].startswith("~"):
            more = min(more, left)
        if more <= left:
            found[i] += more
            left -= more
    return found


def _show_blocks(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first cell as a heading, short cells side by side, the same ones below each other, and prose under them."""
    room = out.width - 2
    values = [_widest(row[i] for row in rows) for i in range(len(columns))]
    # What has no name, such as a bar, only goes with a table.
    named = [i for i in range(1, len(columns)) if _name(columns[i])]
    prose = [i for i in named if columns[i].startswith("~") or len(_name(columns[i])) + 1 + values[i] > room]
    short = [i for i in named if i not in prose]
    for beside in range(len(short), 0, -1):
        stacks = [short[at::beside] for at in range(beside)]
        labels = [_widest(_name(columns[i]) for i in stack) for stack in stacks]
        widths = [label + 1 + max(values[i] for i in stack) for label, stack in zip(labels, stacks, strict=True)]
        if sum(widths) + _BETWEEN * (beside - 1) <= room or beside == 1:
            break
    for row in rows:
        heading(out, row[0] or "-")
        for begin in range(0, len(short), beside):
            line = Text("  ")
            for i, label, width in zip(short[begin : begin + beside], labels, widths, strict=False):
                line.append(_name(columns[i]).ljust(label + 1), "dim")
                line.append(row[i] + " " * (width + _BETWEEN - label - 1 - cell_len(row[i])))
            line.rstrip()
            out.print(line, soft_wrap=True)
        for i in prose:
            if row[i]:
                say(out, Text.assemble("  ", (f"{_name(columns[i])}: ", "dim"), row[i]))


def show_scorecard(
    out: Console, names: Sequence[str], rows: Sequence[Sequence[str]], sources: Sequence[Sequence[str]] = ()
) -> None:
    """Read across: a row is a quantity, a column a name. Names that do not fit beside the others go below them."""
    if _taking_down(out) is not None:
        show_table(out, ["", *(f">{name}" for name in names)], rows, sources=sources)
        return
    first = _widest(row[0] for row in rows)
    begin = 0
    while begin < len(names):
        end, width = begin, first
        while end < len(names):
            width += _GAP + _widest([names[end], *(row[end + 1] for row in rows)])
            if width > out.width and end > begin:
                break
            end += 1
        if begin:
            out.print()
        show_table(
            out, ["", *(f">{name}" for name in names[begin:end])],
            [[row[0], *row[1 + begin : 1 + end]] for row in rows],
        )  # fmt: skip
        begin = end
