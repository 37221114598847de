"""The catalog as lines of text: a key, a value, and why anyone should believe it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import msgspec

from crosstie.catalog.acceptance import ANY
from crosstie.catalog.library import Catalog
from crosstie.catalog.precision import FOUR_BIT, GGUF, UNIFORM
from crosstie.core.deployment import Accelerator, Efficiency, Stack
from crosstie.core.errors import UnknownName
from crosstie.core.fact import Fact, Label
from crosstie.core.figures import with_unit
from crosstie.core.model import Model


@dataclass(frozen=True)
class FactLine:
    key: str
    value: float | str
    unit: str
    basis: str
    date: str
    source: str
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        return with_unit(self.value, self.unit) if isinstance(self.value, float | int) else self.value


def describe(catalog: Catalog, name: str) -> tuple[str, list[FactLine]]:
    """An accelerator, a model or a stack, whichever the name belongs to; or `costs`, what ownership assumes."""
    if name == "costs":
        return "What owning accelerators assumes", cost_lines(catalog)
    known: list[str] = []
    finders: tuple[tuple[Callable[[str], Any], Callable[[Any], list[FactLine]]], ...] = (
        (catalog.accelerator, lambda accelerator: accelerator_lines(catalog, accelerator)),
        (catalog.model, model_lines),
        (catalog.stack, lambda stack: stack_lines(catalog, stack)),
        (catalog.connector, lambda connector: list(fact_lines(connector))),
    )
    for find, lines_of in finders:
        try:
            noun = find(name)
        except UnknownName as miss:
            known += miss.near
            continue
        return noun.name, lines_of(noun)
    raise UnknownName("accelerator, model or stack", name, known, listing="accelerators|models|stacks")


def fact_lines(of: object, at: str = "") -> Iterator[FactLine]:
    """Every fact in a struct or a table, by its key."""
    if isinstance(of, Fact | Label):
        yield fact_line(at, of)
        return
    parts = msgspec.structs.asdict(of) if isinstance(of, msgspec.Struct) else of
    for key, part in parts.items() if isinstance(parts, dict) else ():
        yield from fact_lines(part, f"{at}.{key}" if at else key)


def accelerator_lines(catalog: Catalog, accelerator: Accelerator) -> list[FactLine]:
    lines = list(fact_lines(accelerator))
    for price in catalog.prices:
        if price.accelerator == accelerator.id:
            lines.append(fact_line(f"price.{price.kind}.{price.provider}", price.amount))
    return lines + efficiency_lines(catalog.efficiency(accelerator))


def cost_lines(catalog: Catalog) -> list[FactLine]:
    lines = []
    for key, ranged in catalog.costs.items():
        lines += [fact_line(f"{key}.{end}", getattr(ranged, end)) for end in ("low", "likely", "high")]
    return lines


def efficiency_lines(efficiency: Efficiency) -> list[FactLine]:
    return [
        replace(line, key=f"efficiency.{line.key}", notes=(*line.notes, f"constant of {efficiency.scope[line.key]}"))
        for line in fact_lines(efficiency)
    ]


def model_lines(model: Model) -> list[FactLine]:
    def read(key: str, value: float | str | None, unit: str = "") -> FactLine | None:
        return None if value is None else FactLine(key, value, unit, "spec", model.date, model.source)

    def derived(key: str, value: float | str, unit: str = "", note: str = "") -> FactLine:
        notes = (note,) if note else ()
        return FactLine(key, value, unit, "derived", model.date, f"computed from {model.id}'s config", notes)

    lines = [
        read("architecture", model.architecture),
        read("hidden", model.hidden, "count"),
        read("layers", model.layer_count, "count"),
        read("heads", model.heads, "count"),
        read("kv_heads", model.kv_heads, "count"),
        read("vocabulary", model.vocabulary, "count"),
        read("max_context", model.max_context, "tokens"),
        read("experts", model.experts or None, "count"),
        read("experts_per_token", model.experts_per_token or None, "count"),
        read("stored_as", model.native_name),
        derived("parameters", model.parameters, "count"),
        derived("active_parameters", model.active_parameters, "count", "weights that a token multiplies by"),
        derived("draft_parameters", model.draft_parameters, "count", "beside the model, for speculative decoding"),
        derived("kv_bytes_per_token", model.cache_bytes(8192) / 8192, "B", "16-bit cache, at 8,192 tokens, all layers"),
    ]
    lines += [derived(f"layer.{i}", f"{layer.count} x {layer.kind}") for i, layer in enumerate(model.layers)]
    notes = [
        FactLine(f"note.{i}", text, "", "assumed" if text.startswith("assumed") else "spec", model.date, model.source)
        for i, text in enumerate(model.notes)
    ]
    return [line for line in lines if line is not None] + notes


def stack_lines(catalog: Catalog, stack: Stack) -> list[FactLine]:
    lines = [replace(line, key=line.key if "." in line.key else f"engine.{line.key}") for line in fact_lines(stack)]
    for connector in catalog.connectors.values():
        if stack.id in connector.stacks:
            lines += fact_lines(connector, f"connector.{connector.id}")
    return lines


def fact_line(key: str, fact: Fact | Label) -> FactLine:
    notes = [fact.note] if fact.note else []
    if fact.chosen_because:
        notes.append(f"chosen because {fact.chosen_because}")
    for other in fact.alternatives:
        shown = with_unit(other.value, other.unit) if isinstance(other.value, float) else other.value
        notes.append(f"another source says {shown} ({other.basis}; {other.source}, {other.date})")
    unit = fact.unit if isinstance(fact, Fact) else ""
    return FactLine(key, fact.value, unit, fact.basis, fact.date, fact.source, tuple(notes))


def overview(catalog: Catalog, kind: str, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One row a noun, with the few numbers that people look for first, in the units that their keys name."""
    if kind == "precisions":
        stored = {"native": "what the checkpoint has", **{name: name for name in UNIFORM}, **FOUR_BIT}
        for name, (base, better) in GGUF.items():
            stored[name] = base if base == better else f"{base}, and {better} where llama.cpp spends more bits"
        return [{"precision": name, "stores linear layers as": what} for name, what in stored.items()]
    if kind == "prices":
        nouns: Iterable[Any] = (price for price in catalog.prices if only is None or price.accelerator in only)
    elif kind == "acceptance":
        nouns = catalog.acceptance_curves
    else:
        nouns = getattr(catalog, kind).values()
    return [{heading: of(noun) for heading, of in _COLUMNS[kind].items()} for noun in nouns]


def _tera(accelerator: Accelerator, compute_format: str) -> float | None:
    rate = accelerator.flop_per_s(compute_format)
    return None if rate is None else rate / 1e12


# Depths of speculation that a list shows.
_SHOWN = (1, 2, 3, 4, 7)


def _same(*names: str, of: str = "") -> dict[str, Callable[[Any], Any]]:
    """Columns that are called as what they show, of the noun itself or of a part of it."""
    return {name: attrgetter(f"{of}.{name}" if of else name) for name in names}


_COLUMNS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "accelerators": {
        **_same("id", "name"),
        "isa": lambda a: a.chip.isa.value,
        "GiB": lambda a: a.memory.capacity.si / 2**30,
        "TB/s": lambda a: a.memory_bytes_per_s / 1e12,
        "bf16 TF": lambda a: _tera(a, "bf16"),
        "fp8 TF": lambda a: _tera(a, "fp8"),
        "fp4 TF": lambda a: _tera(a, "fp4"),
        "fp8": lambda a: a.chip.fp8_dialect.value,
        "link GB/s": lambda a: a.scale_up.bandwidth.si / 1e9,
        **_same("domain"),
        "W": lambda a: a.chip.tdp.si,
    },
    "models": {
        **_same("id"),
        "parameters B": lambda m: m.parameters / 1e9,
        "active B": lambda m: m.active_parameters / 1e9,
        "stored as": attrgetter("native_name"),
        "context": attrgetter("max_context"),
        "layers": lambda m: "; ".join(f"{layer.count} x {layer.kind}" for layer in m.layers),
    },
    "stacks": {
        **_same("id", "name", "versions"),
        "vendors": lambda s: ", ".join(s.vendors),
        "schedules": attrgetter("scheduling"),
        "reads": lambda s: ", ".join(s.loads),
    },
    "formats": {
        **_same("id"),
        "bits a weight": attrgetter("bits"),
        **_same("title"),
        "runs as": lambda f: ", ".join(f.runs_as),
        **_same("source", "date"),
    },
    "libraries": {
        **_same("id"),
        "CUDA": attrgetter("cuda"),
        "ROCm": attrgetter("rocm"),
        **_same("state"),
        "what differs": attrgetter("differs"),
        "names that HIPIFY converts": lambda c: f"{c.hipify.converted:,} of {c.hipify.of:,}" if c.hipify else "",
        **_same("source", "date"),
    },
    "prices": {
        **_same("accelerator", "provider", "kind"),
        **_same("value", "unit", "basis", "date", "source", of="amount"),
    },
    "acceptance": {
        "model": lambda c: "others" if c.model == ANY else c.model,
        **_same("method", "text"),
        "tokens a step by drafts": lambda c: " ".join(f"{k}:{n:.2f}" for k, n in c.lengths.items() if k in _SHOWN),
        **_same("basis"),
        "source": lambda c: f"{c.source} ({c.date})",
    },
}
