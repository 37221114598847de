"""Workload files: what a plan is for. A slip fails here, with the file and the key."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from crosstie.catalog.acceptance import NO_SPECULATION, TEXTS
from crosstie.catalog.days import USUAL, read_day
from crosstie.catalog.lengths import Lengths, cut, read_lengths
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import (
    number,
    only_keys,
    read_record,
    read_toml,
    read_value,
    read_values,
    table,
    text,
    texts,
)
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.core.deployment import KV_FORMATS
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.core.model import Model
from crosstie.core.speculation import DEEPEST
from crosstie.core.workload import (
    Constraints,
    Gpus,
    ModelChoice,
    Prices,
    RequestClass,
    Sharing,
    Target,
    UsdPerGpuHour,
    Workload,
)

_TRAFFIC = ("mean_over_peak", "growth_per_year", "horizon_years")
# Of the peak: what mean traffic is taken as.
_HALF = 0.5
_CLASS = {"name", "model", "share", "requests_per_s", "input", "output", "trace", "ttft_ms", "tpot_ms"}
PERCENTILES = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
# Off a price; what is free is no price.
MOST_DISCOUNT = 0.99
# With more classes than this they are diverse enough without being cut at their medians.
_MANY_CLASSES = 20
# Requests beyond the model's context that a trace or the tail of a distribution may have; they are cut.
_TOO_LONG = 0.01
# Requests/s of a class, at the least: one in a quarter of an hour. Below, a whole replica for them is no question.
_LEAST_RATE = 1e-3
_MOST_RATE = 1e9
# A class gives its name to pools, and these to the gateway.
_NAME = re.compile(r"^[^\W_].{0,59}$")
_RELEASE = re.compile(r"^b?\d[\w.+-]{0,39}$")
# The rate of a trace at its peak: of its minutes, the one that 19 of 20 do not exceed.
_BUSY_MINUTE = 0.95


# Workloads to start from, by name.
EXAMPLES = Path(__file__).parent / "data" / "workloads"


def find_workload(given: Path) -> Path:
    """A file, or the name of a shipped example."""
    shipped = EXAMPLES / f"{given}.toml"
    try:
        if given.is_dir():
            raise BadInput(f"{given}: is a folder, not a workload file")
        if given.exists():
            return given
        if given.name == str(given) and shipped.exists():
            return shipped
    except OSError as error:
        raise BadInput(f"{str(given)[:200]}: cannot be read: {error.strerror}") from None
    names = ", ".join(sorted(file.stem for file in EXAMPLES.glob("*.toml")))
    raise BadInput(f"{given}: no such workload file; shipped examples: {names}")


def example_text() -> str:
    return (EXAMPLES / "assistant.toml").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Reader:
    """What every part of a file needs: names for the fault, the catalog, notes to add to, how many classes."""

    file: Path
    catalog: Catalog
    notes: list[str]
    classes: int


def read_workload(catalog: Catalog, file: Path) -> Workload:
    raw = read_toml(file)
    only_keys(file, "", raw, {"name", "sizing", "traffic", "models", "class", "constraints", "prices", "hosting"})
    classes = raw.get("class")
    reader = _Reader(file, catalog, [], len(classes) if isinstance(classes, list) else 0)
    traffic = table(file, "traffic", raw.get("traffic", {}))
    only_keys(file, "traffic", traffic, {"requests_per_s", "day", *_TRAFFIC})
    values = read_values(file, "traffic", traffic, Workload, _TRAFFIC)
    day = read_day(file, "traffic.day", traffic["day"], values.get("mean_over_peak")) if "day" in traffic else None
    if day:
        values["mean_over_peak"] = fmean(day)
    elif "mean_over_peak" not in traffic:
        reader.notes.append("mean traffic is taken as half the peak (traffic.mean_over_peak)")
    classes = _classes(reader, raw.get("class"), traffic)
    return Workload(
        name=text(file, "name", raw.get("name", file.stem)),
        classes=classes,
        models=_models(reader, raw.get("models", {}), {one.model for one in classes}),
        constraints=_constraints(reader, raw.get("constraints", {})),
        prices=_prices(reader, raw.get("prices", {})),
        sharing=_sharing(reader, raw["hosting"], classes) if "hosting" in raw else None,
        file=str(file),
        notes=tuple(reader.notes),
        day=day or read_day(file, "", USUAL, values.get("mean_over_peak", _HALF)),
        **values,
        **read_values(file, "", raw, Workload, ("sizing",)),
    )


def _classes(reader: _Reader, raw: object, traffic: dict[str, Any]) -> tuple[RequestClass, ...]:
    file = reader.file
    if not isinstance(raw, list) or not raw:
        raise BadData(file, "class", "missing: write a [[class]] for every kind of request")
    total = traffic.get("requests_per_s")
    if total is not None:
        total = number(file, "traffic.requests_per_s", total, _LEAST_RATE, _MOST_RATE)
    shared = [isinstance(one, dict) and "share" in one for one in raw]
    if any(shared):
        _check_shares(file, raw, total)
    found: list[RequestClass] = []
    for index, one in enumerate(raw):
        made = _class(reader, f"class[{index}]", table(file, f"class[{index}]", one), total)
        if any(made.name == other.name for other in found):
            raise BadData(file, f"class[{index}].name", f"'{made.name}' already names a class")
        found.append(made)
    return tuple(found)


def _check_shares(file: Path, raw: list[Any], total: float | None) -> None:
    if total is None:
        raise BadData(file, "traffic.requests_per_s", "missing: classes give a share, but a share of what?")
    for index, one in enumerate(raw):
        if not isinstance(one, dict) or "share" not in one:
            raise BadData(file, f"class[{index}].share", "missing: other classes give one, so all must")
        number(file, f"class[{index}].share", one["share"], 0, 1)
    shares = math.fsum(one["share"] for one in raw)
    if abs(shares - 1.0) > 1e-3:
        raise BadData(file, "class", f"the shares add up to {shares:g}, not 1")


def _class(reader: _Reader, where: str, raw: dict[str, Any], total: float | None) -> RequestClass:
    file = reader.file
    only_keys(file, where, raw, _CLASS)
    name = text(file, f"{where}.name", raw.get("name"))
    if not _NAME.match(name):
        raise BadData(file, f"{where}.name", "must begin with a letter or digit and have at most 60 characters")
    asked = text(file, f"{where}.model", raw.get("model"))
    model = look_up(file, f"{where}.model", lambda: reader.catalog.model(asked))
    ttft = read_target(file, f"{where}.ttft_ms", raw.get("ttft_ms"))
    trace: Trace | None = None
    if "trace" in raw:
        for key in ("input", "output"):
            if key in raw:
                raise BadData(file, f"{where}.{key}", "the class has a trace, which says its lengths")
        given = text(file, f"{where}.trace", raw["trace"])
        # A rate of its own makes the trace's times worthless.
        timed = "share" in raw or "requests_per_s" in raw
        trace = look_up(file, f"{where}.trace", lambda: read_trace(find_trace(given, file.parent), times=not timed))
        inputs, outputs = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    else:
        inputs = read_lengths(file, f"{where}.input", raw.get("input"))
        outputs = read_lengths(file, f"{where}.output", raw.get("output"))
    inputs, outputs = _within_context(reader, where, name, model, inputs, outputs)
    slices = cut(
        inputs,
        outputs,
        paired=trace is not None,
        exempt=ttft.longest_exempt if ttft else 0.0,
        context=_context(model),
        halved=reader.classes <= _MANY_CLASSES,
    )
    return RequestClass(
        name=name,
        model=model.id,
        requests_per_s=_rate(reader, where, name, raw, total, trace),
        slices=slices,
        ttft=ttft,
        tpot=read_target(file, f"{where}.tpot_ms", raw.get("tpot_ms")),
    )


def _within_context(
    reader: _Reader, where: str, name: str, model: Model, inputs: Lengths, outputs: Lengths
) -> tuple[Lengths, Lengths]:
    """The tail of a distribution may reach beyond what the model takes; its body may not."""
    room = float(_context(model))
    # A fixed length goes with each of the others; two distributions meet long with long.
    longest = inputs + outputs
    beyond = float(np.mean(longest > room))
    if beyond > _TOO_LONG:
        raise BadData(
            reader.file, where,
            f"{beyond:.0%} of the requests of '{name}' exceed the {room:,.0f} tokens of {model.id}",
        )  # fmt: skip
    if beyond:
        reader.notes.append(f"{name}: {beyond:.2%} of its requests exceed {room:,.0f} tokens and are cut there")
    return np.minimum(inputs, room - 1.0), np.minimum(outputs, room - 1.0)


def _context(model: Model) -> int:
    return model.max_context or 10**8


def _rate(
    reader: _Reader, where: str, name: str, raw: dict[str, Any], total: float | None, trace: Trace | None
) -> float:
    file = reader.file
    if "share" in raw and "requests_per_s" in raw:
        raise BadData(file, f"{where}.requests_per_s", "give a share or a rate, not both")
    if "share" in raw:
        assert total is not None, "checked with the shares"
        rate = float(raw["share"]) * total
        if rate < _LEAST_RATE:
            raise BadData(file, f"{where}.share", f"comes to {rate:g} requests/s; leave out what is less than 0.001")
        return rate
    if "requests_per_s" in raw:
        return number(file, f"{where}.requests_per_s", raw["requests_per_s"], _LEAST_RATE, _MOST_RATE)
    if trace is None or trace.arrival_s is None or (trace.span_s or 0.0) < 60.0:
        raise BadData(file, f"{where}.requests_per_s", "missing: a rate, or a share of traffic.requests_per_s")
    minutes = np.bincount((trace.arrival_s // 60).astype(int))[: max(int((trace.span_s or 60.0) // 60), 1)]
    rate = float(np.quantile(minutes, _BUSY_MINUTE)) / 60.0
    if rate < _LEAST_RATE:
        raise BadData(file, f"{where}.requests_per_s", "missing: most minutes of the trace have no request")
    reader.notes.append(f"{name}: {rate:.3g} requests/s, the rate that 19 of 20 minutes of its trace do not exceed")
    return rate


def read_target(file: Path, where: str, raw: object) -> Target | None:
    if raw is None:
        return None
    if not isinstance(raw, dict) or len(raw) != 1:
        raise BadData(file, where, "write the percentile and its milliseconds, such as { p90 = 500 }")
    only_keys(file, where, raw, set(PERCENTILES))
    (key, value), = raw.items()  # fmt: skip
    milliseconds = number(file, f"{where}.{key}", value, 0.01, 1e8)
    return Target(seconds=milliseconds / 1e3, percentile=PERCENTILES[key])


def _models(reader: _Reader, raw: object, asked: set[str]) -> dict[str, ModelChoice]:
    found: dict[str, ModelChoice] = {}
    for name, entry in table(reader.file, "models", raw).items():
        where = f'models."{name}"'
        entry = table(reader.file, where, entry)
        only_keys(reader.file, where, entry, {"precisions", "kv", "stacks", *_DRAFTS})
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name))
        _once(reader.file, where, model.id, found)
        if model.id not in asked:
            reader.notes.append(f"{where} changes nothing: no class asks for {model.id}")
        choice = ModelChoice()
        kv = _list(reader.file, f"{where}.kv", entry.get("kv"), choice.kv_formats)
        for format in kv:
            if format not in KV_FORMATS:
                raise BadData(reader.file, f"{where}.kv", f"'{format}' is not one of {', '.join(KV_FORMATS)}")
        precisions = _list(reader.file, f"{where}.precisions", entry.get("precisions"), choice.precisions)
        for key, listed in (("precisions", precisions), ("kv", kv)):
            if not listed:
                raise BadData(reader.file, f"{where}.{key}", "is empty: leave the key out for the usual ones")
        for precision in precisions:
            look_up(reader.file, f"{where}.precisions", lambda p=precision, m=model: reader.catalog.precision(m, p))
        stacks: list[str] = []
        releases: dict[str, str] = {}
        for said in _list(reader.file, f"{where}.stacks", entry.get("stacks"), ()):
            stack, _, release = said.partition("==")
            stacks.append(look_up(reader.file, f"{where}.stacks", lambda s=stack: reader.catalog.stack(s)).id)
            if "==" in said:
                releases[stacks[-1]] = release_text(reader.file, f"{where}.stacks", release)
        found[model.id] = ModelChoice(
            precisions=precisions,
            kv_formats=kv,
            stacks=tuple(dict.fromkeys(stacks)),
            releases=releases,
            **_speculation(reader, where, entry, model),
        )
    return found


_DRAFTS = ("speculation", "text", "acceptance")


def _speculation(reader: _Reader, where: str, entry: dict[str, Any], model: Model) -> dict[str, Any]:
    """Ways to draft, each tried on the model."""
    file, found = reader.file, dict[str, Any]()
    if "text" in entry:
        found["text"] = text(file, f"{where}.text", entry["text"])
        if found["text"] not in TEXTS:
            raise BadData(file, f"{where}.text", f"'{found['text']}' is not one of {', '.join(TEXTS)}")
    if "acceptance" in entry:
        found["acceptance"] = number(file, f"{where}.acceptance", entry["acceptance"], 1, 1 + DEEPEST)
    if "speculation" in entry:
        ways = _list(file, f"{where}.speculation", entry["speculation"], ())
        if not ways:
            raise BadData(file, f"{where}.speculation", 'is empty: write ["none"] for none')
        for way in ways:
            if way != NO_SPECULATION:
                look_up(
                    file,
                    f"{where}.speculation",
                    lambda w=way: reader.catalog.speculation(
                        model, w, text=found.get("text", "chat"), length=found.get("acceptance")
                    ),
                )
        found["speculation"] = tuple(dict.fromkeys(ways))
    elif "acceptance" in entry:
        raise BadData(file, f"{where}.acceptance", "is of a way to draft, which `speculation` must name")
    return found


def release_text(file: Path, where: str, raw: object) -> str:
    """A release of an engine: 0.32.0, or llama.cpp's b6000."""
    said = text(file, where, raw)
    if not _RELEASE.match(said):
        raise BadData(file, where, f"'{said}' is no release of an engine, such as 0.32.0")
    return said


def _sharing(reader: _Reader, raw: object, classes: tuple[RequestClass, ...]) -> Sharing:
    """[hosting]: which models share replicas, and what that may cost in cold loads."""
    entry, asked = table(reader.file, "hosting", raw), tuple(dict.fromkeys(one.model for one in classes))
    only_keys(reader.file, "hosting", entry, set(Sharing.__struct_fields__))
    models = _hosted(reader, "hosting.models", entry.get("models"), asked) or asked
    pinned = _hosted(reader, "hosting.pinned", entry.get("pinned"), models)
    found = read_record(reader.file, "hosting", raw, Sharing, models=models, pinned=pinned)
    for key, needs in (("host_gb_per_s", ("host",)), ("disk_gb_per_s", ("disk", "start")), ("start_s", ("start",))):
        if key in entry and found.load_from not in needs:
            raise BadData(reader.file, f"hosting.{key}", f"has no meaning with load_from = '{found.load_from}'")
    return found


def _hosted(reader: _Reader, where: str, raw: object, among: tuple[str, ...]) -> tuple[str, ...]:
    found: list[str] = []
    for name in _list(reader.file, where, raw, ()):
        model = look_up(reader.file, where, lambda name=name: reader.catalog.model(name)).id
        if model not in among:
            whose = "asked for by no class" if where.endswith("models") else "not among hosting.models"
            raise BadData(reader.file, where, f"{model} is {whose}")
        if model in found:
            raise BadData(reader.file, where, f"{model} is there twice")
        found.append(model)
    if raw is not None and not found:
        others = "all" if where.endswith("models") else "none"
        raise BadData(reader.file, where, f"is empty: leave the key out for {others}")
    return tuple(found)


def _constraints(reader: _Reader, raw: object) -> Constraints:
    file, at = reader.file, "constraints"
    entry = table(file, at, raw)
    found = read_record(
        file, at, raw, Constraints,
        accelerators=_listed(reader, f"{at}.accelerators", entry.get("accelerators"), _accelerator),
        vendors=_listed(reader, f"{at}.vendors", entry.get("vendors"), _vendor),
        inventory=_by_accelerator(reader, f"{at}.inventory", entry.get("inventory", {}), Gpus),
        at_most=_by_accelerator(reader, f"{at}.at_most", entry.get("at_most", {}), Gpus),
        vendor_share=_vendor_shares(reader, f"{at}.vendor_share", entry.get("vendor_share", {})),
    )  # fmt: skip
    for name in found.inventory:
        if found.accelerators and name not in found.accelerators:
            raise BadData(file, f"{at}.inventory.{name}", f"is not among {at}.accelerators")
    return found


def _listed(reader: _Reader, where: str, raw: object, known_as: Callable[[_Reader, str, str], str]) -> tuple[str, ...]:
    """Names by their ids, each once."""
    return tuple(dict.fromkeys(known_as(reader, where, name) for name in _list(reader.file, where, raw, ())))


def _vendor_shares(reader: _Reader, where: str, raw: object) -> dict[str, float]:
    shares: dict[str, float] = {}
    for name, share in table(reader.file, where, raw).items():
        vendor = _vendor(reader, f"{where}.{name}", name)
        _once(reader.file, f"{where}.{name}", vendor, shares)
        shares[vendor] = number(reader.file, f"{where}.{name}", share, 0, 1)
    total = math.fsum(shares.values())
    if total > 1 + 1e-9:
        raise BadData(reader.file, where, f"the least shares add up to {total:g}, more than 1")
    if total > 1 - 1e-9 and sum(share > 0 for share in shares.values()) > 1:
        # Only numbers of GPUs whose prices match to the cent would do, however many it takes.
        raise BadData(reader.file, where, "the least shares add up to 1, which leaves nothing to choose: give less")
    return shares


def _prices(reader: _Reader, raw: object) -> Prices:
    file = reader.file
    entry = table(file, "prices", raw)
    only_keys(file, "prices", entry, {"kind", "usd_per_gpu_hour", "reserved_usd_per_gpu_hour", "discount"})
    discounts: dict[str, float] = {}
    for name, share in table(file, "prices.discount", entry.get("discount", {})).items():
        key = f"prices.discount.{name}"
        whom = _vendors(reader.catalog).get(name.casefold()) or _accelerator(reader, key, name)
        _once(file, key, whom, discounts)
        discounts[whom] = number(file, key, share, 0, MOST_DISCOUNT)
    return Prices(
        kinds=_kinds(file, entry.get("kind", "on-demand")),
        **{
            key: _by_accelerator(reader, f"prices.{key}", entry.get(key, {}), UsdPerGpuHour)
            for key in ("usd_per_gpu_hour", "reserved_usd_per_gpu_hour")
        },
        discount=discounts,
    )


def _kinds(file: Path, raw: object) -> tuple[str, ...]:
    """One kind, or several of which the first that an accelerator has a price of is taken."""
    found = texts(file, "prices.kind", [raw] if isinstance(raw, str) else raw)
    if not found:
        raise BadData(file, "prices.kind", "is empty: leave the key out for on-demand")
    return tuple(dict.fromkeys(found))


def _by_accelerator(reader: _Reader, where: str, raw: object, kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table(reader.file, where, raw).items():
        accelerator = _accelerator(reader, f"{where}.{name}", name)
        _once(reader.file, f"{where}.{name}", accelerator, found)
        found[accelerator] = read_value(reader.file, f"{where}.{name}", value, kind)
    return found


def _once(file: Path, where: str, name: str, others: Mapping[str, object]) -> None:
    """Names have aliases and any case, so that one thing can be there twice."""
    if name in others:
        raise BadData(file, where, f"{name} is there already, under another spelling")


def _accelerator(reader: _Reader, where: str, name: str) -> str:
    found: str = look_up(reader.file, where, lambda: reader.catalog.accelerator(name)).id
    return found


def _vendors(catalog: Catalog) -> dict[str, str]:
    """By their names in lower case."""
    return {accelerator.vendor.casefold(): accelerator.vendor for accelerator in catalog.accelerators.values()}


def _vendor(reader: _Reader, where: str, name: str) -> str:
    known = _vendors(reader.catalog)
    if name.casefold() not in known:
        raise BadData(reader.file, where, f"'{name}' is no vendor; known: {', '.join(sorted(known.values()))}")
    return known[name.casefold()]


def look_up(file: Path, where: str, find: Any) -> Any:
    """What a name stands for, or its fault with the place in this file."""
    try:
        return find()
    except CrosstieError as error:
        raise BadData(file, where, str(error)) from None


def _list(file: Path, where: str, raw: object, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if raw is None else texts(file, where, raw)
