"""What the columns of a row say, each read alone: numbers, layouts, precisions, fleets."""

import math
import re
from collections.abc import Mapping

from crosstie.catalog.library import Catalog
from crosstie.catalog.protocols import BenchmarkSettings
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import BadInput, CrosstieError, DoesNotFit, UnknownName
from crosstie.core.model import Model
from crosstie.prove.calibration.results import Point

DECIMAL = r"\d+(?:\.\d+)?"
_LAYOUT = re.compile(r"(attention_dp|dep|tep|tp|dp|pp|ep)\s*=?(\d{1,9})", re.IGNORECASE)
_REPLICAS = re.compile(r"(\d{1,9})x\S+ (\d{1,9})FP8", re.IGNORECASE)
_SHORTEST = re.compile(r"random lengths (\d+)-100%")
_MEAN = re.compile(rf"(\S+) mean ({DECIMAL})")
_PART = re.compile(r"(?:(\d+)\s*x\s*)?(.+)", re.IGNORECASE)


class NotPredicted(CrosstieError):
    """The reason why a point has no prediction."""


# What a row itself may be at fault for; a broken catalog file is not among it.
UNPREDICTABLE = (NotPredicted, UnknownName, BadInput, DoesNotFit)


def reason_of(error: Exception) -> str:
    """Suggestions of the catalog are kept out of reasons, so that equal faults count together."""
    if isinstance(error, UnknownName):
        return f"{error.kind} '{error.name}' is not in the catalog"
    return str(error)


def fleet_parts(parts: list[str], gpus: int, said: bool = False) -> list[tuple[str, int]]:
    """`8 x H200 + 8 x MI350X` as names and counts; without counts the GPUs are shared evenly."""
    found = list[tuple[str, int]]()
    for part in parts:
        match = _PART.fullmatch(part)
        if not match:
            raise NotPredicted(f"accelerator '{part}' is no name")
        if match[1] is None and gpus % len(parts):
            raise NotPredicted(f"{gpus} GPUs do not divide over {len(parts)} kinds")
        found.append((match[2], int(match[1]) if match[1] else gpus // len(parts)))
    if said and sum(count for _, count in found) != gpus:
        raise NotPredicted(f"the parts of {' + '.join(parts)} are not the {gpus} GPUs of the row")
    return found


def row_settings(point: Point) -> BenchmarkSettings:
    """Optional columns of the row: kv_format, chunk_tokens, max_sequences; lengths' spread from its notes."""
    spread = _SHORTEST.search(point["notes"])
    return BenchmarkSettings(
        kv_format=point["kv_format"] or None,
        chunk_tokens=positive(point, "chunk_tokens"),
        max_sequences=positive(point, "max_sequences"),
        shortest=int(spread[1]) / 100 if spread else None,
    )


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def positive(point: Point, column: str) -> float | None:
    """An optional column: nothing where it is empty, never what it does not say."""
    if not point[column]:
        return None
    value = number(point[column])
    if value is None or value < 1:
        raise NotPredicted(f"{column} '{point[column][:40]}' is no number of at least 1")
    return value


def whole(point: Point, column: str, default: int) -> int:
    value = number(point[column]) if point[column] else float(default)
    if value is None or value < 1 or value != int(value):
        raise NotPredicted(f"{column} '{point[column]}' is no positive whole number")
    return int(value)


def length(point: Point, column: str) -> float | None:
    """Tokens; a data set's mean where the row names one."""
    mean = _MEAN.fullmatch(point[column])
    value = float(mean[2]) if mean else number(point[column])
    if value is not None and value < 1:
        raise NotPredicted(f"{column} {point[column]} is less than one token")
    return value


def precision_of(name: str, model: Model, accelerator: Accelerator) -> str:
    """Rows name a width; which of its formats that was follows from the model and the vendor."""
    name = name.casefold()
    native = set(model.native_name.split("+"))
    if name in ("fp4", "mxfp4", "nvfp4") and "mxfp4" in model.native_name:
        return "native"
    if name == "fp8" and ("fp8" in model.native_name or "mxfp4" in native):
        return "native"
    if name == "fp4":
        return "mxfp4" if accelerator.vendor == "AMD" else "nvfp4"
    if name in ("bfloat16", "float16"):
        return {"bfloat16": "bf16", "float16": "fp16"}[name]
    return name or "native"


def engine_of(catalog: Catalog, point: Point, alone: bool) -> str | None:
    """GPU work alone needs no engine: PyTorch's kernels stand for one that the catalog does not know."""
    name = point["engine"]
    if not alone:
        # MLPerf's summaries name one engine and its version another where a submission brings several.
        mislabelled = "TensorRT-LLM" in point["engine_version"] and name.casefold() == "vllm"
        return "tensorrt-llm" if mislabelled else name or None
    try:
        return catalog.stack(name or "pytorch").id
    except UnknownName:
        return "pytorch"


def layout_of(point: Point, published: Mapping[str, str], model: Model, gpus: int) -> Parallelism | None:
    """The row's own layout, else a published one, else None."""
    parts = {name.casefold(): int(n) for name, n in _LAYOUT.findall(point["parallelism"])}
    if "dep" in parts:
        return Parallelism(dp=parts["dep"], ep=parts["dep"], pp=parts.get("pp", 1))
    if "tep" in parts:
        return Parallelism(tp=parts["tep"], ep=parts["tep"], pp=parts.get("pp", 1))
    if "DPA" in point["parallelism"] and model.is_moe:
        # Attention in replicas: the ranks that would share a head each serve requests of their own.
        ranks = parts.get("tp", 1)
        return Parallelism(dp=ranks, ep=parts.get("ep", 1), pp=parts.get("pp", 1))
    if not parts and point["tp"]:
        parts = {"tp": whole(point, "tp", 1)}
    copies = _REPLICAS.match(point["accelerator_raw"])
    if not parts and copies:
        parts = {"tp": int(copies[1]) // max(int(copies[2]), 1)}
    if not parts and published:
        width = int(published["tp"])
        parts = {"tp": width, "pp": int(published["pp"] or 1), "ep": int(published["ep"] or 1)}
        if published["attention_dp"] == "1" and width > 1:
            parts |= {"tp": 1, "dp": width}
    if not parts:
        return Parallelism() if gpus == 1 else None
    replicas = parts.get("attention_dp", parts.get("dp", 1)) if model.is_moe else 1
    spread = parts.get("ep", 1) if model.is_moe else 1
    return Parallelism(tp=parts.get("tp", 1), pp=parts.get("pp", 1), ep=spread, dp=replicas)
