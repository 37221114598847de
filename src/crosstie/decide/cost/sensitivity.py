"""What moves the answer: break-evens, each input at its ends (the tornado), and all of them at once (Monte Carlo).

Inputs that options share, such as the tariff, move for all of them together: a dear kilowatt-hour is dear
for both. Prices and throughputs are an option's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.costs import COSTS
from crosstie.core.errors import BadInput
from crosstie.decide.cost.ownership import Costs, Option, inputs, usd_per_mtok
from crosstie.decide.cost.ranges import ValueRange, likely
from crosstie.perf.hardware import Array

Inputs = Mapping[str, ValueRange]
# Ends of the intervals that samples are summed up by: 80% lie between.
_ENDS = (0.1, 0.9)


@dataclass(frozen=True, slots=True)
class PriceContest:
    """Options that are held against each other, by name, with every input's span."""

    inputs: dict[str, dict[str, ValueRange]]

    @property
    def names(self) -> list[str]:
        return list(self.inputs)

    def usd_per_mtok(self) -> dict[str, float]:
        return {name: float(usd_per_mtok(likely(spans))) for name, spans in self.inputs.items()}

    def ranking(self) -> list[str]:
        """Cheapest first."""
        costs = self.usd_per_mtok()
        return sorted(costs, key=lambda name: costs[name])

    def shares(self, key: str) -> bool:
        """Whether an input is one thing for all options: an assumption that none of them overrides alone."""
        return key in COSTS and len({spans[key] for spans in self.inputs.values()}) == 1

    def varied(self, share: float) -> "PriceContest":
        """Every assumption about operation within `share` of its likely value; prices exact, throughputs and power as
        unsure as they are: nobody chooses them."""
        if not 0.0 <= share < 1.0:
            raise BadInput(f"a variation of {share:.0%}: must be from 0% to below 100%")
        changed = {}
        for name, spans in self.inputs.items():
            exact = {key: ValueRange(span.likely, span.likely, span.likely) for key, span in spans.items()}
            rates = {key: spans[key] for key in ("output_tokens_per_s_per_gpu", "gpu_busy_watts") if key in spans}
            changed[name] = exact | rates | {key: bounded(key, spans[key].scaled(share)) for key in COSTS}
        return PriceContest(changed)


def bounded(key: str, span: ValueRange) -> ValueRange:
    """Ends that an assumption cannot pass: a site draws at least what its servers draw, and no share exceeds 1."""
    low, high = {"pue": (1.0, np.inf), "mean_power_fraction": (0.0, 1.0), "utilisation": (0.0, 1.0)}.get(
        key, (0.0, np.inf)
    )
    return ValueRange(max(span.low, low), span.likely, min(span.high, high))


def contest(options: Sequence[Option], costs: Costs, years: float) -> PriceContest:
    if not options:
        raise BadInput("there is nothing to hold against each other")
    if any(option.output_tokens_per_s_per_gpu is None for option in options):
        raise BadInput("an option without throughput has no cost per token")
    return PriceContest({option.name: inputs(option, costs, years) for option in options})


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The value of one option's input at which it costs per token what another does."""

    option: str
    against: str
    key: str
    now: float
    # None where no value within the input's bounds does it.
    at: float | None


def break_even(contest: PriceContest, option: str, against: str, key: str) -> BreakEven:
    """`key`: "discount", "engineers", "purchase_usd" or "output_tokens_per_s_per_gpu" of `option`.

    The bill is linear in the first three, so two evaluations give the line; tokens divide it.
    """
    mine, theirs = likely(contest.inputs[option]), likely(contest.inputs[against])
    wanted, now = float(usd_per_mtok(theirs)), float(mine[key])
    if key == "output_tokens_per_s_per_gpu":
        return BreakEven(option, against, key, now, now * float(usd_per_mtok(mine)) / wanted)
    at_0 = float(usd_per_mtok({**mine, key: np.asarray(0.0)}))
    at_1 = float(usd_per_mtok({**mine, key: np.asarray(1.0)}))
    slope = at_1 - at_0
    at = (wanted - at_0) / slope if slope else None
    low, high = _BOUNDS[key]
    return BreakEven(option, against, key, now, at if at is not None and low <= at <= high else None)


_BOUNDS = {"discount": (-np.inf, 1.0), "engineers": (0.0, np.inf), "purchase_usd": (0.0, np.inf)}


@dataclass(frozen=True, slots=True)
class Bar:
    """One input at its ends; `outcome` is the saving of the first against the second, or USD/Mtok of a single one."""

    key: str
    # The option whose input it is; None where it is everybody's.
    option: str | None
    low: float
    high: float
    outcome_at_low: float
    outcome_at_high: float

    @property
    def swing(self) -> float:
        return abs(self.outcome_at_high - self.outcome_at_low)


def tornado(contest: PriceContest, first: str, second: str | None = None) -> list[Bar]:
    """Each input that has a span from end to end, the others likely; the widest swing first."""
    names = [first] if second is None else [first, second]
    middle = {name: likely(contest.inputs[name]) for name in names}
    bars = []
    for key, owner in _movable(contest, names):
        span = contest.inputs[owner or first][key]
        moved = [owner] if owner else names
        ends = [
            outcome([{**middle[n], key: np.asarray(end)} if n in moved else middle[n] for n in names])
            for end in (span.low, span.high)
        ]
        bars.append(Bar(key, owner, span.low, span.high, *ends))
    return sorted((bar for bar in bars if bar.swing > 1e-12), key=lambda bar: -bar.swing)


def outcome(values: Sequence[Mapping[str, Array]]) -> float:
    """USD per million tokens of one, or the share by which the first is cheaper than the second."""
    costs = [float(usd_per_mtok(each)) for each in values]
    return costs[0] if len(costs) == 1 else saving(costs[0], costs[1])


def saving(cost: float, against: float) -> float:
    """Share of `against` that is saved; negative where it costs more."""
    return 1.0 - cost / against


def _movable(contest: PriceContest, names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Inputs with a span, and whose they are."""
    movable: list[tuple[str, str | None]] = []
    for name in names:
        for key, span in contest.inputs[name].items():
            owner = None if contest.shares(key) else name
            if not span.is_exact and (key, owner) not in movable:
                movable.append((key, owner))
    return movable


@dataclass(frozen=True, slots=True)
class SampledCost:
    """What samples say of one option."""

    option: str
    # USD per million output tokens: the end that a tenth is below, the middle, the end that a tenth is above.
    low: float
    middle: float
    high: float
    # Share of samples in which no other option is cheaper.
    cheapest: float


@dataclass(frozen=True, slots=True)
class Risk:
    samples: int
    seed: int
    spreads: list[SampledCost]
    # Saving of the likely cheapest against the likely second: its 80% interval; None for a single option.
    saving: tuple[float, float] | None


def monte_carlo(contest: PriceContest, samples: int = 10_000, seed: int = 0) -> Risk:
    """All inputs at once: triangular between their ends, throughputs as in one world of all options."""
    if not 100 <= samples <= 1_000_000:
        raise BadInput(f"{samples} samples: must be from 100 to 1,000,000")
    costs = sampled(contest, np.random.default_rng(seed), samples)
    # A tie is won by all who share it, in equal parts.
    rows = np.array([costs[name] for name in contest.names])
    least = np.isclose(rows, rows.min(axis=0), rtol=1e-12)
    wins = (least / least.sum(axis=0)).mean(axis=1)
    spreads = []
    for name, won in zip(contest.names, wins, strict=True):
        low, middle, high = np.quantile(costs[name], (_ENDS[0], 0.5, _ENDS[1]))
        spreads.append(SampledCost(name, float(low), float(middle), float(high), float(won)))
    order = contest.ranking()
    saved = None
    if len(order) > 1:
        ends = np.quantile(1.0 - costs[order[0]] / costs[order[1]], _ENDS)
        saved = (float(ends[0]), float(ends[1]))
    return Risk(samples, seed, spreads, saved)


def sampled(contest: PriceContest, random: np.random.Generator, samples: int) -> dict[str, Array]:
    """USD per million tokens of every option, sample by sample; what is shared is drawn once, and the world that
    throughputs are of is one for all."""
    common = {key: random.random(samples) for key in COSTS}
    world = random.random(samples)
    by_name = {}
    for name, spans in contest.inputs.items():
        values = {}
        for key, span in spans.items():
            uniform = common[key] if contest.shares(key) else random.random(samples)
            values[key] = span.draw(world if span.worlds else uniform)
        by_name[name] = usd_per_mtok(values)
    return by_name
