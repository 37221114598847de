"""What the gateway counts, and how Prometheus reads it.

On the way of a request only plain numbers are added up; names and labels are put together when someone asks.
"""

from collections import Counter
from collections.abc import Callable

from crosstie.core.histogram import Histogram
from crosstie.route.ask import Ask
from crosstie.route.live import Flight, Served
from crosstie.run.gateway.record import RequestRecord

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TPOT_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
# By the names under which `observe` keeps a pool's histograms.
_HISTOGRAMS = {
    "ttft": ("crosstie_ttft_seconds", "Time from a request's arrival to its first token."),
    "tpot": ("crosstie_tpot_seconds", "Time between the tokens after the first, mean of a request."),
}


# A metric as a part gives it: its name, its kind, what it says, and its values by their labels. Samples that have a
# name of their own, as those of a histogram do, have it as the label __name__.
Family = tuple[str, str, str, list[tuple[dict[str, str], float]]]


class _PoolCounts:
    __slots__ = ("charged_usd", "input_tokens", "output_tokens", "tpot", "ttft")

    def __init__(self) -> None:
        self.input_tokens = self.output_tokens = 0
        self.charged_usd = 0.0
        self.ttft, self.tpot = Histogram(TTFT_S), Histogram(TPOT_S)


class Metrics:
    def __init__(self) -> None:
        # By (pool, model, class, how it ended, status).
        self.requests: Counter[tuple[str, str, str, str, int]] = Counter()
        # By (class, target, kept or missed).
        self.targets: Counter[tuple[str, str, bool]] = Counter()
        self.refused: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        # Answers that went on elsewhere, by where; those that could not, by why.
        self.resumed: Counter[str] = Counter()
        self.not_resumed: Counter[str] = Counter()
        self.pools: dict[str, _PoolCounts] = {}
        # What the gateway's parts have to add to the page.
        self.sources: list[Callable[[], list[Family]]] = []

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

    def observe(self, pool: str, ask: Ask, served: Served, waited_s: float) -> None:
        counts = self._of(pool)
        counts.input_tokens += round(served.input_tokens)
        counts.output_tokens += served.output_tokens or 0
        counts.charged_usd += served.charged_usd
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

    def count_request(self, record: RequestRecord) -> None:
        self.requests[record.pool, record.model, record.class_name, record.how, record.status] += 1

    def page(self, gauges: list[Family]) -> str:
        """As Prometheus reads it; `gauges` tell what there is at this moment."""
        lines: list[str] = []
        _family(lines, "crosstie_requests_total", "counter", "Requests by how they ended.")
        for (pool, model, name, how, status), count in self.requests.items():
            labels = {"pool": pool, "model": model, "class": name, "outcome": how, "status": str(status)}
            _sample(lines, "crosstie_requests_total", labels, count)
        _family(lines, "crosstie_refused_total", "counter", "Requests refused before any decision, by code.")
        for code, count in self.refused.items():
            _sample(lines, "crosstie_refused_total", {"code": code}, count)
        _family(lines, "crosstie_targets_total", "counter", "Requests with a target, by whether it was kept.")
        for (name, target, kept), count in self.targets.items():
            labels = {"class": name, "target": target, "kept": "yes" if kept else "no"}
            _sample(lines, "crosstie_targets_total", labels, count)
        for name, what, found in (
            ("crosstie_retries_total", "Attempts that were repeated elsewhere.", self.retries),
            ("crosstie_backend_faults_total", "Faults of backends: refused, cut, 5xx, silent.", self.faults),
            ("crosstie_resumed_total", "Streams that broke off elsewhere and went on here.", self.resumed),
        ):
            _family(lines, name, "counter", what)
            for pool, count in found.items():
                _sample(lines, name, {"pool": pool}, count)
        _family(lines, "crosstie_resume_failed_total", "counter", "Streams that broke off and did not go on, by why.")
        for reason, count in self.not_resumed.items():
            _sample(lines, "crosstie_resume_failed_total", {"reason": reason}, count)
        self._pool_counts(lines)
        for families in (gauges, *(source() for source in self.sources)):
            for name, kind, what, samples in families:
                _family(lines, name, kind, what)
                for labels, value in samples:
                    _sample(lines, labels.pop("__name__", name), labels, value)
        return "\n".join(lines) + "\n"

    def _pool_counts(self, lines: list[str]) -> None:
        _family(lines, "crosstie_tokens_total", "counter", "Tokens that were served, as the engines count them.")
        for pool, counts in self.pools.items():
            _sample(lines, "crosstie_tokens_total", {"pool": pool, "kind": "input"}, counts.input_tokens)
            _sample(lines, "crosstie_tokens_total", {"pool": pool, "kind": "output"}, counts.output_tokens)
        _family(
            lines, "crosstie_usd_total", "counter", "What served requests cost at their pools' prices and design loads."
        )
        for pool, counts in self.pools.items():
            _sample(lines, "crosstie_usd_total", {"pool": pool}, counts.charged_usd)
        for field, (name, what) in _HISTOGRAMS.items():
            _family(lines, name, "histogram", what)
            for pool, counts in self.pools.items():
                for labels, value in histogram_samples(name, {"pool": pool}, getattr(counts, field)):
                    _sample(lines, labels.pop("__name__"), labels, value)


def histogram_samples(name: str, labels: dict[str, str], histogram: Histogram) -> list[tuple[dict[str, str], float]]:
    samples: list[tuple[dict[str, str], float]] = [
        ({"__name__": f"{name}_bucket", **labels, "le": bound}, count) for bound, count in histogram.buckets()
    ]
    samples.append(({"__name__": f"{name}_sum", **labels}, histogram.total))
    samples.append(({"__name__": f"{name}_count", **labels}, histogram.count))
    return samples


def _family(lines: list[str], name: str, kind: str, what: str) -> None:
    lines.append(f"# HELP {name} {what}")
    lines.append(f"# TYPE {name} {kind}")


def _sample(lines: list[str], name: str, labels: dict[str, str], value: float) -> None:
    said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    lines.append(f"{name}{{{said}}} {value}" if said else f"{name} {value}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
