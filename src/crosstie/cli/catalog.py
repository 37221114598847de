"""`crosstie catalog`: what Crosstie knows, and where each number comes from."""

import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import click

from crosstie.catalog.accelerators import read_accelerator
from crosstie.catalog.describe import Line, describe, overview
from crosstie.catalog.library import Catalog, check_everything, user_directory
from crosstie.catalog.models import model_file_text, model_id, read_model_file
from crosstie.catalog.prices import KINDS as PRICE_KINDS
from crosstie.cli.show import console, json_option, print_json, table
from crosstie.core.errors import BadInput

LISTS = ("accelerators", "models", "stacks", "formats", "precisions", "prices")


@click.group("catalog")
def command() -> None:
    """Accelerators, models, stacks and prices; every number with its basis, source and date.

    \b
    crosstie catalog list accelerators
    crosstie catalog show mi300x
    crosstie catalog show mi300x dense.fp8
    crosstie catalog list prices --on mi300x,h200
    crosstie catalog add ./my-model --source "the team's fine-tune" --date 2026-11-01

    A new accelerator or model is one file: put it into the folder that `crosstie catalog path` prints,
    or name it wherever a command takes a name. Files there replace shipped ones of the same id.
    """


@command.command("list")
@click.argument("kind", type=click.Choice(LISTS), default="accelerators")
@click.option("--on", metavar="A,B", help="Only these accelerators' prices.")
@json_option
def list_command(kind: str, on: str | None, as_json: bool) -> int:
    """Lists everything of one KIND (accelerators by default)."""
    catalog = Catalog()
    only = [catalog.accelerator(name.strip()).id for name in on.split(",")] if on else None
    if only and kind != "prices":
        raise BadInput("--on goes with `list prices`")
    columns, rows = overview(catalog, kind, only)
    if as_json:
        print_json([dict(zip([name for name, _ in columns], row, strict=True)) for row in rows])
        return 0
    out = console()
    out.print(table("", columns, [[str(cell) for cell in row] for row in rows]))
    if kind == "prices":
        for name, meaning in PRICE_KINDS.items():
            out.print(f"  {name}: {meaning}", style="dim")
    return 0


@command.command("show")
@click.argument("name")
@click.argument("key", required=False)
@json_option
def show_command(name: str, key: str | None, as_json: bool) -> int:
    """Everything about NAME, or one KEY of it, with basis, date and source.

    \b
    crosstie catalog show h100-sxm
    crosstie catalog show h100-sxm dense.fp8
    crosstie catalog show llama-3.1-70b
    crosstie catalog show vllm host
    """
    title, lines = describe(Catalog(), name)
    if key:
        lines = [line for line in lines if line.key == key or line.key.startswith(f"{key}.")]
        if not lines:
            known = ", ".join(line.key for line in describe(Catalog(), name)[1])
            raise BadInput(f"{name} has no key '{key}'; known: {known}")
    if as_json:
        print_json({"name": title, "facts": [line.as_json() for line in lines]})
        return 0
    out = console()
    columns = [("key", "left"), ("value", "right"), ("basis", "left"), ("date", "left"), ("source", "left")]
    out.print(table(title, columns, [row(line) for line in lines]))
    for line in lines:
        for note in line.notes:
            out.print(f"  {line.key}: {note}", style="dim", soft_wrap=True)
    return 0


def row(line: Line) -> list[str]:
    return [line.key, line.shown, line.basis, line.date, line.source]


@command.command("path")
def path_command() -> int:
    """Prints the folder where your own catalog files go."""
    click.echo(str(user_directory()))
    return 0


@command.command("check")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
def check_command(files: tuple[Path, ...]) -> int:
    """Validates catalog FILES, or without any the whole catalog."""
    for file in files:
        _read_any(file)
        click.echo(f"{file}: good")
    if not files:
        click.echo(f"good: {check_everything(Catalog())}")
    return 0


@command.command("add")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--id", "identifier", metavar="ID", help="Catalog name. [default: from the path]")
@click.option("--name", metavar="TEXT", help="Name for people. [default: the id]")
@click.option("--source", metavar="TEXT", help="Where the config comes from. [default: the path]")
@click.option("--date", metavar="YYYY-MM-DD", help="As of when. [default: today]")
@click.option("--licence", metavar="TEXT", default="", help="Licence of the config.")
@click.option(
    "--to", "directory", type=click.Path(path_type=Path), help="Catalog folder. [default: `crosstie catalog path`]"
)
@click.option("--force", is_flag=True, help="Replace a file that is already there.")
@json_option
def add_command(
    path: Path, identifier: str | None, name: str | None, source: str | None, date: str | None, licence: str,
    directory: Path | None, force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Adds a model from its directory or config.json, or a ready catalog file (.toml).

    The file is read back and checked before it is kept; a bad one leaves nothing behind.
    """
    base = directory or user_directory()
    if path.suffix == ".toml":
        kind, identifier, text = _read_any(path), path.stem, path.read_text(encoding="utf-8")
    else:
        kind, identifier = "models", identifier or model_id(path / "config.json" if path.is_dir() else path)
        text = model_file_text(
            path, id=identifier, name=name or identifier, aliases=(), source=source or str(path),
            date=date or datetime.now(UTC).date().isoformat(), licence=licence,
        )  # fmt: skip
    target = base / kind / f"{identifier}.toml"
    if target.exists() and not force:
        raise BadInput(f"{target} is already there; --force replaces it")
    _keep(text, target)
    if as_json:
        print_json({"id": identifier, "kind": kind, "file": str(target)})
    else:
        click.echo(f"added {identifier} as {target}")
    return 0


def _read_any(file: Path) -> str:
    """Validates a catalog file and says which folder it belongs to."""
    if not file.is_file():
        raise BadInput(f"{file}: no such file")
    if "[config]" in file.read_text(encoding="utf-8", errors="replace"):
        read_model_file(file)
        return "models"
    read_accelerator(file)
    return "accelerators"


def _keep(text: str, target: Path) -> None:
    """Writes beside the target, reads it back, and only then moves it into place."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            draft = Path(scratch) / target.name
            draft.write_text(text, encoding="utf-8")
            _read_any(draft)
            os.replace(draft, target)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror}") from None
