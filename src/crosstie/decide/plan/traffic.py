"""The requests of a simulation, as columns: drawn from a workload's classes, or as somebody recorded them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from crosstie.catalog.recorded_sessions import recorded_turns
from crosstie.catalog.traces import Floats, Ints, Trace
from crosstie.core.errors import BadInput
from crosstie.core.figures import plural
from crosstie.core.fleet import Fleet, ServedClass
from crosstie.core.workload import RequestClass, Slice, Workload
from crosstie.perf.hardware import Array
from crosstie.perf.rounding import nine_digits
from crosstie.route.lengths import Classes
from crosstie.sim.fleet import SimulatedRequest
from crosstie.sim.recorded import arrivals_of
from crosstie.sim.sessions import SessionLoad, replayed, shaped


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """In the order of arrival. `kinds` are indices into `classes`, which are names with their models."""

    classes: tuple[tuple[str | None, str], ...]
    arrival_s: Floats
    kinds: Ints
    input_tokens: Ints
    output_tokens: Ints
    # Of the prompt, what is in the cache wherever it goes; blocks of it, where the trace numbers them.
    cached_tokens: Ints | None = None
    prefixes: Sequence[tuple[int, ...]] | None = None
    # Whether the rate is the same all the time, so that a beginning in which the fleet fills says nothing.
    steady: bool = True
    # What was left out, in words.
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1]) if len(self) else 0.0

    def requests(self) -> Iterator[SimulatedRequest]:
        columns = (self.arrival_s, self.kinds, self.input_tokens, self.output_tokens)
        # Piece by piece: millions of Python numbers at once would take more memory than the simulation.
        for begin in range(0, len(self), _PIECE):
            piece = slice(begin, begin + _PIECE)
            rows = zip(*(column[piece].tolist() for column in columns), strict=True)
            cached = None if self.cached_tokens is None else self.cached_tokens[piece].tolist()
            for index, (at, kind, inputs, outputs) in enumerate(rows):
                name, model = self.classes[kind]
                prefix = self.prefixes[begin + index] if self.prefixes is not None else ()
                held = cached[index] if cached is not None else 0
                yield SimulatedRequest(at, model, inputs, outputs, name, prefix, cached_tokens=held)


_PIECE = 50_000

# Of closed loops, in times from one turn to the next: over how many sessions begin, after how many it is measured, and
# how many it is measured for at least; and turns that are measured where nobody says how many.
_RAMP, _SETTLED, _LEAST_MEASURED, _USUAL_TURNS = 8.0, 14.0, 6.0, 3000


@dataclass(frozen=True, slots=True, eq=False)
class ClosedTraffic:
    """Sessions that are at work at once, and beside them requests that come by the clock."""

    classes: tuple[tuple[str | None, str], ...]
    loads: tuple[SessionLoad, ...]
    others: Traffic | None
    ramp_s: float
    since_s: float
    span_s: float
    seed: int
    notes: tuple[str, ...] = ()
    steady = True


def closed(
    loads: Sequence[SessionLoad], others: Callable[[float], Traffic] | None, turns: int | None, seed: int,
    notes: Sequence[str] = (),
) -> ClosedTraffic:  # fmt: skip
    """`others`: for so many seconds. `turns`: to measure."""
    turn_s = max(load.turn_s for load in loads)
    measured = max((turns or _USUAL_TURNS) / sum(load.live for load in loads), 1.0 if turns else _LEAST_MEASURED)
    span_s = (_SETTLED + measured) * turn_s
    beside = others(span_s) if others is not None else None
    names = tuple((load.class_name, load.model) for load in loads)
    return ClosedTraffic(
        names + (beside.classes if beside else ()), tuple(loads), beside, _RAMP * turn_s, _SETTLED * turn_s, span_s,
        seed, tuple(notes),
    )  # fmt: skip


def sessions_of(workload: Workload, load: float, live: int | None) -> list[SessionLoad]:
    """The sessions of its classes; `live`: at once in all, in place of what the workload says, in its proportions."""
    asked = [(number, one, one.sessions) for number, one in enumerate(workload.classes) if one.sessions is not None]
    scale = load * (live / sum(sessions.live for _, _, sessions in asked) if live and asked else 1.0)
    return [
        SessionLoad(
            class_name=request_class.name, model=request_class.model, live=max(round(sessions.live * scale), 1),
            turns=sessions.turns, turn_s=sessions.pause_s + sessions.answer_s, make=shaped(sessions.shape, number),
            success_rate=sessions.success_rate,
        )
        for number, request_class, sessions in asked
    ]  # fmt: skip


def recorded_loads(
    trace: Trace, fleet: Fleet, class_name: str | None, live: int
) -> tuple[list[SessionLoad], list[str]]:
    """The sessions of a recording, so many of them at once."""
    kind = _class_of_trace(trace, fleet, class_name)
    longest = max((pool.max_context for pool in fleet.pools if kind is None or pool.model == kind.model), default=0)
    found, left_out = recorded_turns(trace, longest)
    lengths = [len(one) for one in found]
    pauses = [turn.pause_s for one in found for turn in one]
    notes = [f"{plural(left_out, 'session')} of more than {longest:,} tokens are left out"] if left_out else []
    tpot_s = kind.tpot.seconds if kind is not None and kind.tpot else 0.0
    answer_s = tpot_s * float(trace.output_tokens.mean())
    return [
        SessionLoad(
            class_name=kind.name if kind else None, model=kind.model if kind else fleet.pools[0].model, live=live,
            turns=fmean(lengths), turn_s=max(fmean(pauses) + answer_s, 1.0), make=replayed(found),
        )
    ], notes  # fmt: skip


def _class_of_trace(trace: Trace, fleet: Fleet, class_name: str | None) -> ServedClass | None:
    if class_name is not None:
        return _class_named(fleet, class_name)
    return Classes(fleet).of(fleet.pools[0].model, float(trace.input_tokens.mean()))


def _class_named(fleet: Fleet, name: str) -> ServedClass:
    known = {served_class.name: served_class for served_class in fleet.classes}
    if name not in known:
        raise BadInput(f"--class {name}: fleet '{fleet.name}' has {', '.join(known) or 'none'}")
    return known[name]


def drawn(
    rates: Array, slices: Sequence[Slice], count: int, chance: np.random.Generator
) -> tuple[Floats, Ints, Ints, Ints, Floats]:
    """Poisson traffic: when, of which slice, with which of its lengths, and what endless memory has of the prompt."""
    arrivals = np.cumsum(nine_digits(chance.exponential(1.0 / rates.sum(), count)))
    kinds = chance.choice(len(rates), count, p=rates / rates.sum())
    inputs, outputs, cached = np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count)
    places = chance.random(count)
    for kind, piece in enumerate(slices):
        mine = kinds == kind
        sample = np.array(piece.sample, np.int64)
        rows = (places[mine] * len(sample)).astype(np.int64)
        inputs[mine], outputs[mine] = sample[rows].T
        if piece.cached_sample:
            cached[mine] = np.array(piece.cached_sample)[rows]
    return arrivals, kinds, inputs, outputs, cached


def poisson(workload: Workload, count: int, requests_per_s: float | None, load: float, seed: int) -> Traffic:
    """`requests_per_s`: of all classes together, in place of the workload's peak; `load`: times that."""
    parts = [(number, one, piece) for number, one in enumerate(workload.classes) for piece in one.slices]
    rates = np.array([request_class.requests_per_s * piece.share for _, request_class, piece in parts])
    rates *= load * (requests_per_s / rates.sum() if requests_per_s else 1.0)
    slices = [piece for _, _, piece in parts]
    at, kinds, inputs, outputs, cached = drawn(rates, slices, count, np.random.default_rng(seed))
    endless = [one.name for one in workload.classes if one.prefix is not None and one.prefix.measured]
    numbers = np.array([number for number, _, _ in parts])
    return Traffic(
        tuple((request_class.name, request_class.model) for request_class in workload.classes),
        at,
        numbers[kinds],
        inputs,
        outputs,
        cached.astype(np.int64) if cached.any() else None,
        notes=tuple(
            f"class {name}: prompts find what endless memory would have of them; --trace replays its conversations"
            for name in endless
        ),
    )


def recorded(
    trace: Trace, fleet: Fleet, *, class_name: str | None, requests_per_s: float | None, load: float, count: int | None,
    seed: int,
) -> Traffic:  # fmt: skip
    """At the trace's own times, stretched to a rate where one is given. Requests that say no class belong to the one
    that the gateway would put them into."""
    classes = {served_class.name: served_class for served_class in fleet.classes}
    known = ", ".join(classes) or "none"
    if class_name is not None:
        _class_named(fleet, class_name)
    unknown = {one for one in trace.classes or () if one is not None} - set(classes)
    if class_name is None and unknown:
        raise BadInput(
            f"{trace.file}: has requests of {', '.join(sorted(unknown))}, but fleet '{fleet.name}' has {known}; "
            "--class NAME has them all belong to another"
        )
    models = sorted({pool.model for pool in fleet.pools})
    if class_name is None and trace.classes is None and len(models) > 1:
        raise BadInput(f"{trace.file}: does not say which of {', '.join(models)} it asks for; --class NAME does")
    rows, notes = _short_enough(trace, fleet, models if class_name is None else [classes[class_name].model])
    rows = rows[:count]
    rate = requests_per_s or _own_rate(trace, rows)
    names = _names(trace, rows, fleet, class_name, models[0])
    found = sorted(set(names), key=lambda name: (name is None, name))
    place = {name: number for number, name in enumerate(found)}
    return Traffic(
        tuple((name, classes[name].model if name is not None else models[0]) for name in found),
        arrivals_of(trace, rows, rate * load if rate and (requests_per_s or load != 1.0) else None, seed=seed),
        np.array([place[name] for name in names]),
        trace.input_tokens[rows],
        trace.output_tokens[rows],
        prefixes=None if trace.blocks is None else [trace.blocks[row] for row in rows],
        steady=False,
        notes=(*notes, *(f"class {name}: the trace has no request of it" for name in classes if name not in place)),
    )


def _own_rate(trace: Trace, rows: Ints) -> float | None:
    if trace.arrival_s is None or len(rows) < 2:
        return None
    span = float(trace.arrival_s[rows[-1]] - trace.arrival_s[rows[0]])
    return (len(rows) - 1) / span if span else None


def _short_enough(trace: Trace, fleet: Fleet, models: Sequence[str]) -> tuple[Ints, list[str]]:
    longest = max((pool.max_context for pool in fleet.pools if pool.model in models), default=0)
    rows = np.flatnonzero(trace.input_tokens + trace.output_tokens <= longest)
    if not len(rows):
        raise BadInput(
            f"{trace.file}: all its requests have more than the {longest:,} tokens that fleet '{fleet.name}' takes; "
            "a pool with a longer max_context would take them"
        )
    long = len(trace) - len(rows)
    return rows, [f"{long:,} of {len(trace):,} requests have more than {longest:,} tokens and are left out"] * bool(
        long
    )


def _names(trace: Trace, rows: Ints, fleet: Fleet, class_name: str | None, model: str) -> list[str | None]:
    if class_name is not None:
        return [class_name] * len(rows)
    said = trace.classes
    unnamed = Classes(fleet)

    def nearest(row: int) -> str | None:
        served_class = unnamed.of(model, float(trace.input_tokens[row]))
        return served_class.name if served_class is not None else None

    return [(said[row] if said is not None else None) or nearest(row) for row in rows.tolist()]


def of_means(fleet: Fleet) -> Workload:
    """The classes of a fleet file, which says no more of lengths than their means."""
    asked = [served_class for served_class in fleet.classes if served_class.requests_per_s > 0]
    if not asked:
        raise BadInput(
            f"fleet '{fleet.name}' has no class with requests_per_s, so nothing says what is sent: "
            "--workload FILE or --trace FILE does"
        )
    return Workload(
        name=fleet.name,
        classes=tuple(
            RequestClass(
                name=served_class.name,
                model=served_class.model,
                requests_per_s=served_class.requests_per_s,
                slices=(_slice(served_class.input_tokens, served_class.output_tokens),),
                ttft=served_class.ttft,
                tpot=served_class.tpot,
            )
            for served_class in asked
        ),
        notes=("every request has its class's mean lengths; --workload or --trace says how they scatter",),
    )


def _slice(inputs: float, outputs: float) -> Slice:
    input_tokens, output_tokens = math.ceil(inputs), math.ceil(outputs)
    return Slice(
        share=1.0, input_tokens=inputs, output_tokens=outputs, longest_input=input_tokens,
        longest_output=output_tokens, sample=((input_tokens, output_tokens),),
    )  # fmt: skip
