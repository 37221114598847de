"""A machine in; what of it an engine would trip over, with remedies, out."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.finding import Finding, verdict
from crosstie.port.doctor.checks import check_findings
from crosstie.port.doctor.host import machine_of
from crosstie.port.doctor.machine import Machine
from crosstie.port.doctor.record import capture, read_record
from crosstie.port.doctor.relations import relation_findings
from crosstie.port.preflight.engine import EngineRelease, engine_from

_ENGINES = ("vllm", "sglang")


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    # Those that were checked against: the installed ones, or those that were asked for.
    engines: tuple[str, ...]
    # By kind of GPU, or of the machine where it has none.
    verdicts: dict[str, str]
    findings: tuple[Finding, ...]


def read_machine(folder: str | Path | None = None, python: str | None = None) -> Machine:
    """This machine, or one that `crosstie doctor --record` wrote into a folder."""
    if folder is None:
        return machine_of(capture(python))
    return machine_of(read_record(Path(folder)), str(folder))


def diagnose(machine: Machine, *, engines: Sequence[str] = (), catalog: Catalog | None = None) -> Diagnosis:
    """`engines` as preflight takes them, vllm==0.27.1; the installed ones by default."""
    releases = [engine_from(said) for said in engines] or installed(machine)
    findings = [*check_findings(machine), *relation_findings(machine, catalog or Catalog(), releases)]
    names = list(machine.kinds) or ["this machine"]
    verdicts = {name: verdict(finding for finding in findings if finding.target in ("", name)) for name in names}
    return Diagnosis(
        machine=machine, engines=tuple(map(str, releases)), verdicts=verdicts, findings=tuple(findings)
    )  # fmt: skip


def installed(machine: Machine) -> list[EngineRelease]:
    said = [f"{name}=={machine.packages[name].partition('+')[0]}" for name in _ENGINES if name in machine.packages]
    said += [f"llama.cpp=={machine.llama_cpp}"] if machine.llama_cpp else []
    releases = []
    for one in said:
        try:
            releases.append(engine_from(one))
        except BadInput:
            # A build of one's own, with no number that a release has.
            continue
    return releases
