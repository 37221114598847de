"""All claims with their findings: every check run, contradictions between claims found, verdicts counted."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.prove.claims import choices, fits, prices, rates, software, specs
from crosstie.prove.claims.evidence import Evidence
from crosstie.prove.claims.reading import PublishedClaim, Span, read_claims
from crosstie.prove.claims.rests import Rest
from crosstie.prove.claims.verdicts import CHECKS, CONDITIONAL, CONTRADICTED, HOLDS, UNCHECKABLE, VERDICTS, Judgement

# Importing them registers what they check.
CHECKED_BY = (specs, fits, rates, prices, software, choices)


@dataclass(frozen=True)
class Same:
    """A quantity that several claims speak of: which of a claim's values it is, or where its text has it."""

    quantity: str
    parts: dict[str, int | str]


SAME = (
    Same("memory of an MI300X over an H100's", {"c02": 0, "c34": 0}),
    Same("percentage by which an MI300X is cheaper than an H100", {"c04": 0, "c58": 0}),
    Same("percentage off an H200's list price", {"c23": 0, "c18": r"(\d+)% discount"}),
    Same("FP8 rate of an MI350X over MI300X and MI325X, whose matrix units are alike", {"c21": 0, "c63": 0}),
    Same("most throughput", {"c65": "MI350X", "c30": "B200"}),
)


@dataclass(frozen=True)
class Checked:
    claim: PublishedClaim
    finding: Judgement


def check_claims(catalog: Catalog, claims: Sequence[PublishedClaim] | None = None) -> list[Checked]:
    """The findings of these claims, or of all; contradictions are sought among all claims that ship."""
    everything = read_claims()
    evidence = Evidence(catalog)
    against = contradictions(everything)
    return [
        Checked(claim, _with_others(checked(evidence, claim), against.get(claim.id, {})))
        for claim in (everything if claims is None else claims)
    ]


def checked(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    if claim.id not in CHECKS:
        raise BadInput(f"claim {claim.id} has no check")
    try:
        return CHECKS[claim.id](evidence, claim)
    except (BadInput, DoesNotFit) as error:
        # A user's catalog may lack what a check needs, or be too small for the model that it runs.
        return Judgement(
            UNCHECKABLE, "no value", f"with this catalog: {error}", (Rest("catalog", str(error), "your files"),)
        )


def _with_others(finding: Judgement, others: Mapping[str, str]) -> Judgement:
    """Another claim decides nothing that the check has decided; it only takes the place of no answer."""
    named = tuple(sorted({*finding.contradicted_by, *others}))
    if finding.verdict == UNCHECKABLE and others:
        said = "; ".join(f"{name} says {what}" for name, what in others.items())
        return replace(finding, verdict=CONTRADICTED, reason=f"{finding.reason}. {said}", contradicted_by=named)
    return replace(finding, contradicted_by=named)


def contradictions(claims: Sequence[PublishedClaim]) -> dict[str, dict[str, str]]:
    """For a claim, those whose value for the same quantity does not overlap with its own, and what they say."""
    by_id = {claim.id: claim for claim in claims}
    found: dict[str, dict[str, str]] = {}
    for same in SAME:
        values = {name: _value(by_id[name], part) for name, part in same.parts.items() if name in by_id}
        for one, value in values.items():
            for other, said in values.items():
                if other != one and _differ(value, said):
                    found.setdefault(one, {})[other] = f"{said} for the {same.quantity}"
    return found


def _value(claim: PublishedClaim, part: int | str) -> Span | str:
    if isinstance(part, int):
        return claim.spans[part]
    match = re.search(part, claim.text)
    if match and match.groups():
        return Span(float(match[1]), float(match[1]))
    return claim.value


def _differ(one: Span | str, other: Span | str) -> bool:
    if isinstance(one, Span) and isinstance(other, Span):
        return not one.meets(other.low, other.high)
    return one != other


@dataclass(frozen=True)
class ClaimsSummary:
    counts: dict[str, int]
    # Of each article: claims, and those of them that hold, under conditions or not.
    articles: dict[str, tuple[int, int, int]]

    @property
    def best(self) -> list[str]:
        """Articles by the share of their claims that hold as they stand, then under conditions."""

        def share(article: str) -> tuple[float, float]:
            total, held, under = self.articles[article]
            return held / total, (held + under) / total

        return sorted(self.articles, key=share, reverse=True)

    @property
    def line(self) -> str:
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        total = sum(self.counts.values())
        opening = f"{total} claim{'s' * (total != 1)}: {counted}."
        if len(self.articles) < 2:
            return opening
        ranked = ", ".join(
            f"{name} ({held} of {made} hold, {under} more under conditions)"
            for name in self.best
            for made, held, under in (self.articles[name],)
        )
        return f"{opening} Articles, best first: {ranked}."


def summarise(found: Sequence[Checked]) -> ClaimsSummary:
    counts = Counter(one.finding.verdict for one in found)
    articles = {}
    for name in sorted({one.claim.article for one in found}):
        own = [one.finding.verdict for one in found if one.claim.article == name]
        articles[name] = (len(own), own.count(HOLDS), own.count(CONDITIONAL))
    return ClaimsSummary({verdict: counts[verdict] for verdict in VERDICTS}, articles)
