"""Logs of agents' sessions as traces: the form of AgentX (InferenceX), in which kv-cache-tester records.

A session is a JSON object with its requests in order, each with its seconds from the session's begin, its tokens and
the numbers of the prompt's blocks, which hold within the session alone. Sub-agents stand among the requests, with
requests of their own. Nobody says when sessions began beside each other: all do at once.
"""

from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from crosstie.core.errors import BadData

# Of a log, what says which form it has.
_HEAD = 4096


class _Asked(msgspec.Struct):
    """A request, or a sub-agent with its own."""

    t: float
    type: Literal["n", "s", "subagent"]
    inputs: int = msgspec.field(default=0, name="in")
    outputs: int = msgspec.field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    api_time: float | None = None
    requests: "tuple[_Asked, ...]" = ()


class _Session(msgspec.Struct):
    block_size: int
    hash_id_scope: Literal["local", "global"]
    requests: tuple[_Asked, ...]


class AgentLog(NamedTuple):
    lines: list[int]
    times: list[float]
    inputs: list[int]
    outputs: list[int]
    blocks: list[tuple[int, ...]]
    answers_s: list[float]
    # Number of the session and of its agent, 0 being the session itself.
    whose: list[tuple[int, int]]


def is_agent_log(text: str) -> bool:
    """By the scope of block numbers, which is said before the first request."""
    return '"hash_id_scope"' in text[:_HEAD]


def read_agent_log(file: Path, text: str, block_tokens: int) -> AgentLog:
    log = AgentLog([], [], [], [], [], [], [])
    sessions = _sessions(file, text, block_tokens)
    # Of a sub-agent's requests seconds are since its own begin or the session's, throughout a log.
    helpers = [one for _, session in sessions for one in session.requests if one.requests]
    since_own = any(one.requests[0].t < one.t for one in helpers)
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for number, (line, session) in enumerate(sessions):
        agents = count(1)
        for asked in session.requests:
            agent = next(agents) if asked.type == "subagent" else 0
            for one in asked.requests if agent else (asked,):
                begins, blocks = -1 if session.hash_id_scope == "global" else -2 - number, []
                # By all that lies before them, as everywhere: the same text elsewhere is no beginning in common.
                for place in range(0, len(one.hash_ids), block_tokens // session.block_size):
                    ids = one.hash_ids[place : place + block_tokens // session.block_size]
                    begins = known.setdefault((begins, ids), len(known))
                    blocks.append(begins)
                log.lines.append(line)
                log.times.append(one.t + asked.t if agent and since_own else one.t)
                log.inputs.append(one.inputs)
                log.outputs.append(one.outputs)
                log.blocks.append(tuple(blocks))
                log.answers_s.append(max(one.api_time or 0.0, 0.0))
                log.whose.append((number, agent))
    return log


def _sessions(file: Path, text: str, block_tokens: int) -> list[tuple[int, _Session]]:
    """Each with its line: one object over several lines, or one a line."""
    decoder, read = msgspec.json.Decoder(_Session), []
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines if len(lines) == 1 or lines[0][1].rstrip().endswith("}") else [(1, text)]:
        try:
            session = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise BadData(file, f"line {number}", str(error)) from None
        if session.block_size < 1 or block_tokens % session.block_size:
            raise BadData(file, f"line {number}", f"block_size {session.block_size} does not divide {block_tokens}")
        read.append((number, session))
    return read
