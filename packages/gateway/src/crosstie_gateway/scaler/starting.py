"""How long a replica takes from being asked for to serving: what the catalog says, corrected by what is seen."""

import math

import msgspec

from crosstie.catalog.loading import LoadingFacts
from crosstie.core.deployment import Deployment
from crosstie.host.sizes import LoadPath
from crosstie.perf.memory import gpu_weight_bytes

# The catalog's word counts as so many starts that were seen, this far apart as a logarithm's deviation.
_WORTH, _APART = 2.0, 0.3
# Later starts weigh more: what was seen twenty starts ago counts little.
_MEMORY = 10.0
# Nine in ten are no later.
_DEVIATIONS = 1.28


class StartTime(msgspec.Struct, kw_only=True):
    """Of one supply."""

    mean: float
    square: float = _APART**2
    worth: float = _WORTH
    seen: int = 0

    @classmethod
    def of(cls, seconds: float) -> "StartTime":
        return cls(mean=math.log(seconds))

    def see(self, seconds: float) -> None:
        """A replica serves, so long after it was asked for."""
        self.seen += 1
        self.worth = min(self.worth + 1.0, _MEMORY)
        away = math.log(max(seconds, 1.0)) - self.mean
        self.mean += away / self.worth
        self.square += (away * away - self.square) / self.worth

    @property
    def likely_s(self) -> float:
        return math.exp(self.mean)

    @property
    def late_s(self) -> float:
        """Nine of ten starts take no longer."""
        return math.exp(self.mean + _DEVIATIONS * math.sqrt(self.square))


def start_s(facts: LoadingFacts, deployment: Deployment) -> float:
    """An engine that compiles and captures anew, with weights on a disk of its host; without the machine itself."""
    gpus = deployment.parallelism.gpus
    fixed = facts.cold_start.si + (facts.peer_check.si if gpus > 1 else 0.0)
    if deployment.accelerator.vendor == "AMD":
        fixed += facts.first_graphs.si
    return LoadPath(facts.disk.si, False, fixed, 0.0).load_s(gpu_weight_bytes(deployment) * gpus, gpus)
