"""`--html FILE` of the commands whose answers go to meetings: what they print, as a page in one file."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

from crosstie import __version__
from crosstie.catalog.writing import write_text
from crosstie.cli.options import FILE, Decorator
from crosstie.cli.show import print_json, taken_down
from crosstie.core.errors import BadInput
from crosstie.web.chart import check_pages
from crosstie.web.report import Figure, Heading, KeyNumber, Report, ReportPart, write_report

html_option: Decorator = click.option(
    "--html", type=FILE, metavar="FILE", help="Write the answer as a page, in one file to mail or print."
)


def check_html(file: Path | None) -> None:
    """Before the work: a page must not fail at its end for a name or a library."""
    if file is None:
        return
    if file.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--html {file}: the name must end in .html")
    check_pages()


def give(
    document: Callable[[], Any],
    show: Callable[[bool], object],
    *,
    title: str,
    html: Path | None,
    verbose: bool,
    as_json: bool,
    figures: Callable[[], Mapping[str, Figure]] = dict,
    markdown: Callable[[], str] | None = None,
) -> None:
    """An answer as it is wanted: printed, as JSON or Markdown, and as a page. `show` takes whether details are wanted;
    the document is made only for those who read it."""
    made = document() if html or as_json else None
    if html:
        write_html(html, title, made, lambda: show(True), figures=figures())
    if as_json:
        print_json(made)
    elif markdown:
        click.echo(markdown(), nl=False)
    else:
        show(verbose)


def write_html(
    file: Path,
    title: str,
    document: Any,
    show: Callable[[], object],
    *,
    facts: Sequence[KeyNumber] = (),
    figures: Mapping[str, Figure] | None = None,
    appendix: Sequence[ReportPart] = (),
) -> None:
    """`show` prints the answer with all its details. Figures go under the heading that begins as they are named; ""
    is the answer itself."""
    with taken_down() as parts:
        show()
    report = Report(
        title=title,
        command=shlex.join(["crosstie", *sys.argv[1:]]),
        made=date.today().isoformat(),
        version=__version__,
        facts=facts,
        parts=[*_placed(parts, figures or {}), *appendix],
        document=document,
    )
    write_text(file, write_report(report))
    click.echo(f"report written to {file}", err=True)


def _placed(parts: Sequence[ReportPart], figures: Mapping[str, Figure]) -> list[ReportPart]:
    """At the end of the section that each belongs to; where there is none, at the end."""
    left = dict(figures)
    placed: list[ReportPart] = []
    here = ""
    for part in parts:
        if isinstance(part, Heading):
            placed += [left.pop(name) for name in list(left) if (here.startswith(name) if name else not here)]
            here = part.text
        placed.append(part)
    return [*placed, *left.values()]
