"""What vLLM's own recipes say of the catalog's models, as data of recipes: run it again when they move.

    git clone https://github.com/vllm-project/recipes
    python tools/public_recipes.py recipes > src/crosstie/port/recipe/data/vllm_recipes.toml
    python tools/public_recipes.py recipes --beside > docs/notes/public-recipes.md    # ours beside theirs

With --beside, status 1 where a difference has no reason. Names, values and sizes are facts; no text of theirs is kept.
A bare clone will do.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml
from packaging.version import Version

from crosstie.catalog.library import Catalog
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.flags import flag_table, parse_settings
from crosstie.port.recipe.published import GENERATIONS, left_out
from crosstie.port.recipe.recipe import Recipe, Setting


class TheirRecipe(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    raw: dict[str, Any]

    @property
    def model(self) -> str:
        return str(self.raw["model"]["model_id"])

    @property
    def base(self) -> list[str]:
        model = self.raw["model"]
        return [*variables(model.get("base_env")), *flags(model.get("base_args"))]

    def of_generation(self, name: str) -> list[str]:
        said = (self.raw.get("hardware_overrides") or {}).get(name) or {}
        return [*variables(said.get("extra_env")), *flags(said.get("extra_args"))]

    def feature(self, name: str) -> list[str]:
        return flags(((self.raw.get("features") or {}).get(name) or {}).get("args"))

    @property
    def memory_gb(self) -> dict[str, int]:
        """By precision: the least that a replica's GPUs have together, weights and cache. The model's own come first:
        other variants may be models of another size."""
        variants = [one for one in self.raw["variants"].values() if one.get("vram_minimum_gb")]
        found: dict[str, int] = {}
        for one in sorted(variants, key=lambda one: one.get("model_id") is not None):
            found.setdefault(str(one.get("precision")), int(one["vram_minimum_gb"]))
        return found


def git(clone: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", clone, *arguments], capture_output=True, text=True, check=True).stdout


def public_recipes(clone: Path) -> Iterator[TheirRecipe]:
    for file in git(clone, "ls-tree", "-r", "--name-only", "HEAD", "models").split():
        raw = yaml.safe_load(git(clone, "show", f"HEAD:{file}"))
        if "omni" not in (raw["meta"].get("tasks") or []):
            yield TheirRecipe(file=file, raw=raw)


def of_catalog(catalog: Catalog, found: Iterable[TheirRecipe]) -> dict[str, TheirRecipe]:
    """By our id: the recipe of the first of a model's names that has one."""
    known = {one.model: one for one in found}
    named = {
        model.id: next((known[one] for one in model.aliases if one in known), None) for model in catalog.models.values()
    }
    return {name: one for name, one in named.items() if one}


def flags(words: Iterable[str] | None) -> list[str]:
    """Each flag with what follows it."""
    found: list[str] = []
    for word in map(str, words or ()):
        if word.startswith("-") or not found:
            found.append(word.replace("=", " ", 1) if word.startswith("-") else word)
        else:
            found[-1] += f" {word}"
    return found


def variables(said: Mapping[str, object] | None) -> list[str]:
    return [f"{name}={value}" for name, value in (said or {}).items()]


def commit(clone: Path) -> tuple[str, str]:
    short, day = git(clone, "log", "-1", "--format=%h %cs", "--abbrev=8").split()
    return short, day


def listed(said: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{one}'" if '"' in one else f'"{one}"' for one in said) + "]"


def row(one: TheirRecipe) -> Iterator[str]:
    yield "[[recipe]]"
    yield f'model = "{one.model}"'
    yield f'since = "{one.raw["model"]["min_vllm_version"]}"'
    yield "memory_gb = {" + ", ".join(f"{name} = {size}" for name, size in one.memory_gb.items()) + " }"
    if one.base:
        yield f"base = {listed(one.base)}"
    for generation in GENERATIONS:
        if said := one.of_generation(generation):
            yield f"{generation} = {listed(said)}"
    yield 'source = "recipes"'
    yield f'at = "{one.file}"'


# Their names of hardware with a catalog's, and the generation that their overrides are kept under.
HARDWARE = {
    "h100": ("h100-sxm", "hopper"), "h200": ("h200", "hopper"), "b200": ("b200", "blackwell"),
    "b300": ("b300", "blackwell"), "gb200": ("gb200", "blackwell"), "gb300": ("gb300", "blackwell"),
    "mi300x": ("mi300x", "amd"), "mi325x": ("mi325x", "amd"), "mi355x": ("mi355x", "amd"),
}  # fmt: skip
UNEXPLAINED = "NO REASON"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    hardware: str
    theirs: str
    # Ours of the same name, if there is one.
    ours: str
    why: str


def differences(catalog: Catalog, model: str, one: TheirRecipe, hardware: str) -> tuple[int, list[Difference]]:
    """How many settings of theirs ours has too, and each that it has not, with the reason."""
    accelerator, generation = HARDWARE[hardware]
    asked, chosen = asked_pool(catalog, catalog.model(model), catalog.accelerator(accelerator), engine="vllm")
    (recipe,) = RecipeBook(catalog, RecipeOptions(chosen=chosen)).recipes(asked)
    names = flag_table("vllm")
    ours = {names.canonical(own.name): own for own in recipe.settings}
    wide = one.of_generation("nvidia") if generation != "amd" else []
    said = [*one.base, *wide, *one.of_generation(generation), *one.feature("tool_calling"), *one.feature("reasoning")]
    theirs = {names.canonical(own.name): own for own in parse_settings(one.file, said, "")}
    same, found = 0, []
    for name, their in theirs.items():
        own = ours.get(name)
        if own is not None and own.value == their.value:
            same += 1
        else:
            why = reason(their, own, recipe)
            shown = own.shown if own else ""
            found.append(Difference(model=model, hardware=hardware, theirs=their.shown, ours=shown, why=why))
    return same, found


def reason(their: Setting, own: Setting | None, recipe: Recipe) -> str:
    if why := left_out(their, Version(recipe.release)):
        return why
    if their.name == "--chat-template" and any("--chat-template" in note for note in recipe.notes):
        return "a file of vLLM's repository: the recipe tells of it in a note"
    if own is None:
        return UNEXPLAINED
    if own.why.startswith(("preflight", "max_in_flight", "the longest request", "as far as")) or "; " in own.why:
        return own.why.partition(":")[0]
    return own.why if own.name == "--reasoning-parser" else UNEXPLAINED


def beside(clone: Path) -> int:
    catalog = Catalog([])
    short, day = commit(clone)
    same, found, pairs = 0, list[Difference](), 0
    for model, one in of_catalog(catalog, public_recipes(clone)).items():
        listed = one.raw["meta"].get("hardware") or {}
        for hardware in (name for name, state in listed.items() if state == "verified" and name in HARDWARE):
            alike, differ = differences(catalog, model, one, hardware)
            same, pairs = same + alike, pairs + 1
            found += differ
    unexplained = sum(each.why == UNEXPLAINED for each in found)
    print(BESIDE.format(short=short, day=day, pairs=pairs, same=same, other=len(found), unexplained=unexplained))
    print("| theirs | ours | models | hardware | why |\n|---|---|---|---|---|")
    grouped: dict[tuple[str, str, str], list[Difference]] = {}
    for each in found:
        grouped.setdefault((each.theirs, each.ours, each.why), []).append(each)
    for (theirs, ours, why), some in grouped.items():
        models, parts = (", ".join(dict.fromkeys(getattr(each, of) for each in some)) for of in ("model", "hardware"))
        print(f"| {code(theirs)} | {code(ours)} | {models} | {parts} | {why} |")
    return int(unexplained > 0)


def code(said: str) -> str:
    return f"`{said}`".replace("|", "\\|") if said else ""


BESIDE = """# Recipes beside vLLM's own

vLLM's project publishes recipes (vllm-project/recipes@{short}, {day}). Of {pairs} pairs of a model of the catalog and \
hardware that they call verified, {same} settings of theirs are in ours too and {other} are not or have another value; \
{unexplained} of those without a reason. Ours start as few GPUs as hold the model, theirs one or a whole node. Nothing \
was started. `python tools/public_recipes.py CLONE --beside` writes this page anew.
"""


def main() -> int:
    clone = Path(sys.argv[1])
    if "--beside" in sys.argv:
        return beside(clone)
    short, day = commit(clone)
    print(
        "# Written by tools/public_recipes.py: what vLLM's own recipes say of the catalog's models. None of their text."
    )
    print("[sources]")
    print(f'recipes = {{ ref = "vllm-project/recipes@{short}", date = "{day}", licence = "Apache-2.0" }}')
    rows = {one.model: one for one in of_catalog(Catalog([]), public_recipes(clone)).values()}
    for one in rows.values():
        print("\n" + "\n".join(row(one)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
