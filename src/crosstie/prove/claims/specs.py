"""Claims about silicon: datasheet values, ratios of them, number formats, and a rule that is computed from them."""

from crosstie.core.fact import Fact
from crosstie.core.units import UNITS
from crosstie.prove.claims.evidence import Evidence, called
from crosstie.prove.claims.reading import PublishedClaim, Span
from crosstie.prove.claims.rests import Rest, fact_rests, source_rests
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, WRONG, Judgement, check, verdict_of

# Datasheets round, and articles round again.
SPEC_TOLERANCE = 0.02
# Printed in decimal units though they are powers of two.
_PRINTED_AS = {"GiB": "GB", "KiB": "KB"}

# Where the values of a claim stand in the catalog, in the claim's order.
FIELDS: dict[str, tuple[tuple[str, str], ...]] = {
    "c01": (("mi300x", "memory.capacity"),),
    "c03": (("h200", "memory.capacity"),),
    "c06": (("h100-sxm", "dense.fp8"),),
    "c09": (("mi325x", "memory.bandwidth"),),
    "c10": (("h200", "memory.bandwidth"),),
    "c16": (("mi325x", "chip.tdp"),),
    "c17": (("h200", "chip.tdp"),),
    "c32": (("mi300x", "memory.bandwidth"),),
    "c33": (("h100-sxm", "memory.capacity"), ("h100-sxm", "memory.bandwidth")),
    "c43": (("mi300x", "dense.fp16"), ("mi300x", "dense.fp32"), ("mi300x", "dense.fp8")),
    "c44": (("h100-sxm", "dense.fp16"), ("h100-sxm", "dense.fp8")),
    "c53": (("mi300x", "chip.lds"),),
    "c59": (("mi350x", "memory.capacity"),),
    "c60": (("b200", "memory.capacity"),),
    "c62": (("mi350x", "chip.tdp"),),
}
RATIOS = {
    "c02": ("mi300x", "h100-sxm", ("memory.capacity",)),
    "c34": ("mi300x", "h100-sxm", ("memory.capacity", "memory.bandwidth")),
}


@check(*FIELDS)
def datasheet(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Each value beside the catalog's; where they differ, whose figure it is instead."""
    verdicts, shown, reasons, rests = [], [], list[str](), list[Rest]()
    units = claim.unit.split(" and ")
    for index, (span, (owner, path)) in enumerate(zip(claim.spans, FIELDS[claim.id], strict=True)):
        fact = evidence.field(owner, path)
        unit = units[index] if len(units) > 1 else units[0]
        verdict, reason = _beside(evidence, span, owner, path, unit)
        verdicts.append(verdict)
        shown.append(f"{_value(fact, unit):,.10g}")
        reasons.append(reason)
        rests += fact_rests(evidence, f"{owner} {path}")
        if path == "dense.fp32" and verdict == WRONG and span.holds(evidence.number("tf32_of_cdna3"), SPEC_TOLERANCE):
            reasons[-1] += f"; its TF32 rate is {evidence.number('tf32_of_cdna3'):,.10g}"
            rests += source_rests(evidence, "tf32_of_cdna3")
    worst = next(v for v in (WRONG, CONDITIONAL, HOLDS) if v in verdicts)
    return Judgement(worst, f"{' / '.join(shown)} {claim.unit}", "; ".join(reasons), rests)


def _value(fact: Fact, unit: str) -> float:
    """In the unit of the claim; 192 GiB are printed as 192 GB."""
    return fact.value if _PRINTED_AS.get(fact.unit) == unit else fact.si / UNITS[unit].si


def _beside(evidence: Evidence, span: Span, owner: str, path: str, unit: str) -> tuple[str, str]:
    fact = evidence.field(owner, path)
    value = _value(fact, unit)
    what = f"{called(owner)} {path} is {value:,.10g} {unit} in the catalog"
    if span.holds(value, SPEC_TOLERANCE):
        return HOLDS, f"{what} (compared within {SPEC_TOLERANCE:.0%})"
    for other in fact.alternatives:
        known = Fact(value=float(other.value), unit=other.unit, basis=other.basis, source=other.source, date=other.date)
        if span.holds(_value(known, unit), SPEC_TOLERANCE):
            return CONDITIONAL, f"{what}; {span} holds by another source: {fact.chosen_because}"
    group, _, key = path.partition(".")
    sparse = evidence.part(owner).sparse.get(key) if group == "dense" else None
    if sparse and span.holds(_value(sparse, unit), SPEC_TOLERANCE):
        return WRONG, f"{what}; {span} is its rate with 2:4 sparsity, which no dense model reaches"
    owners = _whose(evidence, owner, path, span, unit)
    return WRONG, f"{what}, not {span}" + (f", which is the {called(owners)}'s" if owners else "")


def _whose(evidence: Evidence, owner: str, path: str, span: Span, unit: str) -> str:
    """A sibling of the same vendor that has the claimed figure: articles mix up generations."""
    for name, part in evidence.catalog.accelerators.items():
        if name == owner or part.vendor != evidence.part(owner).vendor or path.startswith("dense"):
            continue
        if span.holds(_value(evidence.field(name, path), unit), 1e-6):
            return name
    return ""


@check(*RATIOS)
def datasheet_ratio(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    above, below, paths = RATIOS[claim.id]
    agrees, shown, rests = [], [], list[Rest]()
    for span, path in zip(claim.spans, paths, strict=True):
        value = evidence.field(above, path).si / evidence.field(below, path).si
        agrees.append(span.holds(value, SPEC_TOLERANCE))
        shown.append(f"{value:.2f}")
        rests += fact_rests(evidence, f"{above} {path}", f"{below} {path}")
    verdict = HOLDS if all(agrees) else WRONG
    parts = ", ".join(f"{path} {value}x" for path, value in zip(paths, shown, strict=True))
    reason = f"{called(above)} over {called(below)}, by the catalog: {parts} (compared within {SPEC_TOLERANCE:.0%})" + (
        "" if all(agrees) else f", not {claim.value}"
    )
    return Judgement(verdict, f"{' and '.join(shown)} x", reason, rests)


@check("c12")
def no_fp4(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    family = [name for name, part in evidence.catalog.accelerators.items() if part.family == "cdna3"]
    having = [name for name in family if evidence.label(name, "chip.fp4_dialect") != "none"]
    verdict = HOLDS if bool(having) == claim.says_yes else WRONG
    has = f"{', '.join(map(called, having))} has" if having else "none has"
    reason = f"of {', '.join(map(called, family))} {has} FP4 matrix units"
    rests = fact_rests(evidence, *(f"{name} chip.fp4_dialect" for name in family))
    return Judgement(verdict, "yes" if having else "no", f"{reason}; FP4 weights run there in a wider format", rests)


@check("c54")
def shared_memory(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    span, block = claim.only, evidence.field("h100-sxm", "chip.lds")
    alone, both = evidence.number("hopper_shared_memory"), evidence.number("hopper_l1_and_shared")
    agrees = [span.holds(alone, 0.001), span.holds(both, 0.001)]
    reason = (
        f"it holds for shared memory alone, {alone:.0f} KB an SM, of which one block may use {block.value:.0f}. It "
        f"does not hold for shared memory and L1 together, as the claim has it: that is {both:.0f} KB"
    )
    rests = source_rests(evidence, "hopper_shared_memory", "hopper_l1_and_shared")
    rests += fact_rests(evidence, "h100-sxm chip.lds")
    return Judgement(verdict_of(agrees), f"{alone:.0f} KB shared, {both:.0f} KB with L1", reason, rests)


@check("c55")
def wave_width(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    wave, warp = claim.spans
    widths = {name: evidence.field(name, "chip.wave_width").value for name in evidence.catalog.accelerators}
    amd = {name: w for name, w in widths.items() if evidence.part(name).vendor == "AMD"}
    nvidia = {name: w for name, w in widths.items() if evidence.part(name).vendor == "NVIDIA"}
    others = sorted(name for name, width in amd.items() if width != wave.low)
    right = all(width == warp.low for width in nvidia.values())
    verdict = WRONG if not right or len(others) == len(amd) else CONDITIONAL if others else HOLDS
    reason = f"it holds for {len(amd) - len(others)} of {len(amd)} AMD parts of the catalog, with waves of {wave}"
    if others:
        discussed = ", which the article discusses too" if others == ["rx-7900-xtx"] else ""
        reason += f", and not for {', '.join(map(called, others))}{discussed}: {amd[others[0]]:.0f}"
    rests = fact_rests(evidence, *(f"{name} chip.wave_width" for name in ("mi300x", "h100-sxm", *others)))
    return Judgement(verdict, f"{widths['mi300x']:.0f} / {widths['h100-sxm']:.0f} threads", reason, rests)


@check("c27")
def export_threshold(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Total processing performance: dense rate times the bits of an operand, the largest over the formats."""
    limit, link_limit = evidence.number("export_score"), evidence.number("export_link_2022")
    scores = {name: export_score(evidence, name) for name in ("mi300x", "a100-80gb", "h100-sxm")}
    below = scores["mi300x"] < limit
    # Both directions together, as the earlier rule counts them.
    link = 2.0 * evidence.field("mi300x", "scale_up.bandwidth").si / 1e9
    verdict = HOLDS if below == claim.says_yes else WRONG
    reason = (
        f"the score of an MI300X is {scores['mi300x']:,.0f}, {scores['mi300x'] / limit:.1f}x the threshold of "
        f"{limit:,.0f} and above those of A100 ({scores['a100-80gb']:,.0f}) and H100 ({scores['h100-sxm']:,.0f}); "
        f"the rule of 2022 asked besides for {link_limit:.0f} GB/s between chips, and it has {link:.0f}"
    )
    rests = [
        *fact_rests(evidence, "mi300x dense.fp8", "mi300x scale_up.bandwidth"),
        *source_rests(evidence, "export_score", "export_score_definition", "export_link_2022"),
        Rest("arithmetic", "dense TFLOP/s x bits, the largest over the formats"),
    ]
    shown = f"{'yes' if below else 'no'}: {scores['mi300x']:,.0f}, threshold {limit:,.0f}"
    return Judgement(verdict, shown, reason, rests)


def export_score(evidence: Evidence, name: str) -> float:
    dense = evidence.part(name).dense
    bits = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4}
    return max(dense[format].si / 1e12 * width for format, width in bits.items() if format in dense)
