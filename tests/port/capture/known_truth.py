"""The cases whose verdict on a real GPU is known (truth/h200.csv), and the checker's verdict of each."""

import csv
import importlib
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from crosstie.core.errors import CrosstieError
from crosstie_port.capture.check import check
from crosstie_port.capture.twin import Twin

HERE = Path(__file__).parent
_NOT_CASES = ("__init__", "setting", "tiny_transformers")


class Truth(NamedTuple):
    case: str
    verdict: str
    # "cases" to "cases4": the folder of its file; "models": cases/tiny_transformers.py.
    group: str
    message: str


def truths() -> list[Truth]:
    with (HERE / "truth" / "h200.csv").open() as rows:
        return [Truth(row["case"], row["verdict"], row["set"], row["message"]) for row in csv.DictReader(rows)]


def verdict_here(truth: Truth) -> tuple[str, str]:
    """The checker's verdict and its first grounds, taken in a process of its own: what cases do to globals stays."""
    module = _modules(truth.group)[truth.case]
    with Twin(partial(_judged, truth.case, module)) as apart:
        verdict, why = apart.result()
    return verdict, why


def _judged(case: str, module: Any) -> tuple[str, str]:
    try:
        result = check(module.CASES[case], module.inputs, state=module.State)
    except CrosstieError as error:
        return "refused", str(error)
    return result.verdict, f"{result.hazards[0].what}: {result.hazards[0].evidence}" if result.hazards else "no hazard"


@cache
def _modules(group: str) -> dict[str, Any]:
    """By case, the module that it stands in."""
    if group == "models":
        names = ["cases.tiny_transformers"]
    else:
        names = [f"{group}.{file.stem}" for file in sorted((HERE / group).glob("*.py")) if file.stem not in _NOT_CASES]
    modules = [importlib.import_module(f"tests.port.capture.{name}") for name in names]
    return {case: module for module in modules for case in module.CASES}
