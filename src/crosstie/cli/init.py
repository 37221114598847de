"""`crosstie init`: a first workload or fleet file, from five answers."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.workloads import read_workload
from crosstie.catalog.writing import toml_value, write_text
from crosstie.cli.options import FILE, Decorator, complete_accelerators, complete_models
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


def _option(question: InitQuestion, **more: Any) -> Decorator:
    kinds = [kind for kind, asked in _QUESTIONS.items() if question in asked]
    metavar = {float: "NUMBER", int: "COUNT"}.get(type(question.usual), "TEXT")
    told = f"{question.asks.partition('?')[0]}. [{' and '.join(kinds)}]"
    made: Decorator = click.option(
        f"--{question.option.replace('_', '-')}", type=type(question.usual), metavar=metavar, help=told, **more
    )
    return made


@click.command("init")
@click.argument("kind", type=click.Choice(list(_QUESTIONS)), metavar="workload|fleet")
@click.argument("file", type=FILE, required=False)
@_option(_MODEL, shell_complete=complete_models)
@_option(_QUESTIONS["workload"][1])
@_option(_QUESTIONS["workload"][2])
@_option(_QUESTIONS["workload"][3])
@_option(_QUESTIONS["workload"][4])
@_option(_QUESTIONS["fleet"][1], shell_complete=complete_accelerators)
@_option(_QUESTIONS["fleet"][2])
@_option(_QUESTIONS["fleet"][3])
@_option(_QUESTIONS["fleet"][4])
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
    text = _workload(answers) if kind == "workload" else _fleet(catalog, answers)
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


def _workload(answers: dict[str, Any]) -> str:
    said = {name: toml_value(value) for name, value in answers.items()}
    return f"""\
# What users ask and how fast they must be answered. Every key: docs/plan.md.
name = "first"

[traffic]
requests_per_s = {said["requests_per_s"]}         # at the peak
mean_over_peak = 0.5        # over the day
# growth_per_year = 0.25

[[class]]
name = "chat"
model = {said["model"]}
share = 1.0
input = {said["input"]}                # or {{ median = 1500, p95 = 6000 }}, or a trace instead of lengths
output = {said["output"]}
ttft_ms = {{ p95 = {said["ttft_ms"]} }}
# tpot_ms = {{ p90 = 50 }}

[constraints]
# accelerators = ["mi300x", "h200"]
# budget_usd_per_month = 80000
"""


def _fleet(catalog: Catalog, answers: dict[str, Any]) -> str:
    model, accelerator = catalog.model(answers["model"]), catalog.accelerator(answers["accelerator"])
    usual = catalog.deployment(model, accelerator)
    said = {name: toml_value(value) for name, value in answers.items()}
    return f"""\
# What is served, and where. Every key: docs/fleet.md.
format = 1
name = "first"

[serve]
default_class = "chat"

[[pool]]
name = {toml_value(answers["accelerator"])}
model = {said["model"]}
accelerator = {said["accelerator"]}
precision = {toml_value(usual.precision.id)}
stack = {toml_value(usual.stack.id)}
usd_per_gpu_hour = {said["usd_per_gpu_hour"]}
max_in_flight = {said["max_in_flight"]}
backends = {toml_value(names_in(answers["backends"]))}

[[class]]
name = "chat"
model = {said["model"]}
ttft_ms = {{ p95 = 1000 }}
"""
