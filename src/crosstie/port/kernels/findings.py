"""Everything that was found, each thing once: by kernel, statement and target, over all configurations."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from crosstie.core.finding import Finding, Place, rank, verdict
from crosstie.port.kernels.checks import CHECKS
from crosstie.port.kernels.compilation import Compilation
from crosstie.port.kernels.failures import failures, silent_errors
from crosstie.port.kernels.running import Answer
from crosstie.port.kernels.wave_hints import wave_hints

# Triton's autotuner takes these for "too slow" and goes on (triton/runtime/autotuner.py, Autotuner._bench).
_PASSED_OVER = ("lds-over-limit", "threads-over-limit", "tensor-memory-over-limit")
_PASSED_OVER_ERRORS = ("CompileTimeAssertionFailure", "PTXASError")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A finding, the compilation that has it, and of how many it was said."""

    finding: Finding
    one: Compilation


def find(answers: Sequence[Answer]) -> list[Finding]:
    found: list[Finding] = []
    for answer in answers:
        found += _of_target(answer)
    return [
        msgspec.structs.replace(one, where=msgspec.structs.replace(one.where, file=shown(one.where.file)))
        for one in found
    ]


def _of_target(answer: Answer) -> Iterator[Finding]:
    seen = [Seen(finding=finding, one=one) for one in answer.compilations for finding in _of(one)]
    yield from _merged(_as_tuned(seen, answer.compilations), answer.compilations)
    yield from wave_hints(answer.compilations)
    yield from _not_compiled(answer)
    yield from _stopped(answer)
    if answer.left_out:
        yield Finding(
            check="configurations-left-out", severity="unknown",
            where=Place(file=answer.compilations[0].job["file"]),
            what=f"{answer.left_out} configurations of autotuned kernels were left out",
            evidence="max_configs takes the first of each kernel alone; an autotuner stops where one does not compile",
            grounds="compiled", remedy="a run without max_configs; what was compiled is cached",
            target=answer.target.name,
        )  # fmt: skip


def _of(one: Compilation) -> Iterator[Finding]:
    yield from failures(one)
    if one.compiled:
        for check in CHECKS:
            yield from check(one)
        yield from silent_errors(one)


def _as_tuned(seen: Sequence[Seen], compilations: Sequence[Compilation]) -> list[Seen]:
    """An autotuner passes over what does not fit and takes the quickest: one good configuration is enough."""
    grave = {id(entry.one) for entry in seen if rank(entry.finding.severity) >= rank("slow")}
    good = {one.job["group"] for one in compilations if one.job["chosen_by_tuner"] and id(one) not in grave}
    return [
        msgspec.structs.replace(entry, finding=_softened(entry.finding))
        if entry.one.job["group"] in good and _is_passed_over(entry)
        else entry
        for entry in seen
    ]


def _is_passed_over(entry: Seen) -> bool:
    if entry.finding.severity == "error":
        kind = entry.one.result.get("error", {}).get("type", "")
        return entry.finding.check in _PASSED_OVER or kind in _PASSED_OVER_ERRORS
    return entry.finding.severity == "slow"


def _softened(finding: Finding) -> Finding:
    what = f"{finding.what}; the autotuner has other configurations"
    return msgspec.structs.replace(finding, severity="note", what=what)


def _merged(seen: Sequence[Seen], compilations: Sequence[Compilation]) -> Iterator[Finding]:
    def key(entry: Seen) -> tuple[str, str, str, int]:
        # Of a note, one place is enough.
        line = 0 if entry.finding.severity == "note" else entry.finding.where.line or 0
        return entry.finding.check, entry.one.kernel, entry.finding.where.file, line

    for _, entries in groupby(sorted(seen, key=key), key=key):
        same = list(entries)
        worst = max(same, key=lambda entry: (rank(entry.finding.severity), entry.one.lds_bytes, entry.one.threads))
        evidence = worst.finding.evidence
        lines = len({entry.finding.where.line for entry in same}) - 1
        if lines:
            evidence += f"; and at {lines} more line{'s' if lines > 1 else ''}"
        of = sum(one.key == worst.one.key for one in compilations)
        if of > 1:
            evidence += f"; {len({id(entry.one) for entry in same})} of {of} configurations"
        yield msgspec.structs.replace(worst.finding, evidence=evidence)


def _not_compiled(answer: Answer) -> Iterator[Finding]:
    compiled = {one.key for one in answer.compilations}
    for kernel in answer.found:
        if kernel["helper"] or kernel["imported"] or (kernel["file"], kernel["line"]) in compiled:
            continue
        yield Finding(
            check="not-compiled", severity="unknown", what=f"{kernel['name']} was not compiled: no signature",
            where=Place(file=kernel["file"], line=kernel["line"], name=kernel["name"]),
            evidence="the module has this kernel, and neither the spec nor a launch says how it is launched",
            remedy="a [[kernel]] in a spec beside the file, or --launch with a function that launches it",
            grounds="read", target=answer.target.name,
        )  # fmt: skip


def _stopped(answer: Answer) -> Iterator[Finding]:
    for failure in answer.failures:
        yield Finding(
            check="launch-stopped", severity="unknown",
            what=f"{failure['launcher']} stopped before it had launched everything: {failure['type']}",
            where=Place(file=failure["file"], line=failure["line"] or None, name=failure["launcher"]),
            evidence=f"{failure['type']}: {failure['message']}", grounds="emulated",
            remedy="a launcher that keeps to CPU tensors and to what the fake device answers; values are not computed",
            target=answer.target.name,
        )  # fmt: skip


def shown(file: str) -> str:
    """As code-scanning pages want it: below the current folder where it is there."""
    here = Path.cwd()
    return os.path.relpath(file, here) if file and Path(file).is_relative_to(here) else file


def verdicts(answers: Iterable[Answer], findings: Sequence[Finding]) -> dict[str, str]:
    return {
        answer.target.name: verdict(one for one in findings if one.target in ("", answer.target.name))
        for answer in answers
    }
