"""Accelerator files: facts as the structs of `core.deployment` have them, and what no single field shows."""

import re
from pathlib import Path

from crosstie.catalog.reading import file_id, read_facts, read_record, sourced_file
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData
from crosstie.core.fact import Quantity
from crosstie.core.model import COMPUTE_FORMATS

_MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")
_ACHIEVED = Quantity("flop_per_s", 1e12, 1e17, "matrix product rate reached", ("measured",))
_MEASURED = {
    "copy_bandwidth": Quantity("bytes_per_s", 5e10, 5e13, "device copy, read plus write", ("measured",)),
    "read_bandwidth": Quantity("bytes_per_s", 5e10, 5e13, "reading alone", ("measured",)),
    **{f"matmul_{name}": _ACHIEVED for name in COMPUTE_FORMATS},
}


def read_accelerator(file: Path) -> Accelerator:
    with sourced_file(file, Accelerator.__struct_fields__) as (raw, sources):
        measured = read_facts(file, "measured", raw.get("measured", {}), _MEASURED, sources, frozenset(_MEASURED))
        own = {"id": file_id(file, raw.get("id")), "measured": measured}
        accelerator = read_record(file, "", raw, Accelerator, sources, **own)
        _check_against_itself(file, accelerator)
    return accelerator


def _check_against_itself(file: Path, accelerator: Accelerator) -> None:
    """What no single field shows: a format without its dialect, a sparse peak in the dense table."""
    if "bf16" not in accelerator.dense and "fp16" not in accelerator.dense:
        raise BadData(file, "dense", "needs bf16 or fp16: every model computes its attention in 16 bits")
    told = accelerator.announced
    if told and not _MONTH.fullmatch(told.expected.value):
        raise BadData(file, "announced.expected", f"'{told.expected.value}' is no month: write it as 2027-03")
    if told and not told.usd_low.si <= told.usd.si <= told.usd_high.si:
        raise BadData(file, "announced.usd", "must lie between usd_low and usd_high")
    for rate, dialect in (("fp8", accelerator.chip.fp8_dialect), ("fp4", accelerator.chip.fp4_dialect)):
        if (rate in accelerator.dense) != (dialect.value != "none"):
            raise BadData(
                file, f"dense.{rate}",
                f"does not agree with chip.{rate}_dialect = '{dialect.value}'",
            )  # fmt: skip
    for name, sparse in accelerator.sparse.items():
        dense = accelerator.dense.get(name)
        if dense is None or sparse.si <= dense.si:
            raise BadData(file, f"sparse.{name}", "must exceed the dense rate of the same format")
    for name, fact in accelerator.measured.items():
        peak: float | None
        if name.startswith("matmul_"):
            peak = accelerator.flop_per_s(name.removeprefix("matmul_"))
        else:
            peak = accelerator.memory_bytes_per_s
        if peak is None or fact.si > peak:
            raise BadData(file, f"measured.{name}", "exceeds the peak it should be compared with")
