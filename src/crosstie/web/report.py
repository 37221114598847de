"""An answer as a page or as Markdown. A page is one HTML file for a meeting with everything in it, that needs no
network, prints on A4 and can be mailed; the document that `--json` prints goes with it, so that whoever doubts a number
has the exact one.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.text import Text

from crosstie import __version__
from crosstie.web.parts import Bars, CommandLine, Figure, Heading, Line, Part, Section, Table, Verbatim, column_name

_DATA = Path(__file__).parent / "data"
# What stands so far in is a command to type.
_COMMAND = 4
# Letters of a cell that are not broken.
_SHORT = 24

Tone = Literal["", "note", "caution", "bad", "good", "name", "under"]
_TONES: dict[str, Tone] = {"dim": "note", "bold": "name", "yellow": "caution", "red": "bad", "green": "good"}
# Of some words alone they are the whole line's.
_LOUD = ("red", "yellow", "green")


class Paragraph(NamedTuple):
    """A line of an answer without the signs that it has on a terminal."""

    text: str
    tone: Tone
    item: bool
    # A command to type: its spaces count.
    verbatim: bool
    # Its first words, which a terminal sets apart by a colour: so many letters.
    lead: int = 0


class KeyNumber(msgspec.Struct, frozen=True, tag=True):
    """A number that the meeting is about."""

    name: str
    value: str
    beside: str = ""


# Runs of list items are one list.
Block = Paragraph | Table | Figure | Bars | list[Paragraph]


class Chapter(NamedTuple):
    title: str
    blocks: list[Block]
    folded: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    # The command that made it, as it was typed.
    command: str
    made: str
    version: str
    facts: Sequence[KeyNumber] = ()
    parts: Sequence[Part]
    # Headings, by how they begin, of what comes first and open; the rest is folded. None: all is open, in its order.
    leading: Sequence[str] | None = None
    # Pages beside it, by their files.
    links: Sequence[tuple[str, str]] = ()
    # What `--json` prints; None where no command has made the page.
    document: Any


def report_of(title: str, parts: Sequence[Part], **more: Any) -> Report:
    """By the command that was typed, today."""
    typed = shlex.join(["crosstie", *sys.argv[1:]])
    return Report(
        title=title, command=typed, made=date.today().isoformat(), version=__version__, parts=parts,
        **{"document": None, **more},
    )  # fmt: skip


def write_report(report: Report) -> str:
    return _filled(
        "report.html",
        report=report,
        style=(_DATA / "report.css").read_text(),
        document=_in_a_script(report.document),
        **_shown(report.parts, report.leading),
    )


def write_sections(
    title: str, facts: Sequence[KeyNumber], parts: Sequence[Part], leading: Sequence[str] | None = None
) -> str:
    """The same without a page around it, for one that shows several."""
    return _filled("sections.html", title=title, facts=facts, **_shown(parts, leading))


def _shown(parts: Sequence[Part], leading: Sequence[str] | None) -> dict[str, Any]:
    return {
        "chapters": _arranged(_chapters(parts), leading),
        "sources": _numbered(parts),
        "kind": _kind,
        "source_of": _source,
        "name_of": column_name,
        "kinds_of": _kinds,
        "tone_of": _tone,
        "class_of": _class,
    }


def _filled(template: str, **values: Any) -> str:
    # Names of models, classes and files are other people's: everything is escaped unless it says otherwise.
    pages = Environment(
        loader=FileSystemLoader(_DATA), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return pages.get_template(template).render(**values)


def _source(table: Table, row: int, cell: int) -> str:
    return table.sources[row][cell] if table.sources else ""


def _tone(table: Table, row: int, cell: int) -> str:
    return table.tones[row][cell] if table.tones else ""


def _kinds(table: Table) -> list[str]:
    """How each column's cells stand: to the right, as prose, or whole where it has nothing long."""
    kinds = [{">": "right", "~": "prose"}.get(column[:1], "") for column in table.columns]
    for place in range(1, len(kinds)):
        if not kinds[place] and max((len(row[place]) for row in table.rows), default=0) <= _SHORT:
            kinds[place] = "whole"
    return kinds


def _class(kind: str, tone: str) -> str:
    return f"{kind} tone-{tone}" if tone else kind


def _arranged(chapters: Sequence[Chapter], leading: Sequence[str] | None) -> list[Chapter]:
    if leading is None:
        return list(chapters)

    def place(chapter: Chapter) -> int:
        begins = [at for at, name in enumerate(leading, 1) if name and chapter.title.startswith(name)]
        return begins[0] if begins else len(leading) + 1 if chapter.title else 0

    return [chapter._replace(folded=place(chapter) > len(leading)) for chapter in sorted(chapters, key=place)]


def _numbered(parts: Sequence[Part]) -> dict[str, int]:
    """The sources of all tables, each once, in the order in which a reader meets them."""
    cells = (source for part in parts if isinstance(part, Table) for row in part.sources for source in row)
    return {source: number for number, source in enumerate(dict.fromkeys(filter(None, cells)), 1)}


def _chapters(parts: Iterable[Part]) -> list[Chapter]:
    """A heading begins a chapter; what comes before the first one is the answer."""
    chapters = [Chapter("", [])]
    for part in parts:
        if isinstance(part, Heading | Section):
            chapters.append(Chapter(part.text if isinstance(part, Heading) else part.title, []))
        elif isinstance(part, Table):
            if part.title:
                chapters.append(Chapter(part.title, []))
            chapters[-1].blocks.append(part)
        elif isinstance(part, Figure | Bars):
            chapters[-1].blocks.append(part)
        elif isinstance(part, CommandLine | Verbatim):
            _add(chapters[-1].blocks, Paragraph(part.text, "", item=False, verbatim=True))
        elif (paragraph := _paragraph(part)).text:
            _add(chapters[-1].blocks, paragraph)
    return [chapter for chapter in chapters if chapter.blocks]


def _paragraph(part: str | Text | Line) -> Paragraph:
    line = part if isinstance(part, Line) else Line(part)
    text = Text(line.text) if isinstance(line.text, str) else line.text
    begun = text.plain.lstrip(" ")
    stands_in = len(text.plain) - len(begun) >= _COMMAND
    verbatim = line.hang is None and stands_in
    begun, item = begun.removeprefix("- "), begun.startswith("- ")
    of_words = (str(span.style).removeprefix("bold ") for span in text.spans)
    tones = (_TONES[style] for style in (line.style, *(each for each in of_words if each in _LOUD)) if style in _TONES)
    # What stands in and is no command is about the line above.
    tone: Tone = "under" if stands_in and not verbatim else next(tones, "")
    first = text.spans[0] if text.spans and text.spans[0].start == 0 and text.spans[0].end < len(text) else None
    lead = len(text.plain[: first.end].strip().removeprefix("- ")) if first else 0
    return Paragraph(begun.rstrip(), tone, item, verbatim, lead)


def _add(blocks: list[Block], paragraph: Paragraph) -> None:
    last = blocks[-1] if blocks else None
    if not (paragraph.item or paragraph.verbatim):
        blocks.append(paragraph)
    elif isinstance(last, list) and last[-1].verbatim == paragraph.verbatim:
        last.append(paragraph)
    else:
        blocks.append([paragraph])


def _kind(block: Block) -> str:
    if isinstance(block, Table):
        return "blocks" if _is_wide(block) else "table"
    if isinstance(block, list):
        return "commands" if block[0].verbatim else "list"
    if isinstance(block, Bars):
        return "bars"
    return "figure" if isinstance(block, Figure) else "line"


def _is_wide(table: Table) -> bool:
    """Too wide for a sheet of A4: a block for each row in its place, as on a narrow terminal. A heat map scrolls."""
    if table.tones:
        return False
    widest = [
        max([20 if column.startswith("~") else len(column_name(column)), *(len(row[i]) for row in table.rows)])
        for i, column in enumerate(table.columns)
    ]
    return sum(min(width, 28) for width in widest) + 2 * len(widest) > 118


def write_markdown(parts: Iterable[Part]) -> str:
    """The first line is the title."""
    title, *rest = _chapters(parts)
    lines: list[str] = []
    for chapter in (title, *rest):
        lines += ["", f"## {chapter.title}", ""] if chapter.title else []
        for block in chapter.blocks:
            if isinstance(block, Table):
                lines += ["", *_markdown_table(block), ""]
            elif isinstance(block, list):
                listed = [line.text if line.verbatim else f"- {line.text}" for line in block]
                lines += ["", "```sh", *listed, "```", ""] if block[0].verbatim else ["", *listed, ""]
            elif isinstance(block, Paragraph):
                lines += ["", block.text] if lines else [f"# {block.text}", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    sides = ["---:" if column.startswith(">") else "---" for column in table.columns]
    return [_cells(map(column_name, table.columns)), _cells(sides), *map(_cells, table.rows)]


def _cells(cells: Iterable[str]) -> str:
    """Names come from files: what would end a cell does not."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _in_a_script(document: Any) -> str:
    """JSON that no text within it can end early."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
