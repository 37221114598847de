"""Requests to replay: when each comes, its length, its class, and which blocks its prompt begins with."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadInput
from crosstie.sim.recorded import arrivals_of


class TimedRequest(NamedTuple):
    # Of the replay, from 0 on.
    arrival_s: float
    input_tokens: int
    output_tokens: int
    class_name: str | None = None
    # Blocks of the prompt, as `Trace.blocks` numbers them.
    blocks: tuple[int, ...] = ()


def from_trace(
    trace: Trace,
    *,
    class_name: str | None = None,
    requests_per_s: float | None = None,
    requests: int | None = None,
    seconds: float | None = None,
    start: int = 0,
    longest: int | None = None,
    own_times: bool = True,
) -> list[TimedRequest]:
    """A part of a trace from row `start` on: so many requests, or so many seconds of it.

    With a rate its gaps are all stretched or shrunk by one factor, so that the part as a whole has that rate and keeps
    its bursts; without `own_times` it has none, and requests come at random at that rate. Times that were recorded in
    steps are spread at random within them, or a slower replay would make bursts of what was none. Requests beyond
    `longest` tokens, which no replica would take, are left out.
    """
    for what, value in (("rate", requests_per_s), ("time", seconds)):
        if value is not None and not 0.0 < value < math.inf:
            raise BadInput(f"a {what} of {value:g} is no number above zero")
    if start >= len(trace):
        raise BadInput(f"{trace.file}: has {len(trace):,} requests, none from {start:,} on")
    rows = np.arange(start, len(trace))
    if longest is not None:
        rows = rows[(trace.input_tokens + trace.output_tokens)[rows] <= longest]
        if not len(rows):
            raise BadInput(f"{trace.file}: all its requests from {start:,} on have more than {longest:,} tokens")
    if requests_per_s is not None and seconds is not None:
        requests = min(requests or len(rows), max(round(requests_per_s * seconds), 1))
    rows = rows[:requests]
    arrivals = arrivals_of(trace, rows, requests_per_s, own_times)
    if requests_per_s is None and seconds is not None:
        rows, arrivals = rows[arrivals < seconds], arrivals[arrivals < seconds]
    return [
        TimedRequest(
            float(at),
            int(trace.input_tokens[row]),
            int(trace.output_tokens[row]),
            class_name if class_name is not None or trace.classes is None else trace.classes[row],
            trace.blocks[row] if trace.blocks is not None else (),
        )
        for at, row in zip(arrivals, rows, strict=True)
    ]


def merged(*parts: Iterable[TimedRequest]) -> list[TimedRequest]:
    """Several streams of requests as one, by the clock."""
    return sorted((request for part in parts for request in part), key=lambda request: request.arrival_s)
