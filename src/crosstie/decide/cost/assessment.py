"""The whole answer to "which of these do we buy": bills, risk, what drives it, in sentences for a meeting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars
from crosstie.core.units import HOURS_PER_YEAR
from crosstie.decide.cost.ownership import LINES, SHARES, WORDS, Costs, Option, Ownership, own
from crosstie.decide.cost.sensitivity import (
    Bar,
    BreakEven,
    Risk,
    SampledCost,
    break_even,
    contest,
    monte_carlo,
    saving,
    tornado,
)

# Times per token that differ by more than this are not the same service.
_SAME_SERVICE = 0.15
# Costs that differ by less than this are called the same: no input is known better.
_SAME = 0.03
_SHOWN_BARS = 3
KEYS = ("discount", "purchase_usd", "engineers", "output_tokens_per_s_per_gpu")


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
