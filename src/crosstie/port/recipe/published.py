"""What engines' own projects say of how a model is started: parsers by family, and vLLM's recipes by model.

Rows of `data/`, each with its source. Of a public recipe nothing is taken that the engine's release does not know, nor
what `not_taken.toml` names with its reason.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import Version

from crosstie.catalog.reading import only_keys, read_records, read_toml, sourced_file, table
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.model import Precision
from crosstie.port.preflight.variables import variables
from crosstie.port.recipe.flags import flag_table, parse_settings
from crosstie.port.recipe.recipe import Setting

_DATA = Path(__file__).parent / "data"
# Their generations of hardware, as preflight's rules name instruction sets.
GENERATIONS = {
    "amd": ("gfx942", "gfx950"),
    "hopper": ("sm_90",),
    "blackwell": ("sm_100", "sm_103"),
    "nvidia": ("sm_90", "sm_100", "sm_103"),
}
# Engines that parse tool calls and thinking by a flag; llama.cpp does by the chat template alone.
PARSING = ("vllm", "sglang")
_LIMITS = {"--max-model-len": "context", "--max-num-seqs": "sequences"}
# A card's memory is sold in GB of a size between 10^9 and 2^30 bytes, and has a little less.
_SOLD_GB = 0.99 * 2**30


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Which parsers a family of models takes with an engine."""

    engine: str
    models: tuple[str, ...]
    tools: str = ""
    reasoning: str = ""
    more: tuple[str, ...] = ()
    note: str = ""
    # The first release that has them.
    since: str = "0"
    source: str
    date: str
    at: str

    @property
    def settings(self) -> list[Setting]:
        why = f"its family's, by {self.source} {self.at}"
        found = list[Setting]()
        if self.tools:
            found.append(Setting(name="--tool-call-parser", value=self.tools, why=f"calls to tools are read: {why}"))
            if self.engine == "vllm":
                wanted = "without it vLLM refuses requests that leave the choice of a tool to the model"
                found.append(Setting(name="--enable-auto-tool-choice", why=wanted))
        if self.reasoning:
            told = f"what it thinks is told apart from the answer: {why}"
            found.append(Setting(name="--reasoning-parser", value=self.reasoning, why=told))
        return found + parse_settings(self.engine, self.more, why)


class PublicRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's own recipe of a model: settings everywhere and by generation of hardware."""

    model: str
    since: str
    # By precision: what a replica's GPUs have together at least.
    memory_gb: dict[str, int]
    base: tuple[str, ...] = ()
    amd: tuple[str, ...] = ()
    hopper: tuple[str, ...] = ()
    blackwell: tuple[str, ...] = ()
    nvidia: tuple[str, ...] = ()
    source: str
    date: str
    at: str

    def said(self, isa: str) -> tuple[str, ...]:
        """What it sets on a chip, the narrower generation after the wider."""
        own = [getattr(self, name) for name in ("nvidia", "hopper", "blackwell", "amd") if isa in GENERATIONS[name]]
        return tuple(one for some in (self.base, *own) for one in some)


class PublishedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a public recipe lets a replica have, and the memory that it asks for; None where it says nothing."""

    context: int | None = None
    sequences: int | None = None
    memory_gb: int | None = None
    why: str = ""

    def has_room(self, split: Parallelism, accelerator: Accelerator) -> bool:
        return self.memory_gb is None or split.gpus * accelerator.memory_bytes >= self.memory_gb * _SOLD_GB


@cache
def families() -> tuple[Family, ...]:
    file = _DATA / "parsers.toml"
    with sourced_file(file, {"family"}) as (raw, sources):
        return read_records(file, "family", raw.get("family"), Family, sources)


@cache
def public_recipes() -> tuple[PublicRecipe, ...]:
    file = _DATA / "vllm_recipes.toml"
    with sourced_file(file, {"recipe"}) as (raw, sources):
        return read_records(file, "recipe", raw.get("recipe"), PublicRecipe, sources)


@cache
def _not_taken() -> dict[str, str]:
    file = _DATA / "not_taken.toml"
    raw = read_toml(file)
    only_keys(file, "", raw, {"names"})
    return {name: str(why) for name, why in table(file, "names", raw.get("names")).items()}


def left_out(one: Setting, release: Version) -> str:
    """Why a public recipe's setting is not taken; nothing where it is."""
    for name in (one.shown, one.name):
        if why := _not_taken().get(name):
            return why
    if one.name in _LIMITS:
        return ""
    if not one.is_variable:
        return flag_table("vllm").fault(one)
    known = variables("vllm")
    return known.fault(one.name, release) if known else ""


def parsers(engine: str, release: str, names: Sequence[str]) -> Family | None:
    """`names`: the checkpoint's and the catalog's; the first that a row knows decides."""
    known = [family for family in families() if family.engine == engine and Version(family.since) <= Version(release)]
    return next(
        (one for name in map(_short, names) for one in known if any(fnmatch(name, pattern) for pattern in one.models)),
        None,
    )


def public_recipe(engine: str, release: str, names: Sequence[str]) -> PublicRecipe | None:
    if engine != "vllm":
        return None
    rows = {_short(recipe.model): recipe for recipe in public_recipes() if Version(recipe.since) <= Version(release)}
    return next((rows[name] for name in map(_short, names) if name in rows), None)


def _short(name: str) -> str:
    """A model's name without who published it, or where it lies."""
    return name.rstrip("/").rpartition("/")[2].lower()


def published_settings(recipe: PublicRecipe, isa: str, release: str) -> list[Setting]:
    why = f"vLLM's own recipe: {recipe.source} {recipe.at}, {recipe.date}"
    return [
        parse_setting
        for parse_setting in parse_settings(recipe.model, recipe.said(isa), why)
        if parse_setting.name not in _LIMITS and not left_out(parse_setting, Version(release))
    ]


def published_limits(recipe: PublicRecipe | None, isa: str, precision: Precision) -> PublishedLimits:
    if recipe is None:
        return PublishedLimits()
    least = {key: int(value) for key, value in _limits(recipe, isa)}
    kind = precision.id.partition("+")[0].partition("-")[0]
    return PublishedLimits(
        **least,
        memory_gb=recipe.memory_gb.get(kind),
        why=f"as vLLM's own recipe has it: {recipe.source} {recipe.at}, {recipe.date}",
    )


def _limits(recipe: PublicRecipe, isa: str) -> Iterator[tuple[str, str]]:
    for parse_setting in parse_settings(recipe.model, recipe.said(isa), ""):
        if parse_setting.name in _LIMITS:
            yield _LIMITS[parse_setting.name], str(parse_setting.value)
