"""An answer in the forms that the command line asked for: on the screen, as JSON or Markdown, and as a page in one
file."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from crosstie.catalog.writing import write_text
from crosstie.cli.options import FILE, Decorator, dark_option, json_option, option_group, verbose_option
from crosstie.cli.show import print_json, show
from crosstie.core.errors import BadInput, MissingExtra
from crosstie.web.parts import Figure, Heading, Part, note
from crosstie.web.report import KeyNumber, report_of, write_report

if TYPE_CHECKING:
    # Reads the catalog, which few answers need before they are asked for.
    from crosstie.web.chart import Picture

html_option: Decorator = click.option(
    "--html", type=FILE, metavar="FILE", help="Write the answer as a page, in one file to mail or print."
)


class Drawing(NamedTuple):
    """Where a picture goes, if one was asked for."""

    file: Path | None
    dark: bool

    def draw(self, picture: "Callable[[], Picture | None]", otherwise: str = "") -> None:
        """`otherwise`: why there is none."""
        if self.file is None:
            return
        try:
            if (made := picture()) is None:
                raise BadInput(otherwise)
            made.draw(self.file, dark=self.dark)
        except BadInput as error:
            raise BadInput(f"--plot {self.file}: {str(error).removeprefix(f'--plot {self.file}: ')}") from None
        click.echo(f"drawn as {self.file}", err=True)


def plot_option(what: str) -> Decorator:
    """--plot and --dark, which a command gets as `plot`. A name that cannot be drawn to is refused before the work."""

    def give(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*, plot: Path | None, dark: bool, **given: Any) -> Any:
            if plot is not None:
                from crosstie.web.chart import check_picture

                check_picture(plot)
            return function(plot=Drawing(plot, dark), **given)

        plot_file = click.option("--plot", type=FILE, metavar="FILE", help=f"{what} (.svg, .png, .pdf, .html).")
        return option_group(plot_file, dark_option)(called)

    return give


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
        pictures: "Sequence[Picture | None]" = (),
        markdown: Callable[[], str] | None = None,
        leading: Sequence[str] | None = None,
    ) -> None:
        """`parts` takes whether details are wanted, as a page has them; the document is made only for those who read
        it."""
        made = document() if self.html or self.as_json else None
        if self.html:
            shown = parts(True)
            try:
                drawn = [picture.on_page() for picture in pictures if picture]
            except MissingExtra as error:
                drawn, shown = [], [*shown, note(f"without its charts: {error}")]
            write_html(self.html, title, made, shown, facts=facts(), figures=drawn, leading=leading)
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
    """Before the work: a page must not fail at its end for its name."""
    if file is None:
        return
    if file.suffix.lower() not in (".html", ".htm"):
        raise BadInput(f"--html {file}: the name must end in .html")


def write_html(
    file: Path,
    title: str,
    document: Any,
    parts: Iterable[Part],
    *,
    facts: Sequence[KeyNumber] = (),
    figures: Sequence[Figure] = (),
    leading: Sequence[str] | None = None,
) -> None:
    """`parts`: with all details. Figures come before its words. `leading`: headings of what is not folded."""
    # A page has its title above.
    shown = [part for part in parts if (part.text if isinstance(part, Heading) else str(part)) != title]
    made = report_of(title, [*figures, *shown], facts=facts, leading=leading, document=document)
    write_text(file, write_report(made))
    click.echo(f"report written to {file}", err=True)
