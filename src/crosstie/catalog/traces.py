"""Requests as somebody recorded them: when each came, how long its prompt was and how long its answer.

A trace is read whole, column by column; only where a column turns out bad is it walked for the line to blame.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.logs import read_log
from crosstie.catalog.reading import text_of
from crosstie.core.errors import BadData, BadInput, did_you_mean, near_names

# Spellings by their origin: Azure, plain, Mooncake, vidur, LLMServingSim's ShareGPT.
INPUT = ("contexttokens", "input_tokens", "input_length", "num_prefill_tokens", "input_toks")
OUTPUT = ("generatedtokens", "output_tokens", "output_length", "num_decode_tokens", "output_toks")
# Columns of arrivals, and the seconds of their unit.
TIME = {"timestamp": 1.0, "timestamp_ms": 1e-3, "arrival_time_ns": 1e-9, "arrived_at": 1.0}
# Clocks of several front ends differ a little: rows this much out of order are put in order, others refused.
JITTER_S = 1.0
# Mooncake's blocks of prompts: those with the same number hold the same text, and all before them is the same too.
BLOCKS, BLOCK_TOKENS = "hash_ids", 512
# A column of them in a CSV: numbers and ranges, such as 0;14-27.
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
# More tokens than a request has, and later than a time in seconds since 1970 can be.
_MOST_TOKENS, _LATEST_S = 10**9, 1e11

# Date, time and zone. Centuries are few because nanoseconds since 1970 end in 2262.
_WHEN = re.compile(
    r"\s*((?:19|20|21)\d\d-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?) ?([zZ]|[+-]\d\d:?\d\d|)\s*", re.ASCII
)

_SHIPPED = Path(__file__).parent / "data" / "traces"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Answers:
    """How the gateway that recorded requests answered them, in their order; NaN and None where it does not say."""

    pools: tuple[str | None, ...]
    ttft_s: Floats
    tpot_s: Floats
    # Of the prompts, in the engines' caches; of all NaN where no engine said so of any.
    cached_tokens: Floats

    def taken(self, rows: Ints) -> "Answers":
        pools = tuple(self.pools[row] for row in rows)
        return Answers(pools, self.ttft_s[rows], self.tpot_s[rows], self.cached_tokens[rows])


@dataclass(frozen=True, eq=False)
class Trace:
    file: str
    # From 0 on, in order; None where the file has no times.
    arrival_s: Floats | None
    input_tokens: Ints
    output_tokens: Ints
    # Requests without an answer, which are counted as answers of one token.
    empty_outputs: int = 0
    # The blocks of each prompt by number: equal numbers are equal text; those beyond its end are of its answer. None
    # where nobody says.
    blocks: tuple[tuple[int, ...], ...] | None = None
    # The class of each request, where recordings of a gateway say it.
    classes: tuple[str | None, ...] | None = None
    answers: Answers | None = None
    # How long each answer took, and of which session and which agent of it each request is (0: the session itself),
    # where logs of agents say it.
    answers_s: Floats | None = None
    sessions: tuple[tuple[int, int], ...] | None = None
    # Of the first arrival, by the recording's own clock: its files, which are several, have it in common.
    began_s: float = 0.0
    # Of each block; recordings have Mooncake's.
    block_tokens: int = BLOCK_TOKENS

    def __len__(self) -> int:
        return len(self.input_tokens)

    @property
    def span_s(self) -> float | None:
        """From the first arrival to the last."""
        return None if self.arrival_s is None else float(self.arrival_s[-1])

    @property
    def requests_per_s(self) -> float | None:
        """Arrivals after the first, over the span; None where nothing tells time."""
        return (len(self) - 1) / self.span_s if self.span_s else None

    def taken(self, rows: Ints) -> "Trace":
        """These requests in this order, at their times."""
        return replace(
            self,
            arrival_s=None if self.arrival_s is None else self.arrival_s[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            blocks=self.blocks and tuple(self.blocks[row] for row in rows),
            classes=self.classes and tuple(self.classes[row] for row in rows),
            answers=self.answers and self.answers.taken(rows),
            answers_s=None if self.answers_s is None else self.answers_s[rows],
            sessions=self.sessions and tuple(self.sessions[row] for row in rows),
        )


class _Request(msgspec.Struct):
    """One line of a Mooncake trace; whatever else it has is left alone."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    # The gateway's recordings have both; what others may call so is not looked into.
    class_name: object = msgspec.field(default=None, name="class")
    model: object = None
    pool: object = None
    ttft_ms: object = None
    tpot_ms: object = None
    cached_length: object = None


@dataclass
class _Columns:
    """What a file holds, and where each row stands in it."""

    file: Path
    inputs: Sequence[str | int]
    outputs: Sequence[str | int]
    times: Sequence[str | float] | None
    second: float
    lines: Callable[[], list[int]]
    blocks: Sequence[tuple[int, ...] | str] | None = None
    classes: Sequence[str | None] | None = None
    answers: Answers | None = None
    answers_s: Floats | None = None
    sessions: tuple[tuple[int, int], ...] | None = None
    # Whether rows must be in order of time, a little disorder excepted.
    ordered: bool = True

    def blame(self, row: int, reason: str) -> NoReturn:
        raise BadData(self.file, f"line {self.lines()[row]}", reason)


def shipped_traces() -> dict[str, Path]:
    return {file.name.partition(".")[0]: file for file in sorted(_SHIPPED.glob("*.csv.gz"))}


def find_trace(name: str, beside: Path) -> Path:
    """The file of that name in the folder `beside` (or anywhere, if the path says so), or a shipped trace."""
    try:
        file = beside / Path(name).expanduser()
        if file.is_file():
            return file
    except (OSError, RuntimeError) as error:
        raise BadInput(f"trace {name[:200]}: cannot be looked for: {getattr(error, 'strerror', error)}") from None
    shipped = shipped_traces()
    if name.casefold() in shipped:
        return shipped[name.casefold()]
    hint = did_you_mean(near_names(name, shipped))
    raise BadInput(f"unknown trace '{name}': no file in {beside}, and shipped are {', '.join(shipped)}.{hint}")


def read_trace(path: str | Path, *, times: bool = True) -> Trace:
    """A CSV with one of the known spellings, or JSON lines as Mooncake's, of calls of OpenAI's API or of sessions of
    agents; any may be gzipped.

    Without `times` arrivals are not looked at, which halves the work.
    """
    file = Path(path)
    text = text_of(file)
    if not text.strip():
        raise BadData(file, "", "is empty")
    table = _from_json_lines(file, text) if text.lstrip().startswith("{") else _from_csv(file, text)
    inputs = _tokens(table, table.inputs, "input", least=1)
    outputs = _tokens(table, table.outputs, "output", least=0)
    arrivals = None if table.times is None or not times else _seconds(table, table.times)
    # They only matter to whoever sends the requests, at their times.
    blocks = None if table.blocks is None or not times else _numbered(table, table.blocks)
    classes = None if table.classes is None else tuple(table.classes)
    empty = int(np.count_nonzero(outputs == 0))
    trace = Trace(
        str(file), arrivals, inputs, np.maximum(outputs, 1), empty, blocks, classes, table.answers, table.answers_s,
        table.sessions,
    )  # fmt: skip
    if arrivals is not None:
        began_s = float(arrivals.min())
        in_order = trace.taken(np.argsort(arrivals, kind="stable"))
        trace = replace(in_order, arrival_s=np.sort(arrivals) - began_s, began_s=began_s)
    for column in (trace.arrival_s, trace.input_tokens, trace.output_tokens):
        if column is not None:
            column.flags.writeable = False
    return trace


def _from_csv(file: Path, text: str) -> _Columns:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        head, *body = filter(None, reader)
    except csv.Error as error:
        raise BadData(file, f"line {reader.line_num}", f"not valid CSV: {error}") from None

    def lines() -> list[int]:
        again = csv.reader(io.StringIO(text, newline=""))
        return [again.line_num for row in again if row][1:]

    names = [name.strip().casefold() for name in head]
    inputs, outputs = _column(file, names, INPUT, "the prompt"), _column(file, names, OUTPUT, "the answer")
    if inputs is None or outputs is None:
        looked_for = f"the prompt ({', '.join(INPUT)}) and the answer ({', '.join(OUTPUT)})"
        raise BadData(
            file, "line 1",
            f"needs a column for the length of {looked_for}, and one of {', '.join(TIME)} if it has times; "
            f"it has {', '.join(head)[:200]}",
        )  # fmt: skip
    time = _column(file, names, tuple(TIME), "the arrival")
    if not body:
        raise BadData(file, "", "has no requests")
    for index, row in enumerate(body):
        if len(row) != len(names):
            raise BadData(file, f"line {lines()[index]}", f"has {len(row)} fields, the header {len(names)}")
    cells = list(zip(*body, strict=True))
    return _Columns(
        file=file,
        inputs=cells[inputs],
        outputs=cells[outputs],
        times=None if time is None else cells[time],
        second=1.0 if time is None else TIME[names[time]],
        lines=lines,
        blocks=cells[names.index(BLOCKS)] if BLOCKS in names else None,
    )


def _column(file: Path, names: list[str], spellings: Sequence[str], what: str) -> int | None:
    places = [index for index, name in enumerate(names) if name in spellings]
    if len(places) > 1:
        raise BadData(file, "line 1", f"has several columns for {what}: {', '.join(names[i] for i in places)}")
    return places[0] if places else None


def _from_json_lines(file: Path, text: str) -> _Columns:
    if log := read_log(file, text, BLOCK_TOKENS):
        # In the order in which answers ended, as a rule.
        return _Columns(
            file=file, inputs=log.inputs, outputs=log.outputs, times=log.times, second=1.0, lines=lambda: log.lines,
            blocks=log.blocks, answers_s=np.array(log.answers_s) if log.answers_s else None,
            sessions=tuple(log.whose) or None, ordered=False,
        )  # fmt: skip
    decoder = msgspec.json.Decoder(_Request)
    try:
        requests = decoder.decode_lines(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        requests = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    requests.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeEncodeError) as error:
                    raise BadData(file, f"line {number}", str(error)) from None
    classes = [request.class_name if isinstance(request.class_name, str) else None for request in requests]
    return _Columns(
        file=file,
        inputs=[request.input_length for request in requests],
        outputs=[request.output_length for request in requests],
        times=[request.timestamp for request in requests],
        second=1e-3,
        lines=lambda: [number for number, line in enumerate(text.splitlines(), start=1) if line.strip()],
        blocks=[request.hash_ids for request in requests] if any(request.hash_ids for request in requests) else None,
        classes=classes if any(classes) else None,
        answers=_answers(requests),
        # A gateway's recording that is still being written is in the order in which requests ended.
        ordered=not all(isinstance(request.model, str) for request in requests),
    )


def _answers(requests: Sequence[_Request]) -> Answers | None:
    pools = tuple(request.pool if isinstance(request.pool, str) else None for request in requests)
    if not any(pools):
        return None

    def column(values: Sequence[object], scale: float) -> Floats:
        return np.array([v * scale if isinstance(v, int | float) and v >= 0 else np.nan for v in values], np.float64)

    cached = column([request.cached_length for request in requests], 1.0)
    if not np.isnan(cached).all():
        cached = np.nan_to_num(cached)
    return Answers(
        pools,
        column([line.ttft_ms for line in requests], 1e-3),
        column([line.tpot_ms for line in requests], 1e-3),
        cached,
    )


def _numbered(table: _Columns, column: Sequence[tuple[int, ...] | str]) -> tuple[tuple[int, ...], ...]:
    blocks = []
    for row, cell in enumerate(column):
        blocks.append(_from_ranges(table, row, cell) if isinstance(cell, str) else cell)
        if len(blocks[-1]) > _MOST_TOKENS // BLOCK_TOKENS:
            table.blame(row, f"has {len(blocks[-1]):,} blocks")
    return tuple(blocks)


def _from_ranges(table: _Columns, row: int, cell: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in filter(None, cell.split(";")):
        bounds = _RANGE.fullmatch(part)
        if not bounds:
            table.blame(row, f"{BLOCKS} '{part[:40]}' is neither a number nor a range such as 14-27")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not first <= last < first + _MOST_TOKENS // BLOCK_TOKENS:
            table.blame(row, f"{BLOCKS} '{part}' is no range")
        numbers += range(first, last + 1)
    return tuple(numbers)


def _tokens(table: _Columns, column: Sequence[str | int], what: str, least: int) -> Ints:
    try:
        counts = np.fromiter(map(int, column), np.int64, len(column))
    except (ValueError, OverflowError):
        row = _first_bad(column, lambda cell: np.int64(int(cell)))
        table.blame(row, f"{what} '{column[row]}' is not a whole number of tokens")
    bad = (counts < least) | (counts > _MOST_TOKENS)
    if bad.any():
        row = int(bad.argmax())
        table.blame(row, f"{what} of {counts[row]} tokens: must be {least} to {_MOST_TOKENS:,}")
    return counts


def _seconds(table: _Columns, column: Sequence[str | float]) -> Floats:
    try:
        float(column[0])
    except ValueError:
        times_s = _calendar(table, column)
    else:
        times_s = _numbers(table, column) * table.second
    bad = ~((times_s >= 0) & (times_s < _LATEST_S))
    if bad.any():
        row = int(bad.argmax())
        finer = "timestamp_ms and arrival_time_ns are for finer ones"
        table.blame(row, f"time '{column[row]}' is no number of seconds ({finer})")
    late = np.maximum.accumulate(times_s) - times_s > JITTER_S
    if table.ordered and late.any():
        row = int(late.argmax())
        before = float(times_s[: row + 1].max() - times_s[row])
        table.blame(row, f"time '{column[row]}' is {before:,.3g} s before that of an earlier row")
    return times_s


def _numbers(table: _Columns, column: Sequence[str | float]) -> Floats:
    try:
        return np.fromiter(map(float, column), np.float64, len(column))
    except ValueError:
        row = _first_bad(column, float)
        table.blame(row, f"time '{column[row]}' is not a number, as that of the first row is")


def _first_bad(column: Sequence[Any], convert: Callable[[Any], object]) -> int:
    """The row of the cell that cannot be converted; there is one."""
    for row, cell in enumerate(column):
        try:
            convert(cell)
        except (ValueError, OverflowError):
            return row
    raise AssertionError("every cell can be converted")


def _calendar(table: _Columns, column: Sequence[str | float]) -> Floats:
    """Dates and times, in seconds after the earliest; of one zone, if they name any."""
    bare, zones = [], []
    for row, cell in enumerate(column):
        match = _WHEN.fullmatch(str(cell))
        if not match:
            table.blame(row, f"time '{cell}' is neither a number nor a date and time")
        bare.append(match[1])
        zones.append(match[2])
        if match[2] != zones[0]:
            table.blame(row, f"time '{cell}' is not of the first row's time zone")
    try:
        when = np.array(bare, "datetime64[ns]")
    except ValueError as error:
        row = _first_bad(bare, lambda cell: np.datetime64(cell, "ns"))
        table.blame(row, f"time '{column[row]}': {error}")
    seconds: Floats = (when - when.min()) / np.timedelta64(1, "s")
    return seconds
