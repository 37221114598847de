"""Why two answers differ: which assumption makes which part of the difference, and what is left unexplained.

A million output tokens cost the price of a GPU-hour over the tokens that it sells. The price and the share that is sold
are factors of their own; what a GPU gives is the performance model's, which is asked again with lengths, replica and
load of one answer and the other. These are swapped in every order, and each gets the mean of what it changed (Shapley's
value), so that no order is preferred and the parts add up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.core.question import BuyersQuestion, Reckoning, differing
from crosstie.perf.estimate import estimate

LENGTHS, REPLICA, DRAFTS, LOAD, HEADROOM = "lengths", "replica", "speculation", "load", "headroom"
PRICE, SOLD, LEFT = "price", "share sold", "left"
# Parts of what a GPU gives that the performance model tells apart.
_MODELLED = (LENGTHS, REPLICA, DRAFTS, LOAD)
RATE = "output tokens/s a GPU"
USD = "USD per million output tokens"
# A part below this share of the figure is not worth a line.
WORTH_SAYING = 0.005


@dataclass(frozen=True, slots=True)
class SavedAnswer:
    """What a saved answer says of itself; a scorecard has one a scenario."""

    name: str
    question: BuyersQuestion
    reckoned: list[Reckoning]


@dataclass(frozen=True, slots=True)
class DifferencePart:
    """One assumption: what it is in each answer, and its factor between the first's figure and the second's."""

    name: str
    first: str
    second: str
    factor: float


@dataclass(frozen=True, slots=True)
class FigureDifference:
    """Of one model on one accelerator."""

    model: str
    accelerator: str
    # RATE, where one of the answers has no price.
    unit: str
    first: float
    second: float
    first_80: tuple[float, float] | None
    second_80: tuple[float, float] | None
    # The largest first; what is left comes last.
    parts: list[DifferencePart]

    @property
    def left(self) -> float:
        """The factor that no assumption explains."""
        return next(part.factor for part in self.parts if part.name == LEFT)

    @property
    def agree(self) -> bool:
        """Whether their 80% intervals overlap, or the figures are equal."""
        mine, theirs = self.first_80 or (self.first, self.first), self.second_80 or (self.second, self.second)
        return mine[0] <= theirs[1] * 1.0001 and theirs[0] <= mine[1] * 1.0001


@dataclass(frozen=True, slots=True)
class Reconciled:
    first: SavedAnswer
    second: SavedAnswer
    # Assumptions that differ, by name.
    assumptions: list[str]
    differences: list[FigureDifference]
    # Accelerators that only one of them has.
    alone: list[str]


class _Saved(msgspec.Struct, frozen=True):
    assumptions: dict[str, Any]
    reckoned: list[Reckoning]
    scenario: str = ""


class _Document(msgspec.Struct, frozen=True):
    scenarios: list[_Saved] = []
    assumptions: dict[str, Any] | None = None
    reckoned: list[Reckoning] = []


def read_answers(file: Path) -> list[SavedAnswer]:
    """From what `--json` printed or `plan --save` kept."""
    try:
        document = msgspec.json.decode(file.read_bytes(), type=_Document)
        rest = [] if document.assumptions is None else [_Saved(document.assumptions, document.reckoned)]
        saved = [*document.scenarios, *rest]
        answers = [
            SavedAnswer(row.scenario or file.stem, msgspec.convert(row.assumptions, BuyersQuestion), row.reckoned)
            for row in saved
        ]
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadData(file, "", f"is no answer that --json printed: {error}") from None
    if not answers:
        raise BadData(file, "assumptions", "missing: ask again, earlier versions did not say what they assume")
    return answers


def chosen(first: Sequence[SavedAnswer], second: Sequence[SavedAnswer]) -> tuple[SavedAnswer, SavedAnswer]:
    """Of answers with several scenarios those that are about the same model and accelerators."""

    def common(pair: tuple[SavedAnswer, SavedAnswer]) -> tuple[int, int]:
        first_rows, other = ({(row.model, row.accelerator) for row in answer.reckoned} for answer in pair)
        lengths = [{(row.input_tokens, row.output_tokens) for row in answer.reckoned} for answer in pair]
        return len(first_rows & other), len(lengths[0] & lengths[1])

    pairs = [(saved_answer, other) for saved_answer in first for other in second]
    return max(pairs, key=common)


def reconcile(catalog: Catalog, first: SavedAnswer, second: SavedAnswer) -> Reconciled:
    mine, theirs = _first_of_each(first), _first_of_each(second)
    shared = [key for key in mine if key in theirs]
    if not shared:
        have = [", ".join(sorted({f"{m} on {a}" for m, a in rows})) or "nothing" for rows in (mine, theirs)]
        raise BadInput(f"nothing in common: {first.name} has {have[0]}; {second.name} has {have[1]}")
    differences = [_difference(catalog, mine[key], theirs[key]) for key in shared]
    alone = [accelerator for model, accelerator in mine.keys() ^ theirs.keys()]
    return Reconciled(
        first, second, differing(first.question, second.question), [gap for gap in differences if gap], sorted(alone)
    )


def _first_of_each(answer: SavedAnswer) -> dict[tuple[str, str], Reckoning]:
    """Where an accelerator has several pools or layouts, the first: answers have what matters most first."""
    first: dict[tuple[str, str], Reckoning] = {}
    for row in answer.reckoned:
        first.setdefault((row.model, row.accelerator), row)
    return first


def _difference(catalog: Catalog, mine: Reckoning, other: Reckoning) -> FigureDifference | None:
    rates = mine.output_tokens_per_s_per_gpu, other.output_tokens_per_s_per_gpu
    if not rates[0] or not rates[1]:
        return None
    usd = mine.usd_per_mtok, other.usd_per_mtok
    # More tokens are fewer dollars.
    sign, parts = 1.0, list[DifferencePart]()
    figures, intervals = (rates[0], rates[1]), (mine.tokens_80, other.tokens_80)
    if usd[0] is not None and usd[1] is not None:
        sign, figures, intervals = -1.0, (usd[0], usd[1]), (mine.usd_per_mtok_80, other.usd_per_mtok_80)
        prices = [f"${row.usd_per_gpu_hour:.2f}/h ({row.price})" for row in (mine, other)]
        paid = (usd[0] * rates[0] * mine.utilisation, usd[1] * rates[1] * other.utilisation)
        parts.append(DifferencePart(PRICE, prices[0], prices[1], paid[1] / paid[0]))
        sold = [f"{row.utilisation:.0%}" for row in (mine, other)]
        parts.append(DifferencePart(SOLD, sold[0], sold[1], mine.utilisation / other.utilisation))
    modelled = _modelled(catalog, mine, other)
    if modelled is None:
        # What the answers themselves say is the replica's, the load's and the headroom's together.
        modelled = {REPLICA: math.log(rates[1] / rates[0])}
    else:
        modelled[HEADROOM] = math.log(other.filled / mine.filled)
    parts += [
        DifferencePart(name, *_words(name, mine, other), factor=math.exp(sign * log)) for name, log in modelled.items()
    ]
    parts = [part for part in parts if abs(math.log(part.factor)) > WORTH_SAYING]
    parts.sort(key=lambda part: -abs(math.log(part.factor)))
    left = figures[1] / figures[0] / math.prod(part.factor for part in parts)
    parts.append(DifferencePart(LEFT, "", "", left))
    return FigureDifference(mine.model, mine.accelerator, USD if sign < 0 else RATE, *figures, *intervals, parts=parts)


def _modelled(catalog: Catalog, first: Reckoning, other: Reckoning) -> dict[str, float] | None:
    """By assumption its part of the logarithm of the second's rate over the first's, by the performance model; None
    where that does not know one of the replicas."""
    asked: dict[frozenset[str], float] = {}

    def rate(swapped: frozenset[str]) -> float:
        if swapped not in asked:
            asked[swapped] = math.log(_rate(catalog, *(other if name in swapped else first for name in _MODELLED)))
        return asked[swapped]

    try:
        return _shapley(rate, [name for name in _MODELLED if len(set(_words(name, first, other))) > 1])
    except CrosstieError:
        return None


def _shapley(value: Callable[[frozenset[str]], float], names: Sequence[str]) -> dict[str, float]:
    """What each name adds to the value of those before it, in the mean of all orders."""
    parts = dict.fromkeys(names, 0.0)
    orders = list(permutations(names))
    for order in orders:
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            parts[name] += (value(before | {name}) - value(before)) / len(orders)
    return parts


def _rate(catalog: Catalog, lengths: Reckoning, replica: Reckoning, drafts: Reckoning, load: Reckoning) -> float:
    """Output tokens/s of a GPU."""
    if replica.parallelism is None or load.in_flight is None:
        raise BadInput("disaggregated prefill and decode, or nothing in flight")
    model = catalog.model(replica.model)
    length = drafts.kept if drafts.kept > 1.0 else None
    ahead = catalog.speculation(model, drafts.drafts, length=length) if drafts.drafts else None
    deployment = catalog.deployment(
        model, catalog.accelerator(replica.accelerator), Parallelism(**replica.parallelism),
        replica.precision, replica.kv_format, replica.stack or None, ahead,
    )  # fmt: skip
    estimated = estimate(
        deployment, concurrency=max(round(load.in_flight), 1), input_tokens=lengths.input_tokens,
        output_tokens=lengths.output_tokens,
    )  # fmt: skip
    return estimated.output_tokens_per_s_per_gpu


def _words(name: str, *rows: Reckoning) -> tuple[str, str]:
    """What an assumption is in each answer; equal words are no difference."""
    if name == LENGTHS:
        words = [f"{row.input_tokens:,} in, {row.output_tokens:,} out" for row in rows]
    elif name == REPLICA:
        words = [f"{row.layout} {row.precision}, {row.kv_format} cache, {row.stack}" for row in rows]
    elif name == DRAFTS:
        words = [row.drafts or "none" for row in rows]
    elif name == LOAD:
        words = [f"{row.in_flight or 0.0:.3g} in flight" for row in rows]
    else:
        words = [f"{row.filled:.0%} of what estimates give then" for row in rows]
    return words[0], words[1]
