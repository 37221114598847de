"""Findings as SARIF 2.1.0, which code-scanning pages and editors read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from crosstie.core.finding import GROUNDS, Finding
from crosstie.core.version import __version__

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"note": "note", "setting": "warning", "slow": "warning", "unknown": "warning", "error": "error"}


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    checks = sorted({finding.check for finding in findings})
    driver = {
        "name": "crosstie",
        "version": __version__,
        "informationUri": "https://pypi.org/project/crosstie/",
        "rules": [{"id": check, "shortDescription": {"text": check.replace("-", " ")}} for check in checks],
    }
    results = [_result(finding, checks.index(finding.check)) for finding in findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    place = finding.where
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(place.file)}}
    if place.line:
        physical["region"] = {"startLine": place.line}
    location: dict[str, Any] = {"physicalLocation": physical}
    if place.name:
        location["logicalLocations"] = [{"fullyQualifiedName": place.name}]
    on = f" [{finding.target}]" if finding.target else ""
    cure = f" Remedy: {finding.remedy.rstrip('.')}." if finding.remedy else ""
    return {
        "ruleId": finding.check,
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what.rstrip('.')}{on}. Evidence: {finding.evidence.rstrip('.')}.{cure}"},
        "locations": [location],
        "properties": {
            "severity": finding.severity,
            "target": finding.target,
            "rests_on": GROUNDS[finding.grounds],
        },
    }


def _uri(file: str) -> str:
    """Relative to the working directory where the file is below it, as code-scanning pages want it."""
    path = Path(file)
    if path.is_absolute():
        here = Path.cwd()
        if not path.is_relative_to(here):
            return path.as_uri()
        path = path.relative_to(here)
    return quote(path.as_posix())
