"""The sessions of a recording: which prompts go on with which, and what that says as a class of a workload file."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from crosstie.catalog.sessions import SessionTurn
from crosstie.catalog.traces import BLOCKS, Trace
from crosstie.core.errors import BadData

# Of minutes, the sessions at work that 19 of 20 do not exceed, as rates of traces are read.
_BUSY_MINUTE = 0.95
# Shares of a distribution between which a file takes it as even; finer where tails are long.
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
# Moments at which a recording's sessions are counted, at the least.
_MOMENTS = 100
# Turns a session, on average, below which a trace is better given as it is.
_WITHOUT_SESSIONS = 1.2

# A session by its requests, rows of the trace.
_Session = list[int]


def workload_text(trace: Trace) -> str:
    """A workload file with one class, of the sessions that a trace has."""
    if trace.blocks is None or trace.arrival_s is None:
        raise BadData(trace.file, "", f"needs times and {BLOCKS}, which tell what prompts have in common")
    sessions = _sessions(trace)
    turns = [len(session) for session in sessions]
    if np.mean(turns) < _WITHOUT_SESSIONS:
        raise BadData(
            trace.file, "", f"its {len(trace):,} prompts hardly go on with one another ({np.mean(turns):.2f} turns a "
            "session): give it as `trace` of a class",
        )  # fmt: skip
    system = _shared_tokens(trace, sessions)
    first = [int(trace.input_tokens[session[0]]) - system for session in sessions]
    added, pauses = _between_turns(trace, sessions)
    spoke = "" if trace.answers is not None else "  # the recording does not say how long answers took: they are in it"
    return "\n".join([
        f"# Sessions of {Path(trace.file).name}: {len(sessions):,} of {len(trace):,} requests.",
        '[[class]]',
        'name = "agents"',
        'model = "llama-3.3-70b"                # yours',
        "ttft_ms = { p95 = 5000 }               # what they should be given",
        "tpot_ms = { p90 = 30 }",
        "",
        "[class.sessions]",
        f"live = {_live(trace, sessions)}",
        f"turns = {_distribution(turns)}",
        f"system = {system}",
        f"first = {_distribution(first)}",
        f"added = {_distribution(added)}",
        f"output = {_distribution(trace.output_tokens.tolist())}",
        f"pause_s = {_distribution(pauses, 0.001)}{spoke}",
        f"context = {int((trace.input_tokens + trace.output_tokens).max())}",
        "",
    ])  # fmt: skip


def _sessions(trace: Trace) -> list[_Session]:
    """A prompt goes on with the session whose last whole block it has; numbers stand for all that lies before them."""
    assert trace.blocks is not None
    ends: dict[int, _Session] = {}
    sessions: list[_Session] = []
    for row, blocks in enumerate(trace.blocks):
        whole = blocks[: int(trace.input_tokens[row]) // trace.block_tokens]
        place = next((index for index in range(len(whole) - 1, -1, -1) if whole[index] in ends), None)
        if place is None:
            session: _Session = []
            sessions.append(session)
        else:
            session = ends.pop(whole[place])
        session.append(row)
        if whole:
            ends[whole[-1]] = session
    return sessions


def recorded_turns(trace: Trace, longest: int) -> tuple[list[list[SessionTurn]], int]:
    """Each session of a trace, turn by turn with the blocks that each has; and how many have more than so many
    tokens, which are left out."""
    if trace.blocks is None or trace.arrival_s is None:
        raise BadData(trace.file, "", f"needs times and {BLOCKS}, which tell what prompts have in common")
    total = trace.input_tokens + trace.output_tokens
    sessions, left_out = [], 0
    for rows in _sessions(trace):
        if int(total[rows].max()) > longest:
            left_out += 1
            continue
        pauses = [0.0, *_between_turns(trace, [rows])[1]]
        sessions.append([
            SessionTurn(
                pause_s, int(trace.input_tokens[row]), int(trace.output_tokens[row]), int(total[row]), 0,
                trace.blocks[row],
            )
            for row, pause_s in zip(rows, pauses, strict=True)
        ])  # fmt: skip
    if not sessions:
        raise BadData(trace.file, "", f"every session has more than the {longest:,} tokens that the fleet takes")
    return sessions, left_out


def _shared_tokens(trace: Trace, sessions: list[_Session]) -> int:
    """What more than half of the sessions begin with, in whole blocks."""
    assert trace.blocks is not None
    begins = [trace.blocks[session[0]] for session in sessions]
    shared = 0
    for place in range(min(map(len, begins))):
        most = Counter(blocks[place] for blocks in begins).most_common(1)[0][1]
        if most <= len(begins) / 2:
            break
        shared += trace.block_tokens
    shortest = min(int(trace.input_tokens[session[0]]) for session in sessions)
    return min(shared, shortest - 1)


def _between_turns(trace: Trace, sessions: list[_Session]) -> tuple[list[float], list[float]]:
    """Tokens that each later prompt has beside the last one and its answer, and seconds since that answer."""
    assert trace.arrival_s is not None
    answer_s = np.zeros(len(trace))
    if trace.answers is not None:
        later = np.maximum(trace.output_tokens - 1, 0)
        answer_s = np.nan_to_num(trace.answers.ttft_s) + np.nan_to_num(trace.answers.tpot_s) * later
    added, pauses = [], []
    for session in sessions:
        for row, after in pairwise(session):
            grown = trace.input_tokens[after] - trace.input_tokens[row] - trace.output_tokens[row]
            added.append(max(float(grown), 1.0))
            pauses.append(max(float(trace.arrival_s[after] - trace.arrival_s[row] - answer_s[row]), 0.001))
    return added, pauses


def _live(trace: Trace, sessions: list[_Session]) -> int:
    assert trace.arrival_s is not None
    begun = np.sort([trace.arrival_s[session[0]] for session in sessions])
    ended = np.sort([trace.arrival_s[session[-1]] for session in sessions])
    moments = np.linspace(0.0, trace.arrival_s[-1], max(_MOMENTS, int(trace.arrival_s[-1] // 60)))
    at_work = np.searchsorted(begun, moments, side="right") - np.searchsorted(ended, moments, side="left")
    return max(round(float(np.quantile(at_work, _BUSY_MINUTE))), 1)


def _distribution(values: list[float] | list[int], least: float = 1.0) -> str:
    """As a file says it: one number where all are equal, or bins with their shares."""
    edges = np.maximum(np.quantile(np.array(values, np.float64), _SHARES), least)
    if edges[0] == edges[-1]:
        return f"{edges[0]:g}"
    shares = np.diff(_SHARES)
    bins = (f"[{low:g}, {high:g}, {part:.2g}]" for (low, high), part in zip(pairwise(edges), shares, strict=True))
    return f"{{ histogram = [{', '.join(bins)}] }}"
