"""How long an operation takes: on a GPU by its own events, inside a graph where capture works."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

Run = Callable[[], object]
# A replay shorter than this is repeated inside the graph, so that starting a graph is not what is timed.
SHORTEST_S = 3e-4
MOST_REPEATS = 50
LEAST_SAMPLES, MOST_SAMPLES = 5, 100


class Timing(NamedTuple):
    """Seconds of one operation (the median), how many samples that is of, and their 90th over their 10th percentile."""

    seconds: float
    samples: int
    spread: float
    graph: bool


def timing(samples: list[float], operations: int, graph: bool) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, middle, high = (ordered[round(last * share)] for share in (0.1, 0.5, 0.9))
    return Timing(middle / operations, len(ordered), high / low if low > 0 else 1.0, graph)


def sampled(measure: Callable[[], float], budget_s: float) -> list[float]:
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < LEAST_SAMPLES or (len(samples) < MOST_SAMPLES and time.perf_counter() - start < budget_s):
        samples.append(measure())
    return samples


class HostTimer:
    """By the wall clock, for devices that work while they are called."""

    def elapsed(self, run: Run) -> float:
        """Seconds that the device spends on one call."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def time(self, run: Run, operations: int = 1, budget_s: float = 0.04, graph: bool = True) -> Timing:
        """A call does `operations` of what is timed; sampling stops after `budget_s`."""
        run()
        return timing(sampled(lambda: self.elapsed(run), budget_s), operations, False)

    def host(self, run: Run, operations: int = 1, budget_s: float = 0.04) -> Timing:
        """Seconds after which the call returns, whether or not the device is done."""
        return self.time(run, operations, budget_s)


class GpuTimer(HostTimer):
    """CUDA and ROCm alike: PyTorch gives both the same events and graphs."""

    def __init__(self, torch: Any):
        self.torch, self.cuda = torch, torch.cuda

    def elapsed(self, run: Run) -> float:
        begin, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        self.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def time(self, run: Run, operations: int = 1, budget_s: float = 0.04, graph: bool = True) -> Timing:
        # Compiles, chooses kernels and allocates, none of which may happen during a capture.
        run()
        self.cuda.synchronize()
        replay = self._captured(run, 1) if graph else None
        call = replay or run
        call()
        once = self.elapsed(call)
        repeats = min(MOST_REPEATS, math.ceil(SHORTEST_S / once)) if once > 0 else MOST_REPEATS
        if repeats > 1:
            replay = self._captured(run, repeats) if replay else None
            call = replay or _repeated(run, repeats)
            call()
        samples = sampled(lambda: self.elapsed(call), budget_s)
        return timing(samples, operations * repeats, replay is not None)

    def host(self, run: Run, operations: int = 1, budget_s: float = 0.04) -> Timing:
        def one() -> float:
            self.cuda.synchronize()
            return HostTimer.elapsed(self, run)

        one()
        samples = sampled(one, budget_s)
        self.cuda.synchronize()
        return timing(samples, operations, False)

    def _captured(self, run: Run, repeats: int) -> Run | None:
        """None where the operation cannot be captured: it asks the host something, or the driver refuses."""
        graph = self.cuda.CUDAGraph()
        try:
            with self.cuda.graph(graph):
                _repeated(run, repeats)()
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                # Ending the capture failed because the user ended it.
                raise KeyboardInterrupt from None
            self.cuda.synchronize()
            return None
        replay: Run = graph.replay
        return replay


def _repeated(run: Run, repeats: int) -> Run:
    def all_of_them() -> None:
        for _ in range(repeats):
            run()

    return all_of_them
