"""What the gateway counts, and how Prometheus reads it. Requests only add numbers; names and labels are put together
when someone asks."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Final

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family, Histogram, Samples, exposition, histogram_samples
from crosstie.route.ask import Ask
from crosstie.route.live import Flight, ServedRequest
from crosstie.route.speed import Prediction
from crosstie_gateway.gateway.record import RequestRecord

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TPOT_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
# Requests of a pool that are looked back on.
_LATELY: Final = 256
# By the names under which `observe` keeps a pool's histograms.
_HISTOGRAMS: Final = {
    "ttft": ("crosstie_ttft_seconds", "Time from a request's arrival to its first token."),
    "tpot": ("crosstie_tpot_seconds", "Time between the tokens after the first, mean of a request."),
}


class _PoolCounts:
    def __init__(self) -> None:
        self.input_tokens = self.output_tokens = 0
        self.charged_usd = 0.0
        self.ttft, self.tpot = Histogram(TTFT_S), Histogram(TPOT_S)
        # Of the last ones: TTFT predicted and seen, TPOT predicted and seen, each of the same request.
        self.lately: deque[tuple[float, float, float, float]] = deque(maxlen=_LATELY)

    def of_late(self) -> dict[str, float] | None:
        """Medians of what was predicted of requests when they were sent, beside what the same ones then saw."""
        if not self.lately:
            return None
        columns = [sorted(column) for column in zip(*self.lately, strict=True)]
        half = len(self.lately) // 2
        names = ("ttft_predicted_p50_s", "ttft_seen_p50_s", "tpot_predicted_p50_s", "tpot_seen_p50_s")
        medians = {name: column[half] for name, column in zip(names, columns, strict=True)}
        return {"requests": len(self.lately), **medians}


class Metrics:
    def __init__(self) -> None:
        # By (pool, model, class, how it ended, status).
        # No Counter, which would set each by a call of its class.
        self.requests: dict[tuple[str, str, str, str, int], int] = defaultdict(int)
        # By (class, target, kept or missed).
        self.targets: Counter[tuple[str, str, bool]] = Counter()
        self.refused: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.panics: Counter[str] = Counter()
        # Answers that went on elsewhere, by where; those that could not, by why.
        self.resumed: Counter[str] = Counter()
        self.not_resumed: Counter[str] = Counter()
        self.pools: dict[str, _PoolCounts] = {}
        # What the gateway's parts have to add to the page.
        self.sources: list[Callable[[], list[Family]]] = []

    def expect(self, fleet: Fleet) -> None:
        """Counters of a healthy gateway begin at 0: one that appears with its first event hides that event from
        `increase`."""
        for pool in fleet.pools:
            self._of(pool.name)
            for counter in (self.retries, self.faults, self.panics, self.resumed):
                counter[pool.name] += 0
            for model in [part.model for part in pool.by_model()]:
                names = [served.name for served in fleet.classes if served.model == model] or [""]
                for name in names:
                    self.requests[pool.name, model, name, "served", 200] += 0
        for served in fleet.classes:
            for target, promised in (("ttft", served.ttft), ("tpot", served.tpot)):
                for kept in (True, False) if promised is not None else ():
                    self.targets[served.name, target, kept] += 0

    def part(self, flight: Flight, input_tokens: int, output_tokens: int) -> None:
        """What one of several backends made of an answer."""
        counts = self._of(flight.replica.pool.name)
        counts.input_tokens += input_tokens
        counts.output_tokens += output_tokens
        counts.charged_usd += flight.charge_usd(float(input_tokens), float(output_tokens))

    def _of(self, pool: str) -> _PoolCounts:
        counts = self.pools.get(pool)
        if counts is None:
            counts = self.pools[pool] = _PoolCounts()
        return counts

    def observe(
        self, record: RequestRecord, ask: Ask, served: ServedRequest, waited_s: float,
        predicted: Prediction | None = None,
    ) -> None:  # fmt: skip
        """What was served by one backend: the same tokens and dollars as its record has."""
        counts = self._of(record.pool)
        counts.input_tokens += record.input_tokens
        counts.output_tokens += record.output_tokens
        counts.charged_usd += record.charged_usd
        name = ask.class_name or ""
        if served.ttft_s is not None:
            ttft_s = waited_s + served.ttft_s
            counts.ttft.add(ttft_s)
            if ask.ttft_s is not None:
                self.targets[name, "ttft", ttft_s <= ask.ttft_s] += 1
        if served.tpot_s is not None:
            counts.tpot.add(served.tpot_s)
            if ask.tpot_s is not None:
                self.targets[name, "tpot", served.tpot_s <= ask.tpot_s] += 1
            if served.ttft_s is not None and predicted is not None:
                counts.lately.append((predicted.ttft_s, served.ttft_s, predicted.tpot_s, served.tpot_s))

    def count_request(self, record: RequestRecord) -> None:
        self.requests[record.pool, record.model, record.class_name, record.how, record.status] += 1

    def page(self, gauges: list[Family]) -> str:
        """As Prometheus reads it; `gauges` tell what there is at this moment."""
        return exposition([*self._families(), *gauges, *(family for source in self.sources for family in source())])

    def _families(self) -> list[Family]:
        pools = self.pools.items()
        requests: Samples = [
            ({"pool": pool, "model": model, "class": name, "outcome": how, "status": str(status)}, count)
            for (pool, model, name, how, status), count in self.requests.items()
        ]
        targets: Samples = [
            ({"class": name, "target": target, "kept": "yes" if kept else "no"}, count)
            for (name, target, kept), count in self.targets.items()
        ]
        tokens: Samples = [
            ({"pool": pool, "kind": kind}, count)
            for pool, counts in pools
            for kind, count in (("input", counts.input_tokens), ("output", counts.output_tokens))
        ]
        usd: Samples = [({"pool": pool}, counts.charged_usd) for pool, counts in pools]
        rows: list[tuple[str, str, Samples]] = [
            ("requests", "Requests by how they ended.", requests),
            ("refused", "Requests refused before any decision, by code.", _counted("code", self.refused)),
            ("targets", "Requests with a target, by whether it was kept.", targets),
            ("retries", "Attempts that were repeated elsewhere.", _counted("pool", self.retries)),
            ("backend_faults", "Faults of backends: refused, cut, 5xx, silent.", _counted("pool", self.faults)),
            ("panic", "Requests sent to backends out of service, as too few were left.", _counted("pool", self.panics)),
            ("resumed", "Streams that broke off elsewhere and went on here.", _counted("pool", self.resumed)),
            (
                "resume_failed",
                "Streams that broke off and did not go on, by why.",
                _counted("reason", self.not_resumed),
            ),
            ("tokens", "Tokens that were served, as engines count them, or as they were seen to pass.", tokens),
            ("usd", "What served requests cost at their pools' prices and design loads.", usd),
        ]
        counters: list[Family] = [(f"crosstie_{name}_total", "counter", said, samples) for name, said, samples in rows]
        for field, (name, meaning) in _HISTOGRAMS.items():
            seen: Samples = []
            for pool, counts in pools:
                seen += histogram_samples(name, {"pool": pool}, getattr(counts, field))
            counters.append((name, "histogram", meaning, seen))
        return counters


def _counted(label: str, counter: Counter[str]) -> Samples:
    return [({label: name}, count) for name, count in counter.items()]
