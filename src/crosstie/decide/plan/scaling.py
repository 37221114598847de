"""How estimates are read in a plan: as slow as in the worlds that one wants to be sure of (core.worlds)."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from crosstie.core.disaggregated import Servable
from crosstie.core.estimate import METRICS
from crosstie.core.workload import Workload
from crosstie.core.worlds import Worlds
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import EstimateScale
from crosstie.perf.hardware import Array
from crosstie.perf.rounding import nine_digits
from crosstie.perf.worlds import world_logs

# Whatever says of each deployment how its estimates are to be read.
Reading = Callable[[Sequence[Servable]], EstimateScale]
# Tokens in and out of a model's mean request, by the model.
Lengths = tuple[tuple[str, float, float], ...]


class InWorlds:
    """What worlds make of the estimates of a workload's replicas, at its mean lengths; each replica looked at once."""

    def __init__(self, lengths: Lengths):
        self._lengths = {model: (tokens_in, tokens_out) for model, tokens_in, tokens_out in lengths}
        self._known: dict[tuple[object, Worlds | None], Array] = {}

    def logs(self, deployments: Sequence[Servable]) -> Array:
        """(deployments, WORLDS, METRICS)."""
        keys = [(key_of(deployment), deployment.correction.worlds) for deployment in deployments]
        new = {key: one for key, one in zip(keys, deployments, strict=True) if key not in self._known}
        for model in {one.model.id for one in new.values()}:
            mine = {key: one for key, one in new.items() if one.model.id == model}
            logs = nine_digits(world_logs(list(mine.values()), *self._lengths[model]))
            self._known.update(zip(mine, logs, strict=True))
        return np.stack([self._known[key] for key in keys])


@lru_cache(maxsize=8)
def _in_worlds(lengths: Lengths) -> InWorlds:
    return InWorlds(lengths)


class WorldScaling:
    """Estimates as slow as one of so many is, replica by replica; the estimates themselves for even odds."""

    def __init__(self, workload: Workload, sure: float):
        self.sure = sure
        models = list(dict.fromkeys(request_class.model for request_class in workload.classes))
        self._worlds = _in_worlds(tuple((model, *_mean_lengths(workload, model)) for model in models))

    def __call__(self, deployments: Sequence[Servable]) -> EstimateScale:
        if self.sure == 0.5 or not deployments:
            return EstimateScale.none(deployments)
        logs = self._worlds.logs(deployments)
        ends = [1.0 - self.sure if metric == "throughput" else self.sure for metric in METRICS]
        slow = np.stack([np.quantile(logs[:, :, i], end, axis=1) for i, end in enumerate(ends)], axis=1)
        return EstimateScale.of_logs(slow)

    def worlds_of(self, deployment: Servable) -> Array:
        """What worlds make of one replica's estimates, in logarithms: (WORLDS, METRICS)."""
        return np.asarray(self._worlds.logs([deployment])[0])

    def in_worlds(self, deployment: Servable) -> EstimateScale:
        """One replica, a row a world."""
        return EstimateScale.of_logs(self.worlds_of(deployment))


def _mean_lengths(workload: Workload, model: str) -> tuple[float, float]:
    """Tokens in and out of the mean request."""
    slices = [(one.requests_per_s * piece.share, piece) for one in workload.classes if one.model == model
              for piece in one.slices]  # fmt: skip
    total = sum(weight for weight, _ in slices)
    tokens_in = sum(weight * piece.input_tokens for weight, piece in slices) / total
    tokens_out = sum(weight * piece.output_tokens for weight, piece in slices) / total
    return max(tokens_in, 1.0), max(tokens_out, 1.0)


def steps_when_sure(deployment: Servable, tokens_in: float, tokens_out: float, sure: float) -> float:
    """How many times as long as estimated its steps take in the slowest of the worlds that one wants to be sure of."""
    logs = nine_digits(world_logs([deployment], tokens_in, tokens_out))[0]
    return float(np.exp(np.quantile(logs[:, METRICS.index("tpot")], sure)))


def scaling_of(workload: Workload) -> WorldScaling:
    return WorldScaling(workload, workload.sureness)
