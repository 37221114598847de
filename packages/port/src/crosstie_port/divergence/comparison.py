"""Two recordings of one model on one input: the first module beyond what rounding explains, and the likely cause.

Errors grow along a model, so no module is held to a fixed bound. What went into it was recorded too: its output may be
as far off as its input was, times what a module may amplify, plus the rounding of its own arithmetic. The first that is
further off did something else. `docs/diff.md` derives the constants.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.core.errors import BadInput
from crosstie_port.divergence.causes import cause_of
from crosstie_port.divergence.digest import MASK, Floats, TensorSummary, matrix_size, normed_rows, sampled_rows
from crosstie_port.divergence.pair import BesideTensors, Cause, is_rotary
from crosstie_port.divergence.records import RecordedTensor, Recording, read
from crosstie_port.divergence.routing import MARGIN, TURNS, RoutingFlips
from crosstie_port.divergence.weights import relation

# Half the distance from 1 to the next number, relative: what one rounding does at most.
ROUNDING = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e4m3fnuz": 2.0**-4, "float8_e5m2": 2.0**-3, "float8_e5m2fnuz": 2.0**-3,
}  # fmt: skip
# Roundings that a module's own arithmetic may add up to, and by how much it may amplify what came in.
OWN_ROUNDINGS = 4.0
AMPLIFIES = 4.0
# Weights and what they are multiplied with are each rounded once to a narrower type: two of its roundings, which a sum
# over many products averages down (an H200's vLLM in FP8 beside BF16: 0.85 of one in its first product).
_NARROW = 2.0
# Code between two modules does several operations: a rotation, scores, a softmax, a weighted sum. A softmax turns the
# relative error of its scores into one of its weights that is as many times larger as the scores are.
BETWEEN = 4
AMPLIFIES_BETWEEN = 8.0
# Of the tokens of a router, so many may choose another expert: two that score the same up to rounding.
NEAR_TIES = 0.25
Excused = dict[int, set[int]]


class ComparedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that both have."""

    module: str
    kind: str
    call: int
    # "output 0", or "input 0" where the code of the module around it made it.
    what: str
    dtype: str
    error: float
    allowed: float
    # The largest error of what it was made of.
    before: float
    identical: bool


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    step: ComparedTensor
    # Where to look, in words.
    where: str
    causes: list[Cause]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    # "same", "diverges" at one module, or "drifts": no module stands out and the sum is more than rounding explains.
    verdict: str
    first: Divergence | None
    # Modules whose tensors were compared; those of one recording only, or of another shape.
    compared: int
    not_compared: list[str]
    # Tensors with the same bits on both, before the first that is not.
    identical: int
    # The largest error, and that which rounding explains at the end of so many modules.
    largest_error: float
    explained: float
    # Routers that chose other experts for some tokens, scores being equal up to rounding.
    flips: list[RoutingFlips]
    machines: list[dict[str, str]]
    # Where weights are of other types: the largest error that was allowed for it, and no fault below that is seen.
    hides: float
    steps: list[ComparedTensor]

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.verdict}: {self.compared} modules, error {self.largest_error:.2g}"
        cause = self.first.causes[0].what if self.first.causes else "no known cause"
        return f"{self.verdict} at {self.first.step.module}: {cause}"


def compare(a: str | Path | Recording, b: str | Path | Recording) -> Comparison:
    """`a` is taken for right. Raises BadInput where the two are not of the same model, input and seed."""
    names = [str(one) if isinstance(one, str | Path) else "the recording" for one in (a, b)]
    one, other = (read(Path(each)) if isinstance(each, str | Path) else each for each in (a, b))
    _refuse(one, other, *names)
    return _Walk(one, other).result()


def _refuse(a: Recording, b: Recording, first: str, second: str) -> None:
    """One sentence where a comparison would say nothing."""
    both = f"{first} and {second}"
    for name, of_a, of_b in (
        ("seeds", a.seed, b.seed),
        ("widths of a head", a.head, b.head),
        ("numbers of ranks", a.machine.get("ranks", "1"), b.machine.get("ranks", "1")),
        ("ranks", a.machine.get("rank", "0"), b.machine.get("rank", "0")),
    ):
        if of_a != of_b:
            raise BadInput(f"{both} have other {name}, {of_a} and {of_b}: record one of them again")
    shared = a.weights.keys() & b.weights.keys()
    alike = [name for name in shared if math.prod(a.weights[name]) == math.prod(b.weights[name])]
    if 2 * len(alike) < min(len(a.weights), len(b.weights)):
        odd = sorted((a.weights.keys() ^ b.weights.keys()) | (shared - set(alike)))[0]
        raise BadInput(f"{both} are of other models: {odd} is {a.weights.get(odd)} and {b.weights.get(odd)}")
    there = {entry.key: entry for entry in b.entries}
    for entry in _given(a):
        match = there.get(entry.key)
        if match is None:
            raise BadInput(f"{both} begin with other modules: {entry.module or 'the model'} is in the first only")
        error = error_between(a.of(entry), b.of(match), set(), a.seed)
        if error is None or error > own_rounding(a.of(entry), b.of(match)):
            raise BadInput(f"{both} have other inputs: {_what(entry)} of {entry.module or 'the model'} differs")


def _given(recording: Recording) -> Iterator[RecordedTensor]:
    """What went into the module that began first."""
    for entry in recording.entries:
        if entry.side != "in" or entry.module != recording.entries[0].module:
            return
        yield entry


def _what(entry: RecordedTensor) -> str:
    return f"{'input' if entry.side == 'in' else 'output'} {entry.name}"


class _Walk:
    """Along the first recording, in the order of its run."""

    def __init__(self, a: Recording, b: Recording):
        self.a, self.b = a, b
        self.there = {entry.key: entry for entry in b.entries}
        self.margins = {entry.key: a.of(entry) for entry in a.entries if entry.name.endswith(MARGIN)}
        # The largest error so far inside each module, its own inputs among them.
        self.inside: dict[str, float] = {}
        # Leaf modules that ended inside each, for the roundings of one that has others in it.
        self.ended: Counter[str] = Counter()
        self.inputs: dict[tuple[str, int], tuple[float, int]] = {}
        self.made: set[tuple[int, int]] = set()
        self.excused: Excused = {}
        self.steps: list[ComparedTensor] = []
        self.not_compared: list[str] = []
        self.flips: list[RoutingFlips] = []
        # Modules in which tokens are grouped by what a router chose for them, once that differs; and for how many.
        self.dispatched: dict[str, int] = {}
        # Whether tokens went elsewhere that no sample shows.
        self.flipped = False
        self.explained = 0.0
        # What modules may differ by whose weights are of another type in the other recording.
        self.narrowed = {
            name.rpartition(".")[0]: _NARROW * ROUNDING[a.narrow.get(name) or b.narrow[name]]
            for name in a.narrow.keys() | b.narrow.keys()
            if a.narrow.get(name) != b.narrow.get(name) and (a.narrow.get(name) or b.narrow[name]) in ROUNDING
        }

    def result(self) -> Comparison:
        first, modules = None, set()
        for entry in self.a.entries:
            if entry.name.endswith(MARGIN):
                continue
            match = self.there.get(entry.key)
            step = self._step(entry, match) if match is not None and not self._regrouped(entry) else None
            if match is None or step is None:
                self.not_compared.append(f"{entry.module or 'the model'} {_what(entry)}")
                continue
            modules.add(entry.module)
            known = (entry.summary, match.summary) in self.made
            self.made.add((entry.summary, match.summary))
            if known and entry.side == "in":
                # Judged where it was made.
                continue
            self.steps.append(step)
            if step.error > step.allowed:
                first = Divergence(step=step, where=self._where(entry), causes=self._causes(entry, match))
                break
        if not modules:
            raise BadInput("the two recordings have no module in common")
        return self._told(first, len(modules))

    def _told(self, first: Divergence | None, modules: int) -> Comparison:
        largest = max((step.error for step in self.steps), default=0.0)
        # What a token that went elsewhere does to those after it is no drift.
        drifts = first is None and not self.flipped and largest > self.explained
        identical = next((i for i, step in enumerate(self.steps) if not step.identical), len(self.steps))
        return Comparison(
            verdict="diverges" if first else "drifts" if drifts else "same", first=first, compared=modules,
            not_compared=self.not_compared, identical=identical, largest_error=largest, explained=self.explained,
            flips=self.flips, machines=[_machine(self.a), _machine(self.b)], steps=self.steps,
            hides=max((step.allowed for step in self.steps), default=0.0) if self.narrowed else 0.0,
        )  # fmt: skip

    def _regrouped(self, entry: RecordedTensor) -> bool:
        """Whether it holds the tokens of an expert, and some of those went to another."""
        if entry.side == "out" and self.dispatched.pop(entry.module, 0):
            return False
        inside = next((rows for name, rows in self.dispatched.items() if name in _ancestors(entry.module)), None)
        return inside is not None and matrix_size(self.a.of(entry).shape)[0] != inside

    def _step(self, entry: RecordedTensor, match: RecordedTensor) -> ComparedTensor | None:
        a, b = self.a.of(entry), self.b.of(match)
        if a.is_whole != b.is_whole:
            return None
        rows = matrix_size(a.shape)[0]
        error = error_between(a, b, self.excused.get(rows, set()), self.a.seed, typical=self.flipped)
        if error is None:
            return None
        before, allowed = self._allowed(entry, a, b)
        if entry.side == "out" and (entry.module, entry.call, "out", f"{entry.name}{MARGIN}") in self.margins:
            # The set and the order of what a router chose: by the latter its experts' tokens lie.
            (chosen, _, order), (chosen_b, _, order_b) = (summary.hash.partition(" ") for summary in (a, b))
            self.flipped |= chosen != chosen_b
            if order != order_b:
                self.dispatched[_parent(entry.module)] = rows
        if a.is_whole and a.dtype != MASK and error and entry.side == "out":
            error = self._ties(entry, a, b, before)
        self._note(entry, error, matrix_size(a.shape)[1])
        return ComparedTensor(
            module=entry.module, kind=entry.kind, call=entry.call, what=_what(entry),
            dtype=a.dtype if a.dtype == b.dtype else f"{a.dtype}, {b.dtype}", error=error,
            allowed=0.0 if a.is_whole else allowed, before=before, identical=a.hash == b.hash,
        )  # fmt: skip

    def _allowed(self, entry: RecordedTensor, a: TensorSummary, b: TensorSummary) -> tuple[float, float]:
        name, parent = entry.module, _parent(entry.module)
        width = 0
        if entry.side == "in":
            before, roundings = self.inside.get(parent, 0.0), BETWEEN
        elif entry.leaf:
            before, width = self.inputs.get((name, entry.call), (self.inside.get(parent, 0.0), 0))
            roundings = 1
        else:
            before, roundings = self.inside.get(name, 0.0), max(self.ended[name], 1)
        rounding = own_rounding(a, b, width)
        own = max(rounding * math.sqrt(roundings), self.narrowed.get(name, 0.0))
        if not a.is_whole:
            most = max([rounding, *self.narrowed.values()])
            self.explained = max(self.explained, most * math.sqrt(1 + self.ended[""]))
        return before, (AMPLIFIES_BETWEEN if entry.side == "in" else AMPLIFIES) * before + own

    def _note(self, entry: RecordedTensor, error: float, width: int) -> None:
        name = entry.module
        if entry.side == "in":
            if entry.place == 0 and not entry.leaf:
                self.inside[name], self.ended[name] = 0.0, 0
            was, widest = self.inputs.get((name, entry.call), (0.0, 0))
            self.inputs[name, entry.call] = max(was, error), max(widest, width)
        elif entry.leaf and entry.place == 0:
            for above in _ancestors(name):
                self.ended[above] += 1
        for above in (name, *_ancestors(name)):
            self.inside[above] = max(self.inside.get(above, 0.0), error)

    def _ties(self, entry: RecordedTensor, a: TensorSummary, b: TensorSummary, before: float) -> float:
        """Indices that differ where what they were chosen by is equal up to rounding: by the margins, where they are
        known, else if few do. A token behind one that went elsewhere attends to it, and its scores are further off."""
        rows = matrix_size(a.shape)[0]
        known = self.excused.get(rows, set())
        flipped, margins = _differing_rows(a, b, self.a.seed) - known, self._margins(entry)
        if not flipped:
            return 0.0 if known or margins else math.inf
        off = self._scores_off(entry, before)
        # Of a token whose margin is not kept, nothing is known.
        unexplained = [row for row in flipped if margins.get(row, 0.0) > TURNS * off] if margins else flipped
        few = max(NEAR_TIES * min(rows, len(a.rows)), 1)
        if len(unexplained) > (few if known or not margins else 0):
            return math.inf
        self.excused[rows], self.flipped = known | flipped, True
        largest = max((float(margins[row]) for row in flipped if row in margins), default=math.nan)
        self.flips.append(
            RoutingFlips(
                module=entry.module, tokens=len(flipped), of=min(rows, len(a.rows)), largest_margin=largest,
                scores_off=off,
            )
        )  # fmt: skip
        return 0.0

    def _margins(self, entry: RecordedTensor) -> dict[int, float]:
        """By row, in the first recording."""
        kept = self.margins.get((entry.module, entry.call, "out", f"{entry.name}{MARGIN}"))
        if kept is None:
            return {}
        # A column, so the mean of a row is its value.
        pairs = zip(normed_rows(kept.shape, self.a.seed).tolist(), kept.rows[:, 1].tolist(), strict=True)
        return {row: margin for row, margin in pairs if margin >= 0.0}

    def _scores_off(self, entry: RecordedTensor, before: float) -> float:
        mine = [
            step.error for step in self.steps
            if (step.module, step.call) == (entry.module, entry.call) and step.what.startswith("output")
        ]  # fmt: skip
        return max([before, *mine])

    def _where(self, entry: RecordedTensor) -> str:
        if entry.side == "out":
            own = "" if entry.leaf else "'s own code, after the modules inside it"
            return f"in {entry.module or 'the model'}{own}"
        parent = _parent(entry.module) or "the model"
        earlier = [step.module for step in self.steps[:-1] if step.what.startswith("output")]
        after = f"after {earlier[-1]} and " if earlier else ""
        return f"in the code of {parent}, {after}before {entry.module or 'the model'}"

    def _causes(self, entry: RecordedTensor, match: RecordedTensor) -> list[Cause]:
        a, b = self.a.of(entry), self.b.of(match)
        inputs = self.inputs.get((entry.module, entry.call), (0.0, 0))[1]
        alike = entry.side == "out" and entry.module not in self.narrowed
        own = relation(entry.module, self.a.sampled, self.b.sampled) if alike else None
        return cause_of(
            entry, a, b, own_rounding(a, b, inputs), BesideTensors(
                settings=self.a.settings, seed=self.a.seed, weights=own, suspects=self._suspects(), kind=match.kind,
                margins=self._margins(entry), scores_off=self._scores_off(entry, 0.0),
            ),
        )  # fmt: skip

    def _suspects(self) -> list[str]:
        """What attention goes by, without that which was compared before and agrees."""
        agreed = {step.dtype == MASK for step in self.steps[:-1]}
        turned = {step.module for step in self.steps[:-1] if is_rotary(step.kind)}
        turns = any(is_rotary(entry.kind) for entry in self.a.entries)
        return ["the rotary angles"] * (turns and not turned) + ["the mask"] * (True not in agreed)


def _machine(recording: Recording) -> dict[str, str]:
    kinds = sorted(set(recording.narrow.values()))
    return recording.machine | ({"weights": f"weights in {' and '.join(kinds)}"} if kinds else {})


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = _parent(name)
        yield name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def own_rounding(a: TensorSummary, b: TensorSummary, width: int = 0) -> float:
    """What one operation may add: roundings of the result in the coarser of the two types, or those of a sum over as
    many products as the input is wide, which is taken in float32."""
    unit = max(ROUNDING.get(a.dtype, ROUNDING["float32"]), ROUNDING.get(b.dtype, ROUNDING["float32"]))
    terms = max(width, a.shape[-1] if a.shape else 1, 1)
    return OWN_ROUNDINGS * max(unit, ROUNDING["float32"] * math.sqrt(terms))


def error_between(
    a: TensorSummary, b: TensorSummary, excused: set[int], seed: int, typical: bool = False
) -> float | None:
    """Relative, of the worst row, head or sample; infinite where one of them is no number; None for other shapes.
    `typical`: of the middle row, where some rows are off for a reason that is known."""
    if a.shape != b.shape:
        return None
    if a.hash == b.hash and a.dtype == b.dtype:
        return 0.0
    if (a.nans, a.infinities) != (b.nans, b.infinities):
        return math.inf
    kept = [i for i, row in enumerate(sampled_rows(a.shape, seed)) if row not in excused]
    # A row whose values are tiny beside the others' is made of their rounding errors.
    mean = a.norm / math.sqrt(max(a.elements, 1))
    worst: Callable[[Floats], Any] = np.median if typical else np.max
    found = [_of_samples(a.grid()[kept], b.grid()[kept], 0.01 * mean, worst)]
    normed = [i for i, row in enumerate(normed_rows(a.shape, seed)) if row not in excused]
    floor = 0.01 * mean * math.sqrt(a.shape[-1] if a.shape else 1)
    found.append(_of_norms(a.rows[normed, 0], b.rows[normed, 0], floor, worst))
    if not typical:
        spread = math.sqrt(float(np.mean(a.groups[:, 0] ** 2))) if len(a.groups) else 0.0
        found.append(_of_norms(a.groups[:, 0], b.groups[:, 0], 0.1 * spread, worst))
    return max(found)


def _of_samples(a: Floats, b: Floats, floor: float, worst: Callable[[Floats], Any]) -> float:
    sound = np.isfinite(a) & np.isfinite(b)
    if (np.isfinite(a) != np.isfinite(b)).any():
        return math.inf
    if not sound.any():
        return 0.0
    count = np.maximum(sound.sum(1), 1)
    away = np.sqrt((np.where(sound, b - a, 0.0) ** 2).sum(1) / count)
    size = np.maximum(np.sqrt((np.where(sound, a, 0.0) ** 2).sum(1) / count), floor)
    return float(worst(np.where(away > 0.0, away / np.where(size > 0.0, size, 1e-300), 0.0)))


def _of_norms(a: Floats, b: Floats, floor: float, worst: Callable[[Floats], Any]) -> float:
    if not len(a):
        return 0.0
    away, size = np.abs(a - b), np.maximum(a, floor)
    return float(worst(np.where(away > 0.0, away / np.where(size > 0.0, size, 1e-300), 0.0)))


def _differing_rows(a: TensorSummary, b: TensorSummary, seed: int) -> set[int]:
    found = {int(row) for i, row in enumerate(sampled_rows(a.shape, seed)) if (a.grid()[i] != b.grid()[i]).any()}
    by_norm: Sequence[int] = [int(row) for row in normed_rows(a.shape, seed)]
    return found | {row for i, row in enumerate(by_norm) if (a.rows[i] != b.rows[i]).any()}
