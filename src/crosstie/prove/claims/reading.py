"""Assertions of public articles, from claims.toml: what each says, and the questions that it is checked by.

A claim has what an article says (`says`), and readings: cases that it leaves open, by name, each with an expression
over the vocabulary of `questions`. `for` has lists of values, and a reading is asked for each of those that its name
has in braces. `let` has expressions that others use by name. `tolerance` is a fraction of the claimed value, `points`
is in its unit; a value with an interval agrees if the interval holds the claim. `wanted` is what readings are compared
with where that is not the claimed value; `unless` a case, told by no figure, in which it does not hold. `same` names a
quantity that other claims speak of too, `contradicts` claims that it cannot be true beside.

Expressions are arithmetic over those questions, and nothing else of Python: one is parsed by Python, every node of it
held to a list, and only then evaluated. Names are those of the vocabulary, of `let` and of `for`; no attribute can be
reached and nothing but the vocabulary be called.
"""

import ast
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Annotated, Any, Literal

import msgspec

from crosstie.catalog.library import SHIPPED
from crosstie.catalog.reading import read_record, read_toml, table, text
from crosstie.core.errors import BadData, BadInput, did_you_mean, near_names
from crosstie.prove.claims.questions import VOCABULARY

SHIPPED_CLAIMS = SHIPPED / "claims.toml"
_NUMBER = r"\d+(?:\.\d+)?"
_SPAN = re.compile(rf"±?({_NUMBER})(?:-({_NUMBER}))?")
_ID = re.compile(r"c\d{2,3}")
_ALLOWED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.Call, ast.keyword, ast.List, ast.Subscript,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.UnaryOp, ast.USub, ast.Not, ast.BoolOp, ast.And, ast.Or,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.IfExp, ast.Lambda,
    ast.arguments, ast.arg, ast.GeneratorExp, ast.ListComp, ast.comprehension,
)  # fmt: skip
_FILLED = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Expression:
    text: str
    code: CodeType
    # What it asks for, besides names of its own.
    names: frozenset[str]

    def value(self, names: Mapping[str, Any]) -> Any:
        # Held to the list above when it was read; no builtins, and no attributes to find them by.
        return eval(self.code, {"__builtins__": {}, **names})


def read_expression(text: str, known: Collection[str]) -> Expression:
    """`ValueError` with what is wrong, for whoever knows file and claim."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"'{text}' is no expression: {error.msg}") from None
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    asked = set[str]()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ValueError(f"'{text}': {type(node).__name__} is not allowed")
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name):
            raise ValueError(f"'{text}': only names of the vocabulary are called")
        if isinstance(node, ast.Name) and node.id not in own:
            if node.id not in known:
                raise ValueError(f"'{text}': {node.id} is not known")
            asked.add(node.id)
    return Expression(text, compile(tree, "<claim>", "eval"), frozenset(asked))


@dataclass(frozen=True)
class Template:
    """A sentence with expressions in braces."""

    words: tuple[str, ...]
    expressions: tuple[Expression, ...]

    def filled(self, value: Callable[[Expression], str]) -> str:
        values = [*map(value, self.expressions), ""]
        return "".join(word + filled for word, filled in zip(self.words, values, strict=True))

    @property
    def names(self) -> frozenset[str]:
        return frozenset().union(*(expression.names for expression in self.expressions))


def read_template(text: str, known: Collection[str]) -> Template:
    pieces = _FILLED.split(text)
    if any("{" in word or "}" in word for word in pieces[::2]):
        raise ValueError(f"'{text}': a brace without its other half")
    return Template(tuple(pieces[::2]), tuple(read_expression(piece, known) for piece in pieces[1::2]))


@dataclass(frozen=True)
class Span:
    """One number of a claim, or a range of it."""

    low: float
    high: float

    def holds(self, value: float, tolerance: float = 0.0, points: float = 0.0) -> bool:
        """Whether the value lies in the span, give or take a fraction of the span's ends, or so many units."""
        return self.low * (1.0 - tolerance) - points <= value <= self.high * (1.0 + tolerance) + points

    def meets(self, low: float, high: float) -> bool:
        return self.low <= high and low <= self.high

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2.0

    def __str__(self) -> str:
        return f"{self.low:,.10g}" if self.low == self.high else f"{self.low:,.10g} to {self.high:,.10g}"


class _Says(msgspec.Struct, frozen=True, kw_only=True):
    article: str
    kind: Literal["spec", "fit", "perf", "cost", "policy", "software", "recommend"]
    subject: str
    claim: str
    value: str
    unit: str = ""


class _Compared(msgspec.Struct, frozen=True, kw_only=True):
    tolerance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    points: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    wanted: str = ""
    unless: str = ""
    same: str = ""
    same_value: str = ""
    contradicts: tuple[str, ...] = ()


class PublishedClaim(_Compared, frozen=True, kw_only=True):
    id: str
    article: str
    kind: str
    subject: str
    text: str
    value: str
    unit: str
    readings: tuple[tuple[Template, Expression], ...]
    loops: dict[str, list[Any] | Expression]
    let: dict[str, Expression]
    note: Template | None = None

    @property
    def spans(self) -> tuple[Span, ...]:
        """The numbers that readings are compared with, `2 and 4-6` as two spans; none where the value is a word."""
        return spans_of(self.wanted or self.value)

    @property
    def says_yes(self) -> bool:
        """Of readings that are true or false: whether true is as claimed."""
        return self.value != "no"

    @property
    def says_of_same(self) -> Span | str:
        said = self.same_value or self.value
        spans = spans_of(said)
        return spans[0] if spans else said

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
    raw = read_toml(file)
    claims = tuple(_read_claim(file, name, table(file, name, entry)) for name, entry in raw.items())
    for claim in claims:
        for other in claim.contradicts:
            if other not in raw:
                raise BadData(file, f"{claim.id}.contradicts", f"there is no claim {other}")
    return claims


def _read_claim(file: Path, name: str, raw: dict[str, Any]) -> PublishedClaim:
    if not _ID.fullmatch(name):
        raise BadData(file, name, "is not c and a number")
    says = read_record(file, f"{name}.says", raw.get("says"), _Says)
    if says.unit == "bool" and says.value not in ("yes", "no"):
        raise BadData(file, f"{name}.says.value", f"'{says.value}' must be yes or no")
    asked = ("says", "readings", "for", "let", "note")
    compared = read_record(file, name, {key: raw[key] for key in raw if key not in asked}, _Compared)
    known = set(VOCABULARY)

    def read(kind: Any, where: str, given: object, names: Collection[str] = known) -> Any:
        try:
            return kind(text(file, f"{name}.{where}", given), names)
        except ValueError as error:
            raise BadData(file, f"{name}.{where}", str(error)) from None

    loops, let = dict[str, Any](), dict[str, Expression]()
    for key, given in table(file, f"{name}.for", raw.get("for", {})).items():
        loops[key] = given if isinstance(given, list) else read(read_expression, f"for.{key}", given)
    known.update(loops)
    for key, given in table(file, f"{name}.let", raw.get("let", {})).items():
        let[key] = read(read_expression, f"let.{key}", given)
        known.add(key)
    readings = tuple(
        (read(read_template, "readings", key, loops), read(read_expression, f"readings.{key}", given))
        for key, given in table(file, f"{name}.readings", raw.get("readings")).items()
    )
    for case, expression in readings:
        names = expression.names | {name for used in expression.names & let.keys() for name in let[used].names}
        for loop in loops.keys() & names:
            if loop not in case.names:
                raise BadData(file, f"{name}.readings", f"'{''.join(case.words)}' uses {loop} and does not name it")
    return PublishedClaim(
        id=name, article=says.article, kind=says.kind, subject=says.subject, text=says.claim, value=says.value,
        unit=says.unit, readings=readings, loops=loops, let=let,
        note=read(read_template, "note", raw["note"]) if "note" in raw else None, **msgspec.structs.asdict(compared),
    )  # fmt: skip


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
    chosen = {claim.id for claim in claims if wanted in f"{claim.words} {claim.kind}".casefold()}
    if chosen and not _ID.fullmatch(wanted):
        return chosen
    words = {
        word for claim in claims for word in re.findall(r"[a-z0-9]{3,}", f"{claim.subject} {claim.kind}".casefold())
    }
    hint = did_you_mean(near_names(wanted, ids if _ID.fullmatch(wanted) else ids | words))
    raise BadInput(f"no claim is named or mentions '{text}'.{hint} `crosstie claims` lists them all.")
