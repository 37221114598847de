"""Logs of OpenAI's API as traces: of each call the messages, the usage that the answer told, and when it was.

Of the texts only which begin alike is kept. Nobody here counts tokens: blocks are cut by bytes, as many to a token as
the whole log has.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from crosstie.core.errors import BadData


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


class ChatLog(NamedTuple):
    lines: list[int]
    # In seconds, or as a calendar has it.
    times: list[float | str]
    inputs: list[int]
    outputs: list[int]
    blocks: list[tuple[int, ...]]


def is_chat_log(text: str) -> bool:
    """By its first line: a call has messages, itself or in `request` or `body`."""
    try:
        call = msgspec.json.decode(text.lstrip().partition("\n")[0], type=_Call)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return _messages(call) is not None


def read_chat_log(file: Path, text: str, block_tokens: int) -> ChatLog:
    log, prompts = ChatLog([], [], [], [], []), []
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
        for what, found in (("messages", messages), ("usage of its answer", usage), ("timestamp or created", at)):
            if found is None:
                raise BadData(file, f"line {number}", f"has no {what}")
        assert messages is not None
        assert usage is not None
        assert at is not None
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
