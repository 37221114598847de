"""A report for a meeting: one HTML file with everything in it, that needs no network, prints on A4 and can be mailed.

It is made of parts. Most of them are what the command prints on a terminal, taken down in the place of being printed
(`cli/show.py`), so that a page never says anything else than the screen; the document that `--json` prints goes with
them, so that whoever doubts a number has the exact one.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.core.errors import MissingExtra

_DATA = Path(__file__).parent / "data"

Tone = Literal["", "note", "caution", "bad", "good"]


class Heading(msgspec.Struct, frozen=True, tag=True):
    text: str


class Line(msgspec.Struct, frozen=True, tag=True):
    text: str
    tone: Tone = ""
    # Of a list: begins with a dash on the screen.
    item: bool = False
    # A command to type, or other text whose spaces count.
    verbatim: bool = False


class TableColumn(msgspec.Struct, frozen=True):
    name: str
    # Numbers stand to the right, so that their digits stand below each other.
    right: bool = False
    prose: bool = False


class Table(msgspec.Struct, frozen=True, tag=True):
    columns: Sequence[TableColumn]
    rows: Sequence[Sequence[str]]
    # Who says what each cell says, "" where nobody need say it; none at all for most tables.
    sources: Sequence[Sequence[str]] = ()

    @property
    def is_wide(self) -> bool:
        """Too wide for a sheet of A4: a block for each row in its place, as on a narrow terminal."""
        widest = [max([len(c.name) if not c.prose else 20, *(len(row[i]) for row in self.rows)], default=0)
                  for i, c in enumerate(self.columns)]  # fmt: skip
        return sum(min(width, 28) for width in widest) + 2 * len(widest) > 118


class Figure(msgspec.Struct, frozen=True, tag=True):
    svg: str
    # What a picture shows, for those who do not see it.
    says: str


class KeyNumber(msgspec.Struct, frozen=True, tag=True):
    """A number that the meeting is about."""

    name: str
    value: str
    beside: str = ""


ReportPart = Heading | Line | Table | Figure


class Section(msgspec.Struct, frozen=True):
    title: str
    # Runs of list items are one list.
    blocks: Sequence[ReportPart | Sequence[Line]]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    # The command that made it, as it was typed.
    command: str
    made: str
    version: str
    facts: Sequence[KeyNumber] = ()
    parts: Sequence[ReportPart]
    # What `--json` prints.
    document: Any


def write_report(report: Report) -> str:
    return _filled(
        "report.html",
        report=report,
        sources=_numbered(report.parts),
        source_of=_source,
        sections=_sections(report.parts),
        style=(_DATA / "report.css").read_text(),
        document=_in_a_script(report.document),
        kind=_kind,
    )


def write_sections(title: str, facts: Sequence[KeyNumber], parts: Sequence[ReportPart]) -> str:
    """The same without a page around it, for one that shows several."""
    return _filled(
        "sections.html", title=title, facts=facts, sections=_sections(parts), kind=_kind, sources=_numbered(parts),
        source_of=_source,
    )  # fmt: skip


def _filled(template: str, **values: Any) -> str:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise MissingExtra("pages need Jinja2", "plot") from None
    # Names of models, classes and files are other people's: everything is escaped unless it says otherwise.
    pages = Environment(
        loader=FileSystemLoader(_DATA), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return pages.get_template(template).render(**values)


def _source(table: Table, row: int, cell: int) -> str:
    return table.sources[row][cell] if table.sources else ""


def _numbered(parts: Sequence[ReportPart]) -> dict[str, int]:
    """The sources of all tables, each once, in the order in which a reader meets them."""
    cells = (source for part in parts if isinstance(part, Table) for row in part.sources for source in row)
    return {source: number for number, source in enumerate(dict.fromkeys(filter(None, cells)), 1)}


def _sections(parts: Sequence[ReportPart]) -> list[Section]:
    """A heading begins a section; what comes before the first one is the answer."""
    found: list[tuple[str, list[ReportPart | list[Line]]]] = [("", [])]
    for part in parts:
        if isinstance(part, Heading):
            found.append((part.text, []))
            continue
        blocks = found[-1][1]
        if isinstance(part, Line) and (part.item or part.verbatim):
            last = blocks[-1] if blocks else None
            if isinstance(last, list) and last[-1].verbatim == part.verbatim:
                last.append(part)
            else:
                blocks.append([part])
        else:
            blocks.append(part)
    return [Section(title, blocks) for title, blocks in found if title or blocks]


def _kind(block: ReportPart | Sequence[Line]) -> str:
    if isinstance(block, Table):
        return "blocks" if block.is_wide else "table"
    if isinstance(block, Line | Figure):
        return type(block).__name__.lower()
    assert not isinstance(block, Heading)
    return "commands" if block[0].verbatim else "list"


def _in_a_script(document: Any) -> str:
    """JSON that no text within it can end early."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
