"""The `sessions` of a class: agents and chats, whose every prompt is the last one, its answer and what came since.

What the file says of one session becomes a trace of many at work at once. Hits follow from that trace as from a
recorded one: from how much of it a replica's memory holds until the next turn.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from crosstie.catalog.lengths import Lengths, read_lengths
from crosstie.catalog.reading import number, only_keys, table
from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadData
from crosstie.core.workload import SessionShape, SessionTraffic, Target

_KEYS = {
    "live", "starts_per_hour", "turns", "system", "first", "added", "output", "pause_s", "context", "compact_to",
    "success_rate",
}  # fmt: skip
# Sessions of the trace. What a cache holds depends on sessions over memory alone, so any number would do; with fewer
# than some forty, chance decides whose turn is next.
SESSIONS_AT_ONCE = 48
# Requests of the trace, and blocks that a mean prompt is cut into: with more, reading a workload takes seconds.
_REQUESTS = 4000
_BLOCKS = 48
_LEAST_BLOCK = 16
_SEED = 7


class SessionTurn(NamedTuple):
    """One request of a session, in tokens."""

    # From the last answer's end.
    pause_s: float
    input_tokens: int
    output_tokens: int
    # Prompt and answer, with which the next turn begins; and which of the session's conversations, one after the
    # other, it is of: a summary begins another.
    known: int
    conversation: int


def read_sessions(file: Path, where: str, raw: object, context: int, tpot: Target | None) -> SessionTraffic:
    """`context`: the most that the model takes."""
    entry = table(file, where, raw)
    only_keys(file, where, entry, _KEYS)
    shape = read_shape(file, where, entry, context)
    # The longest that an answer may take by its target: a faster fleet is asked more often, until answers take that
    # long, so the mean answer keeps its target whichever fleet it is.
    answer_s = fmean(shape.output) * tpot.seconds if tpot else 0.0
    pause_s = fmean(shape.pause_s)
    if answer_s + pause_s <= 0:
        raise BadData(file, f"{where}.pause_s", "is 0, and there is no tpot_ms: nothing says how often turns come")
    turns = fmean(shape.turns)
    solved = number(file, f"{where}.success_rate", entry["success_rate"], 0.001, 1) if "success_rate" in entry else None
    return SessionTraffic(
        live=_live(file, where, entry, turns * (answer_s + pause_s)), turns=turns, pause_s=pause_s, answer_s=answer_s,
        success_rate=solved, shape=shape,
    )  # fmt: skip


def read_shape(file: Path, where: str, entry: dict[str, Any], context: int) -> SessionShape:
    most = number(file, f"{where}.context", entry.get("context", context), 2, context)
    shape = SessionShape(
        turns=_values(read_lengths(file, f"{where}.turns", entry.get("turns"), "turns")),
        system=number(file, f"{where}.system", entry.get("system", 0), 0, most),
        first=_values(read_lengths(file, f"{where}.first", entry.get("first"))),
        added=_values(read_lengths(file, f"{where}.added", entry.get("added"))),
        output=_values(read_lengths(file, f"{where}.output", entry.get("output"))),
        pause_s=_values(_pauses(file, f"{where}.pause_s", entry.get("pause_s"))),
        context=most,
        compact_to=number(file, f"{where}.compact_to", entry.get("compact_to", most / 40), 1, most / 2),
    )
    begins = shape.system + shape.compact_to + fmean(shape.output)
    if begins > most:
        raise BadData(
            file, where, f"a summarised prompt and its answer are {begins:,.0f} tokens, the context {most:,.0f}"
        )
    return shape


def _values(lengths: Lengths) -> tuple[float, ...]:
    return tuple(lengths.tolist())


def _pauses(file: Path, where: str, raw: object) -> Lengths:
    return np.zeros(1) if raw == 0 and raw is not False else read_lengths(file, where, raw, "seconds")


def _live(file: Path, where: str, entry: dict[str, Any], lasts_s: float) -> float:
    """Sessions at work at once at the peak; of those that begin in an hour as many as Little's law says."""
    if ("live" in entry) == ("starts_per_hour" in entry):
        raise BadData(file, where, "give live, sessions at work at once, or starts_per_hour")
    if "live" in entry:
        return number(file, f"{where}.live", entry["live"], 1, 1e7)
    return number(file, f"{where}.starts_per_hour", entry["starts_per_hour"], 0.01, 1e9) / 3600.0 * lasts_s


def session_turns(
    shape: SessionShape, chance: np.random.Generator, whole: Callable[[float], int] = round
) -> Iterator[SessionTurn]:
    """One session, turn by turn. `whole`: rounds what is added to tokens, or to tokens of whole blocks."""

    def draw(values: Sequence[float]) -> float:
        return float(values[int(chance.integers(len(values)))])

    system = round(shape.system)
    known, conversation, pause_s = system + max(whole(draw(shape.first)), 1), 0, 0.0
    for _ in range(max(round(draw(shape.turns)), 1)):
        output = max(draw(shape.output), 1.0)
        if known + output > shape.context:
            # One more request, of what still fits, writes the summary that the session goes on with.
            prompt = min(known, int(shape.context - shape.compact_to))
            yield SessionTurn(pause_s, prompt, round(shape.compact_to), known, conversation)
            known, conversation, pause_s = system + max(whole(shape.compact_to), 1), conversation + 1, 0.0
        prompt = min(known, int(shape.context - output))
        known += whole(output)
        yield SessionTurn(pause_s, prompt, round(output), known, conversation)
        known += whole(draw(shape.added))
        pause_s = draw(shape.pause_s)


def session_trace(name: str, shape: SessionShape, answer_s: float) -> tuple[Trace, float]:
    """A trace of sessions, the same every time, and the requests a second that one of them makes.

    Growth is drawn in whole blocks that have the right mean. A request lists the blocks of its answer too: the next
    turn finds them, as engines keep what they generate.
    """
    chance = np.random.default_rng(_SEED)
    block = _block_tokens(shape)

    def whole(tokens: float) -> int:
        return int(tokens / block + chance.random()) * block

    shared = max(round(shape.system / block), 1) if shape.system else 0
    in_blocks = msgspec.structs.replace(shape, system=float(shared * block))
    numbers = iter(range(shared, 10**12))
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    busy_s = 0.0
    mean_output = fmean(shape.output)
    lasts_s = fmean(shape.turns) * (answer_s + fmean(shape.pause_s))
    for _ in range(SESSIONS_AT_ONCE):
        # Sessions are under way at different turns.
        at, made = chance.random() * lasts_s, 0
        begun = at
        while made < _REQUESTS // SESSIONS_AT_ONCE:
            known, conversation = list(range(shared)), 0
            for turn in session_turns(in_blocks, chance, whole):
                if turn.conversation != conversation:
                    known, conversation = list(range(shared)), turn.conversation
                known += [next(numbers) for _ in range(-(-turn.known // block) - len(known))]
                at += turn.pause_s
                rows.append((at, turn.input_tokens, turn.output_tokens, tuple(known)))
                at, made = at + answer_s * turn.output_tokens / mean_output, made + 1
            at += float(shape.pause_s[int(chance.integers(len(shape.pause_s)))])
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
    grown = shape.system + fmean(shape.first)
    grown += 0.5 * fmean(shape.turns) * (fmean(shape.added) + fmean(shape.output))
    return max(round(min(grown, shape.context) / _BLOCKS / _LEAST_BLOCK), 1) * _LEAST_BLOCK
