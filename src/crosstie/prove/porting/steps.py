"""The nouns of a port: what is asked, the steps of its work, and what each step rests on."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from crosstie.core.deployment import Accelerator
from crosstie.core.finding import Finding
from crosstie.port.preflight.effort import Effort
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.stored import Stored

# "open": no evidence yet, or evidence that settles nothing; "blocked": open, and a step that it needs has failed.
Status = Literal["done", "failed", "blocked", "open"]
# Where a step is done: at a desk, on the machine that runs the model now, on the one that it moves to.
Phase = Literal["desk", "from", "to"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# What commands name where nobody has said where results go.
RESULTS = "results"


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a tree that was changed last."""

    path: str
    at_s: float


class PortQuestion(msgspec.Struct, frozen=True, kw_only=True):
    stored: Stored
    source: Path | None
    # The accelerators `--from` and `--to`.
    origin: Accelerator
    target: Accelerator
    engine: EngineRelease
    # None: no evidence is read.
    results: Path | None
    # Of the checkpoint and of the sources: evidence must be younger. None where there are no files.
    checkpoint_changed: Changed | None = None
    source_changed: Changed | None = None

    def file(self, name: str) -> Path:
        return (self.results or Path(RESULTS)) / name

    def saved(self, *words: object, into: str) -> str:
        """A command whose document goes into a file of the results."""
        return f"{crosstie(*words, '--json')} > {shlex.quote(str(self.file(into)))}"


def crosstie(*words: object) -> str:
    return shlex.join(["crosstie", *map(str, words)])


class PortEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a step rests on; `files` is empty where it was worked out here."""

    status: Status
    says: str
    files: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    effort: Effort | None = None
    # What is still to be looked at, whatever was found so far.
    missing: str = ""


class PortStep(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # What is asked, in a few words.
    what: str
    phase: Phase
    status: Status
    says: str
    # How it is done, and the file that it waits for or that spares the time; "" where there is none.
    command: str
    file: str
    # Files that it rests on, and why others of its name are not taken.
    evidence: tuple[str, ...] = ()
    not_taken: tuple[str, ...] = ()
    # Whether something is still to be looked at, whatever was found so far.
    waiting: bool
    # Steps that come first.
    needs: tuple[str, ...] = ()
    # What cures its findings, gravest first.
    remedies: tuple[str, ...] = ()
    # None: not known before it was done.
    effort: Effort | None = None


class Days(msgspec.Struct, frozen=True, kw_only=True):
    """Person-days."""

    low: float
    likely: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, likely {self.likely:g}"


def days_of(steps: Iterable[PortStep]) -> Days:
    """The ends are sums of the steps' ends, as if all went well, or badly, together."""
    known = [one.effort for one in steps if one.effort]
    low, likely, high = (
        round(sum(days), 1)
        for days in (
            [one.low_days for one in known], [one.likely_days for one in known], [one.high_days for one in known],
        )
    )  # fmt: skip
    return Days(low=low, likely=likely, high=high)


class PortWork(msgspec.Struct, frozen=True, kw_only=True):
    """All steps in the order of the work."""

    model: str
    origin: str
    target: str
    engine: str
    steps: tuple[PortStep, ...]
    # Steps that this port has none of, each with the reason.
    left_out: dict[str, str]

    @property
    def stuck(self) -> tuple[PortStep, ...]:
        return tuple(one for one in self.steps if one.status in ("failed", "blocked"))

    @property
    def next(self) -> tuple[PortStep, ...]:
        """What can be done now: what failed, and what waits for nothing but its own file."""
        waiting = {one.name for one in self.steps if one.waiting or one.status == "failed"}
        can = (one for one in self.steps if one.status == "open" and one.waiting and not waiting & set(one.needs))
        return (*(one for one in self.steps if one.status == "failed"), *can)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Steps that may find work, and have not been done."""
        return tuple(one.name for one in self.steps if one.effort is None and one.name in ("kernels", "capture"))

    def days(self, *phases: Phase) -> Days:
        return days_of(one for one in self.steps if one.phase in phases)

    @property
    def days_left(self) -> Days:
        return days_of(one for one in self.steps if one.status != "done")
