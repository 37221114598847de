"""Recipes of every model of the catalog on every AMD and NVIDIA part with every engine: a recipe, or a reason.

    python benchmarks/all_recipes.py [--models a,b] [--on x,y] [--engine vllm] [--json FILE]
        [--vllm PYTHON] [--sglang PYTHON --sglang-source FOLDER] [--llama PYTHON]

Flags are checked against the table of the engine's release; with the engines' own Pythons also by their parsers
(tools/engine_flags.py says what those need; for llama.cpp `pip install xllamacpp`). Status 1 where a parser refuses a
line.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions

ENGINES = ("vllm", "sglang", "llama.cpp")
# llama.cpp reads GGUF files, so it is asked for one.
PRECISION = {"llama.cpp": "q4_k_m"}
TOOL = Path(__file__).parents[1] / "tools" / "engine_flags.py"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    accelerator: str
    vendor: str
    engine: str
    # Of a recipe: its layout, preflight's verdict and the arguments; else why there is none.
    layout: str = ""
    verdict: str = ""
    arguments: tuple[str, ...] = ()
    reason: str = ""


def outcome(catalog: Catalog, book: RecipeBook, model: str, accelerator: str, engine: str) -> Outcome:
    part = catalog.accelerator(accelerator)
    asked = Outcome(model=model, accelerator=accelerator, vendor=part.vendor, engine=engine)
    precision = PRECISION.get(engine, "native")
    try:
        pool, _ = asked_pool(catalog, catalog.model(model), part, engine=engine, precision=precision)
        (recipe,) = book.recipes(pool)
    except BadInput as error:
        return msgspec.structs.replace(asked, reason=str(error))
    made = {"layout": recipe.layout, "verdict": recipe.verdict, "arguments": recipe.arguments}
    return msgspec.structs.replace(asked, **made)


def outcomes(
    models: Sequence[str] = (), accelerators: Sequence[str] = (), engines: Sequence[str] = ENGINES
) -> Iterator[Outcome]:
    catalog = Catalog([])
    book = RecipeBook(catalog, RecipeOptions(chosen="as asked"))
    for model in models or catalog.models:
        for accelerator in accelerators or catalog.accelerators:
            if catalog.accelerator(accelerator).vendor in ("AMD", "NVIDIA"):
                yield from (outcome(catalog, book, model, accelerator, engine) for engine in engines)


def complaints(found: Sequence[Outcome], engine: str, python: str, source: str = "") -> list[tuple[Outcome, str]]:
    """What the engine's own parser says against each line."""
    taken = [one for one in found if one.engine == engine and not one.reason]
    # Of vLLM the weights are the first word, and stand after the subcommand.
    lines = json.dumps([one.arguments for one in taken])
    command = [python, str(TOOL), engine, *([source] if source else []), "--parse"]
    # Elsewhere, so that no folder here hides a package of that environment.
    done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd="/", check=False)
    if done.returncode:
        raise SystemExit(f"{python} {TOOL}: {done.stderr[-500:]}")
    return [(one, said) for one, said in zip(taken, json.loads(done.stdout), strict=True) if said]


def table(found: Iterable[Outcome]) -> Iterator[str]:
    by_engine: dict[tuple[str, str], Counter[str]] = {}
    for one in found:
        said = one.verdict or "no recipe: " + kind(one.reason)
        by_engine.setdefault((one.engine, one.vendor), Counter())[said] += 1
    yield "| engine | vendor | pairs | with a recipe | verdicts and reasons |"
    yield "|---|---|---|---|---|"
    for (engine, vendor), count in by_engine.items():
        total = sum(count.values())
        made = sum(number for said, number in count.items() if not said.startswith("no recipe"))
        told = "; ".join(f"{said} {number}" for said, number in count.most_common())
        yield f"| {engine} | {vendor} | {total} | {made} | {told} |"


def kind(reason: str) -> str:
    """A reason without the names in it."""
    for words in ("does not fit", "no image is built", "no image of", "machines, and llama.cpp", "is no flag"):
        if words in reason:
            return words
    return reason[:60]


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--models", "--on", "--engine"):
        asked.add_argument(name, default="")
    for name in ("--json", "--vllm", "--sglang", "--sglang-source", "--llama"):
        asked.add_argument(name)
    given = asked.parse_args()
    split = [tuple(one for one in said.split(",") if one) for said in (given.models, given.on, given.engine)]
    found = list(outcomes(split[0], split[1], split[2] or ENGINES))
    print("\n".join(table(found)))
    if given.json:
        Path(given.json).write_bytes(msgspec.json.encode(found))
    refused: list[tuple[Outcome, str]] = []
    parsers = (("vllm", given.vllm, ""), ("sglang", given.sglang, given.sglang_source), ("llama.cpp", given.llama, ""))
    for engine, python, source in parsers:
        if python:
            against = complaints(found, engine, python, source or "")
            asked_of = sum(one.engine == engine and not one.reason for one in found)
            print(f"{engine}'s own parser takes {asked_of - len(against)} of {asked_of} lines")
            refused += against
    for one, said in refused[:20]:
        print(f"{one.model} on {one.accelerator}, {one.engine}: {said}")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
