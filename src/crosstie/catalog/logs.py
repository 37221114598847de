"""Logs of calls as columns of a trace, in two forms.

Sessions of agents, as AgentX (InferenceX) has them and kv-cache-tester records them: a session is a JSON object with
its requests in order, each with its seconds from the session's begin, its tokens and the numbers of the prompt's
blocks, which hold within the session alone. Sub-agents stand among the requests, with requests of their own. Nobody
says when sessions began beside each other: all do at once.

Calls of OpenAI's API: of each the messages, the usage that the answer told, and when it was. Of the texts only which
begin alike is kept. Nobody here counts tokens: blocks are cut by bytes, as many to a token as the whole log has.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from crosstie.core.errors import BadData

# Of a log of agents, what says which form it has.
_HEAD = 4096


class CallLog(NamedTuple):
    """By request; times in seconds, or as a calendar has them."""

    lines: list[int]
    times: list[float | str]
    inputs: list[int]
    outputs: list[int]
    blocks: list[tuple[int, ...]]
    # Of agents: how long each answer took, and the number of the session and of its agent, 0 being the session itself.
    answers_s: list[float]
    whose: list[tuple[int, int]]


def read_log(file: Path, text: str, block_tokens: int) -> CallLog | None:
    """None where it has neither form."""
    # The scope of block numbers is said before the first request.
    if '"hash_id_scope"' in text[:_HEAD]:
        return _agents(file, text, block_tokens)
    try:
        first = msgspec.json.decode(text.lstrip().partition("\n")[0], type=_Call)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    # A call has messages, itself or in `request` or `body`.
    return None if _messages(first) is None else _chats(file, text, block_tokens)


class _AgentRequest(msgspec.Struct):
    """A request, or a sub-agent with its own."""

    t: float
    type: Literal["n", "s", "subagent"]
    inputs: int = msgspec.field(default=0, name="in")
    outputs: int = msgspec.field(default=0, name="out")
    hash_ids: tuple[int, ...] = ()
    api_time: float | None = None
    requests: "tuple[_AgentRequest, ...]" = ()


class _Session(msgspec.Struct):
    block_size: int
    hash_id_scope: Literal["local", "global"]
    requests: tuple[_AgentRequest, ...]


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    created: float | None = None
    # Of a line of a batch's output.
    body: "_Answer | None" = None


class _Asked(msgspec.Struct):
    messages: list[Any] | None = None
    model: object = None


class _Call(msgspec.Struct):
    """One line: a call with its answer inside, or both side by side."""

    messages: list[Any] | None = None
    request: _Asked | None = None
    body: _Asked | None = None
    response: _Answer | None = None
    usage: _Usage | None = None
    timestamp: float | str | None = None
    created: float | None = None


def _agents(file: Path, text: str, block_tokens: int) -> CallLog:
    log = CallLog([], [], [], [], [], [], [])
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


def _chats(file: Path, text: str, block_tokens: int) -> CallLog:
    log, prompts = CallLog([], [], [], [], [], [], []), []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            call = msgspec.json.decode(line, type=_Call)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise BadData(file, f"line {number}", str(error)) from None
        messages, answer = _messages(call), call.response or _Answer()
        if answer.body is not None:
            answer = answer.body
        usage = call.usage or answer.usage
        at = next((at for at in (call.timestamp, call.created, answer.created) if at is not None), None)
        if messages is None or usage is None or at is None:
            missing = "messages" if messages is None else "usage of its answer" if usage is None else None
            raise BadData(file, f"line {number}", f"has no {missing or 'timestamp or created'}")
        log.lines.append(number)
        log.times.append(at)
        log.inputs.append(usage.prompt_tokens)
        log.outputs.append(usage.completion_tokens)
        prompts.append(b"".join(map(msgspec.json.encode, messages)))
    size = max(round(block_tokens * sum(map(len, prompts)) / max(sum(log.inputs), 1)), 1)
    log.blocks.extend(_numbered(prompts, log.inputs, size, block_tokens))
    return log


def _messages(call: _Call) -> list[Any] | None:
    asked = call.request or call.body
    return call.messages if call.messages is not None else asked.messages if asked is not None else None


def _numbered(prompts: Sequence[bytes], inputs: Sequence[int], size: int, block_tokens: int) -> list[tuple[int, ...]]:
    """As many blocks as a prompt's tokens have; what is no whole one by its bytes is like no other."""
    numbers: dict[bytes, int] = {}
    found: list[tuple[int, ...]] = []
    for prompt, tokens in zip(prompts, inputs, strict=True):
        digest, blocks = blake2b(digest_size=16), []
        for place in range(-(-tokens // block_tokens)):
            piece = prompt[place * size : (place + 1) * size]
            digest.update(piece if len(piece) == size else b"%d of %d" % (place, len(found)))
            blocks.append(numbers.setdefault(digest.digest(), len(numbers)))
        found.append(tuple(blocks))
    return found
