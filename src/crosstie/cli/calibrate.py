"""`crosstie calibrate`: constants from measured results."""

from pathlib import Path

import click

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import user_directories
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import FILE, file_option, flag_option, tool_options
from crosstie.cli.progress import progress
from crosstie.core.errors import BadInput
from crosstie.core.figures import percent
from crosstie.prove.calibration.calibrate import Calibrated, calibrate, keep, kept_files
from crosstie.prove.calibration.own import OWN
from crosstie.web.parts import Parts, Table, closing, note

_OVERALL = (
    "points left out", "a curve left out", "a source left out", "a model left out", "a release left out",
    "an accelerator left out", "a family left out",
)  # fmt: skip
_DETAILS = "errors by model and accelerator left out, and results that were not used"


@click.command("calibrate")
@click.argument("files", nargs=-1, metavar="[RESULTS...]", type=FILE)
@file_option("-o --output", "Where to. [default: your catalog's calibration.json]")
@flag_option("--full", "Fit everything again, with the measurements that Crosstie ships: minutes.")
@flag_option("--alone", "Learn from RESULTS only, without the measurements that Crosstie ships.")
@flag_option("--shipped", "Learn from what Crosstie ships only: the calibration it comes with.")
@flag_option("--add", "Keep RESULTS in your catalog, and learn from all that were ever added.")
@tool_options
@answer_options(_DETAILS)
def command(
    files: tuple[Path, ...], output: Path | None, full: bool, alone: bool, shipped: bool, add: bool, wanted: Wanted,
    **given: str,
) -> int:  # fmt: skip
    """Fits the model's constants to measured RESULTS, and says how wrong it is on what it has not seen.

    \b
    crosstie calibrate mine.csv
    crosstie calibrate mine.csv probe-mi300x.json -o calibration.json
    crosstie calibrate --add bench.json --accelerator mi300x --tp 8
    crosstie calibrate --shipped -o calibration.json

    RESULTS are files as for `validate`, documents of `crosstie probe`, or tables of kernel times. By default it
    learns in seconds what they change in the shipped calibration: estimates of what you measured move and become
    surer, and related ones by as much as they have in common. --full fits everything again together with the
    shipped results: a scope with many measurements moves far from the catalog's constants, one without any follows
    its family, stack and relatives.

    The calibration in your catalog (`crosstie catalog path`) takes the place of the one that Crosstie comes with.
    """
    if full and alone:
        raise BadInput("--full learns from what Crosstie ships as well, --alone from RESULTS only: give one of them")
    if shipped and (files or alone or add):
        raise BadInput("--shipped learns from what Crosstie ships alone; give no RESULTS with it")
    if not files and not shipped:
        raise BadInput("no RESULTS are named; --shipped makes the calibration that Crosstie comes with")
    target = output or _own_file()
    if target.is_dir():
        raise BadInput(f"{target}: is a folder; say which file in it")
    folder = _own_file().parent if add else None
    with progress() as on_progress:
        # What is shipped must not depend on whose machine makes it.
        made = calibrate(
            [*(kept_files(folder, besides=files) if folder else ()), *files],
            with_shipped=not alone,
            quick=not (full or alone or shipped),
            directories=[] if shipped else None,
            given=given,
            on_progress=on_progress,
        )
    if folder:
        keep(folder, files, given)
    made.write(target)
    fitted = made.calibration
    wanted.give(
        lambda: {"file": str(target), "results": fitted.results, "refused": made.unused, "errors": fitted.errors},
        lambda details: parts(made, details),
    )
    if not wanted.as_json:
        click.echo(f"written to {target}", err=True)
    return 0


def _own_file() -> Path:
    directories = user_directories()
    if not directories:
        raise BadInput("there is no folder for your own catalog: set CROSSTIE_CATALOG, or say where with -o")
    return directories[-1] / "calibration.json"


def parts(done: Calibrated, verbose: bool) -> Parts:
    made = done.calibration
    for file in done.files:
        emulated = "  of emulated replicas: it teaches what the model believes already" if file.get("emulated") else ""
        yield f"{file['file']}: {file['points']:,} operating points, {file['kernels']:,} kernels{emulated}"
    if verbose:
        yield from (f"  {count:,} not used: {reason}" for reason, count in done.unused.items())
    elif done.unused:
        yield f"  {sum(done.unused.values()):,} rows not used"
    metrics = [">TPOT", ">TTFT", ">throughput"]
    if "beside" in made.made:
        titles = [title for title in made.errors if title.startswith(tuple(OWN.values()))]
        yield Table(["median error of your results", *metrics], [[title, *_errors(made, title)] for title in titles])
        yield note(f"learnt beside {made.made['beside']}; --full fits everything again")
        return
    yield f"{len(made.scopes):,} scopes moved"
    cells = [[title, *_errors(made, title)] for title in _OVERALL if title in made.errors]
    yield Table(["cross-validated median error", *metrics], cells)
    for title in ("a model left out", "an accelerator left out") if verbose else ():
        names = [key for key in made.errors if key.startswith(f"{title}: ")]
        cells = [[key.removeprefix(f"{title}: "), *_errors(made, key)] for key in names]
        yield Table([title, *metrics], cells)
    if not verbose:
        yield closing(_DETAILS)


def _errors(made: Calibration, title: str) -> list[str]:
    errors = made.errors[title]
    return [
        f"{percent(errors[m]['median_ape'])} of {errors[m]['n']:,}" if m in errors else "-"
        for m in ("tpot", "ttft", "throughput")
    ]
