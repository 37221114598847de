"""One tensor on two machines, with what is known besides: what every signature is a relation of."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.reading import read_record, read_toml
from crosstie_port.divergence.digest import Floats, TensorSummary
from crosstie_port.divergence.records import RecordedTensor

_FILE = Path(__file__).parent / "data" / "causes.toml"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    # A stable name, such as "factor-2".
    signature: str
    what: str
    # The figures that it rests on.
    evidence: str
    look: str


class _CauseRow(msgspec.Struct, frozen=True, kw_only=True):
    look: str
    what: str = ""
    signature: str = ""


@cache
def _rows() -> dict[str, _CauseRow]:
    return {name: read_record(_FILE, name, row, _CauseRow) for name, row in read_toml(_FILE).items()}


def cause(name: str, evidence: str, what: str = "") -> Cause:
    """By the name of a row of data/causes.toml; `what`: where it depends on the figures."""
    row = _rows()[name]
    return Cause(signature=row.signature or name, what=what or row.what, evidence=evidence, look=row.look)


class BesideTensors(msgspec.Struct, frozen=True, kw_only=True):
    """What the recordings say besides the two tensors."""

    settings: Mapping[str, Any] = {}
    seed: int = 0
    # How the module's own weights differ, as `weights.relation` gives it.
    weights: tuple[str, str] | None = None
    # The class of the module in the second.
    kind: str = ""
    # What attention goes by and was not seen to agree.
    suspects: list[str] = []
    # Of a router's choice: by row, and how far apart its scores are.
    margins: dict[int, float] = {}
    scores_off: float = 0.0


class ComparedPair(msgspec.Struct, frozen=True, kw_only=True):
    entry: RecordedTensor
    a: TensorSummary
    b: TensorSummary
    # What rounding explains, relative.
    tolerance: float
    known: BesideTensors
    rows: list[int]

    @property
    def x(self) -> Floats:
        return self.a.grid()

    @property
    def y(self) -> Floats:
        return self.b.grid()

    def explains(self, made: Floats) -> bool:
        """Whether what a hypothesis makes of one side is the other, up to a few roundings, and far better than the side
        as it is: where the samples agree anyway, what differs lies elsewhere."""
        away = distance(made, self.y)
        return away <= 4.0 * self.tolerance and away < 0.3 * distance(self.x, self.y)


def distance(a: Floats, b: Floats) -> float:
    sound = np.isfinite(a) & np.isfinite(b)
    size = math.sqrt(float((np.where(sound, b, 0.0) ** 2).sum()))
    away = math.sqrt(float((np.where(sound, a - b, 0.0) ** 2).sum()))
    return away / size if size else (math.inf if away else 0.0)


def is_rotary(kind: str) -> bool:
    return "rotary" in kind.lower() or "rope" in kind.lower()
