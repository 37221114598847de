"""Arrivals of recorded requests: at their own times, stretched to a rate, or at random ones."""

import numpy as np

from crosstie.catalog.traces import Floats, Ints, Trace
from crosstie.core.errors import BadInput
from crosstie.perf.rounding import nine_digits

# Of gaps where a trace has none, or is not to have any: the same every time.
_SEED = 7


def arrivals_of(
    trace: Trace, rows: Ints, requests_per_s: float | None, own_times: bool = True, seed: int = _SEED
) -> Floats:
    """Seconds from 0 on of these rows of a trace. `requests_per_s`: the rate that their times are stretched to."""
    if trace.arrival_s is None or not own_times:
        if requests_per_s is None:
            raise BadInput(f"{trace.file}: has no times, so the rate must be given")
        gaps = nine_digits(np.random.default_rng(seed).exponential(1.0, len(rows)))
        arrivals: Floats = np.cumsum(gaps) - gaps[0]
    else:
        arrivals = _spread(trace.arrival_s[rows], seed)
        arrivals = arrivals - arrivals[0]
    if requests_per_s is None or len(rows) < 2:
        return arrivals
    if not arrivals[-1]:
        # All at one moment: evenly, for want of anything better.
        arrivals = np.arange(len(rows), dtype=np.float64)
    scaled: Floats = arrivals * ((len(rows) - 1) / requests_per_s / arrivals[-1])
    return scaled


def _spread(recorded: Floats, seed: int) -> Floats:
    """Mooncake's clock stands still for three seconds and then has ten requests: they came at some time in between."""
    moments, sizes = np.unique(recorded, return_counts=True)
    if len(moments) < 2 or 2 * len(moments) > len(recorded):
        return recorded
    steps = np.diff(moments)
    steps = np.append(steps, np.median(steps))
    offsets = np.random.default_rng(seed).random(len(recorded)) * np.repeat(steps, sizes)
    return np.sort(recorded + offsets)
