"""Stack files (an engine's habits) and efficiency files (what kernels reach of the peaks)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import (
    date,
    fact_specs,
    read_facts,
    read_toml,
    read_value,
    read_values,
    sourced_file,
    table,
    text,
)
from crosstie.core.deployment import Accelerator, Efficiency, Emulation, Host, SmallGpu, Stack
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact, Quantity
from crosstie.core.model import COMPUTE_FORMATS, Format

_FRACTION = Quantity("fraction", 0.01, 1.0, "share of the peak that is reached")
COMPUTE = dict.fromkeys(("bf16", "fp16", "fp8", "fp4", "int8", "fp32"), _FRACTION)
WEIGHTS = dict.fromkeys(("16", "8", "4"), _FRACTION)
SINGLE, _ = fact_specs(Efficiency)
_PLAIN = (
    "name", "aliases", "versions", "vendors", "loads", "scheduling", "admission", "memory_of", "serves",
)  # fmt: skip


def read_stack(file: Path) -> Stack:
    with sourced_file(file, {"id", "engine", "host", "emulation", "small", *_PLAIN}) as (raw, sources):
        identifier = text(file, "id", raw.get("id"))
        if identifier != file.stem:
            raise BadData(file, "id", f"'{identifier}' must match the file name '{file.stem}'")
        plain = read_values(file, "", raw, Stack, _PLAIN)
        if not plain["vendors"]:
            raise BadData(file, "vendors", "must name at least one vendor, or 'any'")
        host = dict(table(file, "host", raw.get("host")))
        overlapped = read_value(file, "host.overlapped", host.pop("overlapped", None), bool)
        emulation = table(file, "emulation", raw.get("emulation", {}))
        for vendor, formats in emulation.items():
            for format_id, how in table(file, f"emulation.{vendor}", formats).items():
                read_value(file, f"emulation.{vendor}.{format_id}", how, Emulation)
        return Stack(
            id=identifier,
            host=Host(overlapped=overlapped, **read_facts(file, "host", host, Host, sources)),
            emulation=emulation,
            small=SmallGpu(**read_facts(file, "small", raw["small"], SmallGpu, sources)) if "small" in raw else None,
            file=str(file),
            **plain,
            **read_facts(file, "engine", raw.get("engine"), Stack, sources),
        )


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
    formats = {}
    for key, raw in read_toml(file).items():
        try:
            format = msgspec.convert({"id": key, **table(file, key, raw)}, Format)
        except msgspec.ValidationError as error:
            raise BadData(file, key, str(error)) from None
        if format.group < 1 or not 1 <= format.element_bits <= 64 or not 0 <= format.scale_bits <= 4096:
            raise BadData(file, key, "element_bits, scale_bits or group is out of range")
        if not format.runs_as or not set(format.runs_as) <= set(COMPUTE_FORMATS):
            raise BadData(file, f"{key}.runs_as", f"must be one or more of {', '.join(COMPUTE_FORMATS)}")
        text(file, f"{key}.source", format.source)
        date(file, f"{key}.date", format.date)
        formats[key] = format
    return formats


def _reached(accelerator: Accelerator) -> dict[str, Fact]:
    """Shares of the dense peak that matrix products were measured to reach, the best of all sources."""
    found = {}
    for name, fact in accelerator.measured.items():
        format = name.removeprefix("matmul_")
        if format != name and format in accelerator.dense:
            said = [(fact.value, fact.source, fact.date)]
            said += [(float(o.value), o.source, o.date) for o in fact.alternatives if o.unit == fact.unit]
            best, source, day = max(said)
            peak = accelerator.dense[format]
            note = f"{best:,g} of {peak.value:,g} {peak.unit}, the best that was measured on {accelerator.id}"
            share = best / fact.value * fact.si / peak.si
            found[format] = Fact(value=share, unit="fraction", basis="derived", source=source, date=day, note=note)
    return found


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
