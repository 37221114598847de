"""Variables that are set on a machine and that its engines do not read, any more or at all."""

from collections.abc import Iterable

from crosstie.core.finding import Finding, Location
from crosstie.port.doctor.machine import Machine
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.variables import variables


def variable_findings(machine: Machine, engines: Iterable[EngineRelease]) -> list[Finding]:
    return [
        Finding(
            check="variable", severity="setting", where=Location(file="environment", name=name), grounds="read",
            what=f"{name}={value} does nothing: {fault}",
            evidence=f"{engine}: {known.source}, {known.date}",
            remedy=f"{known.instead[name]} on the engine's command line" if name in known.instead else f"unset {name}",
        )
        for engine in engines
        if (known := variables(engine.name)) is not None
        for name, value in machine.environment.items()
        if name in known.last and (fault := known.fault(name, engine.version))
    ]  # fmt: skip
