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
from crosstie.core.workload import SessionShape, SessionTraffic, SubAgents, Target

_KEYS = {
    "live", "starts_per_hour", "turns", "system", "first", "added", "output", "pause_s", "context", "compact_to",
    "success_rate", "subagents",
}  # fmt: skip
_OF_SUBAGENTS = {"share", "count", "begins", "turns", "first", "added", "output", "pause_s"}
_BEGINS = ("system", "conversation")
# Sessions of the trace. What a cache holds depends on sessions over memory alone, so any number would do; with fewer
# than some forty, chance decides whose turn is next.
SESSIONS_AT_ONCE = 48
# Requests of the trace, and blocks that a mean prompt is cut into: with more, reading a workload takes seconds.
_REQUESTS = 4000
_BLOCKS = 48
_LEAST_BLOCK = 16
_SEED = 7
# Of a block's number: its place in the conversation, that of the conversation in its session, and above the session.
_CONVERSATION_AT, _SESSION_AT = 16, 32


class SessionTurn(NamedTuple):
    """One request of a session, in tokens."""

    # From the last answer's end.
    pause_s: float
    input_tokens: int
    output_tokens: int
    # Prompt and answer, with which the next turn begins; and which of the session's conversations it is of: a summary
    # begins another, and so does a sub-agent.
    known: int
    conversation: int
    # Those of prompt and answer.
    blocks: tuple[int, ...]
    # At work from this answer's end on, turn by turn each; the next turn comes when all have ended and it has paused.
    subagents: "tuple[tuple[SessionTurn, ...], ...]" = ()


def read_sessions(
    file: Path, where: str, name: str, raw: object, context: int, tpot: Target | None
) -> tuple[SessionTraffic, Trace, float]:
    """With a trace of such sessions and the requests a second of one of them. `context`: the most that the model
    takes."""
    entry = table(file, where, raw)
    only_keys(file, where, entry, _KEYS)
    shape = read_shape(file, where, entry, context)
    # The longest that an answer may take by its target: a faster fleet is asked more often, until answers take that
    # long, so the mean answer keeps its target whichever fleet it is.
    answer_s = fmean(shape.output) * tpot.seconds if tpot else 0.0
    pause_s = fmean(shape.pause_s)
    if answer_s + pause_s <= 0:
        raise BadData(file, f"{where}.pause_s", "is 0, and there is no tpot_ms: nothing says how often turns come")
    trace, requests_per_s = session_trace(name, shape, answer_s)
    solved = number(file, f"{where}.success_rate", entry["success_rate"], 0.001, 1) if "success_rate" in entry else None
    return SessionTraffic(
        live=_live(file, where, entry, shape.requests / requests_per_s), turns=shape.requests, pause_s=pause_s,
        answer_s=answer_s, success_rate=solved, shape=shape,
    ), trace, requests_per_s  # fmt: skip


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
    if "subagents" in entry:
        helpers = _read_subagents(file, f"{where}.subagents", entry["subagents"], shape)
        shape = msgspec.structs.replace(shape, subagents=helpers)
    begins = shape.system + shape.compact_to + fmean(shape.output)
    if begins > most:
        raise BadData(
            file, where, f"a summarised prompt and its answer are {begins:,.0f} tokens, the context {most:,.0f}"
        )
    return shape


def _read_subagents(file: Path, where: str, raw: object, shape: SessionShape) -> SubAgents:
    """What they do not say is as the session has it."""
    entry = table(file, where, raw)
    only_keys(file, where, entry, _OF_SUBAGENTS)
    begins = entry.get("begins", "system")
    if begins not in _BEGINS:
        raise BadData(file, f"{where}.begins", f"{begins!r} must be {' or '.join(_BEGINS)}")

    def lengths(key: str, unit: str = "tokens") -> tuple[float, ...]:
        return _values(read_lengths(file, f"{where}.{key}", entry[key], unit)) if key in entry else getattr(shape, key)

    for key in ("share", "count", "turns"):
        if key not in entry:
            raise BadData(file, f"{where}.{key}", "missing: after which share of turns how many work, and how long")
    return SubAgents(
        share=number(file, f"{where}.share", entry["share"], 0.0001, 1), count=lengths("count", "sub-agents"),
        forks=begins == "conversation", turns=lengths("turns", "turns"), first=lengths("first"),
        added=lengths("added"), output=lengths("output"),
        pause_s=_values(_pauses(file, f"{where}.pause_s", entry["pause_s"])) if "pause_s" in entry else shape.pause_s,
    )  # fmt: skip


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
    shape: SessionShape,
    chance: np.random.Generator,
    session: int,
    shared: tuple[int, ...],
    block_tokens: int,
    whole: Callable[[float], int] = round,
) -> Iterator[SessionTurn]:
    """One session, turn by turn; its number is in those of its blocks, behind those that all sessions have. `whole`:
    rounds what is added to tokens, or to tokens of whole blocks."""

    def draw(values: Sequence[float]) -> float:
        return float(values[int(chance.integers(len(values)))])

    def blocks_of(known: int, conversation: int, begins: tuple[int, ...]) -> tuple[int, ...]:
        own = (session + 1 << _SESSION_AT) + (conversation << _CONVERSATION_AT)
        return (*begins, *range(own + len(begins), own - (-known // block_tokens)))

    def sent_off(helpers: SubAgents, known: int, blocks: tuple[int, ...], conversation: int) -> tuple[SessionTurn, ...]:
        begins = blocks[: known // block_tokens] if helpers.forks else shared
        known = (known if helpers.forks else system) + max(whole(draw(helpers.first)), 1)
        turns: list[SessionTurn] = []
        pause_s = 0.0
        for _ in range(max(round(draw(helpers.turns)), 1)):
            output = max(draw(helpers.output), 1.0)
            if turns and known + output > shape.context:
                break
            prompt = min(known, int(shape.context - output))
            known += whole(output)
            own = blocks_of(known, conversation, begins)
            turns.append(SessionTurn(pause_s, prompt, round(output), known, conversation, own))
            known += whole(draw(helpers.added))
            pause_s = draw(helpers.pause_s)
        return tuple(turns)

    system = round(shape.system)
    known, conversation, conversations, pause_s = system + max(whole(draw(shape.first)), 1), 0, 1, 0.0
    left = max(round(draw(shape.turns)), 1)
    while left:
        left -= 1
        output = max(draw(shape.output), 1.0)
        if known + output > shape.context:
            # One more request, of what still fits, writes the summary that the session goes on with.
            prompt, summary = min(known, int(shape.context - shape.compact_to)), round(shape.compact_to)
            yield SessionTurn(pause_s, prompt, summary, known, conversation, blocks_of(known, conversation, shared))
            known, pause_s = system + max(whole(shape.compact_to), 1), 0.0
            conversation, conversations = conversations, conversations + 1
        prompt = min(known, int(shape.context - output))
        known += whole(output)
        blocks, helpers = blocks_of(known, conversation, shared), shape.subagents
        sent: list[tuple[SessionTurn, ...]] = []
        if helpers is not None and left and chance.random() < helpers.share:
            for _ in range(max(round(draw(helpers.count)), 1)):
                sent.append(sent_off(helpers, known, blocks, conversations))
                conversations += 1
        yield SessionTurn(pause_s, prompt, round(output), known, conversation, blocks, tuple(sent))
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

    shared = tuple(range(max(round(shape.system / block), 1) if shape.system else 0))
    in_blocks = msgspec.structs.replace(shape, system=float(len(shared) * block))
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    mean_output = fmean(shape.output)

    def answered(turn: SessionTurn, at: float) -> float:
        rows.append((at, turn.input_tokens, turn.output_tokens, turn.blocks))
        return at + answer_s * turn.output_tokens / mean_output

    busy_s, number = 0.0, 0
    lasts_s = fmean(shape.turns) * (answer_s + fmean(shape.pause_s))
    for _ in range(SESSIONS_AT_ONCE):
        # Sessions are under way at different turns.
        at = begun = chance.random() * lasts_s
        made = len(rows)
        while len(rows) - made < _REQUESTS // SESSIONS_AT_ONCE:
            joined = at
            for turn in session_turns(in_blocks, chance, number, shared, block, whole):
                at = joined = answered(turn, max(at + turn.pause_s, joined))
                for helper in turn.subagents:
                    ended = at
                    for step in helper:
                        ended = answered(step, ended + step.pause_s)
                    joined = max(joined, ended)
            at += float(shape.pause_s[int(chance.integers(len(shape.pause_s)))])
            number += 1
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
