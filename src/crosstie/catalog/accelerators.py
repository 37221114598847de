"""Accelerator files: the fields one may have, their units, and the range beyond which it is a slip."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crosstie.catalog.reading import Quantity, Word, file_id, one_of, read_facts, sourced_file, text, texts
from crosstie.core.deployment import Accelerator, Announced, Chip, Memory, ScaleOut, ScaleUp
from crosstie.core.errors import BadData
from crosstie.core.model import COMPUTE_FORMATS
from crosstie.core.units import UNITS

_MONTH = re.compile(r"20\d\d-(0[1-9]|1[0-2])")
_NOT_MEASURED = ("spec", "derived", "claimed", "assumed")

CHIP = {
    "architecture": Word("the name of the microarchitecture"),
    "isa": Word("the compiler's target, such as gfx942 or sm_90"),
    "compute_units": Quantity("count", 1, 2000, "compute units or streaming multiprocessors", _NOT_MEASURED),
    "wave_width": Quantity("count", 16, 128, "lanes that execute together", _NOT_MEASURED),
    "lds": Quantity("bytes", 16e3, 1e6, "LDS or shared memory one workgroup may use", _NOT_MEASURED),
    "tdp": Quantity("watts", 30, 5000, "board power limit", _NOT_MEASURED),
    "fp8_dialect": Word("which FP8 encoding the matrix units take", ("e4m3fn", "e4m3fnuz", "none")),
    "fp4_dialect": Word("which FP4 encodings they take", ("none", "mxfp4", "nvfp4", "nvfp4+mxfp4")),
}
MEMORY = {
    "kind": Word("memory technology"),
    "capacity": Quantity("bytes", 4e9, 2e12, "memory as sold", _NOT_MEASURED),
    "usable": Quantity("bytes", 4e9, 2e12, "memory that the driver reports", ("measured",)),
    "bandwidth": Quantity("bytes_per_s", 5e10, 5e13, "peak memory bandwidth", _NOT_MEASURED),
}
SCALE_UP = {
    "technology": Word("the link between GPUs of one domain"),
    "topology": Word("how the links join them", ("switch", "mesh", "bridge", "pcie")),
    "bandwidth": Quantity("bytes_per_s", 4e9, 2e13, "per GPU, one direction, all links", _NOT_MEASURED),
    "domain": Quantity("count", 1, 1024, "GPUs joined at that bandwidth", _NOT_MEASURED),
    "node": Quantity("count", 1, 1024, "GPUs of one server or tray, where the domain has several", _NOT_MEASURED),
}
SCALE_OUT = {"bandwidth": Quantity("bytes_per_s", 1e8, 1e12, "network per GPU, one direction", _NOT_MEASURED)}
_RATE = Quantity("flop_per_s", 1e12, 1e17, "peak of the matrix units", _NOT_MEASURED)
RATES = dict.fromkeys(COMPUTE_FORMATS, _RATE)
_ACHIEVED = Quantity("flop_per_s", 1e12, 1e17, "matrix product rate reached", ("measured",))
MEASURED = {
    "copy_bandwidth": Quantity("bytes_per_s", 5e10, 5e13, "device copy, read plus write", ("measured",)),
    "read_bandwidth": Quantity("bytes_per_s", 5e10, 5e13, "reading alone", ("measured",)),
    **{f"matmul_{name}": _ACHIEVED for name in COMPUTE_FORMATS},
}
ANNOUNCED = {
    "expected": Word("the month in which it is said to come, as YYYY-MM"),
    "slip": Quantity("years_in_s", 0, 5 * UNITS["year"].si, "mean delay beyond that", ("claimed", "assumed")),
    **dict.fromkeys(("usd", "usd_low", "usd_high"), Quantity("usd", 100, 1e6, "what one may cost", _NOT_MEASURED)),
}
_TABLES = {"announced", "chip", "memory", "dense", "sparse", "scale_up", "scale_out", "measured"}
VENDORS = ("AMD", "NVIDIA", "Intel", "other")


def read_accelerator(file: Path) -> Accelerator:
    with sourced_file(file, {"id", "name", "aliases", "vendor", "family"} | _TABLES) as (raw, sources):

        def facts(key: str, specs: Any, optional: Iterable[str] = ()) -> dict[str, Any]:
            return read_facts(file, key, raw.get(key), specs, sources, frozenset(optional))

        accelerator = Accelerator(
            id=file_id(file, raw.get("id")),
            name=text(file, "name", raw.get("name")),
            aliases=texts(file, "aliases", raw.get("aliases", [])),
            vendor=one_of(file, "vendor", text(file, "vendor", raw.get("vendor")), VENDORS),
            family=text(file, "family", raw.get("family")),
            chip=Chip(**facts("chip", CHIP)),
            memory=Memory(**facts("memory", MEMORY, ["usable"])),
            dense=facts("dense", RATES, RATES),
            sparse=facts("sparse", RATES, RATES) if "sparse" in raw else {},
            scale_up=ScaleUp(**facts("scale_up", SCALE_UP, ("node",))),
            scale_out=ScaleOut(**facts("scale_out", SCALE_OUT)),
            measured=facts("measured", MEASURED, MEASURED) if "measured" in raw else {},
            announced=Announced(**facts("announced", ANNOUNCED)) if "announced" in raw else None,
            file=str(file),
        )
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
