"""Points that an earlier run of the same benchmark left in its file, so that they need not be measured again."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadData, BadInput
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.summary import PointResult

# Of a document: what must be the same for its points to belong to the run that goes on.
_SAME = ("speed", "lengths", "targets", "settings")
_SAME_ENDPOINT = ("model", "emulated", "conditions")
_MEANS = ("input_tokens", "output_tokens", "asked_input_tokens")


@dataclass(frozen=True)
class EarlierRun:
    """`document`: the file as it was read; nothing where there was none."""

    file: str = ""
    document: Mapping[str, Any] = field(default_factory=dict)

    def check(self, planned: Mapping[str, Any]) -> None:
        """`planned`: the document of the run that goes on, before it has measured anything."""
        if not self.document:
            return
        for key in _SAME:
            self._check_same(key, self.document.get(key), planned[key])
        ends = [endpoint["name"] for endpoint in planned["endpoints"]]
        if list(self._endpoints) != ends:
            raise BadInput(f"{self.file}: is of {', '.join(self._endpoints)} and not of {', '.join(ends)}")
        for entry in planned["endpoints"]:
            for key in _SAME_ENDPOINT:
                self._check_same(f"{entry['name']}: {key}", self._endpoints[entry["name"]].get(key), entry[key])

    def _check_same(self, key: str, was: Any, now: Any) -> None:
        if isinstance(was, dict) and isinstance(now, dict):
            for inner in sorted(now.keys() | was.keys()):
                self._check_same(f"{key}.{inner}", was.get(inner), now.get(inner))
        elif was != now:
            said, asked = json.dumps(was), json.dumps(now)
            raise BadInput(f"{self.file}: was measured with {key} {said}, not {asked}: it cannot go on")

    @property
    def _endpoints(self) -> dict[str, Mapping[str, Any]]:
        return {str(endpoint["name"]): endpoint for endpoint in self.document.get("endpoints", ())}

    def points(self, endpoint: str, whole: bool) -> list[PointResult]:
        """In their order; `whole`: without those that were cut short."""
        raw = self._endpoints.get(endpoint, {}).get("points", ())
        point_results = [_point(self.file, point) for point in raw]
        return [point_result for point_result in point_results if point_result.complete or not whole]

    def shared(self, endpoints: Sequence[str]) -> list[BenchLoad]:
        """Loads that every endpoint has stood to the end."""
        first, *others = ([point.load for point in self.points(name, whole=True)] for name in endpoints)
        return [load for load in first if all(load in of for of in others)]


def read_earlier(file: Path) -> EarlierRun:
    """Of a file that is there, or of none."""
    if not file.exists():
        return EarlierRun()
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadData(str(file), "", f"cannot be gone on with: {error}") from None
    if not isinstance(earlier, dict) or "settings" not in earlier or "crosstie_bench" not in earlier:
        raise BadData(str(file), "", "is no file that `crosstie bench` can go on with")
    return EarlierRun(str(file), earlier)


def _point(file: str, raw: Mapping[str, Any]) -> PointResult:
    try:
        numbers = {
            **raw,
            **_known({name: raw[name] for name in _MEANS}),
            "metrics": {name: _known(metric) for name, metric in raw["metrics"].items() if "low" in metric},
            "gpus": [_known(gpu) for gpu in raw["gpus"]],
            "each": [_known(outcome) for outcome in raw["each"]],
            "phases": [_group(phase) for phase in raw["phases"]],
            "classes": [{**kind, "seen": _group(kind["seen"])} for kind in raw["classes"]],
            "pools": [_group(pool) for pool in raw["pools"]],
        }
        return msgspec.convert(numbers, PointResult)
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise BadData(file, "endpoints", f"has a point that cannot be gone on with: {error}") from None


def _group(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _known(value) if isinstance(value, dict) else value for name, value in raw.items()}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has null where there was no number."""
    return {name: math.nan if value is None else value for name, value in values.items()}
