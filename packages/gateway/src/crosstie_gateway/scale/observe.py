"""What the scaler sees, from the gateway's metrics: requests by class, targets kept, backends that serve."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crosstie.core.errors import BadInput
from crosstie.core.histogram import samples_of
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie_gateway.scaler.rules import ScaleRules
from crosstie_gateway.scaler.scaler import FleetObservation


@dataclass(slots=True)
class GatewayCounts:
    """Totals since the gateways began, and backends that are up now."""

    # Those that are held until a first replica serves have not ended, and count already: somebody must bring one up.
    requests: Counter[str] = field(default_factory=Counter)
    held: int = 0
    # By class and target.
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)
    judged: Counter[tuple[str, str]] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)

    def add(self, page: str) -> None:
        for name, labels, value in samples_of(page):
            kind, pool = labels.get("class", ""), labels.get("pool", "")
            if name == "crosstie_requests_total":
                self.requests[kind] += value  # type: ignore[assignment]
            elif name == "crosstie_held":
                self.requests[kind] += value  # type: ignore[assignment]
                self.held += int(value)
            elif name == "crosstie_targets_total":
                key = kind, labels.get("target", "")
                self.judged[key] += value  # type: ignore[assignment]
                self.kept[key] += value * (labels.get("kept") == "yes")  # type: ignore[assignment]
            elif name == "crosstie_backend_up":
                self.up[pool] = max(self.up[pool], 0) + int(value)
            elif name == "crosstie_in_flight":
                self.in_flight[pool] += value  # type: ignore[assignment]


async def read_gateways(urls: Sequence[str]) -> GatewayCounts:
    """Of all gateways together; raises OSError where one does not answer."""
    counts, up = GatewayCounts(), Counter[str]()
    for url in urls:
        at = Address(url)
        answer = await fetch_once(at, "GET", f"{at.root}/metrics", timeout_s=5.0)
        if answer.status != 200:
            keyed = "where clients have keys, give the address of its --ops-port"
            why = keyed if answer.status == 401 else "is it a gateway of crosstie's?"
            raise BadInput(f"{url}/metrics: status {answer.status}; {why}")
        counts.up = Counter()
        counts.add(answer.body.decode("utf-8", "replace"))
        # Each gateway sees all backends: the one that sees fewest may be cut off from some.
        up |= counts.up
    counts.up = up
    return counts


@dataclass(slots=True)
class CounterWatch:
    """Turns totals into what came since the last look. A gateway that began anew counts from nothing."""

    rules: ScaleRules
    before: GatewayCounts | None = None
    at_s: float = 0.0

    def observe(
        self, now_s: float, counts: GatewayCounts, wanted: Mapping[str, int], empty: Mapping[str, int] | None = None
    ) -> FleetObservation | None:
        """None the first time. `empty`: by supply, emptied replicas. A pool's backends that are up serve its supplies
        in order."""
        before, since = self.before, now_s - self.at_s
        self.before, self.at_s = counts, now_s
        if before is None or since <= 0:
            return None
        came = {name: _grown(counts.requests[name], before.requests[name]) for name in counts.requests}
        return FleetObservation(
            at_s=now_s, over_s=since,
            requests_per_s={name: count / since for name, count in came.items()},
            ready=self._ready(counts, wanted),
            wanted=dict(wanted),
            empty=dict(empty or {}),
            ended=_ended(counts, before, came),
        )  # fmt: skip

    def _ready(self, counts: GatewayCounts, wanted: Mapping[str, int]) -> dict[str, int]:
        left, ready = Counter(counts.up), {}
        for supply in self.rules.supplies:
            ready[supply.name] = min(wanted.get(supply.name, 0), left[supply.pool])
            left[supply.pool] -= ready[supply.name]
        return ready


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _ended(counts: GatewayCounts, before: GatewayCounts, came: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """By class, requests and the least share that can have kept both targets, which are counted apart."""
    ended = {}
    for name, count in came.items():
        shares = [
            _grown(counts.kept[key], before.kept[key]) / judged
            for key in counts.judged
            if key[0] == name and (judged := _grown(counts.judged[key], before.judged[key])) > 0
        ]
        if shares and count > 0:
            ended[name] = (int(count), max(sum(shares) - len(shares) + 1.0, 0.0))
    return ended
