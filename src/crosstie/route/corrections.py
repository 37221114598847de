"""What predictions learn from what was delivered: a factor, and how far single requests scatter around it.

Both live in logarithms, so that twice as slow and twice as fast weigh the same, and both forget. What one process has
observed is kept until it is told to others, who learn it as though they had seen it themselves.
"""

from collections import deque
from math import exp, inf, log, sqrt
from typing import Final

# Observations that a replica's own mean must outweigh before it is believed over its pool's.
_PRIOR: Final = 2.0
# The most that past observations weigh, so that a change shows within as many requests.
_MOST: Final = 12.0
# One observation moves the mean as though it were no further away than this: a factor of three.
_FARTHEST: Final = 1.1
# Factors from a tenth to forty.
_LEAST: Final = -2.3
_LARGEST: Final = 3.7
# Errors up to this are of those that had no limit: what gateways tell each other goes no lower.
_NO_LIMIT: Final = -8.0
# Scatter: the least variance, with which it starts; what one request changes of it, the farthest that one counts for,
# and the most scatter that there is on a fleet that works, if badly.
_SCATTER_LEAST: Final = 0.01
_SCATTER_GAIN: Final = 0.03
_SCATTER_FARTHEST: Final = 1.5
_SCATTER_BELIEVED: Final = 0.2
# Observations of each kind that are kept until they are told; the oldest are lost, so that a little is not learnt.
_MOST_UNTOLD: Final = 4096


def log_ratio(observed: float, predicted: float, guard: float) -> float:
    """`guard` is the difference that does not matter: three milliseconds instead of one is no factor of three."""
    if predicted == inf:
        return -inf
    # Comparisons rather than `max`: this runs four times a request.
    return log(((observed if observed > 0.0 else 0.0) + guard) / ((predicted if predicted > 0.0 else 0.0) + guard))


class OnlineCorrection:
    """Observed over predicted, decayed, and shrunk to that of a parent, or to 1."""

    def __init__(self, memory_s: float, parent: "OnlineCorrection | None" = None, most: float = _MOST):
        self._memory_s = memory_s
        self._most = most
        self._parent = parent
        self._mean = 0.0
        self._weight = 0.0
        self._at = 0.0

    def teach(self, ratio: float, now: float) -> None:
        weight, mean = self._weight_at(now), self._mean
        if weight >= 1.0:
            if ratio < mean - _FARTHEST:
                ratio = mean - _FARTHEST
            elif ratio > mean + _FARTHEST:
                ratio = mean + _FARTHEST
        if ratio < _LEAST:
            ratio = _LEAST
        elif ratio > _LARGEST:
            ratio = _LARGEST
        self._mean = mean + (ratio - mean) / (weight + 1.0)
        self._weight = weight + 1.0 if weight + 1.0 < self._most else self._most
        self._at = now
        if self._parent is not None:
            self._parent.teach(ratio, now)

    def start(self, factor: float, now: float) -> None:
        """Begins as though it had learnt this factor."""
        self._mean, self._weight, self._at = log(factor), self._most, now

    def _weight_at(self, now: float) -> float:
        # With traffic, new observations push old ones out; in silence all of them last a while and are then forgotten,
        # so that whoever was slow is tried again.
        silent = (now - self._at) / self._memory_s
        if silent <= 0.0:
            return self._weight
        return self._weight * exp(-silent * silent) if self._weight and silent < 8.0 else 0.0

    def log_factor(self, now: float) -> float:
        base = self._parent.log_factor(now) if self._parent is not None else 0.0
        weight = self._weight_at(now)
        return (weight * self._mean + _PRIOR * base) / (weight + _PRIOR) if weight else base

    def factor(self, now: float) -> float:
        return exp(self.log_factor(now))


class Scatter:
    """How far requests come beyond what they were sent for: a decayed standard deviation of the logarithm of observed
    over the limit of the replica, or over the corrected prediction where that is more.

    A replica is filled after a request was sent there, up to the limits that it keeps: slower than predicted by that is
    no error, and the light ones of a class leave room for those that come near its limit.
    """

    def __init__(self) -> None:
        self._variance = _SCATTER_LEAST
        # Its root, which is asked for more often than it changes.
        self._scatter = sqrt(_SCATTER_LEAST)

    def teach(self, error: float) -> None:
        if error <= _NO_LIMIT:
            return
        # Coming sooner breaks no target.
        bounded = min(max(error, 0.0), _SCATTER_FARTHEST)
        variance = self._variance + _SCATTER_GAIN * (2.0 * bounded * bounded - self._variance)
        self._variance = variance if variance > _SCATTER_LEAST else _SCATTER_LEAST
        self._scatter = sqrt(self._variance)

    @property
    def beyond_belief(self) -> bool:
        """Whether they are farther off than on any fleet that works, if badly: engines have stood still."""
        return self._variance > _SCATTER_BELIEVED**2

    def margin(self, deviations: float, bounded: bool = False) -> float:
        """The factor that so many deviations above the prediction are; `bounded`: as on a fleet that works."""
        scatter = self._scatter
        return exp(deviations * (min(scatter, _SCATTER_BELIEVED) if bounded else scatter))


class Observations:
    """What this process has seen of replicas and sent there, for other workers and peers."""

    def __init__(self, most: int = _MOST_UNTOLD):
        # By a replica's key: observed over raw and over corrected prediction, in logarithms; what it depends on, prompt
        # tokens or requests in flight; and the seconds.
        self.first: deque[tuple[str, float, float, float, float]] = deque(maxlen=most)
        self.decoded: deque[tuple[str, float, float, float, float]] = deque(maxlen=most)
        # By a replica's key: the prefix of a prompt that was sent there.
        self.sent: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=most)
        # Class, model, output tokens, input tokens, and bytes of the prompt.
        self.lengths: deque[tuple[str | None, str, int | None, int | None, int]] = deque(maxlen=most)

    def clear(self) -> None:
        self.first.clear()
        self.decoded.clear()
        self.sent.clear()
        self.lengths.clear()

    def __len__(self) -> int:
        return len(self.first) + len(self.decoded) + len(self.sent) + len(self.lengths)
