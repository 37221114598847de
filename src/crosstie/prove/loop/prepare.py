"""What a loop measures: this machine by doctor and recipe, an endpoint that runs already, or an emulated replica."""

import shlex
import sys
from pathlib import Path

import msgspec

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog
from crosstie.catalog.models import text_config
from crosstie.catalog.writing import write_text
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.model import Model
from crosstie.port.doctor.doctor import diagnose, installed
from crosstie.port.doctor.host import machine_of
from crosstie.port.doctor.inventory import stock
from crosstie.port.doctor.record import capture
from crosstie.port.preflight.engine import EngineRelease, engine_from
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.forms.shell import unboxed, visible
from crosstie.port.recipe.recipe import Recipe, started_by
from crosstie.prove.bench.endpoint import described
from crosstie.prove.loop.engine import PORT
from crosstie.prove.loop.folder import LoopAsked, PreparedReplica
from crosstie.route.build import deployment_of
from crosstie.wire.address import Address, is_loopback

# An emulated replica is up in seconds.
_EMULATOR_S = 60.0
_THIS = "this"
# Tokens of a request, of an endpoint and a model that do not say.
_LONGEST = 32_768


def prepared(
    catalog: Catalog, asked: LoopAsked, folder: Path, api_key: str | None
) -> tuple[PreparedReplica, Deployment]:
    """And the replica as the model knows it. Raises BadInput where there is none."""
    if asked.endpoint:
        return _running(catalog, asked, api_key)
    if not asked.model:
        raise BadInput("name the MODEL to measure: one of the catalog, or its folder")
    model = catalog.model(asked.model)
    if asked.emulate:
        return _emulated(catalog, asked, model, folder)
    return _on_this_machine(catalog, asked, model)


def _emulated(catalog: Catalog, asked: LoopAsked, model: Model, folder: Path) -> tuple[PreparedReplica, Deployment]:
    """ACCELERATOR[:FACTOR]: steps take FACTOR times as long as they are predicted to."""
    name, colon, said = asked.emulate.partition(":")
    try:
        factor = float(said) if colon else 1.0
    except ValueError:
        factor = 0.0
    if not 0.1 <= factor <= 10.0:
        raise BadInput(f"--emulate {asked.emulate}: write ACCELERATOR[:FACTOR] with a factor from 0.1 to 10")
    pool = _pool(catalog, asked, model, catalog.accelerator(name))
    deployment = deployment_of(catalog, pool)
    assert deployment is not None
    file = folder / "emulated.toml"
    # A fleet file must have a price, which nothing here asks for.
    priced = msgspec.structs.replace(pool, usd_per_gpu_hour=1.0)
    fleet = Fleet(name="emulated", planned="", policy="round-robin", pools=(priced,), classes=())
    write_text(file, fleet_text(fleet))
    command = [sys.executable, "-P", "-m", "crosstie", "emulate", str(file.absolute()), "--port", PORT]
    command += ["--speed", f"{asked.speed:g}"]
    command += ["--fault", f"{pool.name}:slow,factor={factor:g}"] if factor != 1.0 else []
    replica = f"{_words(deployment)}, EMULATED" + (f" {factor:g} times as slow as predicted" if factor != 1.0 else "")
    return PreparedReplica(
        conditions=_conditions(deployment, ""),
        replica=replica,
        emulated=True,
        longest=pool.max_context,
        command=command,
        start_s=_EMULATOR_S,
    ), deployment


def _on_this_machine(catalog: Catalog, asked: LoopAsked, model: Model) -> tuple[PreparedReplica, Deployment]:
    texts = capture(None, tries_engines=True)
    machine = machine_of(texts, "this machine")
    diagnosis = diagnose(machine, catalog=catalog)
    there = {held.accelerator.id: held for held in stock(machine, catalog)}
    if asked.accelerator not in ("", _THIS):
        wanted = catalog.accelerator(asked.accelerator).id
        there = {name: held for name, held in there.items() if name == wanted}
        if not there:
            raise BadInput(f"--on {asked.accelerator}: this machine has none")
    own = next(iter(there.values()))
    pool = _pool(catalog, asked, model, own.accelerator, installed(machine))
    if pool.replica_gpus > own.count:
        raise BadInput(f"a replica takes {pool.replica_gpus} {own.accelerator.id}; there are {own.count}")
    deployment = deployment_of(catalog, pool)
    assert deployment is not None
    recipe, *_ = RecipeBook(catalog, RecipeOptions(chosen="crosstie loop")).recipes(pool)
    # The memory that the driver tells is this machine's alone; the catalog's is what results are predicted with.
    return PreparedReplica(
        conditions=_conditions(deployment, recipe.release),
        replica=f"{_words(deployment)} {recipe.release}",
        asks_for=_folder_of(model),
        longest=pool.max_context,
        command=_command(recipe, asked),
        variables=_variables(recipe),
        health=recipe.health,
        start_s=float(recipe.start_s),
        doctor={"verdicts": diagnosis.verdicts, "findings": msgspec.to_builtins(diagnosis.findings)},
        notes=[*recipe.notes, *(f"preflight, {warning.severity}: {warning.what}" for warning in recipe.warnings)],
    ), deployment


def _command(recipe: Recipe, asked: LoopAsked) -> list[str]:
    """With this machine's own paths, at a port that is chosen when it starts."""
    if asked.engine_command:
        recipe = started_by(recipe, shlex.split(asked.engine_command))
    words = unboxed(recipe, recipe.command())
    # Nobody else is to ask it.
    for flag, value in (("--port", PORT), ("--host", "127.0.0.1")):
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return [*words, *shlex.split(asked.engine_args)]


def _variables(recipe: Recipe) -> dict[str, str]:
    seen = recipe.seen(0)
    chosen = {visible(recipe.vendor): seen} if seen else {}
    return {name: value for name, value in (recipe.variables | chosen).items() if name != "HF_HOME"}


def _running(catalog: Catalog, asked: LoopAsked, api_key: str | None) -> tuple[PreparedReplica, Deployment]:
    given = {"precision": asked.precision, "tp": str(asked.tp or "")}
    given["engine"] = engine_from(asked.engine).stack if asked.engine else ""
    local = is_loopback(Address(asked.endpoint).host)
    if asked.accelerator not in ("", _THIS):
        given["accelerator"] = catalog.accelerator(asked.accelerator).id
    endpoint = described(asked.endpoint, asked.model or None, api_key, True, given, catalog)
    conditions = dict(endpoint.conditions)
    if "accelerator" not in conditions:
        if not local:
            raise BadInput(f"--endpoint {asked.endpoint}: say on which accelerator it runs with --on")
        conditions["accelerator"] = stock(machine_of(capture(None), "this machine"), catalog)[0].accelerator.id
    named = conditions["model"]
    model = catalog.model(asked.model) if asked.model else catalog.checkpoint(named)[0]
    split = Parallelism(tp=int(conditions.get("tp") or 1))
    accelerator = catalog.accelerator(conditions["accelerator"])
    engine = conditions.get("engine")
    deployment = catalog.deployment(model, accelerator, split, conditions.get("precision") or None, "bf16", engine)
    conditions |= {"tp": str(split.tp), "precision": deployment.precision.id, "engine": deployment.stack.id}
    replica = f"{_words(deployment)} at {asked.endpoint}"
    return PreparedReplica(
        conditions=conditions, replica=f"{replica}, EMULATED" if endpoint.emulated else replica,
        asks_for=asked.model or None, emulated=endpoint.emulated,
        longest=endpoint.longest or model.max_context or _LONGEST,
    ), deployment  # fmt: skip


def _pool(
    catalog: Catalog, asked: LoopAsked, model: Model, accelerator: Accelerator,
    there: list[EngineRelease] | None = None,
) -> Pool:  # fmt: skip
    pool, _ = asked_pool(
        catalog, model, accelerator, engine=asked.engine or None, precision=asked.precision or "native",
        layout=Parallelism(tp=asked.tp) if asked.tp else None, context=asked.context, installed=there or (),
    )  # fmt: skip
    return pool


def _conditions(deployment: Deployment, release: str) -> dict[str, str]:
    model, split = deployment.model, deployment.parallelism
    conditions = {
        "accelerator": deployment.accelerator.id, "model": model.id, "precision": deployment.precision.id,
        "engine": deployment.stack.id, "engine_version": release, "num_accelerators": str(split.gpus),
    }  # fmt: skip
    conditions |= {"tp": str(split.tp)} if split.gpus == split.tp else {"parallelism": deployment.layout}
    if folder := _folder_of(model):
        config = text_config(Path(folder))
        conditions |= {"model": config.name, "model_config": config.text}
    return {name: value for name, value in conditions.items() if value}


def _folder_of(model: Model) -> str | None:
    """Of a model that is a folder of this machine."""
    if not model.file or model.file.endswith(".toml"):
        return None
    path = Path(model.file)
    return str(path.parent if path.name == "config.json" else path)


def _words(deployment: Deployment) -> str:
    many = f"{deployment.gpus} x " if deployment.gpus > 1 else ""
    model, machine = deployment.model.id, f"{many}{deployment.accelerator.id}"
    return f"{model} in {deployment.precision.id} on {machine}, {deployment.stack.name}"
