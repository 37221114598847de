"""What engines are started with, word for word: whatever changes a recipe shows in a diff of `data/commands.txt`.

`python -m tests.port.recipe.test_commands` writes it anew.
"""

from pathlib import Path

from tests.port.recipe.samples import asked

from crosstie.catalog.library import Catalog

FILE = Path(__file__).parent / "data" / "commands.txt"
KEPT = (
    ("plain", "vllm"), ("plain", "sglang"), ("quantised-at-load", "vllm"), ("mtp", "vllm"), ("mtp", "sglang"),
    ("adapters", "vllm"), ("wide", "vllm"), ("apart-nixl", "vllm"), ("apart-mori", "sglang"), ("gguf", "llama.cpp"),
)  # fmt: skip


def commands(catalog: Catalog) -> str:
    lines = []
    for name, engine in KEPT:
        for recipe in asked(catalog, name, engine):
            lines.append(f"# {name}, {engine} {recipe.release}{f', {recipe.role}' if recipe.role else ''}")
            lines += [f"{key}={value}" for key, value in recipe.variables.items()]
            lines.append(" ".join(recipe.command(rank="0", head="head")).replace(" --", "\n  --"))
    return "\n".join(lines) + "\n"


def test_recipes_are_those_that_were_looked_at(catalog: Catalog) -> None:
    assert commands(catalog) == FILE.read_text()


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(commands(Catalog([])))
