"""Assertions of public articles: one CSV in, claims out, their values read as numbers, ranges or words."""

import csv
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from crosstie.catalog.library import SHIPPED
from crosstie.catalog.reading import text_of
from crosstie.core.errors import BadData, BadInput, did_you_mean, near_names

SHIPPED_CLAIMS = SHIPPED / "claims.csv"
COLUMNS = ("id", "article", "kind", "subject", "claim", "value", "unit")
KINDS = ("spec", "fit", "perf", "cost", "policy", "software", "recommend")
_NUMBER = r"\d+(?:\.\d+)?"
_SPAN = re.compile(rf"±?({_NUMBER})(?:-({_NUMBER}))?")
_ID = re.compile(r"c\d{2,3}")


@dataclass(frozen=True)
class Span:
    """One number of a claim, or a range of it."""

    low: float
    high: float

    def holds(self, value: float, tolerance: float) -> bool:
        """Whether the value lies in the span, give or take a fraction of the span's ends."""
        return self.low * (1.0 - tolerance) <= value <= self.high * (1.0 + tolerance)

    def meets(self, low: float, high: float) -> bool:
        return self.low <= high and low <= self.high

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2.0

    def __str__(self) -> str:
        return f"{self.low:,.10g}" if self.low == self.high else f"{self.low:,.10g} to {self.high:,.10g}"


@dataclass(frozen=True)
class PublishedClaim:
    id: str
    article: str
    kind: str
    subject: str
    text: str
    value: str
    unit: str

    @property
    def spans(self) -> tuple[Span, ...]:
        """The value's numbers, `2 and 4-6` as two spans; none where the value is a word."""
        return spans_of(self.value)

    @property
    def only(self) -> Span:
        """The span of a claim that has one value."""
        (span,) = self.spans
        return span

    @property
    def says_yes(self) -> bool:
        return self.value == "yes"

    @property
    def words(self) -> str:
        """The claim as one line."""
        measure = "" if self.unit in ("bool", "") else f" {self.unit}"
        return f"{self.subject}: {self.text}: {self.value}{measure}"


def spans_of(text: str) -> tuple[Span, ...]:
    matches = [_SPAN.fullmatch(part.strip()) for part in re.split(r" and | / ", text)]
    return tuple(Span(float(m[1]), float(m[2] or m[1])) for m in matches if m) if all(matches) else ()


@cache
def read_claims(file: Path = SHIPPED_CLAIMS) -> tuple[PublishedClaim, ...]:
    text = text_of(file)
    rows = csv.DictReader(io.StringIO(text), strict=True)
    claims: dict[str, PublishedClaim] = {}
    try:
        names = tuple(rows.fieldnames or ())
        for name in names:
            if name not in COLUMNS:
                hint = near_names(name, COLUMNS)
                raise BadData(file, "line 1", f"unknown column '{name}'{f'; did you mean {hint[0]}?' if hint else ''}")
        if names != COLUMNS:
            raise BadData(file, "line 1", f"columns must be {','.join(COLUMNS)}")
        for row in rows:
            where = f"line {rows.line_num}"
            claim = _read_row(file, where, row)
            if claim.id in claims:
                raise BadData(file, where, f"id '{claim.id}' is there twice")
            claims[claim.id] = claim
    except csv.Error as error:
        raise BadData(file, f"line {rows.line_num}", f"not valid CSV: {error}") from None
    return tuple(claims.values())


def _read_row(file: Path, where: str, row: dict[str, str]) -> PublishedClaim:
    if None in row or None in row.values():
        raise BadData(file, where, f"must have {len(COLUMNS)} fields")
    for name in ("id", "article", "kind", "subject", "claim", "value"):
        if not row[name].strip():
            raise BadData(file, where, f"{name} is empty")
    if not _ID.fullmatch(row["id"]):
        raise BadData(file, where, f"id '{row['id']}' is not c and a number")
    if row["kind"] not in KINDS:
        raise BadData(file, where, f"kind '{row['kind']}' is not one of {', '.join(KINDS)}")
    if row["unit"] == "bool" and row["value"] not in ("yes", "no"):
        raise BadData(file, where, f"value '{row['value']}' must be yes or no")
    fields = {name: row[name] for name in ("id", "article", "kind", "subject", "value", "unit")}
    return PublishedClaim(text=row["claim"], **fields)


def select(
    claims: tuple[PublishedClaim, ...], asked: tuple[str, ...], article: str | None = None
) -> tuple[PublishedClaim, ...]:
    """Claims by id or by a word of theirs; of one article where that is named. All where nothing is asked."""
    known = sorted({claim.article for claim in claims})
    if article is not None:
        if article.upper() not in known:
            raise BadInput(f"unknown article '{article}'; known: {', '.join(known)}")
        claims = tuple(claim for claim in claims if claim.article == article.upper())
    if not asked:
        return claims
    chosen = set[str]().union(*(_named(claims, text) for text in asked))
    return tuple(claim for claim in claims if claim.id in chosen)


def _named(claims: tuple[PublishedClaim, ...], text: str) -> set[str]:
    wanted = text.casefold().strip()
    if not wanted:
        raise BadInput("an empty text names no claim")
    ids = {claim.id for claim in claims}
    if wanted in ids:
        return {wanted}
    found = {claim.id for claim in claims if wanted in f"{claim.words} {claim.kind}".casefold()}
    if found and not _ID.fullmatch(wanted):
        return found
    words = {
        word for claim in claims for word in re.findall(r"[a-z0-9]{3,}", f"{claim.subject} {claim.kind}".casefold())
    }
    hint = did_you_mean(near_names(wanted, ids if _ID.fullmatch(wanted) else ids | words))
    raise BadInput(f"no claim is named or mentions '{text}'.{hint} `crosstie claims` lists them all.")
