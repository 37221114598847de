"""The `sessions` of a class: agents and chats, whose every prompt is the last one, its answer and what came since.

What the file says of one session becomes a trace of many at work at once. Hits follow from that trace as from a
recorded one: from how much of it a replica's memory holds until the next turn.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.catalog.lengths import Lengths, read_lengths
from crosstie.catalog.reading import number, only_keys, table
from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadData
from crosstie.core.workload import SessionTraffic, Target

_KEYS = {
    "live", "starts_per_hour", "turns", "system", "first", "added", "output", "pause_s", "context", "compact_to",
}  # fmt: skip
# Sessions of the trace. What a cache holds depends on sessions over memory alone, so any number would do; with fewer
# than some forty, chance decides whose turn is next.
SESSIONS_AT_ONCE = 48
# Requests of the trace, and blocks that a mean prompt is cut into: with more, reading a workload takes seconds.
_REQUESTS = 4000
_BLOCKS = 48
_LEAST_BLOCK = 16
_SEED = 7


@dataclass(frozen=True, slots=True)
class SessionShape:
    """One session: values that each turn draws from, evenly; lengths in tokens."""

    turns: Lengths
    # What every session of the class begins with: system prompt and tools.
    system: float
    # The user's first message; what a tool or the user adds to each later prompt; the model's answers.
    first: Lengths
    added: Lengths
    output: Lengths
    # From an answer's end to the next prompt.
    pause_s: Lengths
    # Prompt and answer at most; what the conversation is summarised to when they would exceed it.
    context: float
    compact_to: float


def read_sessions(
    file: Path, where: str, raw: object, context: int, tpot: Target | None
) -> tuple[SessionTraffic, SessionShape]:
    """`context`: the most that the model takes."""
    entry = table(file, where, raw)
    only_keys(file, where, entry, _KEYS)
    shape = read_shape(file, where, entry, context)
    # The longest that an answer may take by its target: a faster fleet is asked more often, until answers take that
    # long, so the mean answer keeps its target whichever fleet it is.
    answer_s = float(shape.output.mean()) * tpot.seconds if tpot else 0.0
    pause_s = float(shape.pause_s.mean())
    if answer_s + pause_s <= 0:
        raise BadData(file, f"{where}.pause_s", "is 0, and there is no tpot_ms: nothing says how often turns come")
    turns = float(shape.turns.mean())
    return SessionTraffic(live=_live(file, where, entry, turns * (answer_s + pause_s)), turns=turns, pause_s=pause_s,
                    answer_s=answer_s), shape  # fmt: skip


def read_shape(file: Path, where: str, entry: dict[str, Any], context: int) -> SessionShape:
    most = number(file, f"{where}.context", entry.get("context", context), 2, context)
    shape = SessionShape(
        turns=read_lengths(file, f"{where}.turns", entry.get("turns"), "turns"),
        system=number(file, f"{where}.system", entry.get("system", 0), 0, most),
        first=read_lengths(file, f"{where}.first", entry.get("first")),
        added=read_lengths(file, f"{where}.added", entry.get("added")),
        output=read_lengths(file, f"{where}.output", entry.get("output")),
        pause_s=_pauses(file, f"{where}.pause_s", entry.get("pause_s")),
        context=most,
        compact_to=number(file, f"{where}.compact_to", entry.get("compact_to", most / 40), 1, most / 2),
    )
    begins = shape.system + shape.compact_to + float(shape.output.mean())
    if begins > most:
        raise BadData(
            file, where, f"a summarised prompt and its answer are {begins:,.0f} tokens, the context {most:,.0f}"
        )
    return shape


def _pauses(file: Path, where: str, raw: object) -> Lengths:
    return np.zeros(1) if raw == 0 and raw is not False else read_lengths(file, where, raw, "seconds")


def _live(file: Path, where: str, entry: dict[str, Any], lasts_s: float) -> float:
    """Sessions at work at once at the peak; of those that begin in an hour as many as Little's law says."""
    if ("live" in entry) == ("starts_per_hour" in entry):
        raise BadData(file, where, "give live, sessions at work at once, or starts_per_hour")
    if "live" in entry:
        return number(file, f"{where}.live", entry["live"], 1, 1e7)
    return number(file, f"{where}.starts_per_hour", entry["starts_per_hour"], 0.01, 1e9) / 3600.0 * lasts_s


def session_trace(name: str, shape: SessionShape, answer_s: float) -> tuple[Trace, float]:
    """A trace of sessions, the same every time, and the requests a second that one of them makes.

    Growth is drawn in whole blocks that have the right mean. A request lists the blocks of its answer too: the next
    turn finds them, as engines keep what they generate.
    """
    chance = np.random.default_rng(_SEED)
    block = _block_tokens(shape)

    def draw(values: Lengths) -> float:
        return float(values[chance.integers(len(values))])

    def blocks(tokens: float) -> int:
        return int(tokens / block + chance.random())

    shared = max(round(shape.system / block), 1) if shape.system else 0
    numbers = iter(range(shared, 10**12))
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    busy_s = 0.0
    lasts_s = float(shape.turns.mean()) * (answer_s + float(shape.pause_s.mean()))
    for _ in range(SESSIONS_AT_ONCE):
        # Sessions are under way at different turns.
        at, made = chance.random() * lasts_s, 0
        begun = at
        while made < _REQUESTS // SESSIONS_AT_ONCE:
            known = [*range(shared), *(next(numbers) for _ in range(max(blocks(draw(shape.first)), 1)))]
            for _ in range(max(round(draw(shape.turns)), 1)):
                output = max(draw(shape.output), 1.0)
                if len(known) * block + output > shape.context:
                    # One more request, of what still fits, writes the summary that the session goes on with.
                    prompt = min(len(known) * block, int(shape.context - shape.compact_to))
                    rows.append((at, prompt, round(shape.compact_to), tuple(known)))
                    at, made = at + answer_s * shape.compact_to / float(shape.output.mean()), made + 1
                    known = [*range(shared), *(next(numbers) for _ in range(max(blocks(shape.compact_to), 1)))]
                prompt = min(len(known) * block, int(shape.context - output))
                known += [next(numbers) for _ in range(blocks(output))]
                rows.append((at, prompt, round(output), tuple(known)))
                known += [next(numbers) for _ in range(blocks(draw(shape.added)))]
                at, made = at + answer_s * output / float(shape.output.mean()) + draw(shape.pause_s), made + 1
        busy_s += at - begun
    rows.sort(key=lambda row: row[0])
    times, inputs, outputs, held = zip(*rows, strict=True)
    trace = Trace(
        f"sessions of {name}", np.array(times) - times[0], np.array(inputs), np.array(outputs), blocks=held,
        block_tokens=block,
    )  # fmt: skip
    return trace, len(rows) / busy_s


def sessions_note(name: str, sessions: SessionTraffic, trace: Trace, requests_per_s: float) -> str:
    """`requests_per_s`: of one of them."""
    answer = f" and {sessions.answer_s:.3g} s of answer, as tpot_ms allows" if sessions.answer_s else ""
    return (
        f"{name}: {sessions.live:,.0f} sessions at work are {sessions.live * requests_per_s:.3g} requests/s of "
        f"{trace.input_tokens.mean():,.0f} tokens in and {trace.output_tokens.mean():,.0f} out; a turn is "
        f"{sessions.pause_s:.3g} s of pause{answer}"
    )


def _block_tokens(shape: SessionShape) -> int:
    """Whole blocks of engines, in which a mean prompt has about as many as can be counted quickly."""
    grown = shape.system + float(shape.first.mean())
    grown += 0.5 * float(shape.turns.mean()) * float(shape.added.mean() + shape.output.mean())
    return max(round(min(grown, shape.context) / _BLOCKS / _LEAST_BLOCK), 1) * _LEAST_BLOCK
