"""How fast a pool is of which nothing is known but what it delivers: two straight lines, fitted as it serves.

TTFT against the prompt tokens before and in a request, TPOT against the requests in flight. Before anything has been
seen the lines are those of a quick server, so that the pool is tried; they rise, so that not all is tried at once.
"""

from typing import Final

from crosstie.core.fleet import Pool
from crosstie.route.load import ReplicaLoad
from crosstie.route.speed import ENDLESS, Speed, View

_KEPT: Final = 0.98


class FittedLine:
    """y = a + b x by least squares, past points fading; b is not negative, a not below a tenth of the mean of y."""

    def __init__(self, intercept: float, slope: float, at: float):
        """Starts as two points of the line, at 0 and at `at`, which count for as much as one observation."""
        self._n, self._x, self._y = 1.0, 0.5 * at, intercept + 0.5 * slope * at
        self._xx, self._xy = 0.5 * at * at, 0.5 * at * (intercept + slope * at)
        self.intercept, self.slope = intercept, slope

    def add(self, x: float, y: float) -> None:
        # One answer that hung does not tilt the line.
        y = min(y, 10.0 * (self.intercept + self.slope * x))
        kept = _KEPT if self._n > 5.0 else 1.0 - 1.0 / (self._n + 1.0)
        self._n = self._n * kept + 1.0
        self._x, self._y = self._x * kept + x, self._y * kept + y
        self._xx, self._xy = self._xx * kept + x * x, self._xy * kept + x * y
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        together = self._xy / self._n - mean_x * mean_y
        # Points that hardly differ in x say nothing about the slope: it leans towards proportion.
        lean = 0.01 * mean_x * mean_x + 1e-12
        slope = (together + lean * mean_y / max(mean_x, 1e-9)) / (spread + lean)
        slope = min(max(slope, 0.0), 0.9 * mean_y / max(mean_x, 1e-9))
        self.slope, self.intercept = slope, mean_y - slope * mean_x


class LearntSpeed(Speed):
    def __init__(self, pool: Pool):
        super().__init__()
        self.max_in_flight = pool.max_in_flight
        self.ttft = FittedLine(0.01, 1e-5, 1000.0)
        self.tpot = FittedLine(0.001, 0.0005, 8.0)
        # The most requests that it was seen to serve at once.
        self._busiest = 4.0

    def fill(self, view: View, load: ReplicaLoad, now: float) -> None:
        in_flight, _, _, _, queued = load.total(now, self.typical_input)
        # One segment that never ends: see `route.speed.first_token_s`.
        view.before_s = 0.0
        view.none_s, view.slope_low = self.ttft.intercept, self.ttft.slope
        view.eighth = view.room = ENDLESS
        view.eighth_s = view.full_s = 0.0
        view.ahead_tokens = queued
        view.step_s = self.tpot.intercept + self.tpot.slope * (in_flight + 1.0)
        view.stretch = 1.0
        view.free_tokens, view.per_free_s = ENDLESS, 0.0

    def replica_s(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float = float("inf")
    ) -> float:
        """By what it was seen to do at its busiest: so many requests share each second."""
        n = min(self._busiest, float(self.max_in_flight))
        step_s = self.tpot.intercept + self.tpot.slope * n
        return new_tokens * self.ttft.slope + (self.ttft.intercept + output_tokens * step_s) / n

    def empty_step_s(self) -> float:
        return self.tpot.intercept + self.tpot.slope

    def idle_s(self, input_tokens: float, output_tokens: float) -> float:
        first_s = self.ttft.intercept + self.ttft.slope * input_tokens
        return first_s + output_tokens * self.empty_step_s()

    def saw_first(self, tokens: float, ttft_s: float) -> None:
        self.ttft.add(tokens, ttft_s)

    def saw_decode(self, in_flight: float, tpot_s: float) -> None:
        self._busiest = max(self._busiest * 0.999, in_flight)
        self.tpot.add(in_flight, tpot_s)
