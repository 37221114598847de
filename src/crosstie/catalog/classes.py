"""The classes of a workload file: their models, lengths, rates and targets, and what they bring along."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.lengths import Lengths, cut, read_lengths
from crosstie.catalog.library import Catalog
from crosstie.catalog.lora import lora_note, read_lora
from crosstie.catalog.reading import check_unique, in_form, number, only_keys, read_target, table, text
from crosstie.catalog.reuse import read_prefix, with_prefixes
from crosstie.catalog.sessions import read_sessions, read_shape, sessions_note
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.catalog.vision import read_images
from crosstie.core.errors import BadData, CrosstieError
from crosstie.core.model import Model
from crosstie.core.workload import Pictures, RequestClass, SessionTraffic, Target

_CLASS = {
    "name", "model", "share", "requests_per_s", "input", "output", "trace", "ttft_ms", "tpot_ms",
    "prefix", "images", "lora", "sessions", "turn_s",
}  # fmt: skip
# With more classes than this they are diverse enough without being cut at their medians.
_MANY_CLASSES = 20
# Requests beyond the model's context that a trace or the tail of a distribution may have; they are cut.
_TOO_LONG = 0.01
# Requests/s of a class, at the least: one in a quarter of an hour. Below, a whole replica for them is no question.
_LEAST_RATE = 1e-3
_MOST_RATE = 1e9
# A class gives its name to pools, and these to the gateway.
_NAME = re.compile(r"^[^\W_].{0,59}$")
# Of a turn's target, what its first token may take where nobody says it.
_FIRST_TOKEN = 0.25
# The rate of a trace at its peak: of its minutes, the one that 19 of 20 do not exceed.
_BUSY_MINUTE = 0.95


@dataclass(frozen=True, slots=True)
class ClassReader:
    """What every part of a file needs: names for the fault, the catalog, notes to add to, how many classes."""

    file: Path
    catalog: Catalog
    notes: list[str]
    classes: int


def read_classes(reader: ClassReader, raw: object, traffic: dict[str, Any]) -> tuple[RequestClass, ...]:
    file = reader.file
    if not isinstance(raw, list) or not raw:
        raise BadData(file, "class", "missing: write a [[class]] for every kind of request")
    entries = [table(file, f"class[{index}]", entry) for index, entry in enumerate(raw)]
    total = traffic.get("requests_per_s")
    if total is not None:
        total = number(file, "traffic.requests_per_s", total, _LEAST_RATE, _MOST_RATE)
        if len(entries) == 1 and not {"share", "requests_per_s", "trace", "sessions"} & set(entries[0]):
            # The only class has all of it; one with a trace has a rate of its own.
            entries = [{**entries[0], "share": 1.0}]
    if any("share" in entry for entry in entries):
        _check_shares(file, entries, total)
    classes = tuple(_class(reader, f"class[{index}]", entry, total) for index, entry in enumerate(entries))
    check_unique(file, "class", "name", [request_class.name for request_class in classes])
    return classes


def _check_shares(file: Path, entries: list[dict[str, Any]], total: float | None) -> None:
    if total is None:
        raise BadData(file, "traffic.requests_per_s", "missing: classes give a share, but a share of what?")
    for index, entry in enumerate(entries):
        if "share" not in entry:
            raise BadData(file, f"class[{index}].share", "missing: other classes give one, so all must")
        number(file, f"class[{index}].share", entry["share"], 0, 1)
    shares = math.fsum(entry["share"] for entry in entries)
    if abs(shares - 1.0) > 1e-3:
        raise BadData(file, "class", f"the shares add up to {shares:g}, not 1")


def _class(reader: ClassReader, where: str, raw: dict[str, Any], total: float | None) -> RequestClass:
    file = reader.file
    only_keys(file, where, raw, _CLASS)
    name = text(file, f"{where}.name", raw.get("name"))
    if not _NAME.match(name):
        raise BadData(file, f"{where}.name", "must begin with a letter or digit and have at most 60 characters")
    model = in_form(file, f"{where}.model", raw.get("model"), reader.catalog.model)
    ttft, tpot = (
        read_target(file, f"{where}.{key}", raw[key]) if key in raw else None for key in ("ttft_ms", "tpot_ms")
    )
    if "turn_s" in raw:
        ttft, tpot = _turn(reader, where, name, raw, ttft, model)
    trace: Trace | None = None
    sessions: SessionTraffic | None = None
    if "sessions" in raw:
        raw, sessions, trace = _sessions(reader, where, name, raw, _context(model), tpot)
        inputs, outputs = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    elif "trace" in raw:
        for key in ("input", "output"):
            if key in raw:
                raise BadData(file, f"{where}.{key}", "the class has a trace, which says its lengths")
        # A rate of its own makes the trace's times worthless, unless it tells how soon prompts come again.
        timed = "prefix" in raw or not ("share" in raw or "requests_per_s" in raw)
        trace = in_form(
            file, f"{where}.trace", raw["trace"], lambda given: read_trace(find_trace(given, file.parent), times=timed)
        )
        inputs, outputs = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
    else:
        inputs = read_lengths(file, f"{where}.input", raw.get("input"))
        outputs = read_lengths(file, f"{where}.output", raw.get("output"))
    pictures: Pictures | None = None
    if "images" in raw:
        # The lengths are those of the text.
        tokens, pictures = read_images(file, f"{where}.images", raw["images"], model)
        inputs = np.rint(inputs + tokens)
    inputs, outputs = _within_context(reader, where, name, model, inputs, outputs)
    slices = cut(
        inputs,
        outputs,
        paired=trace is not None,
        exempt=ttft.longest_exempt if ttft else 0.0,
        context=_context(model),
        halved=reader.classes <= _MANY_CLASSES,
    )
    rate = _rate(reader, where, name, raw, total, trace)
    if "prefix" in raw:
        prefix = read_prefix(file, f"{where}.prefix", raw["prefix"], trace)
        slices = with_prefixes(file, f"{where}.prefix", prefix, slices, inputs, rate, trace)
    if pictures is not None:
        slices = tuple(msgspec.structs.replace(band, pictures=pictures) for band in slices)
    lora = read_lora(file, f"{where}.lora", raw["lora"]) if "lora" in raw else None
    if lora is not None:
        reader.notes.append(lora_note(name, lora, rate))
    return RequestClass(
        name=name,
        model=model.id,
        requests_per_s=rate,
        slices=slices,
        ttft=ttft,
        tpot=tpot,
        lora=lora,
        sessions=sessions,
    )


def _turn(
    reader: ClassReader, where: str, name: str, raw: dict[str, Any], ttft: Target | None, model: Model
) -> tuple[Target, Target]:
    """A turn is its first token and the others one after the other: what its target leaves for each.

    The others are those of an answer that is as long, among all, as the turn may be slow.
    """
    file, at = reader.file, f"{where}.turn_s"
    if "sessions" not in raw:
        raise BadData(file, at, "is of classes with sessions; others have ttft_ms and tpot_ms")
    if "tpot_ms" in raw:
        raise BadData(file, at, "says what tpot_ms would: a turn is TTFT and its answer's tokens; give one of them")
    turn = read_target(file, at, raw["turn_s"], thousandths=False)
    session = table(file, f"{where}.sessions", raw["sessions"])
    outputs = read_shape(file, f"{where}.sessions", session, _context(model)).output
    first_s = ttft.seconds if ttft else _FIRST_TOKEN * turn.seconds
    tokens = max(float(np.quantile(outputs, turn.percentile)) - 1.0, 1.0)
    if first_s >= turn.seconds:
        raise BadData(file, at, f"{turn.seconds:g} s is no more than ttft_ms leaves to the first token")
    tpot = Target(seconds=(turn.seconds - first_s) / tokens, percentile=turn.percentile)
    reader.notes.append(
        f"{name}: a turn below {turn.seconds:g} s is a first token within {first_s:.3g} s and {tpot.seconds * 1e3:.3g} "
        f"ms for each other of an answer of {tokens + 1.0:,.0f} tokens, p{turn.percentile * 100:g}"
    )
    return ttft or Target(seconds=first_s, percentile=turn.percentile), tpot


def _sessions(
    reader: ClassReader, where: str, name: str, raw: dict[str, Any], context: int, tpot: Target | None
) -> tuple[dict[str, Any], SessionTraffic, Trace]:
    """What the class is by its sessions: a rate, and a trace whose hits are measured."""
    for key in ("input", "output", "trace", "requests_per_s", "share"):
        if key in raw:
            raise BadData(reader.file, f"{where}.{key}", "the class has sessions, which say its lengths and its rate")
    at = f"{where}.sessions"
    sessions, trace, requests_per_s = read_sessions(reader.file, at, name, raw["sessions"], context, tpot)
    reader.notes.append(sessions_note(name, sessions, trace, requests_per_s))
    prefix = {**table(reader.file, f"{where}.prefix", raw.get("prefix", {})), "measured": True}
    return {**raw, "requests_per_s": sessions.live * requests_per_s, "prefix": prefix}, sessions, trace


def _within_context(
    reader: ClassReader, where: str, name: str, model: Model, inputs: Lengths, outputs: Lengths
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
    reader: ClassReader, where: str, name: str, raw: dict[str, Any], total: float | None, trace: Trace | None
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


def look_up(file: Path, where: str, find: Any) -> Any:
    """What a name stands for, or its fault with the place in this file."""
    try:
        return find()
    except CrosstieError as error:
        raise BadData(file, where, str(error)) from None
