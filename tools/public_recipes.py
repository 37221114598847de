"""What vLLM's own recipes say of the catalog's models, as data of recipes: run it again when they move.

    git clone https://github.com/vllm-project/recipes
    python tools/public_recipes.py recipes > src/crosstie/port/recipe/data/vllm_recipes.toml

Facts alone: names of flags and variables, their values, sizes. No text of theirs is kept. A bare clone will do.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from crosstie.catalog.library import Catalog
from crosstie.port.recipe.published import GENERATIONS


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


def main() -> None:
    clone = Path(sys.argv[1])
    short, day = commit(clone)
    print(
        "# Written by tools/public_recipes.py: what vLLM's own recipes say of the catalog's models. None of their text."
    )
    print("[sources]")
    print(f'recipes = {{ ref = "vllm-project/recipes@{short}", date = "{day}", licence = "Apache-2.0" }}')
    rows = {one.model: one for one in of_catalog(Catalog([]), public_recipes(clone)).values()}
    for one in rows.values():
        print("\n" + "\n".join(row(one)))


if __name__ == "__main__":
    main()
