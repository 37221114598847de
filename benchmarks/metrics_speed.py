"""What counting costs: the gateway's own metrics beside prometheus-client, in microseconds of CPU.

    python benchmarks/metrics_speed.py [--rounds 20] [--pools 8] [--json]

    inc         a request counted, by pool, model, class, outcome and status
    observe     a TTFT in its pool's histogram of 17 buckets
    request     all that the gateway counts for one request that was served, as it does and as prometheus-client
                would have it: a counter, two histograms, three sums, two targets
    page        the page that Prometheus reads: 40 kinds of requests, two histograms for each pool

prometheus-client comes with the development tools. Both run in one process, turn by turn; the least of the rounds
counts. Where Crosstie is installed with its compiled modules, these are measured.
"""

import argparse
import json
import time
from collections.abc import Callable

import prometheus_client as theirs
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics

from crosstie.route.ask import Ask
from crosstie.route.live import ServedRequest
from crosstie_gateway.gateway import metrics as ours
from crosstie_gateway.gateway.record import RequestRecord

TTFT_S, TPOT_S = ours.TTFT_S, ours.TPOT_S
LABELS = ("pool", "model", "class", "outcome", "status")


class Theirs:
    """The same counts with prometheus-client, children of labels kept where a gateway could keep them."""

    def __init__(self) -> None:
        self.registry = registry = theirs.CollectorRegistry()
        self.requests = theirs.Counter("crosstie_requests", "Requests.", LABELS, registry=registry)
        self.targets = theirs.Counter("crosstie_targets", "Targets.", ("class", "target", "kept"), registry=registry)
        self.tokens = theirs.Counter("crosstie_tokens", "Tokens.", ("pool", "kind"), registry=registry)
        self.usd = theirs.Counter("crosstie_usd", "Dollars.", ("pool",), registry=registry)
        self.ttft = theirs.Histogram("crosstie_ttft_seconds", "TTFT.", ("pool",), buckets=TTFT_S, registry=registry)
        self.tpot = theirs.Histogram("crosstie_tpot_seconds", "TPOT.", ("pool",), buckets=TPOT_S, registry=registry)
        self.kept: dict[tuple[str, ...], theirs.Counter] = {}

    def count(self, *labels: str) -> None:
        child = self.kept.get(labels)
        if child is None:
            child = self.kept[labels] = self.requests.labels(*labels)
        child.inc()

    def request(self, pool: str) -> None:
        self.count(pool, "m", "chat", "served", "200")
        self.tokens.labels(pool, "input").inc(1000)
        self.tokens.labels(pool, "output").inc(200)
        self.usd.labels(pool).inc(1e-5)
        self.ttft.labels(pool).observe(0.234)
        self.tpot.labels(pool).observe(0.0123)
        self.targets.labels("chat", "ttft", "yes").inc()
        self.targets.labels("chat", "tpot", "yes").inc()


class Ours:
    def __init__(self) -> None:
        self.metrics = ours.Metrics()
        self.ask = Ask(model="m", class_name="chat", input_tokens=1e3, output_tokens=200.0, ttft_s=1.0, tpot_s=0.05)
        self.served = ServedRequest(0.234, 0.0123, 1000.0, 200, 1e-5)

    def record(self, pool: str, how: str = "served", status: int = 200) -> RequestRecord:
        record = RequestRecord(b"id", "/v1/chat/completions", 0.0, how, status)
        record.pool, record.model, record.class_name = pool, "m", "chat"
        return record


def least_us(rounds: int, times: int, *work: Callable[[], object]) -> list[float]:
    """Of each, turn by turn."""
    best = [float("inf")] * len(work)
    for _ in range(rounds):
        for index, one in enumerate(work):
            began = time.process_time()
            for _ in range(times):
                one()
            best[index] = min(best[index], time.process_time() - began)
    return [1e6 * spent / times for spent in best]


def measure(rounds: int, pools: int) -> dict[str, list[float]]:
    mine, other = Ours(), Theirs()
    names = [f"pool-{index}" for index in range(pools)]
    for name in names:
        for how, status in (("served", 200), ("refused", 429), ("failed", 502), ("cut", 200), ("client gone", 0)):
            mine.metrics.count_request(mine.record(name, how, status))
            other.count(name, "m", "chat", how, str(status))
        mine.metrics.observe(name, mine.ask, mine.served, 0.0)
        other.request(name)
    record, pool = mine.record(names[0]), names[0]
    histogram, child = mine.metrics.pools[pool].ttft, other.ttft.labels(pool)

    def request() -> None:
        mine.metrics.count_request(record)
        mine.metrics.observe(pool, mine.ask, mine.served, 0.0)

    return {
        "inc": least_us(
            rounds,
            2000,
            lambda: mine.metrics.count_request(record),
            lambda: other.count(pool, "m", "chat", "served", "200"),
        ),
        "observe": least_us(rounds, 2000, lambda: histogram.add(0.234), lambda: child.observe(0.234)),
        "request": least_us(rounds, 1000, request, lambda: other.request(pool)),
        "page": least_us(
            rounds,
            5,
            lambda: mine.metrics.page([]),
            lambda: theirs.generate_latest(other.registry),
            lambda: open_metrics(other.registry),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pools", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds, options.pools)
    if options.json:
        print(json.dumps(found))
        return
    print("us of CPU: crosstie, prometheus-client (and as OpenMetrics)")
    for name, row in found.items():
        print(f"  {name:8}" + "".join(f"{us:10.2f}" for us in row))


if __name__ == "__main__":
    main()
