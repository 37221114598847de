"""Three claims of one article about three years of ownership, held against `cost.published`.

The article's prices, discount, split of 60 to 40 and engineers are taken as it gives them: they are what its
percentages are said to follow from. Crosstie's own bill for the same purchase stands beside.
"""

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
from crosstie.prove.claims.evidence import Evidence
from crosstie.prove.claims.reading import Claim
from crosstie.prove.claims.rests import Rest
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, WRONG, Judgement, check, verdict_of

# Savings are compared within two percentage points.
TOLERANCE = 0.02


@check("c18", "c19", "c20")
def ownership(evidence: Evidence, claim: Claim) -> Judgement:
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
    verdict = verdict_of(abs(reading.saving() - saved) <= TOLERANCE for reading in (own, equal))
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
