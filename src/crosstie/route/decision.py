"""What a policy answers: where a request goes, what is expected of that, and why."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from crosstie.route.ask import Ask
from crosstie.route.live import Replica
from crosstie.route.speed import Prediction

# Two digits of dollars, written once: to write a float takes as long as to compare two pools.
_CENTS: Final = [f"${cents / 100:.2g}" for cents in range(101)]
_TENTHS: Final = [f"${tenths / 10:.2g}" for tenths in range(101)]

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
    """`meets`: whether the prediction keeps the targets. `told`: whose targets the prediction is told beside, after a
    `why` that has only names from here. The reason is put into words when it is asked for."""

    def __init__(
        self,
        outcome: Outcome,
        why: str | Callable[[], str],
        *,
        replica: Replica | None = None,
        prediction: Prediction | None = None,
        meets: bool = False,
        refusal: Refusal | None = None,
        told: Ask | None = None,
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
        self._told = told
        # What names come into was made up by people; the rest is numbers.
        self._why = _for_a_header(why) if told is None and isinstance(why, str) else why

    @property
    def reason(self) -> str:
        """Short, ASCII and on one line, so that it fits a header: what goes into it is put so where it is made."""
        why, told = self._why, self._told
        if not isinstance(why, str):
            why = self._why = why()
        elif told is not None and self.prediction is not None:
            why = self._why = f"{why}: {in_words(self.prediction, told)}"
            self._told = None
        if self.note:
            why = f"{why}; {_for_a_header(self.note)}"
        return f"{why}; out of service, but too few are in it" if self.panic else why

    def __repr__(self) -> str:
        where = f" {self.replica.key}" if self.replica else ""
        return f"Decision({self.outcome}{where}: {self.reason})"


def in_words(prediction: Prediction, ask: Ask) -> str:
    """Price and latencies beside their targets; milliseconds because people read them. Every answer says why it came
    from where it did: whole numbers are written ten times as fast, and rounded here, not by a call for each."""
    ttft = f" of {int(ask.ttft_s * 1e3 + 0.5)}" if ask.ttft_s is not None else ""
    tpot = f" of {int(ask.tpot_s * 1e3 + 0.5)}" if ask.tpot_s is not None else ""
    held = f", {int(prediction.cached_tokens + 0.5)} tokens held" if prediction.cached_tokens else ""
    return (
        f"{a_million(prediction.predicted_usd * 1e6)} a million such requests, "
        f"TTFT {int(prediction.ttft_s * 1e3 + 0.5)}{ttft} ms, "
        f"TPOT {int(prediction.tpot_s * 1e3 + 0.5)}{tpot} ms{held}"
    )


def a_million(usd: float) -> str:
    """Whole dollars; of small models a few requests cost less than a cent, and nothing is not what they cost."""
    if usd >= 9.5:
        return f"${int(usd + 0.5)}"
    if usd >= 0.995:
        return _TENTHS[int(usd * 10.0 + 0.5)]
    if usd >= 0.0995:
        return _CENTS[int(usd * 100.0 + 0.5)]
    return f"${usd:.2g}" if usd > 0.0 else "nothing"


def _for_a_header(text: str) -> str:
    printed = text.encode("ascii", "replace").decode("ascii")
    return "".join(sign if sign.isprintable() else " " for sign in printed)[:300]
