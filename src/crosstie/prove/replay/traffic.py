"""Requests to replay: when each comes, how long it is, whom it belongs to, and its prompt of just that length.

Prompts are filler. What matters of them is their length, and how much of their beginning was seen before: blocks that
a trace numbers alike are alike here, and where it numbers none the first bytes are like no other prompt's.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from crosstie.catalog.traces import BLOCK_TOKENS, Trace
from crosstie.core.errors import BadInput
from crosstie.sim.recorded import arrivals_of

# Text has about four bytes a token, and the emulated replicas count so.
BYTES_PER_TOKEN = 4
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
_SENTENCE = b"Filler that stands for somebody's prompt, of the same length and of no other meaning. "
_FILLER = memoryview(_SENTENCE * (2**21 // len(_SENTENCE)))


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
    return sorted((one for part in parts for one in part), key=lambda one: one.arrival_s)


def prompt(request: TimedRequest, number: int) -> bytes:
    """Its text: plain ASCII that JSON need not escape, four bytes a token."""
    size = request.input_tokens * BYTES_PER_TOKEN
    if not request.blocks:
        # Cut from the left where even the number is too long: neighbours still differ.
        name = b"%08x: " % number
        return name[-size - 2 : -2] if size < len(name) else b"".join((name, _filler(size - len(name))))
    pieces = []
    for block in request.blocks:
        name = b"block %08x: " % block
        pieces += [name, _filler(_BLOCK_BYTES - len(name))]
    whole = b"".join(pieces)
    return whole[:size] if len(whole) >= size else b"".join((whole, b"%08x: " % number, _filler(size)))[:size]


def _filler(size: int) -> bytes | memoryview:
    return (
        _FILLER[:size]
        if size <= len(_FILLER)
        else bytes(_FILLER) * (size // len(_FILLER)) + _FILLER[: size % len(_FILLER)]
    )
