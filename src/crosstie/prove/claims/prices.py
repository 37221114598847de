"""Claims about prices, against the quotes of the catalog, each kind of price for itself.

No quote here rests on an article whose claims are checked (`Evidence.prices`), and as no vendor publishes a list
price, no purchase price holds without a condition.
"""

from collections.abc import Mapping, Sequence

from crosstie.prove.claims.evidence import LLAMA, EstimatedRun, Evidence, called, ratio_of
from crosstie.prove.claims.reading import Claim
from crosstie.prove.claims.rests import Rest, between, percent, quote_rest, run_rest
from crosstie.prove.claims.verdicts import CONDITIONAL, UNCHECKABLE, WRONG, Judgement, check, verdict_of

# Prices scatter more than they are worth quoting to the percent.
PRICE_TOLERANCE = 0.15
RENTS = ("rent-3-years", "on-demand", "spot")


def discounts(evidence: Evidence, cheap: str, dear: str, kinds: Sequence[str]) -> tuple[dict[str, float], list[Rest]]:
    """By how much the one is below the other, as a fraction, for each kind of price that both have."""
    found, rests = {}, list[Rest]()
    for kind in kinds:
        one, other = evidence.price(cheap, kind), evidence.price(dear, kind)
        if one and other:
            found[kind] = 1.0 - one.usd / other.usd
            rests += [quote_rest(evidence, one), quote_rest(evidence, other)]
    return found, rests


def price_rests(evidence: Evidence, *names: str) -> list[Rest]:
    """The purchase prices of these parts, or that there is none."""
    quotes = {name: evidence.price(name, "purchase") for name in names}
    none = "no purchase price of {} by anybody but an article"
    return [
        quote_rest(evidence, quote) if quote else Rest("catalog", none.format(called(name)), "prices.csv")
        for name, quote in quotes.items()
    ]


def _listed(found: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {percent(value)}" for kind, value in found.items()) or "no price of both"


@check("c04")
def unit_cost(evidence: Evidence, claim: Claim) -> Judgement:
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
def cheaper(evidence: Evidence, claim: Claim) -> Judgement:
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
    newer = discounts(evidence, "mi355x", "h100-sxm", ("rent-3-years",))[0] if claim.id == "c64" else {}
    if newer and newer["rent-3-years"] < 0.0:
        reason += f". Newer AMD parts are dearer: an MI355X by {percent(-newer['rent-3-years'])} over three years"
    return Judgement(verdict_of(agrees.values()), _listed(found), reason, rests)


@check("c14", "c15")
def price_of_one(evidence: Evidence, claim: Claim) -> Judgement:
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
def volume_discount(evidence: Evidence, claim: Claim) -> Judgement:
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
def tokens_per_dollar(evidence: Evidence, claim: Claim) -> Judgement:
    load = (512, 3072, 1024)
    gaps, runs, rests = {}, list[EstimatedRun](), list[Rest]()
    for precision in ("fp8", "bf16"):
        h100, mi300x = (evidence.best_of_node(LLAMA, on, load, precision) for on in ("h100-sxm", "mi300x"))
        runs += [h100, mi300x]
        found, rests = discounts(evidence, "mi300x", "h100-sxm", ("rent-3-years", "on-demand"))
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
