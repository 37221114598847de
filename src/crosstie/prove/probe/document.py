"""The probe's document as nouns: read back with every fault named, and set beside the catalog's peaks."""

import re
from collections.abc import Iterator
from heapq import nlargest, nsmallest
from itertools import chain, count
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.perf.hardware import Hardware
from crosstie.perf.step import shape, step
from crosstie.prove.probe.kernels import FORMAT, SHAPE_FIELDS

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp8": 1}
# With so few rows a matrix product is a stream of weights.
FEW_ROWS = 64


class Shaped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of which shape something was, or was not, measured; `SHAPE_FIELDS` says which fields a kind has."""

    kind: str
    format: str | None = None
    m: Count | None = None
    n: Count | None = None
    k: Count | None = None
    sequences: Count | None = None
    context: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    bytes: Count | None = None
    model: str | None = None
    batch: Count | None = None

    def size(self, field: str) -> int:
        value = getattr(self, field)
        assert isinstance(value, int), f"{self.kind} has no {field}"
        return value


class Failure(Shaped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: str


class Measurement(Shaped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one operation: the median of `samples`, whose 90th percentile is `spread` times the 10th."""

    backend: str
    seconds: Positive
    samples: Count
    spread: Annotated[float, msgspec.Meta(ge=1)]
    # Whether it ran inside a graph, where no launch from the host is in the time.
    graph: bool

    @property
    def flop_per_s(self) -> float:
        """Of a matrix product or of causal attention."""
        if self.kind == "gemm":
            return 2.0 * self.size("m") * self.size("n") * self.size("k") / self.seconds
        scores = self.size("sequences") * self.size("heads") * self.size("context") ** 2 / 2
        return 4.0 * scores * self.size("head_dim") / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Read and written by a copy or a matrix product, read from the cache by decode attention."""
        if self.kind == "copy":
            moved = 2.0 * self.size("bytes")
        elif self.kind == "gemm":
            m, n, k = self.size("m"), self.size("n"), self.size("k")
            moved = float((n + m) * k * ELEMENT_BYTES[self.format or ""] + 2 * m * n)
        else:
            rows = self.size("sequences") * self.size("context")
            moved = 4.0 * rows * self.size("kv_heads") * self.size("head_dim")
        return moved / self.seconds


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a document comes from: enough to repeat it, and to know why another run differs."""

    device: str
    # The catalog's id, guessed from name and memory; None where that leaves a doubt.
    accelerator: str | None
    architecture: str
    memory_bytes: Count
    gpus: Count
    power_limit_w: float | None
    driver: str | None
    torch: str
    cuda: str | None
    hip: str | None
    python: str
    host: str
    fp8_dialect: str | None
    date: str
    crosstie: str
    parts: tuple[str, ...]
    quick: bool
    # Why the run did not get to its end, or None.
    partial: str | None
    wall_s: float
    # Parts that could not run, and why: of earlier probes alone.
    skipped: dict[str, str]
    failures: tuple[Failure, ...]


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    provenance: Provenance
    measurements: tuple[Measurement, ...]


def is_probe(text: str) -> bool:
    """Whether it is such a document, by the names in it."""
    return '"provenance"' in text and '"measurements"' in text


def read_probe(file: Path) -> Probe:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    return probe_from(raw, file)


def probe_from(raw: bytes, file: object) -> Probe:
    try:
        version = msgspec.json.decode(raw, type=_Versioned).format
        if version != FORMAT:
            raise BadData(file, "format", f"is {version}, and this Crosstie reads {FORMAT}")
        probe = msgspec.json.decode(raw, type=Probe)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise BadData(file, path.strip("`.") or "document", reason) from None
    except msgspec.DecodeError as error:
        raise BadData(file, "", f"is not JSON: {error}") from None
    for i, row in enumerate(probe.measurements):
        _check_shape(file, f"measurements[{i}]", row)
    return probe


class _Versioned(msgspec.Struct):
    format: int


def _check_shape(file: object, key: str, row: Measurement) -> None:
    """Each kind has its own fields, all of them and no others."""
    if row.kind not in SHAPE_FIELDS:
        raise BadData(file, f"{key}.kind", f"'{row.kind}' is unknown; known: {', '.join(SHAPE_FIELDS)}")
    if row.format not in ELEMENT_BYTES:
        raise BadData(file, f"{key}.format", f"'{row.format}' is unknown; known: {', '.join(ELEMENT_BYTES)}")
    wanted = SHAPE_FIELDS[row.kind]
    for field in sorted({field for fields in SHAPE_FIELDS.values() for field in fields}):
        if (getattr(row, field) is None) == (field in wanted):
            raise BadData(
                file, f"{key}.{field}", f"{'is missing from' if field in wanted else 'is no field of'} {row.kind}"
            )


class Reached(NamedTuple):
    """One line of the report: `value` at some shape, and the peak that it is a fraction of, where there is one."""

    what: str
    at: str
    value: float
    unit: Literal["bytes_per_s", "flop_per_s", "s"]
    peak: float | None = None
    peak_name: str = ""

    @property
    def fraction(self) -> float | None:
        if not self.peak:
            return None
        return self.peak / self.value if self.unit == "s" else self.value / self.peak


def reached(probe: Probe, catalog: Catalog) -> list[Reached]:
    """The best of each kind, beside the datasheet's peak of the accelerator that the device was taken for."""
    id = probe.provenance.accelerator
    accelerator = catalog.accelerators.get(id) if id else None
    return [*_kernels(probe, accelerator), *_steps(probe, catalog, accelerator), *_launches(probe)]


def _of(probe: Probe, kind: str, format: str | None = None) -> list[Measurement]:
    return [row for row in probe.measurements if row.kind == kind and format in (None, row.format)]


def _kernels(probe: Probe, accelerator: Accelerator | None) -> Iterator[Reached]:
    memory = accelerator.memory_bytes_per_s if accelerator else None
    moved, computed = attrgetter("bytes_per_s"), attrgetter("flop_per_s")

    def by_memory(what: str, at: str, row: Measurement) -> Reached:
        return Reached(what, at, row.bytes_per_s, "bytes_per_s", memory, "memory")

    def by_arithmetic(what: str, at: str, row: Measurement) -> Reached:
        peak = accelerator.flop_per_s(row.format or "") if accelerator else None
        return Reached(what, at, row.flop_per_s, "flop_per_s", peak, f"dense {row.format}")

    # The largest rather than the fastest: a small one stays in a cache.
    for row in nlargest(1, _of(probe, "copy"), lambda row: row.size("bytes")):
        yield by_memory("copy", f"{row.size('bytes') >> 20:,} MiB", row)
    for format in ("bf16", "fp8"):
        few = [row for row in _of(probe, "gemm", format) if row.size("m") <= FEW_ROWS]
        for row in nlargest(1, few, moved):
            yield by_memory(f"GEMM {format}, few rows", _gemm_shape(row), row)
    for row in nlargest(1, _of(probe, "attention-decode"), moved):
        yield by_memory("decode attention", f"{row.sequences} x {row.context:,} tokens, {_heads(row)}", row)
    for format in ("bf16", "fp8"):
        for row in nlargest(1, _of(probe, "gemm", format), computed):
            yield by_arithmetic(f"GEMM {format}", _gemm_shape(row), row)
    for row in nlargest(1, _of(probe, "attention-prefill"), computed):
        yield by_arithmetic("prefill attention", f"{row.context:,} tokens, {_heads(row)}", row)


def _steps(probe: Probe, catalog: Catalog, accelerator: Accelerator | None) -> Iterator[Reached]:
    """Of each model one stream with the longest context, and the longest prompt, beside their rooflines."""
    models = dict.fromkeys((row.model, row.format) for row in probe.measurements if row.model)
    for model, format in models:
        decodes = [row for row in _of(probe, "decode-step", format) if row.model == model]
        prefills = [row for row in _of(probe, "prefill-step", format) if row.model == model]
        alone = nsmallest(1, decodes, lambda row: (row.size("batch"), -row.size("context")))
        for row in (*alone, *nlargest(1, prefills, lambda row: row.size("context"))):
            decode = row.kind == "decode-step"
            at = f"batch {row.batch} at {row.context:,} tokens" if decode else f"{row.context:,} tokens"
            what = f"{model} {format}, {'decode' if decode else 'prefill'} step"
            yield Reached(
                what, f"{at}, {row.backend}", row.seconds, "s", _ideal_s(row, catalog, accelerator), "roofline"
            )


def _ideal_s(row: Measurement, catalog: Catalog, accelerator: Accelerator | None) -> float | None:
    """The step at peak rates with nothing in the way; None where the catalog cannot say."""
    if accelerator is None:
        return None
    try:
        replica = catalog.deployment(catalog.model(row.model or ""), accelerator, precision=row.format)
    except CrosstieError:
        return None
    batch, context = row.size("batch"), row.size("context")
    prompt = shape(prefill_tokens=batch * context, prefill_span=context)
    at = shape(batch, context) if row.kind == "decode-step" else prompt
    return float(step(Hardware([replica]), at).ideal_s[0, 0])


def _launches(probe: Probe) -> Iterator[Reached]:
    names = {"kernel-in-graph": "kernel in a graph", "kernel-eager": "kernel, eager", "host-launch": "host, a launch"}
    for kind, what in names.items():
        for row in _of(probe, kind):
            yield Reached(what, f"{row.bytes:,} bytes", row.seconds, "s")


def _gemm_shape(row: Measurement) -> str:
    return f"{row.n} x {row.k}, {row.m:,} rows"


def _heads(row: Measurement) -> str:
    return f"{row.heads} heads over {row.kv_heads} of {row.head_dim}, {row.backend}"


def default_name(device: str, accelerator: str | None, date: str, folder: Path) -> Path:
    """probe-h200-2026-11-20.json, or the first number after it that is free: a run does not replace another."""
    slug = accelerator or re.sub(r"[^a-z0-9]+", "-", device.casefold()).strip("-")
    names = chain([f"probe-{slug}-{date}"], (f"probe-{slug}-{date}-{again}" for again in count(2)))
    return next(target for name in names if not (target := folder / f"{name}.json").exists())
