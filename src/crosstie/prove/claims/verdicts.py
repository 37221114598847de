"""What a check of a claim gives: a verdict, the value beside it, the reason, and what that rests on.

A check is a function of the evidence and the claim, registered under the claim's id. It computes first and
compares then, so that another catalog gives another verdict.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.prove.claims.evidence import Evidence
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest

HOLDS = "holds"
CONDITIONAL = "holds under stated conditions"
WRONG = "wrong"
CONTRADICTED = "contradicted by another"
UNCHECKABLE = "cannot be checked"
VERDICTS = {
    HOLDS: "every value computed or sourced here agrees, within the tolerance that the reason names",
    CONDITIONAL: "it agrees in a case that the claim leaves open, which the reason names, and not in all",
    WRONG: "what was computed or sourced lies elsewhere",
    CONTRADICTED: "the check alone does not settle it, and another claim of the list says otherwise",
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


class Verdict(str):
    """One of the verdicts, which knows how many of the readings that were tried agree with the claim."""

    agreeing: int
    tried: int


@dataclass(frozen=True)
class Judgement:
    verdict: str
    computed: str
    reason: str
    rests: Sequence[Rest]
    contradicted_by: tuple[str, ...] = ()

    @property
    def readings(self) -> tuple[int, int] | None:
        """Of the ways to read the claim, those in which it agrees, and those that were tried; None: only one."""
        found = self.verdict
        return (found.agreeing, found.tried) if isinstance(found, Verdict) and found.tried > 1 else None

    @property
    def extrapolated(self) -> bool:
        """Whether every estimate that it rests on is of something that was not measured there."""
        estimates = [rest.what for rest in self.rests if rest.kind == "model" and " in flight" in rest.what]
        return bool(estimates) and all("extrapolated" in what for what in estimates)

    @property
    def qualified(self) -> str:
        """The verdict with what it must not be read without."""
        more = [f"{self.readings[0]} of {self.readings[1]} readings agree"] if self.readings else []
        more += ["by extrapolation alone"] if self.extrapolated else []
        return f"{self.verdict} ({', '.join(more)})" if more else str(self.verdict)


Check = Callable[[Evidence, PublishedClaim], Judgement]
CHECKS: dict[str, Check] = {}


def check(*ids: str) -> Callable[[Check], Check]:
    """Registers a check under the ids of the claims that it decides."""

    def register(function: Check) -> Check:
        for name in ids:
            if name in CHECKS:
                raise ValueError(f"claim {name} has two checks")
            CHECKS[name] = function
        return function

    return register


def verdict_of(agrees: Iterable[bool]) -> Verdict:
    """Of cases that a claim leaves open: all, some or none of them agree."""
    cases = list(agrees)
    found = Verdict(HOLDS if all(cases) else CONDITIONAL if any(cases) else WRONG)
    found.agreeing, found.tried = sum(cases), len(cases)
    return found
