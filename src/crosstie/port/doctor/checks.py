"""Rows of checks.toml against a machine: each that holds is a finding with its remedy and its source."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_record, sourced_file, table
from crosstie.core.errors import BadData
from crosstie.core.finding import Finding, Location, Severity
from crosstie.port.doctor.facts import UNSET, gpu_facts, known_facts, machine_facts, place_of
from crosstie.port.doctor.machine import Machine
from crosstie.port.preflight.rules import Value, conditions, covers, hold, targets

FILE = Path(__file__).parent / "data" / "checks.toml"
_NAMED = re.compile(r"\{([\w.]+)\}")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    on: tuple[str, ...]
    when: dict[str, tuple[Value, ...]]
    unless: dict[str, tuple[Value, ...]] = {}
    severity: Severity
    # Facts in braces are filled in, here and in the remedy.
    what: str
    remedy: str = ""
    needs: str
    source: str
    date: str


@cache
def checks(file: Path = FILE) -> tuple[Check, ...]:
    found: list[Check] = []
    with sourced_file(file, {"check"}) as (raw, sources):
        for index, raw_check in enumerate(raw.get("check") or []):
            where = f"check[{index}]"
            entry = table(file, where, raw_check)
            known = known_facts(key[4:] for key in {**entry.get("when", {}), **entry.get("unless", {})} if _env(key))
            check = read_record(
                file, where, entry, Check, sources,
                on=targets(file, f"{where}.on", entry.get("on")),
                when=conditions(file, f"{where}.when", entry.get("when") or {}, known),
                unless=conditions(file, f"{where}.unless", entry.get("unless") or {}, known),
            )  # fmt: skip
            for name in _NAMED.findall(check.what + check.remedy + check.needs):
                if name not in known:
                    raise BadData(file, f"{check.id}.what", f"{{{name}}} is no fact")
            if check.severity != "note" and not check.remedy:
                raise BadData(file, f"{check.id}.remedy", "missing: only a note may do without")
            if any(check.id == other.id for other in found):
                raise BadData(file, check.id, "this id stands here twice")
            found.append(check)
    return tuple(found)


def _env(key: str) -> bool:
    return key.startswith("env.")


def check_findings(machine: Machine) -> list[Finding]:
    common = machine_facts(machine)
    found: dict[Finding, None] = {}
    for check in checks():
        variables = {key: machine.environment.get(key[4:], UNSET) for key in check.when if _env(key)}
        for gpu in machine.gpus:
            facts = {**common, **variables, **gpu_facts(gpu, machine.environment)}
            isa = gpu.isa or ("gfx" if gpu.vendor == "AMD" else "sm_")
            if any(covers(target, isa) for target in check.on) and hold(check.when, check.unless, facts):
                of_gpu = any(key.startswith("gpu.") for key in check.when)
                # A GPU inside the processor is the machine's fault, and no kind that a verdict is given of.
                found[_finding(check, facts, gpu.label if of_gpu and not gpu.integrated else "")] = None
    return list(found)


def _finding(check: Check, facts: Mapping[str, Value], target: str) -> Finding:
    asked = [key for key in check.when if key in facts]
    seen = ", ".join(f"{key} = {facts[key]}" for key in asked)
    first = asked[0] if asked else ""
    return Finding(
        check=check.id, severity=check.severity, what=_filled(check.what, facts), grounds="seen", target=target,
        where=Location(file=place_of(first), name=first), remedy=_filled(check.remedy, facts),
        evidence=f"{seen}; {_filled(check.needs, facts)} ({check.source}, {check.date})",
    )  # fmt: skip


def _filled(text: str, facts: Mapping[str, Value]) -> str:
    return _NAMED.sub(lambda name: str(facts.get(name[1], "not told")), text)
