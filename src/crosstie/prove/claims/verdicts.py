"""What a check of a claim gives: a verdict, the value beside it, the reason, and what that rests on.

A check is a function of the evidence and the claim, registered under the claim's id. It computes first and
compares then, so that another catalog gives another verdict.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.prove.claims.evidence import Evidence
from crosstie.prove.claims.reading import Claim
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


@dataclass(frozen=True)
class Judgement:
    verdict: str
    computed: str
    reason: str
    rests: Sequence[Rest]
    contradicted_by: tuple[str, ...] = ()


Check = Callable[[Evidence, Claim], Judgement]
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


def verdict_of(agrees: Iterable[bool]) -> str:
    """Of cases that a claim leaves open: all, some or none of them agree."""
    cases = list(agrees)
    return HOLDS if all(cases) else CONDITIONAL if any(cases) else WRONG
