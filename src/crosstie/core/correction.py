"""What calibration on measured results changes of the catalog's constants, and how sure that makes an estimate."""

import math

import msgspec

# Constants that measured results correct, by a factor each. Those of Efficiency and Host keep their names; besides,
#   experts    rate of grouped products over that of plain ones
#   routing    time of the small kernels around the experts
CONSTANTS = (
    "compute", "experts", "weights", "attention", "cache", "kernel", "routing", "collective", "link",
    "host_step", "host_prompt", "host_sequence", "host_request",
)  # fmt: skip

METRICS = ("ttft", "tpot", "throughput")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of the logarithm of measured over predicted, and the points that they come from."""

    low: float
    high: float
    points: int

    def around(self, predicted: float) -> tuple[float, float]:
        return predicted * math.exp(self.low), predicted * math.exp(self.high)


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    factors: dict[str, float] = {}
    # The share of measurements that the spreads are meant to hold, and one spread a metric.
    level: float = 0.0
    spread: dict[str, Spread] = {}
    # How near the measurements are: see NEARNESS; and how many points stand behind that.
    nearness: str = "nothing"
    points: int = 0
    basis: str = "uncalibrated"

    @property
    def extrapolated(self) -> bool:
        return self.nearness != "model"


# What was measured of a deployment, from near to far.
NEARNESS = {
    "model": "this model and weight width on this accelerator under this stack",
    "stack": "other models or widths on this accelerator under this stack",
    "accelerator": "this accelerator under other stacks",
    "family": "accelerators of the same family",
    "nothing": "nothing near",
}

NONE = Correction()
