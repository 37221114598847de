"""Files of what `core.deployment` describes: accelerators, stacks (an engine's habits), efficiency (what kernels reach
of the peaks), formats; and connectors (how an engine moves a prompt's cache from prefill to decode)."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstie.catalog.reading import date, fact_specs, file_id, read_facts, read_record, read_toml, sourced_file
from crosstie.core.deployment import Accelerator, Efficiency, Stack
from crosstie.core.disaggregated import Connector
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact, Quantity
from crosstie.core.model import COMPUTE_FORMATS, Format

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


_FRACTION = Quantity("fraction", 0.01, 1.0, "share of the peak that is reached")
COMPUTE = dict.fromkeys(("bf16", "fp16", "fp8", "fp4", "int8", "fp32"), _FRACTION)
WEIGHTS = dict.fromkeys(("16", "8", "4"), _FRACTION)
SINGLE, _ = fact_specs(Efficiency)


def read_stack(file: Path) -> Stack:
    with sourced_file(file, {"engine", *Stack.__struct_fields__}) as (raw, sources):
        engine = read_facts(file, "engine", raw.pop("engine", None), Stack, sources)
        stack = read_record(file, "", raw, Stack, sources, id=file_id(file, raw.get("id")), **engine)
    if not stack.vendors:
        raise BadData(file, "vendors", "must name at least one vendor, or 'any'")
    return stack


def read_efficiency(file: Path) -> dict[str, Any]:
    """One layer of constants: the default sets all, a family or an accelerator what it knows."""
    everything = frozenset((*COMPUTE, *WEIGHTS, *SINGLE))
    with sourced_file(file, {"compute", "weights", *SINGLE}) as (raw, sources):
        singles = {key: value for key, value in raw.items() if key in SINGLE}
        layer = read_facts(file, "", singles, SINGLE, sources, everything)
        for key, specs in (("compute", COMPUTE), ("weights", WEIGHTS)):
            if key in raw:
                layer[key] = read_facts(file, key, raw[key], specs, sources, everything)
    return layer


def merge_efficiency(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Constants of the same layer from a later file: those that it has replace the earlier ones."""
    for key, value in layer.items():
        if isinstance(value, dict):
            into.setdefault(key, {}).update(value)
        else:
            into[key] = value


def read_formats(file: Path) -> dict[str, Format]:
    formats = {key: read_record(file, key, raw, Format, id=key) for key, raw in read_toml(file).items()}
    for key, format in formats.items():
        if not format.runs_as:
            raise BadData(file, f"{key}.runs_as", f"must be one or more of {', '.join(COMPUTE_FORMATS)}")
        date(file, f"{key}.date", format.date)
    return formats


def _reached(accelerator: Accelerator) -> dict[str, Fact]:
    """Shares of the dense peak that matrix products were measured to reach, the best of all sources."""
    facts = {}
    for name, fact in accelerator.measured.items():
        format = name.removeprefix("matmul_")
        if format != name and format in accelerator.dense:
            said = [(fact.value, fact.source, fact.date)]
            said += [(float(o.value), o.source, o.date) for o in fact.alternatives if o.unit == fact.unit]
            best, source, day = max(said)
            peak = accelerator.dense[format]
            note = f"{best:,g} of {peak.value:,g} {peak.unit}, the best that was measured on {accelerator.id}"
            share = best / fact.value * fact.si / peak.si
            facts[format] = Fact(value=share, unit="fraction", basis="derived", source=source, date=day, note=note)
    return facts


def resolve_efficiency(
    layers: Mapping[str, dict[str, Any]], accelerator: Accelerator, relatives: Sequence[Accelerator] = ()
) -> Efficiency:
    """The accelerator's own constants first, then its topology's and family's, then the default.

    `relatives`: of its family; what nobody measured on it, it reaches no more of than they do.
    """
    order = ("default", accelerator.scale_up.topology.value, accelerator.family, accelerator.id)
    merged: dict[str, Any] = {"compute": {}, "weights": {}}
    scope: dict[str, str] = {}
    for name in order:
        for key, value in layers.get(name, {}).items():
            if isinstance(value, Fact):
                merged[key] = value
                scope[key] = name
            else:
                merged[key].update(value)
                scope.update({f"{key}.{inner}": name for inner in value})
    reached: dict[str, Fact] = {}
    for relative in relatives:
        for format, share in _reached(relative).items():
            if format not in reached or share.value > reached[format].value:
                reached[format] = share
    reached |= _reached(accelerator)
    if "bf16" in reached:
        reached.setdefault("fp16", reached["bf16"])
    scope.update({f"measured.{format}": "measured products" for format in reached})
    return Efficiency(scope=scope, measured=reached, **merged)


def read_connectors(file: Path) -> dict[str, Connector]:
    with sourced_file(file) as (raw, sources):
        connectors = {name: read_record(file, name, entry, Connector, sources, id=name) for name, entry in raw.items()}
    for name, connector in connectors.items():
        for key, what in (("vendors", "vendor"), ("stacks", "stack")):
            if not getattr(connector, key):
                raise BadData(file, f"{name}.{key}", f"must name at least one {what}")
        if connector.recomputes and connector.first_token != "decode":
            raise BadData(file, f"{name}.recomputes", 'goes with first_token = "decode"')
    return connectors
