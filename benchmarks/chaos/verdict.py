"""Whether it all adds up: what clients saw, what the gateway told of each request, and what its store has counted."""

import json
import sqlite3
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crowd import Seen
from plan import KEYS

# What the gateway may say of a request whose client saw this.
_AGREES = {
    "answer": {"served"},
    "error": {"refused", "failed", "client error"},
    "in-band error": {"cut"},
    # Its client went while it was queued, tried, or answered; or just after its last byte had left.
    "left": {"client gone", "served", "refused", "failed", "cut", "client error"},
    "stalled": {"client stalled", "client gone", "served", "cut"},
}
# Of plain requests, how many may end with a status of 500 or more while engines and gateway are disturbed.
_FAILED = 0.02
# What the gateway counts by bytes may be off by so much.
_BY_BYTES = 0.02
# Usage is written twice a second; what had ended longer before a kill than this must be in the store.
_SAFE_S = 1.5


class Told:
    """The gateway's log: its lines about requests, by id, and whatever else must not be in it."""

    def __init__(self, log: Path):
        self.requests: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.events: Counter[str] = Counter()
        self.complaints: list[str] = []
        for line in log.read_text(errors="replace").splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                self.complaints.append(line[:300])
                continue
            self.events[said.get("event", "")] += 1
            if said.get("event") == "request":
                self.requests[said["request_id"]].append(said)
            elif said.get("event") == "internal_error":
                self.complaints.append(str(said)[:500])


class Verdict:
    """`problems`: sentences with the request's id, if it is about one."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def check(self, good: bool, problem: str) -> None:
        if not good:
            self.problems.append(problem)

    def each_ended_once(self, seen: Iterable[Seen], told: Told, *, killed: bool) -> None:
        known = set()
        for one in seen:
            name = one.plan.id.decode()
            known.add(name)
            lines = told.requests.get(name, [])
            self.check(one.how != "lost", f"{name} ({one.plan.manner}): lost: {one.why}")
            self.check(len(lines) <= 1, f"{name}: the gateway told of its end {len(lines)} times")
            must = one.how in ("answer", "error", "in-band error") and not killed
            self.check(bool(lines) or not must, f"{name}: its client saw {one.how}, and the gateway told of no end")
            if lines:
                self._agrees(one, lines[0])
        for name in told.requests.keys() - known:
            self.problems.append(f"{name}: the gateway told of a request that nobody sent")

    def _agrees(self, one: Seen, line: dict[str, Any]) -> None:
        name, outcome = one.plan.id.decode(), line["outcome"]
        allowed = _AGREES.get(one.how)
        if allowed is None:
            return
        self.check(
            outcome in allowed, f"{name}: its client saw {one.how} ({one.status} {one.code}), told was {outcome}"
        )
        if one.how in ("error", "in-band error"):
            self.check(line["status"] == one.status, f"{name}: status {one.status}, told was {line['status']}")
        if one.how == "answer" and not one.plan.local:
            wanted = (one.plan.prompt_tokens, one.plan.tokens)
            counted = (line["input_tokens"], line["output_tokens"])
            self.check(counted == wanted, f"{name}: served {wanted} tokens, counted {counted}")
        if one.how == "in-band error" and not one.plan.local:
            counted = line["output_tokens"]
            # An engine that was stopped says several tokens in an event afterwards; what it has not counted itself can
            # only be told by bytes then, and the gateway says so.
            most = 0 if line["counted"] else max(1, one.tokens * _BY_BYTES)
            self.check(
                abs(counted - one.tokens) <= most, f"{name}: {one.tokens} tokens before the error, counted {counted}"
            )
        if one.how in ("left", "stalled") and not one.plan.local:
            # What had left the gateway may have been on its way: never less than was read, nor more than was asked.
            counted = line["output_tokens"]
            self.check(
                one.tokens <= counted <= one.plan.tokens,
                f"{name}: {one.how} after {one.tokens} of {one.plan.tokens} tokens, counted {counted}",
            )
        if one.how == "error":
            self.check(line["output_tokens"] == 0, f"{name}: an error, and {line['output_tokens']} tokens counted")

    def innocent_are_served(self, seen: Iterable[Seen]) -> None:
        """What others send, and what goes wrong with some engines, turns few away who did nothing."""
        plain = [one for one in seen if one.plan.manner == "plain" and not one.plan.local]
        failed = Counter(f"{one.status} {one.code}" for one in plain if one.how == "error" and one.status >= 500)
        count = sum(failed.values())
        self.check(count <= _FAILED * len(plain), f"{count} of {len(plain)} plain requests failed: {dict(failed)}")

    def store_equals_log(self, store: Path, told: Told) -> dict[str, Any]:
        """Requests and tokens by key, as the store has them and as the ends that were told add up."""
        kept = stored(store)
        summed: dict[str, list[int]] = {}
        names = key_names(store)
        for lines in told.requests.values():
            for line in lines:
                row = summed.setdefault(names.get(line["key"] or 0, "no key"), [0, 0, 0])
                row[0] += 1
                row[1] += line["input_tokens"]
                row[2] += line["output_tokens"]
        for name in kept.keys() | summed.keys():
            have, want = kept.get(name, [0, 0, 0]), summed.get(name, [0, 0, 0])
            self.check(have == want, f"usage of {name}: requests, input, output {have} in the store, {want} were told")
        return {name: dict(zip(("requests", "input_tokens", "output_tokens"), row, strict=True)) for name, row in
                sorted(kept.items())}  # fmt: skip

    def store_within_bounds(self, store: Path, seen: Iterable[Seen], downs: list[list[float]]) -> dict[str, Any]:
        """After kills: never more than was sent, never less than had been answered a while before."""
        least, most = Counter[str](), Counter[str]()
        for one in seen:
            key, plan = one.plan.key, one.plan
            if plan.local or plan.wrong:
                continue
            if one.how == "answer" and not any(down - _SAFE_S <= one.ended <= down for down, _ in downs):
                least[key] += plan.tokens
            if one.complete_request and one.how != "error":
                most[key] += plan.tokens
        kept, found = stored(store, local=False), {}
        for key in KEYS:
            have = kept.get(key, [0, 0, 0])[2]
            self.check(
                have >= least[key], f"usage of {key}: {have} tokens in the store, {least[key]} were surely served"
            )
            self.check(have <= most[key], f"usage of {key}: {have} tokens in the store, {most[key]} were asked for")
            found[key] = {"least": least[key], "stored": have, "most": most[key]}
        return found


def key_names(store: Path) -> dict[int, str]:
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as at:
        return dict(at.execute("SELECT id, name FROM crosstie_keys"))


def stored(store: Path, *, local: bool = True) -> dict[str, list[int]]:
    names = key_names(store)
    where = "" if local else "WHERE pool != 'local'"
    sql = f"SELECT key_id, SUM(requests), SUM(input_tokens), SUM(output_tokens) FROM crosstie_usage {where} GROUP BY 1"
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as at:
        return {names.get(key, "no key"): list(row) for key, *row in at.execute(sql)}


def undisturbed(seen: Iterable[Seen], told: Told, windows: dict[str, list[tuple[float, float]]]) -> list[Seen]:
    """Plain requests that were answered at the first attempt, by a backend with which nothing was wrong meanwhile."""
    found = []
    for one in seen:
        lines = told.requests.get(one.plan.id.decode(), [])
        if one.how != "answer" or one.plan.manner != "plain" or one.plan.local or not lines:
            continue
        line = lines[0]
        if line["attempts"] != 1 or line["resumed"]:
            continue
        if not any(a <= one.ended and one.began <= b for a, b in windows.get(line["backend"], ())):
            found.append(one)
    return found


def latencies(seen: list[Seen]) -> dict[str, float]:
    """Of the whole answer, and of its first byte where it was streamed; seconds, by the clients' clocks."""
    whole = [one.ended - one.began for one in seen]
    first = [one.first - one.began for one in seen if one.plan.stream and one.first is not None]
    return {
        "requests": len(seen),
        "ttft_p50_s": _percentile(first, 50), "ttft_p99_s": _percentile(first, 99),
        "latency_p50_s": _percentile(whole, 50), "latency_p99_s": _percentile(whole, 99),
    }  # fmt: skip


def _percentile(values: list[float], percent: int) -> float:
    return round(statistics.quantiles(values, n=100)[percent - 1], 4) if len(values) > 1 else 0.0
