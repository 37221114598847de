"""What a policy answers: where a request goes, what is expected of that, and why."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from crosstie.route.live import Replica
from crosstie.route.speed import Prediction

Outcome = Literal["send", "wait", "refuse"]
# "cold": the model is loaded nowhere at the moment, and waited for.
Refusal = Literal["unknown-model", "context", "modality", "pin", "unavailable", "cold"]


class Considered(NamedTuple):
    """One pool, by its best replica: what it would have given, or which filter dropped it."""

    pool: str
    backend: str | None
    prediction: Prediction | None
    dropped: str | None
    # What the policy compares, smaller being better; its unit is the policy's.
    score: float | None
    # Whether the plan sends this class there.
    planned: bool = False
    # At the rated power of its pool; None where nobody knows that.
    joules: float | None = None


class Decision:
    """`meets`: whether the prediction keeps the targets. The reason is put into words when it is asked for."""

    def __init__(
        self,
        outcome: Outcome,
        why: str | Callable[[], str],
        *,
        replica: Replica | None = None,
        prediction: Prediction | None = None,
        meets: bool = False,
        refusal: Refusal | None = None,
    ):
        self.outcome = outcome
        self.replica = replica
        self.prediction = prediction
        self.meets = meets
        self.refusal = refusal
        self.considered: list[Considered] = []
        # Its replica was taken out of service; too few were left.
        self.panic = False
        # What is to be said besides.
        self.note = ""
        # What names come into was made up by people; the rest is numbers.
        self._why = _for_a_header(why) if isinstance(why, str) else why

    @property
    def reason(self) -> str:
        """Short, ASCII and on one line, so that it fits a header: what goes into it is put so where it is made."""
        if not isinstance(self._why, str):
            self._why = self._why()
        why = f"{self._why}; {_for_a_header(self.note)}" if self.note else self._why
        return f"{why}; out of service, but too few are in it" if self.panic else why

    def __repr__(self) -> str:
        where = f" {self.replica.key}" if self.replica else ""
        return f"Decision({self.outcome}{where}: {self.reason})"


def _for_a_header(text: str) -> str:
    printed = text.encode("ascii", "replace").decode("ascii")
    return "".join(sign if sign.isprintable() else " " for sign in printed)[:300]
