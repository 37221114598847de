"""What a replica gives, computed, simulated or measured: one type, so an error is a subtraction.

TTFT is the mean time from a request's arrival to its first token. TPOT is the mean time between the
tokens after it. Throughput counts output tokens of the whole replica.
"""

import msgspec

# What can bind: the scarce thing that more of would help most.
# "engine limit" is the number of sequences that the engine runs at once by default.
BOUNDS = ("compute", "memory bandwidth", "memory capacity", "interconnect", "host", "engine limit")


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Where measurements fall around estimates as far from the measured as this one: low and high."""

    # Share of measurements that are meant to fall inside.
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
    # None where no calibration says how wrong such estimates are.
    interval: Interval | None
    # What was measured near it, in words, and whether this goes beyond that.
    basis: str
    extrapolated: bool
