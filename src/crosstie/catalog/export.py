"""The US export rule in figures: total processing performance (TPP), and what it is held against.

TPP is 2 x MacTOPS x bit length, the largest over formats, of dense matrices: dense TFLOP/s x bits.
"""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import read_facts, sourced_file
from crosstie.core.deployment import Accelerator
from crosstie.core.fact import Fact, Quantity

_FILE = Path(__file__).parent / "data" / "export.toml"
BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4, "int8": 8}
_TPP = Quantity("count", 100, 1e6, "total processing performance")


class ExportRule(msgspec.Struct, frozen=True, kw_only=True):
    # 3A090.a whatever the size of the die; and with how many TPP a square millimetre from which TPP on.
    tpp: Annotated[Fact, _TPP]
    tpp_if_dense: Annotated[Fact, _TPP]
    density: Annotated[Fact, Quantity("ratio", 0.1, 100, "TPP a square millimetre")]
    # Below both of these, licences for China and Macau are reviewed case by case.
    review_tpp: Annotated[Fact, _TPP]
    review_bandwidth: Annotated[Fact, Quantity("bytes_per_s", 1e11, 1e14, "of all DRAM")]


class ExportClass(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures say of a part. Density needs the area of the die, which the catalog does not have."""

    tpp: float
    # The format in which it is largest, and its rate.
    format: str
    rate: Fact
    # "3A090.a", "by density" (that alone decides), or "below".
    threshold: str
    # Whether licences for China and Macau are reviewed case by case; None where the first threshold is not passed.
    case_by_case: bool | None


@cache
def shipped_export() -> ExportRule:
    return read_export(_FILE)


def read_export(file: Path) -> ExportRule:
    with sourced_file(file, ["rule"]) as (raw, sources):
        return ExportRule(**read_facts(file, "rule", raw.get("rule"), ExportRule, sources))


def export_class(accelerator: Accelerator, rule: ExportRule) -> ExportClass:
    tera = {name: rate.si / 1e12 * BITS[name] for name, rate in accelerator.dense.items()}
    format = max(tera, key=lambda name: tera[name])
    tpp = tera[format]
    threshold = "3A090.a" if tpp >= rule.tpp.value else "by density" if tpp >= rule.tpp_if_dense.value else "below"
    eligible = tpp < rule.review_tpp.value and accelerator.memory_bytes_per_s < rule.review_bandwidth.si
    return ExportClass(
        tpp=tpp, format=format, rate=accelerator.dense[format], threshold=threshold,
        case_by_case=eligible if threshold == "3A090.a" else None,
    )  # fmt: skip
