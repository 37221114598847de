"""The sessions of a recording: which prompts go on with which, and what that says as a class of a workload file.

A prompt goes on with the request that it has the last whole block of. Where several go on with one request, they are
calls of sub-agents beside each other and the session's own next turn, which waits for them; or sessions that only begin
alike. Time tells: sub-agents are sent off soon after the answer, and have ended when the session goes on.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crosstie.catalog.sessions import SessionTurn
from crosstie.catalog.traces import BLOCKS, Floats, Trace
from crosstie.core.errors import BadData
from crosstie.core.pauses import comes_back_s

# Of minutes, the sessions at work that 19 of 20 do not exceed, as rates of traces are read.
_BUSY_MINUTE = 0.95
# Prompts that go on with an unknown one grow by at most twice what this share of the others do.
_USUAL_GROWTH = 0.95
# Shares of a distribution between which a file takes it as even; finer where tails are long.
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
# Moments at which a recording's sessions are counted, at the least.
_MOMENTS = 100
# Turns a session, on average, below which a trace is better given as it is.
_WITHOUT_SESSIONS = 1.2


class _Turn(NamedTuple):
    """A request of a session, a row of the trace."""

    row: int
    # From the last answer of the session and of its sub-agents on; None: the first.
    pause_s: float | None
    # Whether the prompt has the last one in it; otherwise a summary begins another conversation.
    goes_on: bool
    # Each turn by turn.
    subagents: tuple[list["_Turn"], ...]


class _Rows:
    """Which request each goes on with, and what becomes of those that go on with one: sub-agents, and behind them the
    session's next turn; -1: none, as of sub-agents that it does not wait for."""

    def __init__(self, trace: Trace):
        if trace.blocks is None or trace.arrival_s is None:
            raise BadData(trace.file, "", f"needs times and {BLOCKS}, which tell what prompts have in common")
        self.asked_s = trace.arrival_s.tolist()
        self.answered_s = (trace.arrival_s + _answers_s(trace)).tolist()
        # Of which session and agent each is, if the recording says so.
        self.named = trace.sessions is not None
        self.whose = trace.sessions or ((0, 0),) * len(trace)
        self.goes_on = [False] * len(trace)
        self.after: list[list[int]] = [[] for _ in range(len(trace))]
        self.first: list[int] = []
        inputs = trace.input_tokens.tolist()
        whole = [held[: tokens // trace.block_tokens] for held, tokens in zip(trace.blocks, inputs, strict=True)]
        common = _beginnings(whole, inputs)
        self._find(whole, common)
        pairs = [(row, rows[0]) for row, rows in enumerate(self.after) if len(rows) == 1 and self.goes_on[rows[0]]]
        self.patience_s = comes_back_s(sorted(self.asked_s[after] - self.answered_s[row] for row, after in pairs))
        known = (trace.input_tokens + trace.output_tokens).tolist()
        self._find_alike(whole, common, known, inputs, sorted(inputs[after] - known[row] for row, after in pairs))
        # Of each row's session from it on, sub-agents included, when its last answer had come.
        self.ended_s = list(self.answered_s)
        for row in range(len(trace) - 1, -1, -1):
            self._settle(row)

    def _find(self, whole: list[tuple[int, ...]], common: set[int]) -> None:
        """By what only one session has."""
        ends: dict[int, int] = {}
        before: list[int | None] = []
        last: dict[tuple[int, int], int] = {}
        for row, held in enumerate(whole):
            whose = self.whose[row]
            found = next((ends[block] for block in reversed(held) if block in ends), None)
            # Who is still being answered cannot be gone on with.
            while found is not None and self.answered_s[found] > self.asked_s[row]:
                found = before[found] if self.goes_on[found] else None
            self.goes_on[row] = found is not None
            if found is None and self.named:
                # What the recording says to be of the session, with or without a beginning in common.
                found = last.get(whose, last.get((whose[0], 0)))
            before.append(found)
            (self.first if found is None else self.after[found]).append(row)
            last[whose] = row
            if held and held[-1] not in common:
                ends[held[-1]] = row

    def _find_alike(
        self, whole: list[tuple[int, ...]], common: set[int], known: list[int], inputs: list[int], grown: list[int]
    ) -> None:
        """First prompts of which no whole block is a session's own: which of them another goes on with does not matter,
        since they are alike. It comes as soon and grows by as much as those that are known do."""
        most = 2 * grown[int(_USUAL_GROWTH * len(grown))] if grown else 0.0
        alone: dict[int, list[int]] = {}
        first, self.first = self.first, []
        for row in first:
            begins = next((block for block in reversed(whole[row]) if block in common), None)
            waiting = alone.setdefault(begins, []) if begins is not None else []
            soon = (other for other in reversed(waiting) if
                    0 <= self.asked_s[row] - self.answered_s[other] <= self.patience_s
                    and 0 <= inputs[row] - known[other] <= most)  # fmt: skip
            found = next(soon, None)
            if found is None:
                self.first.append(row)
            else:
                waiting.remove(found)
                self.after[found] = [row]
                self.goes_on[row] = True
            if whole[row] and whole[row][-1] in common and not self.after[row]:
                alone.setdefault(whole[row][-1], []).append(row)

    def _settle(self, row: int) -> None:
        """Of those that go on with a row, the last is its session's next turn and those before it are sub-agents'; or
        one is of the session, and the others begin sessions of their own."""
        after, answered_s = self.after[row], self.answered_s[row]
        if not after:
            return
        same = [other for other in after if self.whose[other] == self.whose[row]]
        *sent_off, own = after
        done_s = max([answered_s, *(self.ended_s[other] for other in sent_off)])
        soon = all(self.asked_s[other] - answered_s <= self.patience_s for other in sent_off)
        waited = done_s <= self.asked_s[own] <= done_s + self.patience_s
        if self.named and (own not in same or (sent_off and not (soon and waited))):
            # They are the session's whatever the time says, which is what goes on the longest.
            own = max(same, key=lambda other: (self.goes_on[other], self.ended_s[other]), default=-1)
            self.after[row] = [*(other for other in after if other != own), own]
        elif sent_off and not (soon and waited):
            self.first += after[1:]
            self.after[row] = after[:1]
        self.ended_s[row] = max([answered_s, *(self.ended_s[other] for other in self.after[row] if other >= 0)])

    def session(self, first: int) -> list[_Turn]:
        turns: list[_Turn] = []
        row, free_s = first, None
        while row >= 0:
            *sent_off, following = self.after[row] or [-1]
            pause_s = None if free_s is None else max(self.asked_s[row] - free_s, 0.001)
            turns.append(_Turn(row, pause_s, self.goes_on[row], tuple(map(self.session, sent_off))))
            free_s = self.answered_s[row]
            if following >= 0:
                ended = [self.ended_s[other] for other in sent_off]
                free_s = max([free_s, *(done_s for done_s in ended if done_s <= self.asked_s[following])])
            row = following
        return turns


def _beginnings(whole: list[tuple[int, ...]], inputs: list[int]) -> set[int]:
    """Last whole blocks of prompts that are no session's own, such as a system prompt's: of the prompts that end there
    and go on with nobody some are shorter than those before them, and so do not contain these."""
    common: set[int] = set()
    alike: dict[int, list[int]] = {}
    for row, held in enumerate(whole):
        if held:
            alike.setdefault(held[-1], []).append(row)
    for block, rows in sorted(alike.items(), key=lambda item: len(whole[item[1][0]])):
        shrinks = any(inputs[later] < inputs[row] for row, later in pairwise(rows))
        if shrinks and all(other in common or other not in alike for other in whole[rows[0]][:-1]):
            common.add(block)
    return common


def workload_text(trace: Trace) -> str:
    """A workload file with one class, of the sessions that a trace has."""
    sessions = _sessions(trace)
    turns = [len(session) for session in sessions]
    if np.mean(turns) < _WITHOUT_SESSIONS:
        raise BadData(
            trace.file, "", f"its {len(trace):,} prompts hardly go on with one another ({np.mean(turns):.2f} turns a "
            "session): give it as `trace` of a class",
        )  # fmt: skip
    own = [turn for session in sessions for turn in session]
    live = f"{len(sessions)}  # the log does not say when each began" if trace.sessions else _live(trace, sessions)
    system = _shared_tokens(trace, sessions)
    spoke = "" if _says_how_long(trace) else "  # the recording does not say how long answers took: they are in it"
    lines = [
        f"# Sessions of {Path(trace.file).name}: {len(sessions):,} of {len(trace):,} requests.",
        '[[class]]',
        'name = "agents"',
        'model = "llama-3.3-70b"                # yours',
        "ttft_ms = { p95 = 5000 }               # what they should be given",
        "tpot_ms = { p90 = 30 }",
        "",
        "[class.sessions]",
        f"live = {live}",
        f"turns = {_distribution(turns)}",
        f"system = {system}",
        f"first = {_distribution([int(trace.input_tokens[session[0].row]) - system for session in sessions])}",
        *_of_turns(trace, sessions, spoke),
        f"context = {int((trace.input_tokens + trace.output_tokens).max())}",
        "",
    ]  # fmt: skip
    sent = [(turn, helper) for turn in own for helper in _sent_off(turn)]
    if sent:
        followed = len(own) - len(sessions)
        senders = Counter(turn.row for turn, _ in sent)
        forks = np.mean([helper[0].goes_on for _, helper in sent]) > 0.5
        total = trace.input_tokens + trace.output_tokens
        begins = [
            int(trace.input_tokens[helper[0].row]) - (total[turn.row] if forks else system) for turn, helper in sent
        ]
        lines += [
            "[class.sessions.subagents]",
            f"share = {min(max(len(senders) / max(followed, 1), 0.0001), 1):.4g}",
            f"count = {_distribution(list(senders.values()))}",
            f"turns = {_distribution([len(helper) for _, helper in sent])}",
            f'begins = "{"conversation" if forks else "system"}"',
            f"first = {_distribution(begins)}",
            *_of_turns(trace, [helper for _, helper in sent], ""),
            "",
        ]
    return "\n".join(lines)


def _sessions(trace: Trace) -> list[list[_Turn]]:
    rows = _Rows(trace)
    return [rows.session(row) for row in sorted(rows.first)]


def _sent_off(turn: _Turn) -> Iterator[list[_Turn]]:
    """Its sub-agents, and theirs."""
    for helper in turn.subagents:
        yield helper
        for step in helper:
            yield from _sent_off(step)


def recorded_turns(trace: Trace, longest: int) -> tuple[list[list[SessionTurn]], int]:
    """Each session of a trace, turn by turn with the blocks that each has; and how many have more than so many
    tokens, which are left out."""
    assert trace.blocks is not None
    total = trace.input_tokens + trace.output_tokens
    blocks, numbers = trace.blocks, count()

    def replayed(turns: list[_Turn]) -> Iterator[SessionTurn]:
        conversation = next(numbers)
        for turn in turns:
            row = turn.row
            conversation = conversation if turn.goes_on or turn.pause_s is None else next(numbers)
            helpers = tuple(tuple(replayed(helper)) for helper in turn.subagents)
            yield SessionTurn(
                turn.pause_s or 0.0, int(trace.input_tokens[row]), int(trace.output_tokens[row]), int(total[row]),
                conversation, blocks[row], helpers,
            )  # fmt: skip

    sessions, left_out = [], 0
    for session in _sessions(trace):
        rows = [turn.row for turn in _all_turns(session)]
        if int(total[rows].max()) > longest:
            left_out += 1
        else:
            sessions.append(list(replayed(session)))
    if not sessions:
        raise BadData(trace.file, "", f"every session has more than the {longest:,} tokens that the fleet takes")
    return sessions, left_out


def _all_turns(session: list[_Turn]) -> Iterator[_Turn]:
    for turn in session:
        yield turn
        for helper in turn.subagents:
            yield from _all_turns(helper)


def _shared_tokens(trace: Trace, sessions: list[list[_Turn]]) -> int:
    """What more than half of the sessions begin with, in whole blocks."""
    assert trace.blocks is not None
    begins = [trace.blocks[session[0].row] for session in sessions]
    shared = 0
    for place in range(min(map(len, begins))):
        most = Counter(blocks[place] for blocks in begins).most_common(1)[0][1]
        if most <= len(begins) / 2:
            break
        shared += trace.block_tokens
    shortest = min(int(trace.input_tokens[session[0].row]) for session in sessions)
    return min(shared, shortest - 1)


def _of_turns(trace: Trace, sessions: list[list[_Turn]], spoke: str) -> list[str]:
    """Tokens that each later prompt has beside the last one and its answer, answers, and pauses."""
    rows = [turn.row for session in sessions for turn in session]
    pairs = [(before.row, turn) for session in sessions for before, turn in pairwise(session)]
    grown = [
        float(trace.input_tokens[turn.row] - trace.input_tokens[row] - trace.output_tokens[row])
        for row, turn in pairs if turn.goes_on
    ]  # fmt: skip
    lines = [f"output = {_distribution(trace.output_tokens[rows].tolist())}"]
    if pairs:
        lines = [f"added = {_distribution(grown or [1.0])}", *lines]
        lines += [f"pause_s = {_distribution([turn.pause_s or 0.0 for _, turn in pairs], 0.001)}{spoke}"]
    return lines


def _says_how_long(trace: Trace) -> bool:
    return trace.answers is not None or trace.answers_s is not None


def _answers_s(trace: Trace) -> Floats:
    """How long each answer took, where the recording says it."""
    if trace.answers_s is not None or trace.answers is None:
        return np.zeros(len(trace)) if trace.answers_s is None else trace.answers_s
    later = np.maximum(trace.output_tokens - 1, 0)
    return np.asarray(np.nan_to_num(trace.answers.ttft_s) + np.nan_to_num(trace.answers.tpot_s) * later)


def _live(trace: Trace, sessions: list[list[_Turn]]) -> int:
    assert trace.arrival_s is not None
    begun = np.sort([trace.arrival_s[session[0].row] for session in sessions])
    ended = np.sort([trace.arrival_s[session[-1].row] for session in sessions])
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
