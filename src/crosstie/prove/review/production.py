"""What production says of itself: recordings of the gateway, its metrics and those of its engines, and its usage."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path

import numpy as np

from crosstie.catalog.reading import text_of
from crosstie.catalog.traces import Answers, Floats, Ints, Trace, read_trace
from crosstie.core.errors import BadData, BadInput
from crosstie.core.histogram import samples_of
from crosstie.core.usage import HOUR_S, Used, total
from crosstie.prove.bench.server_counts import metrics_page
from crosstie.wire.address import Address

# A busiest hour is looked for in recordings that are longer, and a day's mean is known of those that have one.
_HOUR_S, DAY_S = 3600.0, 86_400.0
_STEP_S = 300.0
# How requests end that nobody wanted to end so; who leaves is not a failure.
_FAILED = ("refused", "failed", "cut")
# What engines call the prompt tokens that they looked for in their caches, and those that they found.
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries", "sglang:prompt_tokens_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits", "sglang:cached_tokens_total")


@dataclass(frozen=True)
class Recorded:
    """Requests in the order of arrival, each with its class."""

    trace: Trace
    classes: tuple[str, ...]
    # Where its busiest hour is; all of it, where it is no longer.
    busy: slice
    # Which requests are of each class.
    by_class: dict[str, Ints]

    @property
    def arrivals(self) -> Floats:
        assert self.trace.arrival_s is not None
        return self.trace.arrival_s

    @property
    def span_s(self) -> float:
        return self.trace.span_s or 0.0

    @property
    def whole_day(self) -> bool:
        return self.span_s >= 0.95 * DAY_S

    @property
    def busy_span_s(self) -> float:
        """Of a recording that is no longer, with the gap after its last request: as many gaps as requests."""
        count = len(self.classes)
        return _HOUR_S if self.span_s > _HOUR_S else self.span_s * count / (count - 1)

    def rows(self, name: str, busy: bool = False) -> Ints:
        rows = self.by_class.get(name, np.zeros(0, np.int64))
        return rows[(rows >= self.busy.start) & (rows < self.busy.stop)] if busy else rows

    @property
    def has_latencies(self) -> bool:
        answers = self.trace.answers
        return answers is not None and not bool(np.isnan(answers.ttft_s).all())


def read_recordings(files: Sequence[Path], known: Sequence[str], class_name: str | None = None) -> Recorded:
    """The files of one recording; `known` are the plan's classes, `class_name` that of all requests."""
    trace = _together([read_trace(file) for file in files])
    file = Path(trace.file)
    if trace.arrival_s is None:
        raise BadData(file, "", "has no times, so nothing tells how many requests came when")
    if len(trace) < 2 or not trace.span_s:
        raise BadData(file, "", f"has {len(trace)} request{'s' * (len(trace) != 1)} at one moment: no rate can be told")
    if class_name is not None and class_name not in known:
        raise BadInput(f"--class {class_name}: the plan has {', '.join(known)}")
    said = trace.classes or (None,) * len(trace)
    bare = sum(name is None for name in said)
    only = class_name or (known[0] if len(known) == 1 else None)
    if bare and only is None:
        raise BadData(
            file, "class",
            f"{bare:,} of {len(trace):,} requests say none, and the plan has {', '.join(known)}; --class NAME does",
        )  # fmt: skip
    classes = tuple(class_name or name or str(only) for name in said)
    if not set(classes) & set(known):
        theirs = ", ".join(sorted(set(classes)))
        raise BadData(file, "class", f"has {theirs}, the plan {', '.join(known)}: it is of another fleet")
    names, kinds = np.unique(classes, return_inverse=True)
    by_class = {str(name): np.flatnonzero(kinds == number) for number, name in enumerate(names)}
    return Recorded(trace, classes, _busiest(trace.arrival_s), by_class)


def _together(traces: list[Trace]) -> Trace:
    if len(traces) == 1:
        return traces[0]
    if any(trace.arrival_s is None for trace in traces):
        raise BadInput(f"{traces[0].file}: several recordings, and not all have times")
    at = np.concatenate([trace.arrival_s + trace.began_s for trace in traces if trace.arrival_s is not None])
    blocks = [trace.blocks or ((),) * len(trace) for trace in traces]
    classes = [trace.classes or (None,) * len(trace) for trace in traces]
    whole = Trace(
        traces[0].file,
        at,
        np.concatenate([trace.input_tokens for trace in traces]),
        np.concatenate([trace.output_tokens for trace in traces]),
        sum(trace.empty_outputs for trace in traces),
        tuple(chain(*blocks)) if any(trace.blocks for trace in traces) else None,
        tuple(chain(*classes)) if any(trace.classes for trace in traces) else None,
        _answers_together([trace.answers for trace in traces]),
    )
    began_s = float(at.min())
    return replace(whole.taken(np.argsort(at, kind="stable")), arrival_s=np.sort(at) - began_s, began_s=began_s)


def _answers_together(parts: Sequence[Answers | None]) -> Answers | None:
    known = [answers for answers in parts if answers is not None]
    if len(known) < len(parts):
        return None
    columns = ([getattr(answers, name) for answers in known] for name in ("ttft_s", "tpot_s", "cached_tokens"))
    return Answers(tuple(chain(*(answers.pools for answers in known))), *map(np.concatenate, columns))


def _busiest(arrivals: Floats) -> slice:
    """The hour with most requests, by steps of five minutes."""
    if arrivals[-1] <= _HOUR_S:
        return slice(0, len(arrivals))
    starts = np.arange(0.0, arrivals[-1] - _HOUR_S + _STEP_S, _STEP_S)
    first = np.searchsorted(arrivals, starts)
    last = np.searchsorted(arrivals, starts + _HOUR_S)
    at = int(np.argmax(last - first))
    return slice(int(first[at]), int(last[at]))


@dataclass
class MetricTotals:
    """Since the gateway's start, of all pages together."""

    # By class and target: kept, and all.
    targets: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    # All requests, and those that were refused, failed or cut.
    requests: float = 0.0
    failed: float = 0.0
    # Prompt tokens that engines looked for and found.
    queried: float = 0.0
    found: float = 0.0

    def add(self, page: str) -> None:
        for name, labels, value in samples_of(page):
            if name == "crosstie_targets_total":
                counted = self.targets[labels.get("class", ""), labels.get("target", "")]
                counted[0] += value * (labels.get("kept") == "yes")
                counted[1] += value
            elif name == "crosstie_requests_total":
                self.requests += value
                self.failed += value * (labels.get("outcome") in _FAILED)
            elif name in _QUERIES:
                self.queried += value
            elif name in _HITS:
                self.found += value


def read_metrics(places: Sequence[str]) -> MetricTotals:
    """Pages in Prometheus' text form: files, or addresses to ask."""
    totals = MetricTotals()
    for place in places:
        page = _page(place)
        if not any(True for _ in samples_of(page)):
            raise BadInput(f"--metrics {place}: has no metric; a page in Prometheus' text form is read")
        totals.add(page)
    return totals


def _page(place: str) -> str:
    if not place.startswith(("http://", "https://")):
        return text_of(Path(place))
    at = Address(place)
    return metrics_page(f"--metrics {place}", at, f"{at.root.removesuffix('/metrics')}/metrics")


@dataclass(frozen=True)
class Usage:
    """From the gateway's store, by the hour."""

    hours: list[Used]

    @property
    def sums(self) -> Used:
        return total(self.hours)

    @property
    def span_s(self) -> float:
        """From the first hour with a request to the end of the last."""
        at = [datetime.strptime(hour.of[0], "%Y-%m-%dT%H").timestamp() for hour in self.hours]
        return max(at) - min(at) + HOUR_S
