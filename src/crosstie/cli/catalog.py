"""`crosstie catalog`: what Crosstie knows, and where each number comes from."""

import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from crosstie.catalog.describe import FactLine, describe, overview
from crosstie.catalog.library import Catalog, check_everything, check_file, check_names, names_in, user_directory
from crosstie.catalog.models import model_file_text, model_id
from crosstie.catalog.prices import KINDS as PRICE_KINDS
from crosstie.catalog.reading import is_date
from crosstie.catalog.releases import measured_files
from crosstie.catalog.writing import in_words, write_text
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.catalog_update import pack_command, revert_command, status_command, update_command
from crosstie.cli.options import FILE, flag_option, json_option, text_option
from crosstie.cli.show import tell
from crosstie.core.errors import BadInput, UnknownName, near_names
from crosstie.core.figures import number
from crosstie.port.doctor.checks import checks
from crosstie.port.preflight.engine import architectures, engines, unsupported
from crosstie.port.preflight.matrix import builds
from crosstie.port.preflight.rules import rules
from crosstie.prove.calibration.calibrate import read_inputs
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.tax import shipped_results
from crosstie.web.parts import Line, Parts, Table, closing, note

_PROSE = ("source", "CUDA", "ROCm", "what differs", "provider", "title", "layers", "name", "stores linear layers as")
# What a list says with -v alone.
_DETAILS = ("name", "layers", "source", "basis", "isa", "domain")
LISTS = ("accelerators", "models", "stacks", "formats", "precisions", "prices", "acceptance", "libraries")

_STATES = {
    "same": "the names are the same",
    "alike": "names convert, and parts are missing",
    "other": "a counterpart with an interface of its own",
    "none": "nothing stands for it",
}


@click.group("catalog")
def command() -> None:
    """Accelerators, models, stacks and prices; every number with its basis, source and date.

    \b
    crosstie catalog list accelerators
    crosstie catalog show mi300x
    crosstie catalog show mi300x dense.fp8
    crosstie catalog list prices --on mi300x,h200
    crosstie catalog add ./my-model --source "our fine-tune" --date 2026-11-01
    crosstie catalog update catalog-2026-12-01.json

    A new accelerator or model is one file: put it into the folder that `crosstie catalog path` prints,
    or name it wherever a command takes a name. Files there replace shipped ones of the same id.
    """


for _more in (update_command, revert_command, status_command, pack_command):
    command.add_command(_more)


@command.command("list", epilog="Example: crosstie catalog list prices --on mi300x,h200")
@click.argument("kind", type=click.Choice(LISTS), default="accelerators", metavar="[KIND]")
@text_option("--on", "A,B", "Only these accelerators' prices.")
@text_option("--search", "TEXT", "Only rows with this text in some cell.", default="")
@answer_options("names, layers, instruction sets, links and sources")
def list_command(kind: str, on: str | None, search: str, wanted: Wanted) -> int:
    """Lists everything of one KIND: accelerators (the default), models, stacks, formats, precisions, prices, and the
    acceptance of speculative decoding: tokens kept a step by the number of drafts."""
    catalog = Catalog()
    only = [catalog.accelerator(name).id for name in names_in(on)] if on else None
    if only and kind != "prices":
        raise BadInput("--on goes with `list prices`")
    rows = [
        row for row in overview(catalog, kind, only)
        if any(search.casefold() in str(cell).casefold() for cell in row.values())
    ]  # fmt: skip
    wanted.give(lambda: rows, lambda details: _listed(kind, rows, details))
    return 0


def _listed(kind: str, rows: list[dict[str, Any]], verbose: bool) -> Parts:
    left_out = [] if verbose or not rows else [key for key in rows[0] if key in _DETAILS]
    rows = [{key: value for key, value in row.items() if key not in left_out} for row in rows]
    if rows:
        columns = [
            f">{key}" if any(isinstance(row[key], int | float) for row in rows) else f"~{key}" if key in _PROSE else key
            for key in rows[0]
        ]
        yield Table(columns, [[number(cell) for cell in row.values()] for row in rows])
    if kind == "prices":
        yield from (note(f"  {name}: {meaning}") for name, meaning in PRICE_KINDS.items())
    if left_out:
        yield closing(", ".join(left_out))


@command.command("show")
@click.argument("name")
@click.argument("key", required=False)
@answer_options()
def show_command(name: str, key: str | None, wanted: Wanted) -> int:
    """Everything about NAME, or one KEY of it, with basis, date and source.

    \b
    crosstie catalog show h100-sxm
    crosstie catalog show h100-sxm dense.fp8
    crosstie catalog show llama-3.1-70b
    crosstie catalog show vllm host
    crosstie catalog show costs
    crosstie catalog show libraries       # CUDA's beside ROCm's
    crosstie catalog show libraries nccl
    """
    if name == "libraries":
        libraries = _libraries(key)
        wanted.give(lambda: libraries, lambda _: _library(libraries[0]) if key else _beside(libraries))
        return 0
    title, lines = facts(name, key)
    wanted.give(lambda: facts_json(title, lines), lambda _: _facts(title, lines))
    return 0


def _facts(title: str, lines: list[FactLine]) -> Parts:
    rows = [[line.key, line.shown, line.basis, line.date, line.source] for line in lines]
    yield Table(["key", ">value", "basis", "date", "~source"], rows, title)
    yield from (note(f"  {line.key}: {remark}") for line in lines for remark in line.notes)


def facts(name: str, key: str | None) -> tuple[str, list[FactLine]]:
    title, every = describe(Catalog(), name)
    lines = [line for line in every if not key or line.key == key or line.key.startswith(f"{key}.")]
    if not lines:
        near = near_names(key or "", [line.key for line in every])
        hint = f"; did you mean {' or '.join(near)}?" if near else f"; `crosstie catalog show {name}` shows all"
        raise BadInput(f"{name} has no key '{key}'{hint}")
    return title, lines


def facts_json(title: str, lines: list[FactLine]) -> dict[str, object]:
    return {"name": title, "facts": [asdict(line) for line in lines]}


def _libraries(name: str | None) -> list[dict[str, Any]]:
    """CUDA's libraries beside ROCm's: all of them, or one."""
    rows = overview(Catalog(), "libraries")
    if not name:
        return rows
    chosen = [row for row in rows if name.lower() in (row["id"], row["CUDA"].lower(), row["ROCm"].lower())]
    if not chosen:
        raise UnknownName("library", name, near_names(name, list(Catalog().libraries)), listing="libraries")
    return chosen


def _library(row: dict[str, Any]) -> Parts:
    yield from (Line(f"{key:<28}{value}", hang=28) for key, value in row.items() if value)


def _beside(rows: list[dict[str, Any]]) -> Parts:
    shown = ("id", "CUDA", "ROCm", "state", "what differs")
    yield Table(["id", "~CUDA", "~ROCm", "state", "~what differs"], [[row[key] for key in shown] for row in rows])
    yield from (note(f"  {state}: {meaning}") for state, meaning in _STATES.items())
    yield note("Nothing here ran on an AMD GPU. `crosstie catalog show libraries ID` has source and date.")


@command.command("path", epilog="Example: crosstie catalog path")
@json_option
def path_command(as_json: bool) -> int:
    """Prints the folder where your own catalog files go."""
    tell({"path": str(user_directory())}, str(user_directory()), as_json=as_json)
    return 0


@command.command("check", epilog="Example: crosstie catalog check my-gpu.toml")
@click.argument("files", nargs=-1, type=FILE)
@json_option
def check_command(files: tuple[Path, ...], as_json: bool) -> int:
    """Validates catalog FILES (.toml of any kind, prices.csv, api_prices.csv, acceptance.csv), or without any the
    whole catalog."""
    good = {str(file): check_file(file) for file in files} if files else _check_whole()
    counts = "good: " + ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in good.items())
    kinds = "\n".join(f"{name}: good ({kind})" for name, kind in good.items())
    tell({"good": good}, kinds if files else counts, as_json=as_json)
    return 0


@command.command("add", epilog="Example: crosstie catalog add ./my-model --id my-model")
@click.argument("path", type=FILE)
@text_option("--id identifier", "ID", "Catalog name. [default: from the path]")
@text_option("--name", "TEXT", "Name for people. [default: the id]")
@text_option("--source", "TEXT", "Where the config comes from. [default: the path]")
@text_option("--date", "YYYY-MM-DD", "As of when. [default: today]")
@text_option("--licence", "TEXT", "Licence of the config.", default="")
@click.option("--to", "directory", type=FILE, help="Catalog folder. [default: `crosstie catalog path`]")
@flag_option("--force", "Replace a file that is already there.")
@json_option
def add_command(
    path: Path, identifier: str | None, name: str | None, source: str | None, date: str | None, licence: str,
    directory: Path | None, force: bool, as_json: bool,
) -> int:  # fmt: skip
    """Adds a model from its directory or config.json, or a ready catalog file (.toml).

    The file is read back and checked before it is kept; a bad one leaves nothing behind.
    """
    if path.suffix == ".toml":
        if identifier or name or source or date or licence:
            raise BadInput("--id, --name, --source, --date and --licence go with a config.json; a .toml has its own")
        kind, identifier, content = check_file(path), path.stem, path.read_text(encoding="utf-8")
        if kind in ("formats", "costs"):
            raise BadInput(f"{kind} are one file: put {path} into the catalog folder as {kind}.toml")
    else:
        kind, identifier = "models", identifier or model_id(path / "config.json" if path.is_dir() else path)
        today = datetime.now(UTC).date().isoformat()
        if date is not None and not is_date(date):
            raise BadInput(f"--date {date}: write YYYY-MM-DD or YYYY-MM")
        content = model_file_text(
            path, id=identifier, name=name or identifier, aliases=(), source=source or str(path),
            date=date or today, licence=licence,
        )  # fmt: skip
    target = (directory or user_directory()) / kind / f"{identifier}.toml"
    _keep(content, target, force)
    tell({"id": identifier, "kind": kind, "file": str(target)}, f"added {identifier} as {target}", as_json=as_json)
    return 0


def _check_whole() -> dict[str, int]:
    """Everything that a release of the catalog may bring, as it is in force now."""
    counted = check_everything(Catalog())
    if brought := measured_files(()):
        read_inputs(Catalog(), brought)
    return {
        **counted,
        "calibrated scopes": len(Catalog().calibration.scopes),
        "measured points": len(read_results(shipped_results()).points),
        "rules": sum(len(rules(engine)) for engine in engines()),
        "checks of machines": len(checks()),
        "architectures": sum(len(architectures(engine)) for engine in engines()),
        "engine releases": len(builds()),
        "pairs that recipes call unsupported": sum(len(row.on) for row in unsupported()),
    }


def _keep(content: str, target: Path, force: bool) -> None:
    """Checks a draft elsewhere, then writes beside the target and moves it into place in one go."""
    with tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch) / target.name
        try:
            draft.write_text(content, encoding="utf-8")
        except UnicodeEncodeError:
            raise BadInput("the config has characters that are no text") from None
        check_names(Catalog([target.parent.parent]), draft)
    with in_words(f"cannot write {target}"):
        if target.exists() and not force:
            raise BadInput(f"{target} is already there; --force replaces it")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, content)
