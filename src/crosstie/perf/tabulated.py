"""Step times looked up in microseconds: tabulated once for a deployment, for whatever asks step after step.

The simulator, the emulator and the gateway's router all take their seconds from here.
"""

from bisect import bisect_right

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.rounding import nine_digits
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
        # Steps without prompts by their sequences, which are few and asked for again and again.
        self._decoding: dict[float, float] = {}
        self._tabulate()

    def _tabulate(self) -> None:
        """All of it in one call of the model, which takes about as long for a hundred steps as for one."""
        n, t = (grid.ravel() for grid in np.meshgrid(self.sequences, self.tokens, indexing="ij"))
        size, context, many = len(n), self.context, 64.0
        tables = 2 if self.dp > 1 else 1
        # Behind the tables: a cache twice as long, and a prompt that continues one, each after the step without.
        sequences = np.concatenate((*[n] * tables, [many, many, 0.0, 0.0]))
        tokens = np.concatenate((*[t] * tables, [0.0, 0.0, self.chunk, self.chunk]))
        contexts = np.where(sequences > 0, context, 0.0)
        contexts[-3] = 2.0 * context
        starts = np.zeros_like(contexts)
        starts[-1] = context
        spans = np.ones_like(contexts)
        spans[size:-4] = 1.0 / self.dp
        times = nine_digits(step_s(self.hardware, shape(sequences, contexts, tokens, starts, spans * tokens))[0])
        found = times[:-4].reshape(tables, len(self.sequences), len(self.tokens)).tolist()
        self.on_one: list[list[float]] = found[0]
        self.on_each: list[list[float]] = found[-1]
        plain_cache, longer, plain_prompt, later = times[-4:].tolist()
        # What both add to a large step.
        self.per_cached: float = max(longer - plain_cache, 0.0) / (many * context)
        self.per_attended: float = max(later - plain_prompt, 0.0) / (self.chunk * context)

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

    def seconds_at(self, sequences: Array, tokens: Array, largest: Array) -> Array:
        """`seconds` of many steps at once, where contexts and prompts are those of the tables."""
        spent = self._all_looked_up(self.on_one, sequences, tokens)
        if self.dp > 1:
            even = self._all_looked_up(self.on_each, sequences, tokens)
            on_one = np.divide(largest, tokens, out=np.full_like(tokens, 1.0 / self.dp), where=tokens > 0.0)
            spent = even + (on_one - 1.0 / self.dp) / (1.0 - 1.0 / self.dp) * (spent - even)
        found: Array = np.maximum(spent, 1e-6)
        return found

    def _all_looked_up(self, table: list[list[float]], sequences: Array, tokens: Array) -> Array:
        lines, columns, times = np.asarray(self.sequences), np.asarray(self.tokens), np.asarray(table)
        i = np.minimum(np.searchsorted(lines, sequences, "right") - 1, len(lines) - 2)
        j = np.minimum(np.searchsorted(columns, tokens, "right") - 1, len(columns) - 2)
        a = (sequences - lines[i]) / (lines[i + 1] - lines[i])
        b = (tokens - columns[j]) / (columns[j + 1] - columns[j])
        left = times[i, j] + a * (times[i + 1, j] - times[i, j])
        right = times[i, j + 1] + a * (times[i + 1, j + 1] - times[i, j + 1])
        found: Array = left + b * (right - left)
        return found
