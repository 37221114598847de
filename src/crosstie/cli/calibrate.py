"""`crosstie calibrate`: constants from measured results."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from crosstie.catalog.calibration import Calibration, calibration_text, empty
from crosstie.catalog.library import Catalog, user_directories
from crosstie.catalog.writing import write_text
from crosstie.cli.show import console, json_option, print_json, print_table, table
from crosstie.cli.validate import percent
from crosstie.core.errors import BadInput
from crosstie.prove.calibration.calibrate import MOST_ROUNDS
from crosstie.prove.calibration.learn import SHIPPED_RESULTS, Inputs, learn, read_inputs

FILE = click.Path(path_type=Path)
_OVERALL = ("points left out", "a model left out", "a release left out", "an accelerator left out", "a family left out")


@click.command("calibrate")
@click.argument("files", nargs=-1, metavar="[RESULTS...]", type=FILE)
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Where to. [default: your catalog's calibration.json]")
@click.option("--alone", is_flag=True, help="Learn from RESULTS only, without the measurements that Crosstie ships.")
@click.option("--shipped", is_flag=True, help="Learn from what Crosstie ships only: the calibration it comes with.")
@json_option
def command(files: tuple[Path, ...], output: Path | None, alone: bool, shipped: bool, as_json: bool) -> int:
    """Fits the model's constants to measured RESULTS, and says how wrong it is on what it has not seen.

    \b
    crosstie calibrate mine.csv
    crosstie calibrate mine.csv probe-mi300x.json -o calibration.json
    crosstie calibrate --shipped -o calibration.json

    RESULTS are files as for `validate`, documents of `crosstie probe`, or tables of kernel times. They are
    learnt from together with what Crosstie ships. A few constants of every accelerator and stack move away from the
    catalog's as far as the measurements of their scope are many; a scope without any inherits from its family, its
    stack and its relatives, with a wider interval. Takes minutes.

    The calibration in your catalog (`crosstie catalog path`) takes the place of the one that Crosstie comes with.
    """
    if shipped and (files or alone):
        raise BadInput("--shipped learns from what Crosstie ships alone; give no RESULTS with it")
    if not files and not shipped:
        raise BadInput("no RESULTS are named; --shipped makes the calibration that Crosstie comes with")
    target = output or _own_file()
    # What an earlier calibration says is no evidence, and one that cannot be read must not be in the way. What is
    # shipped must not depend on whose machine makes it.
    catalog = Catalog([] if shipped else None, calibration=empty())
    if target.is_dir():
        raise BadInput(f"{target}: is a folder; say which file in it")
    inputs = read_inputs(catalog, [*(() if alone else SHIPPED_RESULTS), *files])
    with _progress() as advance:
        made = learn(catalog, inputs, advance)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, calibration_text(made))
    if as_json:
        print_json({"file": str(target), "results": made.results, "refused": inputs.refused, "errors": made.errors})
    else:
        show(made, inputs)
        click.echo(f"written to {target}", err=True)
    return 0


def _own_file() -> Path:
    directories = user_directories()
    if not directories:
        raise BadInput("there is no folder for your own catalog: set CROSSTIE_CATALOG, or say where with -o")
    return directories[-1] / "calibration.json"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, nothing elsewhere: the steps are few and slow."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("reading", total=MOST_ROUNDS + 8)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        yield advance


def show(made: Calibration, inputs: Inputs) -> None:
    out = console()
    for file in made.results:
        out.print(f"{file['file']}: {file['points']:,} operating points, {file['kernels']:,} kernels")
    for reason, count in inputs.refused.most_common():
        out.print(f"  {count:,} not used: {reason}", soft_wrap=True)
    out.print(f"{len(made.scopes):,} scopes moved")
    columns = [("cross-validated median error", "left"), ("TPOT", "right"), ("TTFT", "right"), ("throughput", "right")]
    cells = [[title, *_errors(made, title)] for title in _OVERALL if title in made.errors]
    print_table(out, table("", columns, cells))
    for title in ("a model left out", "an accelerator left out"):
        names = [key for key in made.errors if key.startswith(f"{title}: ")]
        cells = [[key.removeprefix(f"{title}: "), *_errors(made, key)] for key in names]
        print_table(out, table("", [(title, "left"), *columns[1:]], cells))


def _errors(made: Calibration, title: str) -> list[str]:
    found = made.errors[title]
    return [
        f"{percent(found[m]['median_ape'])} of {found[m]['n']:,}" if m in found else "-"
        for m in ("tpot", "ttft", "throughput")
    ]
