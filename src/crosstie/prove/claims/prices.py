"""Claims about money: prices, against the quotes of the catalog, each kind of price for itself; and ownership.

No quote here rests on an article whose claims are checked (`Evidence.prices`), and as no vendor publishes a list
price, no purchase price holds without a condition. Three claims of one article about three years of ownership are held
against `cost.published`: its prices, discount, split of 60 to 40 and engineers are taken as it gives them, as what its
percentages are said to follow from, and Crosstie's own bill for the same purchase stands beside.
"""

from collections.abc import Mapping, Sequence

from crosstie.decide.cost.published import (
    DISCOUNT,
    GPUS,
    INPUT_TOKENS,
    MODEL,
    OUTPUT_TOKENS,
    POINTS,
    PRICES_USD,
    Published,
)
from crosstie.decide.cost.sensitivity import saving
from crosstie.prove.claims.evidence import LLAMA, EstimatedRun, Evidence, called, ratio_of
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest, between, percent, quote_rest, run_rest
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, UNCHECKABLE, WRONG, Judgement, check, verdict_of

# Prices scatter more than they are worth quoting to the percent.
PRICE_TOLERANCE = 0.15
RENTS = ("modelled-3-years", "on-demand", "spot")
# Savings are compared within two percentage points.
TOLERANCE = 0.02


def discounts(evidence: Evidence, cheap: str, dear: str, kinds: Sequence[str]) -> tuple[dict[str, float], list[Rest]]:
    """By how much the one is below the other, as a fraction, for each kind of price that both have."""
    found, rests = {}, list[Rest]()
    for kind in kinds:
        one, other = evidence.price(cheap, kind), evidence.price(dear, kind)
        if one and other:
            found[kind] = 1.0 - one.usd / other.usd
            rests += [quote_rest(one), quote_rest(other)]
    return found, rests


def price_rests(evidence: Evidence, *names: str) -> list[Rest]:
    """The purchase prices of these parts, or that there is none."""
    quotes = {name: evidence.price(name, "purchase") for name in names}
    none = "no purchase price of {} by anybody but an article"
    return [
        quote_rest(quote) if quote else Rest("catalog", none.format(called(name)), "prices.csv")
        for name, quote in quotes.items()
    ]


def _listed(found: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {percent(value)}" for kind, value in found.items()) or "no price of both"


@check("c04")
def unit_cost(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """By those who price both parts, each for itself: what a server's eighth costs and a list price differ."""
    ours, theirs = evidence.purchase("mi300x"), evidence.purchase("h100-sxm")
    found = {who: 1.0 - usd / theirs[who] for who, usd in ours.items() if who in theirs}
    span = claim.only
    holding = {who: value for who, value in found.items() if span.holds(100.0 * value, PRICE_TOLERANCE)}
    others = {who: value for who, value in found.items() if who not in holding}
    if holding:
        reason = f"it holds by some prices, {_by_whom(holding)}"
        reason += f", and not by others, {_by_whom(others)}" if others else ""
    else:
        reason = f"third parties' prices of both, which refute nothing, put it at {_by_whom(others)}"
    reason += f"; compared within {PRICE_TOLERANCE:.0%}. Neither vendor publishes a list price"
    rests = price_rests(evidence, "mi300x", "h100-sxm")
    return Judgement(CONDITIONAL if holding else UNCHECKABLE, _by_whom(found), reason, rests)


def _by_whom(found: Mapping[str, float]) -> str:
    return "; ".join(f"{percent(value)} ({who})" for who, value in found.items()) or "no figure"


@check("c58", "c64")
def cheaper(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    kinds = RENTS if claim.id == "c64" else ("purchase", *RENTS, "own-hyperscaler", "own-neocloud")
    found, rests = discounts(evidence, "mi300x", "h100-sxm", kinds)
    span = claim.only
    agrees = {kind: span.holds(100.0 * value, 0.0) for kind, value in found.items()}
    holding = {kind: value for kind, value in found.items() if agrees[kind]}
    others = {kind: value for kind, value in found.items() if not agrees[kind]}
    reason = f"an MI300X is below an H100 as claimed by {_listed(holding) if holding else 'no kind of price'}"
    reason += f", and not by {_listed(others)}" if others else ""
    wide = [quote.high / quote.low for on in ("mi300x", "h100-sxm") if (quote := evidence.price(on, "on-demand"))]
    if wide:
        reason += f". Each is the middle of its providers, whose rents by the hour are up to {max(wide):.0f}x apart"
    newer = discounts(evidence, "mi355x", "h100-sxm", ("modelled-3-years",))[0] if claim.id == "c64" else {}
    if newer and newer["modelled-3-years"] < 0.0:
        reason += f". Newer AMD parts are dearer: an MI355X by {percent(-newer['modelled-3-years'])} over three years"
    return Judgement(verdict_of(agrees.values()), _listed(found), reason, rests)


@check("c14", "c15")
def price_of_one(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    name = "mi325x" if claim.id == "c14" else "h200"
    said, span = evidence.purchase(name), claim.only
    if not said:
        return _unpriced(evidence, name)
    agrees = {who: usd for who, usd in said.items() if span.holds(usd, PRICE_TOLERANCE)}
    far = max(said, key=lambda who: abs(said[who] - span.middle))
    listed = "; ".join(f"{usd:,.0f} ({who})" for who, usd in said.items())
    reason = (
        f"without the article's own figure third parties say, in USD, {listed}. {len(agrees)} of {len(said)} agree "
        f"within {PRICE_TOLERANCE:.0%}; the farthest is {abs(said[far] / span.middle - 1.0):.0%} off. It does "
        "not hold as a list price, which no vendor publishes, nor as what large buyers pay, which nobody publishes"
    )
    low, high = min(said.values()), max(said.values())
    shown = f"{low:,.0f} USD" if low == high else f"{between(low, high)} USD"
    return Judgement(CONDITIONAL if agrees else WRONG, shown, reason, price_rests(evidence, name))


def _unpriced(evidence: Evidence, name: str) -> Judgement:
    """Between what is known of its siblings, for orientation."""
    siblings = [on for on in ("mi300x", "mi350x") if evidence.purchase(on) and on != name]
    near = " and ".join(
        f"an {called(on)} at {' to '.join(f'{usd:,.0f}' for usd in sorted({quote.low, quote.high}))} USD"
        for on in siblings
        if (quote := evidence.price(on, "purchase"))
    )
    own = "the only purchase price in the catalog is the article's own, which confirms nothing"
    reason = f"{own if evidence.own_price(name) else 'the catalog has no purchase price'}; the vendor publishes none"
    reason += f". Third parties put {near}" if near else ""
    return Judgement(UNCHECKABLE, "no price but the article's", reason, price_rests(evidence, name, *siblings))


@check("c22", "c23")
def volume_discount(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """A server's eighth at a hyperscaler beside what others call the price of one is all that is public."""
    name = "mi300x" if claim.id == "c22" else "h100-sxm"
    said = evidence.purchase(name)
    server = {who: usd for who, usd in said.items() if "hyperscaler" in who}
    rest = {who: usd for who, usd in said.items() if who not in server}
    reason = "neither vendor publishes a list price, and no public source that was read has what large buyers pay"
    if server and rest:
        reason += (
            f". An eighth of a hyperscaler's server of {called(name)}s, with all that is in it, is put at "
            f"{min(server.values()):,.0f} USD, the part alone at "
            f"{' to '.join(f'{usd:,.0f}' for usd in sorted({min(rest.values()), max(rest.values())}))}: "
            "different things of different sources, so no discount follows"
        )
    return Judgement(UNCHECKABLE, "no figure", reason, price_rests(evidence, name))


@check("c08")
def tokens_per_dollar(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    load = (512, 3072, 1024)
    gaps, runs, rests = {}, list[EstimatedRun](), list[Rest]()
    for precision in ("fp8", "bf16"):
        h100, mi300x = (evidence.best_of_node(LLAMA, on, load, precision) for on in ("h100-sxm", "mi300x"))
        runs += [h100, mi300x]
        found, rests = discounts(evidence, "mi300x", "h100-sxm", ("modelled-3-years", "on-demand"))
        for kind, lower in found.items():
            gaps[f"{precision}, {kind}"] = ratio_of(h100, mi300x, 1.0 - lower)
    wanted = claim.only.middle
    verdict = verdict_of([gap.low <= wanted <= gap.high for gap in gaps.values()])
    listed = "; ".join(f"{name} {gap}" for name, gap in gaps.items())
    reason = (
        "tokens/s per USD of H100 over MI300X, eight GPUs each, 512 in flight, 3,072 in and 1,024 out, best split of "
        f"each: {listed}. The claim says {wanted}x in favour of H100; "
        f"the highest end of an interval is {max(gap.high for gap in gaps.values()):.2f}x"
    )
    low, high = min(gap.value for gap in gaps.values()), max(gap.value for gap in gaps.values())
    return Judgement(verdict, f"{low:.2f} to {high:.2f} x", reason, (*(run_rest(run) for run in runs), *rests))


@check("c18", "c19", "c20")
def ownership(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    found, saved = evidence.comparison, evidence.claimed("c18").middle / 100.0
    if claim.id == "c18":
        return _three_years(found, saved)
    if claim.id == "c19":
        return _with_engineers(found, saved, claim.only.middle / 100.0)
    return _varied(found, saved, claim.only.high / 100.0)


def _rests(found: Published) -> list[Rest]:
    model = found.modelled
    prices = " and ".join(f"{usd:,.0f} USD for one {name}" for name, usd in PRICES_USD.items())
    bought = f"the article's {prices}, {DISCOUNT:.0%} off, {GPUS} of each, 60/40"
    low, high = model.throughput_ratio_interval
    return [
        Rest("arithmetic", f"{bought}; step by step in docs/tco.md"),
        Rest(
            "model",
            f"{MODEL}, {next(iter(POINTS))}, {INPUT_TOKENS:,} in, {OUTPUT_TOKENS:,} out: an MI325X gives "
            f"{model.throughput_ratio:.2f}x the tokens/s of an H200 ({low:.2f} to {high:.2f}); the MI325X is "
            "extrapolated from other models' published results",
        ),
    ]


def _three_years(found: Published, saved: float) -> Judgement:
    model, own, equal = found.modelled, found.own_split, found.equal_power
    low, high = model.throughput_ratio_interval
    needed = (own.ratio_for(saved), equal.ratio_for(saved))
    verdict: str = verdict_of(abs(reading.saving() - saved) <= TOLERANCE for reading in (own, equal))
    if verdict == WRONG and any(low <= ratio <= high for ratio in needed):
        verdict = CONDITIONAL
    points = model.saving_by_point
    least = min(points, key=lambda name: points[name])
    reason = (
        f"at equal tokens/s the article's figures give {own.saving():.1%}, on hardware alone or with 40% of each "
        f"fleet's own cost for power and cooling, and {equal.saving():.1%} if both fleets pay the same power bill. "
        f"{saved:.0%} holds if an MI325X gives {needed[0]:.2f}x (own split) or {needed[1]:.3f}x (equal bill) the "
        "tokens/s of an H200, a ratio that the article does not state, and not otherwise. In our model an MI325X costs "
        f"{model.saving:.0%} less (80%: {model.saving_interval[0]:.0%} to {model.saving_interval[1]:.0%}) for "
        f"{next(iter(POINTS))}, where the ratio is {model.throughput_ratio:.2f}x ({low:.2f} to {high:.2f}), and "
        f"{abs(points[least]):.0%} {'more' if points[least] < 0 else 'less'} for {least}"
    )
    computed = f"{own.saving():.1%} or {equal.saving():.1%} by its own figures, {model.saving:.0%} by our model"
    return Judgement(verdict, computed, reason, _rests(found))


def _with_engineers(found: Published, saved: float, wanted: float) -> Judgement:
    """What two engineers leave of the saving before them, at the tokens/s that this saving needs."""
    paid, model, equal = found.engineers_usd, found.modelled, found.equal_power
    left = [reading.saving(reading.ratio_for(saved), paid) for reading in (found.own_split, equal)]
    verdict = verdict_of(abs(value - wanted) <= TOLERANCE for value in left)
    before, after = equal.saving(), equal.saving(engineers_usd=paid)
    reason = (
        f"two engineers for three years are {paid / 1e6:.2f} million USD, {100.0 * paid / equal.h200_usd:.1f} points "
        f"of what {GPUS} H200 cost by the article's figures, so {saved:.0%} becomes {min(left):.0%} to {max(left):.0%} "
        f"(compared within {100.0 * TOLERANCE:.0f} points). {wanted:.0%} would take {found.engineers_for_claim:.1f} "
        f"engineers, or a fleet of {found.gpus_for_claim:.0f}. Equal power bills and equal tokens/s leave {after:.0%}, "
        f"but there it was {before:.0%} before them, not {saved:.0%}. Our model: {model.saving:.0%} becomes "
        f"{model.saving_after_engineers:.0%}"
    )
    against = () if verdict == HOLDS else ("c18",)
    return Judgement(verdict, f"{min(left):.0%} to {max(left):.0%}", reason, _rests(found), against)


def _varied(found: Published, saved: float, by: float) -> Judgement:
    """Operation moves both bills together; tokens/s and price move one of them."""
    equal, model = found.equal_power, found.modelled
    ratio = equal.ratio_for(saved)
    power = equal.saving_at(by, ratio)
    fewer, dearer = (
        equal.saving(ratio * (1.0 - by)),
        saving((equal.mi325x_usd + by * (equal.mi325x_usd - equal.mi325x_power_usd)) / ratio, equal.h200_usd),
    )
    stays = [max(abs(end - saved) for end in power) <= TOLERANCE]
    stays += [max(abs(end - model.saving) for end in model.saving_at_variation) <= TOLERANCE]
    stays += [abs(fewer - saved) <= TOLERANCE, abs(dearer - saved) <= TOLERANCE]
    reason = (
        f"taking c18's {saved:.0%} as given, it holds for power and cooling {by:.0%} up or down, which both fleets "
        f"pay: {power[0]:.0%} to {power[1]:.0%}; our own bill, each assumption of operation for itself, moves from "
        f"{model.saving:.0%} to {model.saving_at_variation[0]:.0%} and {model.saving_at_variation[1]:.0%}. It does not "
        f"hold for what one fleet has alone: {by:.0%} fewer tokens/s of the MI325X leave {fewer:.0%}, a price "
        f"{by:.0%} higher {dearer:.0%}"
    )
    return Judgement(verdict_of(stays), f"{power[0]:.0%} to {power[1]:.0%}", reason, _rests(found))
