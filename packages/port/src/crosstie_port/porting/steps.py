"""The nouns of a port: what is asked, what a file says of it, and the steps of the work in their order."""

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
Status = Literal["done", "open", "blocked", "failed"]
# Where a step is done: at a desk, on the machine that runs the model now, on the one that it moves to.
Phase = Literal["desk", "from", "to"]
_ENDS = ("low", "likely", "high")
PHASES: tuple[Phase, ...] = get_args(Phase)


class PortQuestion(msgspec.Struct, frozen=True, kw_only=True):
    stored: Stored
    source: Path | None
    # The accelerators `--from` and `--to`.
    origin: Accelerator
    target: Accelerator
    engine: EngineRelease
    # Where results are, or where commands are told to put them.
    results: Path
    # The file of the checkpoint, and of the sources, that was changed last.
    newest_weights: Path | None
    newest_source: Path | None

    def saved(self, *words: object, into: str) -> str:
        """A command whose document goes into a file of the results."""
        return f"{crosstie(*words, '--json')} > {shlex.quote(str(self.results / into))}"


def crosstie(*words: object) -> str:
    return shlex.join(["crosstie", *map(str, words)])


class PortEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What files say of a step, or what was worked out here."""

    status: Status
    says: str
    findings: tuple[Finding, ...] = ()
    effort: Effort | None = None
    files: tuple[str, ...] = ()
    # Files with kernels that it is about.
    kernels: frozenset[str] = frozenset()
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
    # Whether something is still to be looked at, whatever was found so far.
    waiting: bool
    # Steps that come first.
    needs: tuple[str, ...] = ()
    # Files that it rests on, and why others of its name are not taken.
    evidence: tuple[str, ...] = ()
    not_taken: tuple[str, ...] = ()
    # What cures its findings, gravest first.
    remedies: tuple[str, ...] = ()
    # None: not known before it was done.
    effort: Effort | None = None


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
    def status(self) -> Literal["done", "open", "stuck"]:
        found = {step.status for step in self.steps}
        return "stuck" if found & {"failed", "blocked"} else "open" if "open" in found else "done"

    @property
    def next(self) -> tuple[PortStep, ...]:
        """What can be done now: what failed, and what waits for nothing but its own file."""
        ahead = {step.name for step in self.steps if step.waiting or step.status == "failed"}
        can = (step for step in self.steps if step.status == "open" and step.waiting and not ahead & set(step.needs))
        return (*(step for step in self.steps if step.status == "failed"), *can)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Steps that may find work, and have not been done."""
        return tuple(step.name for step in self.steps if step.effort is None and step.name in ("kernels", "capture"))

    @property
    def effort(self) -> dict[str, Effort]:
        before = (step for step in self.steps if step.phase != "to")
        left = (step for step in self.steps if step.status != "done")
        return {"all": _summed(self.steps), "before_a_gpu": _summed(before), "left": _summed(left)}


def _summed(steps: Iterable[PortStep]) -> Effort:
    """The ends are sums of the steps' ends, as if all went well, or badly, together."""
    known = [(step.name, step.effort) for step in steps if step.effort]
    low, likely, high = (round(sum(getattr(effort, f"{end}_days") for _, effort in known), 1) for end in _ENDS)
    return Effort(
        low_days=low, likely_days=likely, high_days=high,
        parts={name: (days.low_days, days.likely_days, days.high_days) for name, days in known if days.high_days},
        basis=", ".join(dict.fromkeys(effort.basis for _, effort in known if effort.basis)),
        source=", ".join(dict.fromkeys(effort.source for _, effort in known if effort.source)),
    )  # fmt: skip
