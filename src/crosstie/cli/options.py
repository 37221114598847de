"""Options that several commands share, so that they read and behave alike."""

from collections.abc import Callable
from functools import reduce, wraps
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from crosstie.catalog.library import Catalog

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

FILE = click.Path(path_type=Path)


def option_group(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which help lists them."""
    return lambda function: reduce(lambda made, option: option(made), reversed(options), function)


def gathered(name: str, kind: type[NamedTuple], *options: Decorator) -> Decorator:
    """Options that belong together, which a command gets as one record: its fields are their names."""

    def give(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(**given: Any) -> Any:
            record: Any = kind(*(given.pop(field) for field in kind._fields))
            return function(**{name: record}, **given)

        return option_group(*options)(called)

    return give


def _completed(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Names of the catalog's files, after the last comma of what is typed."""

    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, begun = typed.rpartition(",")
        return [CompletionItem(before + comma + name) for name in Catalog().ids(kind) if name.startswith(begun)]

    return complete


complete_models, complete_accelerators = _completed("models"), _completed("accelerators")

json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
dark_option: Decorator = click.option("--dark", is_flag=True, help="Draw pictures light on dark.")
model_argument: Decorator = click.argument("model", shell_complete=complete_models)


def on_option(what: str, *, required: bool = False) -> Decorator:
    return click.option(
        "--on", "accelerators", metavar="A,B,...", required=required, shell_complete=complete_accelerators, help=what
    )


def whole_option(
    names: str, least: int, most: int | None, help: str, metavar: str | None = "N", **more: Any
) -> Decorator:
    """A whole number within bounds: "--requests most" is the option and the name that its command has for it."""
    return _number_option(click.IntRange(least, most), names, help=help, metavar=metavar, **more)


def real_option(
    names: str, least: float, most: float | None, help: str, metavar: str | None = "X", **more: Any
) -> Decorator:
    return _number_option(_Real(least, most), names, help=help, metavar=metavar, **more)


class _Real(click.FloatRange):
    """`nan` is within no bounds."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        number = super().convert(value, param, context)
        return self.fail(f"{value} is no number", param, context) if number != number else number


def _number_option(kind: click.ParamType[Any], names: str, **more: Any) -> Decorator:
    return click.option(*names.split(), type=kind, **{"show_default": "default" in more, **more})


def text_option(names: str, metavar: str, help: str, **more: Any) -> Decorator:
    return click.option(*names.split(), metavar=metavar, help=help, **more)


def file_option(names: str, help: str, metavar: str = "FILE", **more: Any) -> Decorator:
    return click.option(*names.split(), type=FILE, metavar=metavar, help=help, **more)


def flag_option(names: str, help: str) -> Decorator:
    return click.option(*names.split(), is_flag=True, help=help)


def verbose_option(what: str) -> Decorator:
    return click.option("-v", "--verbose", is_flag=True, help=f"Also: {what}.")


# What result files of benchmark tools do not say; a command gets them with its other keywords.
_OF_TOOLS = {
    "model": ("--model", "NAME", "The model, or its folder, where a tool's file has none or a path."),
    "accelerator": ("--accelerator", "NAME", "The accelerator that a tool's file was measured on."),
    "precision": ("--precision", "NAME", "Weights of it. [default: native]"),
    "engine": ("--engine", "NAME", "The engine that served."),
    "tp": ("--tp", "N", "GPUs that a replica was split over."),
    "num_accelerators": ("--gpus", "N", "All GPUs. [default: those of one replica]"),
    "parallelism": ("--layout", "TEXT", "The split where it is more than --tp: TP8EP8, DEP8, TP4PP2."),
    "spec_decode": ("--speculation", "METHOD:N", "How it drafted: mtp:3, eagle3:3, ngram:3."),
}


def _given(name: str, what: str = "") -> Decorator:
    flag, metavar, usual = _OF_TOOLS[name]
    return click.option(flag, name, metavar=metavar, default="", help=what or usual)


tool_options = option_group(*map(_given, _OF_TOOLS))
# The same for whoever measures: what an endpoint does not say of itself, written beside its results.
endpoint_options = option_group(
    _given("accelerator", "The accelerator behind it. [default: the endpoint's NAME, where it is one]"),
    *map(_given, ("precision", "engine", "tp", "num_accelerators", "parallelism", "spec_decode")),
)
