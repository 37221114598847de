"""The screen: an answer's parts, and JSON. Nothing is cut at any width: the terminal's, that of COLUMNS, or 80 in a
pipe."""

import json
import shlex
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from crosstie.cli.progress import caller
from crosstie.web.parts import PAGE_ALONE, CommandLine, Heading, Line, Part, Table, Verbatim, column_name

_GAP = 2
# Between values of a block, which have their names in front.
_BETWEEN = 3
# A column of prose is not made narrower than this: the table becomes blocks instead.
_NARROWEST = 20
# How far in a command to type stands.
_COMMAND = 4


class Output(Console):
    """Plain text, no markup: names come from files. A closed pipe is the caller's to handle."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console() -> Output:
    """Colour only on terminals that want it."""
    return Output(highlight=False, markup=False, emoji=False)


def show(parts: Iterable[Part]) -> None:
    """An answer on the screen."""
    out = console()
    for part in parts:
        if isinstance(part, Table):
            _show_part(out, part)
        elif isinstance(part, Heading):
            heading(out, part.text)
        elif isinstance(part, Line):
            say(out, part.text, part.style, hang=part.hang)
        elif isinstance(part, CommandLine):
            _show_command(out, part.text)
        elif isinstance(part, Verbatim):
            click.echo(part.text)
        elif not isinstance(part, PAGE_ALONE):
            say(out, part)


def say(out: Console, text: str | Text, style: str = "", *, hang: int | None = None) -> None:
    """A line, wrapped on words under its own indentation, or `hang` columns in. A word that is too long for the width,
    such as a path, stays whole."""
    whole = Text(text) if isinstance(text, str) else text
    plain = whole.plain
    indent = len(plain) - len(plain.lstrip(" ").removeprefix("- ")) if hang is None else hang
    first, at = whole[:indent], indent
    room = max(out.width - indent, 1)
    for line in wrap(plain[indent:], room, break_long_words=False, break_on_hyphens=False) or [""]:
        begin = plain.index(line, at)
        at = begin + len(line)
        out.print(first + whole[begin:at], style=style, soft_wrap=True)
        first = Text(" " * indent)


def _show_command(out: Console, command: str) -> None:
    lines = [""]
    # Quotes go back around the words that had them.
    for word in (part if part == ">" else shlex.quote(part) for part in shlex.split(command)):
        if lines[-1] and len(lines[-1]) + len(word) > out.width - 2 * _COMMAND:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    for line in lines:
        say(out, f"{' ' * _COMMAND}{line}")


def heading(out: Console, text: str) -> None:
    say(out, Text(text, "bold"))


def closing(out: Console, details: str) -> None:
    """The last line of an answer that has more to say."""
    say(out, f"-v for {details}", "dim")


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def print_json(value: Any) -> None:
    if asking := caller():
        asking.document = value
    else:
        click.echo(json_text(value))


def tell(document: Any, text: str, *, as_json: bool) -> None:
    """An answer of a line or two, which are not wrapped."""
    print_json(document) if as_json else click.echo(text)


def show_table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """A table where it fits, else a block for each row. What columns are called: `Table` in `web/parts.py`."""
    cells = [list(row) for row in rows]
    if title:
        heading(out, title)
    widths = _widths(columns, cells, out.width)
    if widths is None:
        _show_blocks(out, columns, cells)
        return
    made = RichTable(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        made.add_column(
            Text(column_name(column)),
            justify="right" if column.startswith(">") else "left",
            width=width,
            overflow="fold",
        )
    for row in cells:
        made.add_row(*map(Text, row))
    out.print(made)


def _widest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Of each column; None where they do not fit. Headings wrap on words before a table is given up."""
    room -= _GAP * (len(columns) - 1)
    whole, widths = [], []
    for i, column in enumerate(columns):
        held = [row[i] for row in rows]
        whole.append(_widest([column_name(column), *held]))
        least = _widest(column_name(column).split())
        if column.startswith("~"):
            words = _widest(word for cell in held for word in cell.split())
            widths.append(min(whole[i], max(least, words, _NARROWEST)))
        else:
            widths.append(max(least, _widest(held)))
    left = room - sum(widths)
    if left < 0:
        return None
    # What is left goes to headings that then take one line, and to prose.
    for i in sorted(range(len(columns)), key=lambda i: (columns[i].startswith("~"), whole[i] - widths[i])):
        more = whole[i] - widths[i]
        if columns[i].startswith("~"):
            more = min(more, left)
        if more <= left:
            widths[i] += more
            left -= more
    return widths


def _show_blocks(out: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first cell as a heading, short cells side by side, the same ones below each other, and prose under them."""
    room = out.width - 2
    values = [_widest(row[i] for row in rows) for i in range(len(columns))]
    # What has no name, such as a bar, only goes with a table.
    named = [i for i in range(1, len(columns)) if column_name(columns[i])]
    prose = [i for i in named if columns[i].startswith("~") or len(column_name(columns[i])) + 1 + values[i] > room]
    short = [i for i in named if i not in prose]
    for beside in range(len(short), 0, -1):
        stacks = [short[at::beside] for at in range(beside)]
        labels = [_widest(column_name(columns[i]) for i in stack) for stack in stacks]
        widths = [label + 1 + max(values[i] for i in stack) for label, stack in zip(labels, stacks, strict=True)]
        if sum(widths) + _BETWEEN * (beside - 1) <= room or beside == 1:
            break
    for row in rows:
        heading(out, row[0] or "-")
        for begin in range(0, len(short), beside):
            line = Text("  ")
            for i, label, width in zip(short[begin : begin + beside], labels, widths, strict=False):
                line.append(column_name(columns[i]).ljust(label + 1), "dim")
                line.append(row[i] + " " * (width + _BETWEEN - label - 1 - cell_len(row[i])))
            line.rstrip()
            out.print(line, soft_wrap=True)
        for i in prose:
            if row[i]:
                say(out, Text.assemble("  ", (f"{column_name(columns[i])}: ", "dim"), row[i]))


def _show_part(out: Console, table: Table) -> None:
    if not table.across:
        show_table(out, table.columns, table.rows, table.title)
        return
    if table.title:
        heading(out, table.title)
    names, rows = table.columns[1:], table.rows
    first = _widest(row[0] for row in rows)
    begin = 0
    while begin < len(names):
        end, width = begin, first
        while end < len(names):
            width += _GAP + _widest([column_name(names[end]), *(row[end + 1] for row in rows)])
            if width > out.width and end > begin:
                break
            end += 1
        if begin:
            out.print()
        show_table(out, ["", *names[begin:end]], [[row[0], *row[1 + begin : 1 + end]] for row in rows])
        begin = end
