"""All claims checked: readings asked, verdicts taken from them, contradictions between claims found; and their page."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeGuard

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput, CrosstieError, DoesNotFit, did_you_mean, near_names
from crosstie.prove.claims.questions import Evidence, Questions
from crosstie.prove.claims.reading import SHIPPED_CLAIMS, Expression, PublishedClaim, Span, read_claims
from crosstie.prove.claims.rests import Rest
from crosstie.prove.claims.uncertain import Uncertain, likely, written

# Characters up to which all readings are told where there is room for one value.
_LISTED = 160
_PAGE = Path(__file__).parent / "data" / "page.md"
HOLDS = "holds"
CONDITIONAL = "holds under stated conditions"
WRONG = "wrong"
CONTRADICTED = "contradicted by another"
UNCHECKABLE = "cannot be checked"
VERDICTS = {
    HOLDS: "every value computed or sourced here agrees, within the tolerance that the reason names",
    CONDITIONAL: "it agrees in a case that the claim leaves open, which the reason names, and not in all",
    WRONG: "what was computed or sourced lies elsewhere",
    CONTRADICTED: "the readings do not settle it, and another claim of the list says otherwise",
    UNCHECKABLE: "neither the catalog, the model nor a public source that was read has the figure",
}


def verdict_named(name: str) -> str:
    """A verdict by its name, or by a part that no other has."""
    if name in VERDICTS:
        return name
    near = [known for known in VERDICTS if name.strip() and name.casefold() in known.casefold()]
    if len(near) == 1:
        return near[0]
    hint = did_you_mean(near_names(name, VERDICTS) or near)
    raise BadInput(f"unknown verdict '{name}'.{hint} Known: {', '.join(VERDICTS)}.")


@dataclass(frozen=True)
class Reading:
    """One case of a claim: what the product answers, and whether that is as claimed; None where nothing tells."""

    name: str
    value: object
    agrees: bool | None
    # Why there is no value; and whether that is so because the case is impossible, as where GPUs cannot hold the model.
    lacks: str = ""
    impossible: bool = False
    # Whether all that it rests on are estimates of something that was not measured there.
    extrapolated: bool = False

    @property
    def said(self) -> str:
        return self.lacks or written(self.value)

    def __str__(self) -> str:
        return f"{self.name}: {self.said}"


def verdict_of(agree: Sequence[bool | None]) -> str:
    """All, some or none of the cases agree; where none does and of some nothing is known, it is open."""
    if any(agree):
        return HOLDS if all(agree) else CONDITIONAL
    return UNCHECKABLE if None in agree or not agree else WRONG


@dataclass(frozen=True)
class Judgement:
    claim: PublishedClaim
    verdict: str
    # All that were tried; `tried` leaves out cases that cannot be.
    readings: tuple[Reading, ...]
    computed: str
    reason: str
    rests: Sequence[Rest]
    contradicted_by: tuple[str, ...] = ()

    @property
    def tried(self) -> list[Reading]:
        return [reading for reading in self.readings if not reading.impossible]

    @property
    def agreeing(self) -> int:
        return sum(bool(reading.agrees) for reading in self.tried)

    @property
    def extrapolated(self) -> bool:
        return bool(self.tried) and all(reading.extrapolated for reading in self.tried)

    @property
    def qualified(self) -> str:
        """The verdict with what it must not be read without."""
        more = [f"{self.agreeing} of {len(self.tried)} readings agree"] if len(self.tried) > 1 else []
        more += ["by extrapolation alone"] if self.extrapolated else []
        return f"{self.verdict} ({', '.join(more)})" if more else self.verdict


def agrees(claim: PublishedClaim, value: object) -> bool | None:
    """Intervals must hold the claim, numbers lie within its tolerance, words be its own."""
    if value is None:
        return None
    if isinstance(value, bool):
        return value == claim.says_yes
    if isinstance(value, str):
        return value.casefold() == claim.value.casefold()
    values = value if isinstance(value, list) else [value]
    if len(values) != len(claim.spans):
        raise BadInput(f"claim {claim.id} has {len(claim.spans)} numbers, and its reading {len(values)}")
    return all(
        span.meets(*value.ends) if isinstance(value, Uncertain) else span.holds(value, claim.tolerance, claim.points)
        for span, value in zip(claim.spans, values, strict=True)
    )


def check_claims(catalog: Catalog, claims: Sequence[PublishedClaim] | None = None) -> list[Judgement]:
    """The findings of these claims, or of all; contradictions are sought among all claims that ship."""
    everything = read_claims()
    asking = Questions(catalog, {claim.id: claim.spans[0].middle for claim in everything if claim.spans})
    against = contradictions(everything)
    return [
        _with_others(judged(asking, claim), against.get(claim.id, {}))
        for claim in (everything if claims is None else claims)
    ]


def judged(asking: Questions, claim: PublishedClaim) -> Judgement:
    rests = dict[Rest, None]()
    readings = tuple(
        _asked(asking, claim, case, expression, names, rests)
        for case, expression in claim.readings
        for names in _cases(asking, claim, case.names)
    )
    tried = [reading for reading in readings if not reading.impossible]
    verdict = verdict_of([reading.agrees for reading in tried])
    if verdict == HOLDS and claim.unless:
        verdict = CONDITIONAL
    asking.asked = Evidence()
    note = claim.note.filled(lambda expression: _filled(asking, claim, expression)) if claim.note else ""
    rests |= asking.asked.rests
    if not rests:
        rests = {Rest("catalog", reading.lacks, "your files"): None for reading in readings}
    return Judgement(claim, verdict, readings, _computed(claim, tried), _reason(claim, readings, note), tuple(rests))


def _cases(asking: Questions, claim: PublishedClaim, named: frozenset[str]) -> list[dict[str, Any]]:
    """What the variables of a reading are, in every combination."""
    wanted = {key: values for key, values in claim.loops.items() if key in named}
    lists = [own.value(asking.vocabulary) if isinstance(own, Expression) else own for own in wanted.values()]
    return [dict(zip(wanted, values, strict=True)) for values in product(*lists)]


def _asked(
    asking: Questions, claim: PublishedClaim, case: Any, expression: Expression, names: Mapping[str, Any],
    rests: dict[Rest, None],
) -> Reading:  # fmt: skip
    name = case.filled(lambda expression: _text(expression.value(names)))
    asking.asked = Evidence()
    try:
        value = _value(asking, claim, expression, names)
        reading = Reading(name, value, agrees(claim, value))
    except BadData:
        raise
    except DoesNotFit as error:
        reading = Reading(name, None, None, str(error), impossible=True)
    except CrosstieError as error:
        # A user's catalog may lack what is asked for.
        reading = Reading(name, None, None, str(error))
    rests |= asking.asked.rests
    beyond = asking.asked.extrapolated
    return replace(reading, extrapolated=bool(beyond) and all(beyond))


def _value(asking: Questions, claim: PublishedClaim, expression: Expression, names: Mapping[str, Any]) -> Any:
    """With what it uses of `let`, in which each uses only those before it."""
    known, used = {**asking.vocabulary, **names}, set(expression.names)
    for name in reversed(claim.let):
        used |= claim.let[name].names if name in used else set()
    try:
        for name, given in claim.let.items():
            if name in used:
                known[name] = given.value(known)
        return expression.value(known)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadData(SHIPPED_CLAIMS, claim.id, f"'{expression.text}': {error}") from None


def _filled(asking: Questions, claim: PublishedClaim, expression: Expression) -> str:
    try:
        return written(_value(asking, claim, expression, {}))
    except BadData:
        raise
    except CrosstieError as error:
        return f"({error})"


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _unit(claim: PublishedClaim) -> str:
    return "" if claim.unit in ("", "bool") else f" {claim.unit}"


def _computed(claim: PublishedClaim, tried: Sequence[Reading]) -> str:
    """Every reading, or where that is long, how far they lie apart and the nearest."""
    known = [reading for reading in tried if not reading.lacks]
    numbers = [reading.value for reading in known if _is_number(reading.value)]
    told = "; ".join(f"{term.name}: {written(term.value, brief=True)}" for term in known)
    if len(known) == 1 and (numbers or isinstance(known[0].value, list)):
        return written(known[0].value) + _unit(claim)
    if len(told) <= _LISTED or not numbers:
        return told or "no figure"
    low, *_, high = sorted(map(likely, numbers))
    agreeing = [reading.value for reading in known if reading.agrees and _is_number(reading.value)]
    nearest = min(agreeing or numbers, key=lambda value: abs(likely(value) - claim.spans[0].middle))
    return f"{written(low)} to {written(high)}{_unit(claim)}, nearest {written(nearest)}"


def _is_number(value: object) -> TypeGuard[float | Uncertain]:
    return isinstance(value, int | float | Uncertain) and not isinstance(value, bool)


def _reason(claim: PublishedClaim, readings: Sequence[Reading], note: str) -> str:
    """The readings by how they agree, what they were compared within, and what the data says besides."""
    groups = {
        "As claimed": [reading for reading in readings if reading.agrees],
        "Not as claimed": [reading for reading in readings if reading.agrees is False],
        "Not decided": [reading for reading in readings if reading.agrees is None and not reading.lacks],
        "No figure": [reading for reading in readings if reading.lacks and not reading.impossible],
        "Does not fit": [reading for reading in readings if reading.impossible],
    }
    told = ". ".join(f"{how}: {'; '.join(map(str, some))}" for how, some in groups.items() if some)
    answers = [reading.value for reading in readings]
    values = [value for answer in answers for value in (answer if isinstance(answer, list) else [answer])]
    within = [f"in{_unit(claim)}"] if any(map(_is_number, values)) and claim.unit not in ("", "x") else []
    if any(isinstance(value, Uncertain) for value in values):
        within.append("an estimate agrees if its 80% interval holds the claim")
    if any(_is_number(value) and not isinstance(value, Uncertain) for value in values):
        within += [f"compared within {100.0 * claim.tolerance:.3g}%"] if claim.tolerance else []
        within += [f"compared within {claim.points:g} points"] if claim.points else []
    told += f" ({'; '.join(within)})" if told and within else ""
    unless = f"It does not hold {claim.unless}" if claim.unless and groups["As claimed"] else ""
    return ". ".join(filter(None, (told, unless, note)))


def _with_others(judgement: Judgement, others: Mapping[str, str]) -> Judgement:
    """Another claim decides nothing that the readings have decided; it only takes the place of no answer."""
    beside = judgement.claim.contradicts if judgement.verdict != HOLDS else ()
    named = tuple(sorted({*beside, *others}))
    if judgement.verdict == UNCHECKABLE and others:
        said = "; ".join(f"{name} says {what}" for name, what in others.items())
        return replace(judgement, verdict=CONTRADICTED, reason=f"{judgement.reason}. {said}", contradicted_by=named)
    return replace(judgement, contradicted_by=named)


def contradictions(claims: Sequence[PublishedClaim]) -> dict[str, dict[str, str]]:
    """For a claim, those whose value for the same quantity does not overlap with its own, and what they say."""
    others: dict[str, dict[str, str]] = {}
    for claim, other in product(claims, claims):
        if claim.same and claim.same == other.same and _differ(claim.says_of_same, other.says_of_same):
            others.setdefault(claim.id, {})[other.id] = f"{other.says_of_same} for the {claim.same}"
    return others


def _differ(span: Span | str, other: Span | str) -> bool:
    if isinstance(span, Span) and isinstance(other, Span):
        return not span.meets(other.low, other.high)
    return span != other


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


def summarise(judged: Sequence[Judgement]) -> ClaimsSummary:
    counts = Counter(judgement.verdict for judgement in judged)
    articles = {}
    for name in sorted({judgement.claim.article for judgement in judged}):
        own = [judgement.verdict for judgement in judged if judgement.claim.article == name]
        articles[name] = (len(own), own.count(HOLDS), own.count(CONDITIONAL))
    return ClaimsSummary({verdict: counts[verdict] for verdict in VERDICTS}, articles)


def page(judged: Sequence[Judgement]) -> str:
    """docs/claims.md: by article, with verdict, value and reason."""
    summary = summarise(judged)
    meanings = [(f"**{verdict}**", meaning, str(summary.counts[verdict])) for verdict, meaning in VERDICTS.items()]
    articles = []
    for article in sorted({judgement.claim.article for judgement in judged}):
        rows = [_row(judgement) for judgement in judged if judgement.claim.article == article]
        articles += [f"\n## Article {article}\n", _table(("", "claim", "verdict", "computed", "why"), rows)]
    rests = []
    for judgement in judged:
        rests += [f"- **{judgement.claim.id}**", *(f"  - {rest_words(rest)}" for rest in judgement.rests)]
    return _PAGE.read_text(encoding="utf-8").format(
        summary=summary.line, verdicts=_table(("verdict", "means", "claims"), meanings),
        articles="\n".join(articles), rests="\n".join(rests),
    )  # fmt: skip


def _row(judgement: Judgement) -> Sequence[str]:
    claim, verdict = judgement.claim, judgement.verdict
    against = f" (against {', '.join(judgement.contradicted_by)})" if judgement.contradicted_by else ""
    told = f"**{verdict}**{judgement.qualified.removeprefix(verdict)}{against}"
    return claim.id, claim.words, told, judgement.computed, f"{judgement.reason}."


def rest_words(rest: Rest) -> str:
    source = ", ".join(part for part in (rest.source, rest.date) if part)
    return f"{rest.kind}: {rest.what}" + (f" [{source}]" if source else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)])
