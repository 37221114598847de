"""What a check of a claim gives: its readings, the verdict that follows from them, and what that rests on."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest
from crosstie.prove.claims.uncertain import Uncertain, written

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
