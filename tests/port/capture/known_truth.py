"""The cases whose verdict on a real GPU is known (truth/h200.csv), and the checker's verdict of each."""

import importlib
from functools import partial
from typing import Any, NamedTuple

from tests.port.capture.cases.setting import truth_rows

from crosstie.core.errors import CrosstieError
from crosstie_port.capture.check import check
from crosstie_port.capture.twin import Twin

_SETS = {"cases/tiny_transformers": "models", "cases/shared": "shared"}


class Truth(NamedTuple):
    case: str
    verdict: str
    # The module that has the case, as in "cases2/caches".
    file: str

    @property
    def group(self) -> str:
        """The folder of its file, "cases" to "cases4", or what stands for that file alone."""
        return _SETS.get(self.file, self.file.partition("/")[0])


def truths() -> list[Truth]:
    return [Truth(row["case"], row["verdict"], row["file"]) for row in truth_rows()]


def verdict_here(truth: Truth) -> tuple[str, str]:
    """The checker's verdict and its first grounds, taken in a process of its own: what cases do to globals stays."""
    module = importlib.import_module(f"tests.port.capture.{truth.file.replace('/', '.')}")
    with Twin(partial(_judged, truth.case, module)) as apart:
        verdict, why = apart.result()
    return verdict, why


def _judged(case: str, module: Any) -> tuple[str, str]:
    try:
        result = check(module.CASES[case], module.inputs, state=module.State)
    except CrosstieError as error:
        return "refused", str(error)
    return result.verdict, f"{result.hazards[0].what}: {result.hazards[0].evidence}" if result.hazards else "no hazard"
