"""An answer in the forms that the command line asked for: on the screen, as JSON or Markdown, and as a page in one
file."""

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import click

from crosstie import __version__
from crosstie.catalog.writing import write_text
from crosstie.cli.options import FILE, Decorator, json_option, option_group, verbose_option
from crosstie.cli.show import print_json, show
from crosstie.core.errors import BadInput
from crosstie.web.chart import check_pages
from crosstie.web.parts import Figure, Heading, Part, Table
from crosstie.web.report import KeyNumber, Report, write_report

html_option: Decorator = click.option(
    "--html", type=FILE, metavar="FILE", help="Write the answer as a page, in one file to mail or print."
)


class Wanted(NamedTuple):
    """The forms that were asked for."""

    verbose: bool = False
    as_json: bool = False
    html: Path | None = None

    def give(
        self,
        document: Callable[[], Any],
        parts: Callable[[bool], Iterable[Part]],
        *,
        title: str = "",
        facts: Callable[[], Sequence[KeyNumber]] = tuple,
        figures: Callable[[], Mapping[str, Figure]] = dict,
        markdown: Callable[[], str] | None = None,
    ) -> None:
        """`parts` takes whether details are wanted, as a page has them; the document is made only for those who read
        it."""
        made = document() if self.html or self.as_json else None
        if self.html:
            write_html(self.html, title, made, parts(True), facts=facts(), figures=figures())
        if self.as_json:
            print_json(made)
        elif markdown:
            click.echo(markdown(), nl=False)
        else:
            show(parts(self.verbose))


def answer_options(details: str = "", *, html: bool = False) -> Decorator:
    """--html, -v if there are `details`, and --json, which a command gets as `wanted`."""

    def give(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*, as_json: bool, verbose: bool = False, html: Path | None = None, **given: Any) -> Any:
            check_html(html)
            return function(wanted=Wanted(verbose, as_json, html), **given)

        return option_group(
            *([html_option] if html else []), *([verbose_option(details)] if details else []), json_option
        )(called)

    return give


def check_html(file: Path | None) -> None:
    """Before the work: a page must not fail at its end for a name or a library."""
    if file is None:
        return
    if file.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--html {file}: the name must end in .html")
    check_pages()


def write_html(
    file: Path,
    title: str,
    document: Any,
    parts: Iterable[Part],
    *,
    facts: Sequence[KeyNumber] = (),
    figures: Mapping[str, Figure] | None = None,
    appendix: Iterable[Part] = (),
) -> None:
    """`parts`: with all details. Figures go under the heading that begins as they are named; "" is the answer's own."""
    # A page has its title above.
    shown = [part for part in parts if str(part) != title]
    report = Report(
        title=title,
        command=shlex.join(["crosstie", *sys.argv[1:]]),
        made=date.today().isoformat(),
        version=__version__,
        facts=facts,
        parts=[*_placed(shown, figures or {}), *appendix],
        document=document,
    )
    write_text(file, write_report(report))
    click.echo(f"report written to {file}", err=True)


def _placed(parts: Iterable[Part], figures: Mapping[str, Figure]) -> list[Part]:
    """At the end of the section that each belongs to; where there is none, at the end."""
    left = dict(figures)
    placed: list[Part] = []
    here = ""
    for part in parts:
        title = part.text if isinstance(part, Heading) else part.title if isinstance(part, Table) else ""
        if title:
            placed += [left.pop(name) for name in list(left) if (here.startswith(name) if name else not here)]
            here = title
        placed.append(part)
    return [*placed, *left.values()]
