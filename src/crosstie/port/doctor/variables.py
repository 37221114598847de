"""Variables that preflight's rules ask for, as they are set on a machine: which kernels an engine takes by them."""

from collections.abc import Iterable

from crosstie.core.finding import Finding, Location, rank
from crosstie.port.doctor.machine import Machine
from crosstie.port.doctor.relations import kinds
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.rules import EngineRule, rules

_ENV = "env."


def variable_findings(machine: Machine, engines: Iterable[EngineRelease]) -> list[Finding]:
    return [
        finding
        for engine in engines
        for label, gpus in kinds(machine).items()
        if gpus[0].isa
        for finding in _of(machine, engine, label, gpus[0].isa)
    ]


def _of(machine: Machine, engine: EngineRelease, label: str, isa: str) -> Iterable[Finding]:
    spoken = [rule for rule in rules(engine.name) if rule.speaks_of(min(engine.version, engine.newest), isa)]
    given = {f"{_ENV}{name}": value for name, value in machine.environment.items()}
    names = {key: None for rule in spoken for key, _ in rule.asked_settings if key.startswith(_ENV)}
    for key in names:
        asking = [rule for rule in spoken if any(key == asked for asked, _ in rule.asked_settings)]
        name, value = key.removeprefix(_ENV), given.get(key)
        operations = ", ".join(dict.fromkeys(rule.operation for rule in asking))
        count = f"{len(asking)} of preflight's rules for {engine} on {isa} ask for it ({operations})"
        evidence = f"rules {', '.join(rule.id for rule in asking[:3])}{', ...' if len(asking) > 3 else ''}"
        if value is None:
            yield _note(f"{name} is not set: {count}", name, evidence, label)
        else:
            yield _note(f"{name}={value}: {count}", name, evidence, label)
            for rule in asking:
                if _holds(rule, given) and rank(rule.outcome) >= rank("slow"):
                    yield _risk(rule, f"{name}={value}", name, engine, label)


def _holds(rule: EngineRule, given: dict[str, str]) -> bool:
    """By its variables alone, which are all set: which models it speaks of is preflight's to tell."""
    asked = [key for key, _ in rule.asked_settings]
    return (
        all(key.startswith(_ENV) for key in asked) and any(key in rule.when for key in asked) and rule.holds_with(given)
    )


def _note(what: str, name: str, evidence: str, label: str) -> Finding:
    return Finding(
        check="variable", severity="note", what=what, where=Location(file="environment", name=name), grounds="read",
        evidence=evidence, target=label,
        remedy="`crosstie preflight MODEL` says what becomes of a model with and without it",
    )  # fmt: skip


def _risk(rule: EngineRule, said: str, name: str, engine: EngineRelease, label: str) -> Finding:
    """A model that the row speaks of would hit it; others would not, so it is no more than a setting here."""
    facts = ", ".join(f"{key} {', '.join(map(str, value))}" for key, value in rule.when.items() if key[:4] != _ENV)
    return Finding(
        check="variable", severity="setting", where=Location(file="environment", name=name), grounds="read",
        what=f"{said}, for models with {rule.operation}{f' ({facts})' if facts else ''}: {rule.says}",
        evidence=f"rule {rule.id}: {rule.source}, of {rule.date}, holds for {engine.name} {rule.versions}",
        remedy=rule.remedy or f"unset {name}", target=label,
    )  # fmt: skip
