"""The whole answer to "which of these do we buy": bills, risk, what drives it, in sentences for a meeting.

What moves it: break-evens, each input at its ends (the tornado), and all of them at once (Monte Carlo). Inputs that
options share, such as the tariff, move for all of them together: a dear kilowatt-hour is dear for both. Prices and
throughputs are an option's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.costs import COSTS
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars
from crosstie.core.units import HOURS_PER_YEAR
from crosstie.decide.cost.ownership import LINES, SHARES, WORDS, Costs, Option, Ownership, inputs, own, usd_per_mtok
from crosstie.decide.cost.ranges import ValueRange, likely
from crosstie.perf.hardware import Array

Inputs = Mapping[str, ValueRange]
# Ends of the intervals that samples are summed up by: 80% lie between.
_ENDS = (0.1, 0.9)
# Times per token that differ by more than this are not the same service.
_SAME_SERVICE = 0.15
# Costs that differ by less than this are called the same: no input is known better.
_SAME = 0.03
_SHOWN_BARS = 3
KEYS = ("discount", "purchase_usd", "engineers", "output_tokens_per_s_per_gpu")


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


@dataclass(frozen=True, slots=True)
class Assessment:
    years: float
    bills: dict[str, Ownership]
    usd_per_mtok: dict[str, float]
    # Cheapest first.
    ranking: list[str]
    risk: Risk
    # The cheapest against the second, or the only one's cost.
    tornado: list[Bar]
    break_evens: list[BreakEven]
    verdicts: list[str]


def assess(
    options: Sequence[Option], costs: Costs, years: float, *, samples: int = 10_000, seed: int = 0,
    vary: float | None = None,
) -> Assessment:  # fmt: skip
    """`vary`: move each assumption by this share of itself instead of over its own range."""
    if 0.0 < years < 24.0 / HOURS_PER_YEAR:
        raise BadInput(f"a horizon of {years:g} years: must be a day or more")
    match = contest(options, costs, years)
    if vary is not None:
        match = match.varied(vary)
    ranking, prices = match.ranking(), match.usd_per_mtok()
    bills = {option.name: own(option, costs, years) for option in options}
    risk = monte_carlo(match, samples, seed)
    second = ranking[1] if len(ranking) > 1 else None
    bars = tornado(match, ranking[0], second)
    # What each would need to draw level with the other.
    pairs = [(second, ranking[0]), (ranking[0], second)] if second else []
    evens = [break_even(match, bill, other, key) for bill, other in pairs for key in KEYS]
    return Assessment(
        years=years,
        bills=bills,
        usd_per_mtok=prices,
        ranking=ranking,
        risk=risk,
        tornado=bars,
        break_evens=evens,
        verdicts=sentences(bills, prices, ranking, risk, bars, evens),
    )


def sentences(
    bills: dict[str, Ownership], prices: dict[str, float], ranking: list[str], risk: Risk, bars: list[Bar],
    levels: list[BreakEven],
) -> list[str]:  # fmt: skip
    first = ranking[0]
    spreads = {spread.option: spread for spread in risk.spreads}
    if len(ranking) == 1:
        return [_alone(prices[first], spreads[first]), *_drivers(bars, first, None)]
    second = ranking[1]
    sentences = [_winner(prices, first, second, spreads[first], risk)]
    sentences += [_behind(prices, first, other) for other in ranking[2:]]
    sentences.append(_reason(bills[first], bills[second]))
    sentences += [text for text in map(_level, levels) if text]
    return sentences + _drivers(bars, first, second)


def _alone(price: float, spread: SampledCost) -> str:
    between = f"{dollars(spread.low)} to {dollars(spread.high)}"
    return f"{spread.option} costs {dollars(price)} per million output tokens; 80% of samples give {between}."


def _winner(prices: dict[str, float], first: str, second: str, spread: SampledCost, risk: Risk) -> str:
    saved = saving(prices[first], prices[second])
    against = f"{dollars(prices[first])} against {dollars(prices[second])} per million output tokens"
    odds = f"{first} is the cheapest in {spread.cheapest:.0%} of {risk.samples:,} samples"
    if saved < _SAME:
        return f"{first} and {second} cost the same within 3%: {against}. {_sure(spread.cheapest)}: {odds}."
    assert risk.saving is not None, "two options have a saving"
    low, high = risk.saving
    spreads = f"80% of samples: {_less(low)} to {_less(high)}"
    return f"{first} costs {saved:.0%} less than {second}: {against} ({spreads}). {_sure(spread.cheapest)}: {odds}."


def _sure(odds: float) -> str:
    if odds >= 0.9:
        return "That is fairly sure"
    return "That is likely, not sure" if odds >= 0.7 else "That is open"


def _behind(prices: dict[str, float], first: str, other: str) -> str:
    return f"{first} costs {saving(prices[first], prices[other]):.0%} less than {other} ({dollars(prices[other])})."


def _reason(first: Ownership, second: Ownership) -> str:
    """Tokens of a GPU, dollars of a GPU, and the line of the bill in which they differ most."""
    names = first.option.name, second.option.name
    rates = [bill.output_tokens / (bill.option.gpus * bill.years) for bill in (first, second) if bill.output_tokens]
    hours = first.usd_per_gpu_hour, second.usd_per_gpu_hour
    gaps = {line: _per_hour(second, line) - _per_hour(first, line) for line in LINES}
    widest = max(gaps, key=lambda line: abs(gaps[line]))
    where = f"{LINES[widest]}, {dollars(_per_hour(first, widest))} against {dollars(_per_hour(second, widest))}"
    return (
        f"A GPU of {names[0]} gives {rates[0] / rates[1]:.2f}x the tokens of one of {names[1]} and costs "
        f"{dollars(hours[0])} against {dollars(hours[1])} an hour; the bills differ most in {where}."
    )


def _per_hour(bill: Ownership, line: str) -> float:
    return bill.usd[line] / bill.total_usd * bill.usd_per_gpu_hour


def _level(even: BreakEven) -> str:
    """Levels are listed for the one behind first; each key has its sentence for one side only."""
    behind = even.key == "discount"
    if behind and (even.at is None or even.at >= even.now):
        return _level_discount(even)
    if even.at is None:
        return ""
    if even.key == "engineers" and even.at >= even.now:
        more = f"{even.at:.1f} engineers ({even.now:g} assumed)"
        return f"{even.option} could pay {more} over the horizon and still match {even.against}."
    if even.key == "purchase_usd" and even.at >= even.now:
        prices = f"{dollars(even.at)} before its discount ({dollars(even.now)} now)"
        return f"{even.option} stays ahead up to a price of {prices}."
    if even.key == "output_tokens_per_s_per_gpu" and even.at <= even.now:
        share = even.at / even.now
        return f"{even.option} stays ahead down to {even.at:,.0f} output tokens/s a GPU, {share:.2f}x of the estimate."
    return ""


def _level_discount(even: BreakEven) -> str:
    if even.at is None:
        return (
            f"No discount brings {even.option} level with {even.against}: without any accelerator bill it costs more."
        )
    return f"{even.option} draws level with {even.against} at {even.at:.0%} off its price ({even.now:.0%} assumed)."


def _drivers(bars: Sequence[Bar], first: str, second: str | None) -> list[str]:
    if not bars:
        return ["Every input is exact, so nothing is left to vary."]
    listed = "; ".join(_bar(bar, second is not None) for bar in bars[:_SHOWN_BARS])
    sentences = [f"What moves it most, one at a time: {listed}."]
    if second:
        turning = [describe(bar) for bar in bars if min(bar.outcome_at_low, bar.outcome_at_high) < 0.0]
        sentences.append(
            f"Alone within its range {' or '.join(turning)} can put {second} ahead."
            if turning
            else f"No single input within its range puts {second} ahead of {first}."
        )
    return sentences


def _bar(bar: Bar, is_saving: bool) -> str:
    ends = [_less(end) if is_saving else dollars(end) for end in (bar.outcome_at_low, bar.outcome_at_high)]
    return f"{describe(bar)}, {ends_of(bar)} ({ends[0]} to {ends[1]})"


def describe(bar: Bar) -> str:
    return f"{WORDS[bar.key]} of {bar.option}" if bar.option else WORDS[bar.key]


def ends_of(bar: Bar) -> str:
    """From where to where the input went."""
    if bar.key in SHARES:
        return f"{100.0 * bar.low:.3g}% to {100.0 * bar.high:.3g}%"
    low, high = (f"{end:,.0f}" if abs(end) >= 100 else f"{end:.3g}" for end in (bar.low, bar.high))
    return f"{low} to {high}"


def _less(share: float) -> str:
    return f"{share:.0%} less" if share >= 0 else f"{-share:.0%} more"


def service_gap(tpot_s: Mapping[str, float]) -> str | None:
    """A warning where the options would serve users at different speeds, so that cost alone does not compare them."""
    slow, fast = max(tpot_s, key=lambda name: tpot_s[name]), min(tpot_s, key=lambda name: tpot_s[name])
    ratio = tpot_s[slow] / tpot_s[fast]
    if ratio <= 1.0 + _SAME_SERVICE:
        return None
    return (
        f"Not the same service: at this load {slow} takes {ratio:.2f}x as long for each token as {fast}; "
        "--tp or --concurrency bring them closer, and costs with them."
    )
