"""What an answer is made of. A command makes its answer once, as parts in order; the screen (`cli/show.py`), pages and
Markdown (`web/report.py`) are written from them, so that none says anything that another does not."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.text import Text


class Line(NamedTuple):
    """A line begins with "- " where it is an item of a list, and with four spaces where it is a command to type."""

    text: str | Text
    style: str = ""
    # Columns by which its further lines stand in. None: as far as its first.
    hang: int | None = None


class Heading(NamedTuple):
    text: str


class Table(NamedTuple):
    """Names of columns begin with ">" where cells stand to the right, with "~" where they are prose that may wrap."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    # The source of each cell, "" where none is needed; none at all for most tables. Pages link to them.
    sources: Sequence[Sequence[str]] = ()
    # The shade of each cell, by its name in report.css: for pages.
    tones: Sequence[Sequence[str]] = ()
    # A row is a quantity, a column a name: names that do not fit beside the others go below them.
    across: bool = False


class CommandLine(NamedTuple):
    """To type. Where it does not fit, its lines end in a backslash."""

    text: str


class Verbatim(NamedTuple):
    """Text to copy, whose lines are never wrapped."""

    text: str


class Section(NamedTuple):
    """What follows, on a page: a screen is read in one go and needs no such title."""

    title: str


class Figure(NamedTuple):
    """Only pages have it: drawn for a desk, and for a phone."""

    svg: str
    narrow: str
    # What a picture shows, for those who do not see it.
    says: str


class BarSpan(NamedTuple):
    """Of a bar, in the unit of its chart. `tone`: a colour by its name in report.css."""

    begin: float
    end: float
    tone: str
    thin: bool = False


class ChartBar(NamedTuple):
    name: str
    spans: Sequence[BarSpan]
    # The numbers: a bar alone says how much only roughly.
    words: str


class Bars(NamedTuple):
    """A chart of bars, which pages alone have. Its words are the page's own: it fits any width and any light."""

    title: str
    bars: Sequence[ChartBar]
    # What each tone stands for.
    key: Sequence[tuple[str, str]] = ()
    note: str = ""
    # Of its axis, which pictures alone have.
    unit: str = "$ an hour"

    @property
    def most(self) -> float:
        return max((span.end for bar in self.bars for span in bar.spans), default=0.0) or 1.0


# What a screen has no room or no use for.
PAGE_ALONE = (Section, Figure, Bars)
# A text without a style is a line.
Part = str | Text | Line | Heading | Section | Table | CommandLine | Verbatim | Figure | Bars
Parts = Iterator[Part]


def across(names: Sequence[str], rows: Sequence[Sequence[str]], sources: Sequence[Sequence[str]] = ()) -> Table:
    """A table with a row a quantity and a column a name."""
    return Table(["", *(f">{name}" for name in names)], rows, sources=sources, across=True)


def note(text: str | Text) -> Line:
    return Line(text, "dim")


def caution(text: str) -> Line:
    return Line(text, "yellow")


def closing(details: str) -> Line:
    """The last line of an answer that has more to say."""
    return note(f"-v for {details}")


def column_name(column: str) -> str:
    return column.lstrip("~>")
