"""What a replica gives, computed, simulated or measured: one type, so an error is a subtraction; and how sure it is.

TTFT is the mean time from a request's arrival to its first token. TPOT is the mean time between the
tokens after it. Throughput counts output tokens of the whole replica. A correction is what calibration on
measured results changes of the catalog's constants.
"""

import math

import msgspec

from crosstie.core.worlds import Worlds

# Constants that measured results correct, by a factor each. Those of Efficiency and Host keep their names; besides,
#   experts    rate of grouped products over that of plain ones
#   routing    time of the small kernels around the experts
#   verify     time that the further tokens of a sequence add to a step that verifies drafts
#   draft      time of a drafter's passes
SERVING = (
    "compute", "experts", "weights", "attention", "cache", "kernel", "routing", "collective", "link",
    "host_step", "host_prompt", "host_sequence", "host_request",
)  # fmt: skip
# What only speculation has: plain serving does not depend on them.
DRAFTING = ("host_draft", "host_verify", "verify", "draft")
CONSTANTS = (*SERVING, *DRAFTING)

METRICS = ("ttft", "tpot", "throughput")


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    factors: dict[str, float] = {}
    # None where no calibration says how wrong estimates are.
    worlds: Worlds | None = None
    # How near the measurements are: see NEARNESS; and how many points stand behind that.
    nearness: str = "nothing"
    points: int = 0
    basis: str = "uncalibrated"
    # Requests in flight a GPU, from fewest to most, that those points were measured at.
    loads: tuple[float, float] | None = None

    def doublings(self, load: float) -> float:
        """How often a load must be doubled, or halved, to be one that was measured."""
        if self.loads is None or load <= 0.0:
            return 0.0
        low, high = self.loads
        return max(math.log2(low / load), math.log2(load / high), 0.0)

    @property
    def extrapolated(self) -> bool:
        return self.nearness != "model"


# What was measured of a deployment, from near to far.
NEARNESS = {
    "model": "this model and weight width on this accelerator under this stack",
    "layout": "this model and weight width here, in other layouts or on other numbers of GPUs",
    "stack": "other models or widths on this accelerator under this stack",
    "accelerator": "this accelerator under other stacks",
    "family": "accelerators of the same family",
    "nothing": "nothing near",
}

NONE = Correction()


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Between which ends four fifths of the worlds lie (core.worlds): low and high."""

    level: float
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]
    output_tokens_per_s: tuple[float, float]

    def per_gpu(self, gpus: int) -> tuple[float, float]:
        low, high = self.output_tokens_per_s
        return low / gpus, high / gpus


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    ttft_s: float
    # Mean TTFT if all clients sent their first request at the same moment, as benchmarks do.
    ttft_burst_s: float
    tpot_s: float
    output_tokens_per_s: float
    output_tokens_per_s_per_gpu: float
    requests_per_s: float
    # Requests that are in flight, those of them that decode, and the most that memory can hold.
    concurrency: float
    decoding: float
    concurrency_that_fits: float
    # The scarce thing that more of would help most: compute, memory bandwidth, memory capacity, interconnect, host, or
    # "engine limit", the number of sequences that the engine runs at once by default.
    prefill_bound: str
    decode_bound: str
    # Time of the same work at peak rates over the time predicted.
    prefill_roofline_fraction: float
    decode_roofline_fraction: float
    # Tokens/s of one stream alone, and the ceiling that memory bandwidth puts on it.
    single_stream_tokens_per_s: float
    single_stream_ceiling_tokens_per_s: float
    # GPU-seconds that one output token costs, by phase and by what they are spent on, such as
    # "prefill compute" or "decode interconnect": where two replicas differ, this says in what.
    gpu_s_per_token: dict[str, float]
    # Shares of a decode step that go to "bookkeeping" (norms, activations, routing and whatever else stands between
    # matrix products and attention) and to a "host" that nothing hides.
    decode_shares: dict[str, float]
    # None where no calibration says how wrong such estimates are.
    interval: Interval | None
    # What was measured near it, in words, and whether this goes beyond that.
    basis: str
    extrapolated: bool
