"""Step times looked up in microseconds: tabulated once for a deployment, for whatever asks step after step.

The simulator, the emulator and the gateway's router all take their seconds from here.
"""

from bisect import bisect_right

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.step import shape, step_s

_SEQUENCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class StepTimes:
    """Seconds of a step: tables over sequences and prompt tokens, and slopes for what each reads of the cache.

    Two tables where there are several attention replicas: all prompt tokens on one, and the same on each.
    """

    def __init__(self, deployment: Deployment, context: float):
        self.hardware = Hardware([deployment])
        self.chunk = int(self.hardware.chunk_tokens[0, 0])
        self.sequences = _SEQUENCES
        self.dp = deployment.parallelism.dp
        most = self.chunk * self.dp
        self.tokens = sorted({t for t in _TOKENS if t < most} | {self.chunk, most})
        self.context = context
        self.on_one = self._table(1.0)
        self.on_each = self._table(1.0 / self.dp) if self.dp > 1 else self.on_one
        # Steps without prompts by their sequences, which are few and asked for again and again.
        self._decoding: dict[float, float] = {}
        # A cache twice as long, and a prompt that continues one: what both add to a large step.
        many = 64.0
        longer = self._times([many], [0.0], 2.0 * context, 0.0) - self._times([many], [0.0], context, 0.0)
        self.per_cached = max(float(longer[0]), 0.0) / (many * context)
        later = self._times([0.0], [self.chunk], 0.0, context) - self._times([0.0], [self.chunk], 0.0, 0.0)
        self.per_attended = max(float(later[0]), 0.0) / (self.chunk * context)

    def _times(self, sequences: object, tokens: object, context: float, start: float, span: float = 1.0) -> Array:
        n, t = np.asarray(sequences, np.float64), np.asarray(tokens, np.float64)
        at = shape(n, np.where(n > 0, context, 0.0), t, np.where(t > 0, start, 0.0), span * t)
        return np.asarray(step_s(self.hardware, at)[0])

    def _table(self, span: float) -> list[list[float]]:
        n, t = (grid.ravel() for grid in np.meshgrid(self.sequences, self.tokens, indexing="ij"))
        times = self._times(n, t, self.context, 0.0, span)
        found: list[list[float]] = times.reshape(len(self.sequences), len(self.tokens)).tolist()
        return found

    def seconds(self, sequences: float, cached: float, tokens: float, largest: float, before: float) -> float:
        """`cached`: tokens of all the sequences' contexts. Of the attention replica with the most prompt tokens,
        `largest` is their number and `before` the sum of what lies before each of them."""
        if not tokens:
            alone = self._decoding.get(sequences)
            if alone is None:
                alone = self._decoding[sequences] = self._looked_up(self.on_one, sequences, 0.0)
            return max(alone + (cached - sequences * self.context) * self.per_cached, 1e-6)
        spent = self._looked_up(self.on_one, sequences, tokens)
        if self.dp > 1:
            even = self._looked_up(self.on_each, sequences, tokens)
            uneven = (largest / tokens - 1.0 / self.dp) / (1.0 - 1.0 / self.dp)
            spent = even + uneven * (spent - even)
        # The tables have a replica's tokens in one prompt, from its beginning.
        attended = before - 0.5 * largest * largest
        extra = (cached - sequences * self.context) * self.per_cached + attended * self.per_attended
        return max(spent + extra, 1e-6)

    def _looked_up(self, table: list[list[float]], sequences: float, tokens: float) -> float:
        i = min(bisect_right(self.sequences, sequences) - 1, len(self.sequences) - 2)
        j = min(bisect_right(self.tokens, tokens) - 1, len(self.tokens) - 2)
        low, high = table[i], table[i + 1]
        a = (sequences - self.sequences[i]) / (self.sequences[i + 1] - self.sequences[i])
        b = (tokens - self.tokens[j]) / (self.tokens[j + 1] - self.tokens[j])
        left = low[j] + a * (high[j] - low[j])
        right = low[j + 1] + a * (high[j + 1] - low[j + 1])
        return left + b * (right - left)
