"""What a simulation says of a class, beside what was predicted of it."""

from dataclasses import dataclass

from crosstie.core.workload import Target

# Whatever percentile a class asks for, a fleet that is bought for this traffic turns away no more than so many. Classes
# without a target of TTFT are served, not parked: no more than that may wait for longer than this.
MAY_BE_UNSERVED, PARKED_S = 0.02, 60.0


@dataclass(frozen=True, slots=True)
class SimulatedClass:
    """A class as simulated: its latencies at the percentiles of its targets, None where it has none."""

    name: str
    requests: int
    ttft_s: float | None
    tpot_s: float | None
    ttft: Target | None
    tpot: Target | None
    # Shares of its requests that keep each target: as simulated, and as the closed form has them at this load.
    keeps_ttft: float | None = None
    keeps_tpot: float | None = None
    predicted_ttft: float | None = None
    predicted_tpot: float | None = None
    # Of those sent, turned away because no replica had room in time; they count as late.
    refused: float = 0.0
    # Without a target of TTFT, those that waited for longer than `PARKED_S`, or were turned away.
    parked: float = 0.0
    # Whether it would hold in another run, too: misses are below those allowed by more than chance, and no requests
    # pile up.
    steady: bool = True
    # Whether its looks leave no doubt of that.
    decided: bool = True

    @property
    def holds(self) -> bool:
        pairs = ((self.ttft_s, self.ttft), (self.tpot_s, self.tpot))
        served = max(self.refused, self.parked) <= MAY_BE_UNSERVED
        return (
            self.steady
            and served
            and all(seen <= target.seconds for seen, target in pairs if seen is not None and target is not None)
        )
