"""`crosstie recipe`: how to start the engines of a model, or of every pool of a fleet, and why so."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_folder
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.options import complete_models, file_option, flag_option, on_option, text_option, whole_option
from crosstie.cli.replica import PRECISION_HELP, kv_option, layout_options, speculation_options
from crosstie.cli.this_machine import ON_THIS, accelerators_on, engines_on
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Adapter, Fleet
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions, fleet_recipes
from crosstie.port.recipe.forms import BARE, FORMS, render
from crosstie.port.recipe.forms.cluster import manifests
from crosstie.port.recipe.nodes import check_room, read_nodes
from crosstie.port.recipe.recipe import Recipe, Runner, started_by
from crosstie.web.parts import Heading, Line, Parts, Verbatim, caution, closing

_DETAILS = "the reasons of devices, groups and volumes"


def _named(context: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """POOL=VALUE, or VALUE for all."""
    values: dict[str, str] = {}
    for word in given:
        pool, equals, value = word.partition("=")
        values[pool if equals else ""] = value if equals else word
    return values


def _adapters(context: click.Context, option: click.Parameter, given: Sequence[str]) -> tuple[Adapter, ...]:
    adapters = []
    for word in given:
        name, equals, path = word.partition("=")
        if not (equals and name and path):
            raise click.BadParameter(f"'{word}' is no NAME=PATH")
        adapters.append(Adapter(name=name, path=path))
    return tuple(adapters)


@click.command(
    "recipe",
    cls=GroupedCommand,
    groups={
        "The replica": "--engine --precision --kv --tp --pp --ep --dp --disaggregated --connector --speculation --text "
        "--acceptance --lora --context --in-flight --replicas --served-as",
        "What the catalog does not know": "--weights --drafter --image --engine-command",
        "The answer": "--as --bare -o --nodes --json -v",
    },
)
@click.argument("model", required=False, shell_complete=complete_models)
@on_option(f"Accelerators, a recipe each; {ON_THIS}.")
@file_option("--fleet", "In place of MODEL: every pool of a fleet file.")
@text_option("--pool", "NAME", "With --fleet: this pool alone.")
@text_option("--engine", "E", "vllm, sglang or llama.cpp, with a release or without: vllm==0.27.1.")
@text_option("--precision", "P", PRECISION_HELP, default="native", show_default=True)
@kv_option
@layout_options
@text_option("--disaggregated apart", "P:D", "Disaggregated: 1xTP4:2xTP8.")
@text_option("--connector", "NAME", "With --disaggregated: how the cache travels, such as vllm-nixl.")
@speculation_options
@text_option("--lora adapters", "NAME=PATH", "A LoRA adapter.", multiple=True, callback=_adapters)
@click.option("--context", type=int, metavar="N", help="Tokens of a request. [default: as many as fit]")
@whole_option("--in-flight", 1, 10**6, "Requests that a replica may have at once. "
              "[default: 256, or fewer where vLLM's own recipe has fewer]")  # fmt: skip
@whole_option("--replicas", 1, 10**4, "Of them.", default=1)
@text_option("--served-as", "NAME", "What clients call the model. [default: the catalog's name]")
@click.option("--weights", multiple=True, callback=_named, metavar="[POOL=]WHERE",
              help="The checkpoint: a repository of Hugging Face, or a folder or GGUF file here.")  # fmt: skip
@text_option("--drafter", "[POOL=]WHERE", "The same of the head or model that drafts.", multiple=True, callback=_named)
@text_option("--image", "[POOL=]IMAGE", "Not the engine's own image.", multiple=True, callback=_named)
@text_option("--engine-command", "WORDS", "How the engine is run: 'python3 -m vllm.entrypoints.cli.main'.", default="")
@click.option("--as", "form", type=click.Choice(list(FORMS)), help="The files of this form in place of the line.")
@flag_option("--bare", f"The engine is installed, no container: {', '.join(BARE)}.")
@file_option("-o --out", "Write the files there.", metavar="DIR")
@file_option("--nodes", "`kubectl get nodes -o json`: refuse what they have no room for.")
@answer_options(_DETAILS)
def command(
    model: str | None, accelerators: str | None, fleet: Path | None, pool: str | None, form: str | None, bare: bool,
    out: Path | None, wanted: Wanted, weights: dict[str, str], drafter: dict[str, str],
    image: dict[str, str], nodes: Path | None, engine_command: str, **given: Any,
) -> int:  # fmt: skip
    """How to start MODEL's engine on each accelerator, or those of every pool of a fleet: image, variables, flags,
    devices and volumes, and why each.

    \b
    crosstie recipe llama-3.1-70b --on mi300x
    crosstie recipe deepseek-v3 --on mi355x --engine sglang --speculation mtp:3
    crosstie recipe --fleet fleet.toml --as kubernetes -o manifests
    crosstie recipe llama-3.1-8b --precision q4_k_m --on this --as systemd --bare

    Flags are checked against the engine's own list. Nothing is run, and nothing was run on an AMD GPU. Exit status 1
    where preflight says that a pool will not run, or a model does not fit.
    """
    catalog = Catalog()
    served: Fleet | None = None
    if fleet is not None:
        if model is not None or accelerators is not None:
            raise BadInput("--fleet has models and accelerators already: leave MODEL and --on out")
        options = RecipeOptions(weights=weights, drafter=drafter, image=image)
        served = _read(catalog, fleet, pool, options)
        recipes, left_out = fleet_recipes(RecipeBook(catalog, options), served, pool)
    else:
        if model is None or accelerators is None:
            raise BadInput("name a MODEL and --on an accelerator, or a --fleet file")
        if pool is not None:
            raise BadInput("--pool is about --fleet, which is not given")
        recipes, left_out = _of_model(catalog, model, accelerators, (weights, drafter, image), given), []
    if engine_command:
        recipes = [started_by(recipe, shlex.split(engine_command)) for recipe in recipes]
    if nodes is not None:
        check_room(recipes, read_nodes(catalog, nodes), nodes)
    if served is not None and form == "kubernetes" and pool is None:
        files = manifests(served, recipes)
    else:
        files = {name: text for recipe in recipes for name, text in render(recipe, form or "shell", bare=bare).items()}
    if out is not None:
        write_folder("-o", out, files)
    if form and out is None and not wanted.as_json:
        click.echo("\n".join(f"# {name}\n{text}" if len(files) > 1 else text for name, text in files.items()), nl=False)
    else:
        shown = {"files": files} if form or out else {}
        written = [str(out / name) for name in files] if out else []
        wanted.give(
            lambda: {"recipes": [_json(recipe) for recipe in recipes], "left_out": left_out, **shown},
            lambda details: _parts(recipes, left_out, None if out else bare, details, written),
        )
    return 0 if all(recipe.runs for recipe in recipes) else 1


def _of_model(
    catalog: Catalog, model: str, accelerators: str, named: tuple[dict[str, str], ...], given: dict[str, Any]
) -> list[Recipe]:
    weights, drafter, image = named
    recipes: list[Recipe] = []
    known, at_most = accelerators_on(catalog, accelerators, None)
    here = engines_on(accelerators)
    for accelerator in known:
        pool, chosen = asked_pool(catalog, catalog.model(model), accelerator, installed=here, **given)
        if pool.replica_gpus > at_most.get(accelerator.id, pool.replica_gpus):
            raise BadInput(f"a replica takes {pool.replica_gpus} {accelerator.id}; there are {at_most[accelerator.id]}")
        options = RecipeOptions(weights=weights, drafter=drafter, image=image, chosen=chosen)
        recipes += RecipeBook(catalog, options).recipes(pool)
    return recipes


def _read(catalog: Catalog, file: Path, only: str | None, options: RecipeOptions) -> Fleet:
    fleet = read_fleet(catalog, file)
    names = [pool.name for pool in fleet.pools]
    for pool in (only, *options.weights, *options.drafter, *options.image):
        if pool and pool not in names:
            raise BadInput(f"{file}: has no pool '{pool}'; there are {', '.join(names)}")
    return fleet


def _json(recipe: Recipe) -> dict[str, object]:
    return {**msgspec.to_builtins(recipe), "command": list(recipe.command(rank="0", head="HEAD"))}


def _parts(
    recipes: Sequence[Recipe], left_out: Sequence[dict[str, str]], bare: bool | None, verbose: bool, written: list[str]
) -> Parts:
    """`bare`: whether the line is shown without a container; None: no line, since files were written."""
    for recipe in recipes:
        served = f"{recipe.model} {recipe.precision} on {recipe.gpus} x {recipe.accelerator} {recipe.layout}"
        yield Heading(f"{recipe.name}: {served}, {recipe.engine} {recipe.release}")
        several = recipe.replicas * recipe.nodes > 1
        many = f"{recipe.replicas} replicas on {recipe.machines} machines; " if several else ""
        yield Line(f"  {many}preflight: {recipe.verdict}", "" if recipe.runs else "bold red")
        if bare is not None:
            (text,) = render(recipe, "shell", bare=bare).values()
            yield Verbatim("\n".join(line for line in text.splitlines() if not line.startswith("#")))
            if recipe.ports_note:
                yield caution(f"  - {recipe.ports_note}")
        yield from _reasons(recipe, verbose, "nobody" if bare else "docker")
    yield from (caution(f"{gone['pool']} left out: {gone['why']}") for gone in left_out)
    yield from (f"written: {name}" for name in written)
    if not verbose:
        yield closing(_DETAILS)


def _reasons(recipe: Recipe, verbose: bool, by: Runner) -> Parts:
    """What was chosen; with `verbose` also what every container of the vendor has."""
    yield from (caution(f"  - {note}") for note in recipe.notes)
    for finding in recipe.warnings:
        yield Line(f"  - preflight, {finding.severity}: {finding.what} Remedy: {finding.remedy}", "yellow", hang=4)
    reasons = recipe.reasons(by)
    for what, why in reasons if verbose else reasons[: 1 + len(recipe.settings)]:
        yield Line(Text.assemble("  ", (what, "bold"), f"  {why}"), hang=4)
