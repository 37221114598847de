"""The check of functions by name, for people and programs: findings and a verdict for each callable.

Imports PyTorch when it is called, not before: it is an extra.
"""

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.finding import Finding, Location
from crosstie.core.progress import OnProgress, no_progress
from crosstie_port.capture.hazards import CaptureResult, Verdict
from crosstie_port.capture.parts import DEFAULT, GpuPart, part
from crosstie_port.kernels.report import shown


class CaptureReport(msgspec.Struct, frozen=True, kw_only=True):
    findings: list[Finding]
    # By callable.
    verdicts: dict[str, Verdict]
    # The part that the device stood for; nothing ran on one.
    stand_in: str


def preflight_capture(
    target: str, *, inputs: str, state: str | None = None, every: bool = False, on: str = DEFAULT,
    on_progress: OnProgress = no_progress,
) -> CaptureReport:  # fmt: skip
    """Would a graph capture of these functions succeed, and would its replays be true?

    `target`: MODULE:CALLABLE, where MODULE is dotted or a .py file and CALLABLE a function, a torch module, a factory
    of one, or a dictionary of them. `inputs`: [MODULE:]FACTORY that makes the arguments; `state`: one that makes what
    the function keeps between calls. `every`: all functions of MODULE that take these inputs. `on`: the part that the
    device stands for, an accelerator of the catalog or an instruction set.
    """
    try:
        import_module("torch")
    except ImportError:
        raise BadInput("preflight capture needs torch: pip install torch") from None
    from crosstie_port.capture.survey import survey

    stands_for = part(on)
    found: list[Finding] = []
    verdicts: dict[str, Verdict] = {}
    # What the user's code prints must not mix with a report.
    with redirect_stdout(sys.stderr):
        for label, result in survey(target, inputs, state, every, stands_for, on_progress):
            verdicts[label] = result.verdict
            found += _findings(label, result)
    if not verdicts:
        raise BadInput(f"{target} has no function that takes these inputs")
    return CaptureReport(findings=[*found, *_limits(stands_for)], verdicts=verdicts, stand_in=str(stands_for))


def _findings(label: str, result: CaptureResult) -> Iterator[Finding]:
    for hazard in result.hazards:
        yield Finding(
            check=f"capture-{hazard.kind}", severity="unknown" if hazard.kind == "not-followed" else "error",
            what=f"{label} {hazard.what}", evidence=hazard.evidence, grounds="emulated", remedy=hazard.remedy,
            where=Location(file=shown(hazard.file), line=hazard.line, name=hazard.function),
        )  # fmt: skip
    for note in result.notes:
        yield Finding(
            check="capture-inputs", severity="note", what=f"{label}: {note}", where=Location(file=label),
            evidence=note, grounds="emulated",
            remedy="a factory that takes (device, seed) and gives other values for each seed",
        )  # fmt: skip


def _limits(of: GpuPart) -> list[Finding]:
    return [
        Finding(
            check="capture-limits", severity="note", what=f"{of.name}: {limit.what}", where=Location(file=of.name),
            evidence=limit.source, grounds="read", remedy="",
        )
        for limit in of.limits
    ]  # fmt: skip
