"""Which points to measure: one by one, the one whose rows would narrow most what is asked.

The posterior over the constants is Gaussian and the model taken as linear around it, so how much surer a measurement
makes any answer is known before it is made: the rank-k update that own rows get (prove/calibration/own.py), without
their values. What is asked are the intervals of TTFT, TPOT and throughput at the loads of the workload's classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.core.workload import Workload
from crosstie.perf.memory import cache_sequences
from crosstie.prove.calibration.own import RowsTold, rows_told
from crosstie.prove.calibration.results import MeasuredRow, Metric, OperatingPoint, Results
from crosstie.prove.calibration.sureness import END, TAIL
from crosstie.prove.calibration.validate import validate

METRICS = {
    "ttft_s": Metric("ttft", "p50"),
    "tpot_s": Metric("tpot", "p50"),
    "output_tokens_per_s": Metric("throughput"),
}
# What everybody asks where no workload says otherwise: tokens in and out, and clients.
_USUAL = ((1024, 256), (4096, 1024), (256, 512))
_ASKED_CLIENTS = (1, 8, 32, 128)
# What may be measured besides: short and long prompts, long answers.
_MEASURED = ((1024, 256), (4096, 128), (256, 512), (16384, 128))
_MEASURED_CLIENTS = (1, 4, 16, 32, 64, 128, 256)
# Requests of each client: fewer where they are long, but enough for a middle that counts.
_RUN_S, _FEWEST_ROUNDS, _MOST_ROUNDS, _FEWEST_REQUESTS = 30.0, 4, 10, 6
# Beside the requests themselves: the first ones that say how long prompts are, and the warm-up.
_MORE_ROUNDS, _MORE_S = 1.5, 2.0
# The longest of lengths that vary, over their mean.
_LONGEST = 1.2
# No point takes more than this share of the time that there is.
_MOST_SHARE = 0.25


class PredictedMetric(msgspec.Struct, frozen=True):
    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high / self.low


class LoopPoint(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    clients: int
    requests: int = 0
    # Real seconds that it should take.
    expected_s: float = 0.0
    # What was predicted before anything was measured, by name of METRICS.
    predicted: dict[str, PredictedMetric] = {}
    # The width of all that is asked once this and those before it are measured, over the width before.
    width_left: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.input_tokens}-{self.output_tokens}-{self.clients}"

    @property
    def short(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens} x {self.clients}"

    def operating_point(self, conditions: Mapping[str, str]) -> OperatingPoint:
        """As a result of `crosstie bench` would have it; what its rows say is not looked at."""
        own = {
            "input_len": str(self.input_tokens), "output_len": str(self.output_tokens),
            "concurrency": str(self.clients), "arrivals": "steady",
            "num_prompts": str(self.requests or _MOST_ROUNDS * self.clients),
        }  # fmt: skip
        rows = [MeasuredRow(self.name, line, metric, 1.0) for line, metric in enumerate(METRICS.values())]
        return OperatingPoint({**conditions, **own}, rows)


def asked_points(workload: Workload | None, deployment: Deployment, longest: int) -> list[LoopPoint]:
    """Loads that the plan asks about on this replica, or those of everybody where no class is of its model. `longest`:
    tokens of a request that it takes, here and below."""
    model = deployment.model.id
    own = [request_class for request_class in workload.classes if request_class.model == model] if workload else []
    lengths = [(max(round(kind.input_tokens), 1), max(round(kind.output_tokens), 1)) for kind in own]
    points = _crossed(lengths, _ASKED_CLIENTS, deployment, longest)
    points = points or _crossed(_USUAL, _ASKED_CLIENTS, deployment, longest)
    if not points:
        raise BadInput(
            f"a replica that takes {longest:,} tokens is too small for anything that is asked: more --context"
        )
    return points


def candidates(asked: Sequence[LoopPoint], deployment: Deployment, longest: int) -> list[LoopPoint]:
    lengths = dict.fromkeys([*((point.input_tokens, point.output_tokens) for point in asked), *_MEASURED])
    return _crossed(list(lengths), _MEASURED_CLIENTS, deployment, longest)


def _crossed(
    lengths: Sequence[tuple[int, int]], clients: Sequence[int], deployment: Deployment, longest: int
) -> list[LoopPoint]:
    """As far as the replica holds them at once; lengths vary around these."""
    points: list[LoopPoint] = []
    for inputs, outputs in lengths:
        held = min(float(cache_sequences(deployment, inputs + outputs)), deployment.max_sequences)
        if _LONGEST * (inputs + outputs) < longest:
            points += [LoopPoint(input_tokens=inputs, output_tokens=outputs, clients=n) for n in clients if n <= held]
    return points


def predicted(
    catalog: Catalog, points: Sequence[LoopPoint], conditions: Mapping[str, str]
) -> list[dict[str, PredictedMetric]]:
    """By point and name of METRICS, with 80% intervals."""
    made = [loop_point.operating_point(conditions) for loop_point in points]
    outcomes = validate(catalog, Results(made, [])).outcomes
    names = {metric: name for name, metric in METRICS.items()}
    predicted: dict[int, dict[str, PredictedMetric]] = {id(point): {} for point in made}
    for row in outcomes:
        metric = PredictedMetric(row.predicted, row.low, row.high)
        predicted[id(row.case.point)][names[row.row.metric]] = metric
    return [predicted[id(point)] for point in made]


class Budget(NamedTuple):
    points: int
    # Real seconds for all of them, and emulated seconds to each.
    seconds: float
    speed: float = 1.0


def design(
    catalog: Catalog, conditions: Mapping[str, str], asked: Sequence[LoopPoint], deployment: Deployment,
    longest: int, budget: Budget,
) -> list[LoopPoint]:  # fmt: skip
    """The points to measure, the most telling first. Measuring ends where the time does, and goes on with more."""
    possible = candidates(asked, deployment, longest)
    foretold = predicted(catalog, possible, conditions)
    timed = [
        _timed(point, known, budget.speed) for point, known in zip(possible, foretold, strict=True) if len(known) == 3
    ]
    quick = [point for point in timed if point.expected_s <= _MOST_SHARE * budget.seconds]
    some = quick or sorted(timed, key=lambda point: point.expected_s)[:1]
    told, origin = rows_told(catalog, [point.operating_point(conditions) for point in (*some, *asked)])
    rows = [np.flatnonzero(origin == place).tolist() for place in range(len(some))]
    order = most_telling(told, rows, np.flatnonzero(origin >= len(some)).tolist(), budget.points)
    return [msgspec.structs.replace(some[place], width_left=round(left, 4)) for place, left in order]


def _timed(point: LoopPoint, known: dict[str, PredictedMetric], speed: float) -> LoopPoint:
    request_s = known["ttft_s"].value + known["tpot_s"].value * (point.output_tokens - 1)
    rounds = int(np.clip(_RUN_S / request_s, _FEWEST_ROUNDS, _MOST_ROUNDS))
    requests = max(rounds * point.clients, _FEWEST_REQUESTS)
    expected = (requests / point.clients + _MORE_ROUNDS) * request_s / speed + _MORE_S
    return msgspec.structs.replace(point, requests=requests, expected_s=round(expected, 2), predicted=known)


def most_telling(
    told: RowsTold, candidates: Sequence[Sequence[int]], asked: Sequence[int], most: int
) -> list[tuple[int, float]]:
    """Places of candidates, each by its rows, in the order in which they narrow most; and the width of what is asked
    that each leaves, over the width before."""
    first = _width(told, asked)
    left, chosen = list(range(len(candidates))), list[tuple[int, float]]()
    while left and len(chosen) < most:
        updates = {place: told.after(candidates[place]) for place in left}
        best = min(left, key=lambda place: _width(updates[place], asked))
        told = updates[best]
        left.remove(best)
        chosen.append((best, _width(told, asked) / first))
    return chosen


def _width(told: RowsTold, asked: Sequence[int]) -> float:
    """Of the 80% intervals of these rows together, as logarithms."""
    return float(2.0 * np.hypot(END * told.deviations(asked), TAIL * told.scales[list(asked)]).sum())
