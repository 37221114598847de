"""Crosstie: LLM inference on AMD and NVIDIA accelerators as one fleet.

    import crosstie

    card = crosstie.compare("llama-3.1-70b", on="mi300x,h200", input_tokens=4096, output_tokens=1024, concurrency=64)
    plan = crosstie.plan("workload.toml")
    report = crosstie.preflight("./my-model", on="mi300x", engine="vllm")

Names are imported when first used, so that `import crosstie` stays quick.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from crosstie.core.version import __version__ as __version__


@cache
def _homes() -> dict[str, str]:
    """Where each public name lives: as the stub beside this file, which type checkers read, imports it."""
    import ast

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        name.name: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom) and statement.module
        for name in statement.names
        if name.name != "__version__"
    }


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    home = _homes().get(name)
    if home is None:
        raise AttributeError(f"module 'crosstie' has no name '{name}'")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        package = home.partition(".")[0]
        if error.name != package:
            raise
        from crosstie.core.errors import MissingPackage

        raise MissingPackage(f"crosstie.{name}", package.replace("_", "-")) from None


def __dir__() -> list[str]:
    return sorted(_homes())
