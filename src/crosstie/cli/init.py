"""`crosstie init`: a first workload or fleet file, from five answers."""

import sys
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.workloads import read_workload
from crosstie.catalog.writing import toml_value, write_text
from crosstie.cli.options import FILE, Decorator, complete_accelerators, complete_models, option_group
from crosstie.core.errors import BadInput, CrosstieError


class InitQuestion(NamedTuple):
    option: str
    asks: str
    usual: Any


_MODEL = InitQuestion("model", "Which model? (`crosstie catalog list models`)", "llama-3.1-8b")
_QUESTIONS = {
    "workload": (
        _MODEL,
        InitQuestion("requests_per_s", "Requests a second at the peak?", 10.0),
        InitQuestion("input", "Tokens of a prompt, mean?", 1500),
        InitQuestion("output", "Tokens of an answer, mean?", 300),
        InitQuestion("ttft_ms", "Milliseconds until the first token, for 95% of requests?", 1000.0),
    ),
    "fleet": (
        _MODEL,
        InitQuestion("accelerator", "On which accelerator? (`crosstie catalog list accelerators`)", "mi300x"),
        InitQuestion("backends", "Addresses of its servers, with commas between?", "http://127.0.0.1:8000/v1"),
        InitQuestion("usd_per_gpu_hour", "Dollars a GPU-hour?", 2.0),
        InitQuestion("max_in_flight", "Requests at once on each server?", 64),
    ),
}
_COMPLETED = {"model": complete_models, "accelerator": complete_accelerators}


def _option(question: InitQuestion) -> Decorator:
    kinds = [kind for kind, asked in _QUESTIONS.items() if question in asked]
    metavar = {float: "NUMBER", int: "COUNT"}.get(type(question.usual), "TEXT")
    told = f"{question.asks.partition('?')[0]}. [{' and '.join(kinds)}]"
    made: Decorator = click.option(
        f"--{question.option.replace('_', '-')}",
        type=type(question.usual),
        metavar=metavar,
        help=told,
        shell_complete=_COMPLETED.get(question.option),
    )
    return made


@click.command("init")
@click.argument("kind", type=click.Choice(list(_QUESTIONS)), metavar="workload|fleet")
@click.argument("file", type=FILE, required=False)
@option_group(*map(_option, dict.fromkeys(question for asked in _QUESTIONS.values() for question in asked)))
def command(kind: str, file: Path | None, **given: Any) -> int:
    """Write a first workload file for `plan`, or fleet file for `serve`, from five answers.

    \b
    crosstie init workload
    crosstie init fleet house.toml --model llama-3.1-8b --accelerator h200

    FILE is workload.toml or fleet.toml unless named, and must not be there yet. What no option says is asked on the
    terminal; where there is none, all five options are needed.
    """
    target = file or Path(f"{kind}.toml")
    if target.exists():
        raise BadInput(f"{target} is already there; name another FILE, or remove it")
    asked = {question.option for question in _QUESTIONS[kind]}
    strange = [name for name, value in given.items() if value is not None and name not in asked]
    if strange:
        raise BadInput(f"--{strange[0].replace('_', '-')} does not go with `init {kind}`")
    catalog = Catalog()
    answers = _answers(kind, given)
    text = _text(catalog, kind, answers)
    _check(catalog, kind, text)
    write_text(target, text)
    then = f"crosstie plan {target}" if kind == "workload" else f"crosstie serve {target} --dry-run"
    click.echo(f"{target} written; next: {then}")
    return 0


def _answers(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    missing = [question for question in _QUESTIONS[kind] if given[question.option] is None]
    if missing and not sys.stdin.isatty():
        options = ", ".join(f"--{question.option.replace('_', '-')}" for question in missing)
        raise BadInput(f"nobody can be asked where standard input is no terminal; give {options}")
    told = {question.option: click.prompt(question.asks, default=question.usual, err=True) for question in missing}
    return {question.option: told.get(question.option, given[question.option]) for question in _QUESTIONS[kind]}


def _check(catalog: Catalog, kind: str, text: str) -> None:
    """By those who read such files, before anything is written."""
    with TemporaryDirectory() as folder:
        draft = Path(folder) / "draft.toml"
        write_text(draft, text)
        try:
            if kind == "workload":
                read_workload(catalog, draft)
            else:
                read_fleet(catalog, draft)
        except CrosstieError as error:
            raise BadInput(str(error).replace(f"{draft}: ", "")) from None


def _text(catalog: Catalog, kind: str, answers: dict[str, Any]) -> str:
    values = dict(answers)
    if kind == "fleet":
        usual = catalog.deployment(catalog.model(answers["model"]), catalog.accelerator(answers["accelerator"]))
        values |= {"precision": usual.precision.id, "stack": usual.stack.id, "backends": names_in(answers["backends"])}
    outline = (Path(__file__).parent / "data" / f"{kind}.toml").read_text(encoding="utf-8")
    return Template(outline).substitute({name: toml_value(value) for name, value in values.items()})
