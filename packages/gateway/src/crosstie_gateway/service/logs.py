"""The gateway's log on stderr: notices, and a line for each request that has ended, for people or as JSON.

A thread writes, so a slow reader of stderr slows nobody; what its queue cannot hold is counted and left out. Prompts
are in it only on request, credentials never.
"""

import asyncio
import contextlib
import json
import os
import re
import select
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from time import time
from typing import Any, Literal, get_args

from crosstie.core.histogram import Family
from crosstie_gateway.gateway.identity import trace_id
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.process import BackgroundThread, Component, GatewayProcess

Style = Literal["text", "json"]
STYLES: tuple[Style, ...] = get_args(Style)
_WRITE_EVERY_S = 0.1
_MOST_LINES = 10_000
_MOST_PROMPT_BYTES = 64 * 1024
_MOST_WAITING_BYTES = 32 * 2**20
# What a pipe takes in one piece, so that lines of several processes do not mix.
_PIECE = 4096
# How long a reader of stderr is waited for at the end.
_LAST_S = 2.0
# Control characters, and the line ends that only some programs know.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_PLAIN = re.compile(r"[^\s\"=\\]+", re.ASCII)
_BAD = frozenset(("failed", "cut"))


class Log(Component):
    """`requests`: a line for each; `prompts`: with its body. `descriptor`: written to until closed. `notices`: tells
    them instead."""

    def __init__(
        self, style: Style = "text", *, requests: bool = False, prompts: bool = False, descriptor: int = 2,
        notices: Callable[[str], None] | None = None,
    ):  # fmt: skip
        self._notices = notices
        self.style, self.requests, self.prompts, self.descriptor = style, requests, prompts, descriptor
        self._entries: deque[tuple[float, str | RequestRecord, bytes | None]] = deque()
        # Each is added to by one thread alone: left out because the queue was full; not written; bytes put in, taken.
        self._left_out = self._unwritten = self._given = self._taken = 0
        self._told_lost = 0
        self._thread = BackgroundThread("log", self._write_all, _WRITE_EVERY_S)

    @property
    def lost(self) -> int:
        return self._left_out + self._unwritten

    def notice(self, sentence: str) -> None:
        if self._notices is not None:
            self._notices(sentence)
            return
        self._put(sentence, None)
        self._thread.wake()

    async def start(self, process: GatewayProcess) -> None:
        asyncio.get_running_loop().set_exception_handler(self._broke)
        if self.prompts:
            sentence = "PROMPTS ARE WRITTEN TO THIS LOG (--log-prompts): whoever reads it reads what users ask"
            self.notice(Notice("prompts_logged", "warning", sentence))
        if self.requests:
            process.server.tells_peers = True
            process.gateway.listeners.append(self._on_record)

    def close(self) -> None:
        """Writes what there is. Called by the log's maker, who may have notices after the gateway has stopped."""
        self._thread.stop(_LAST_S)

    def families(self) -> list[Family]:
        meaning = "Lines that are missing from the log, since nobody read it as fast as it grew."
        return [("crosstie_log_dropped_total", "counter", meaning, [({}, self.lost)])]

    # On the loop

    def _on_record(self, record: RequestRecord) -> None:
        body = record.request.body[:_MOST_PROMPT_BYTES] if self.prompts and record.request is not None else None
        self._put(record, body)

    def _put(self, entry: str | RequestRecord, body: bytes | None) -> None:
        size = len(body) if body is not None else 0
        if len(self._entries) >= _MOST_LINES or self._given - self._taken + size > _MOST_WAITING_BYTES:
            self._left_out += 1
            return
        if not self._thread.started:
            self._thread.start()
        self._given += size
        self._entries.append((time(), entry, body))

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs a fault of the gateway and where it arose; its message, which may quote a prompt, only with prompts."""
        error = context.get("exception")
        kind = type(error).__name__ if error is not None else "none"
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        where = " < ".join(f"{os.path.basename(at.filename)}:{at.lineno} {at.name}" for at in reversed(frames))
        said = f": {error}" if self.prompts and error is not None else ""
        sentence = f"internal error: {context.get('message', '')}: {kind}{said}; Traceback, innermost first: {where}"
        self.notice(Notice("internal_error", "error", sentence, kind=kind, where=where))

    # In the thread

    def _write_all(self) -> None:
        piece, lines = b"", 0
        while self._entries:
            at, entry, body = self._entries.popleft()
            self._taken += len(body) if body is not None else 0
            line = self._line(at, entry, body)
            if piece and len(piece) + len(line) > _PIECE:
                self._write(piece, lines)
                piece, lines = b"", 0
            piece, lines = piece + line, lines + 1
        missing = self._left_out - self._told_lost
        if missing:
            self._told_lost += missing
            sentence = f"{missing} lines are missing here: the log was not read as fast as it grew"
            piece += self._line(time(), Notice("log_dropped", "warning", sentence, lines=missing), None)
        self._write(piece, lines)

    def _line(self, at: float, entry: str | RequestRecord, body: bytes | None) -> bytes:
        if isinstance(entry, RequestRecord):
            fields = request_fields(entry)
            if body is not None:
                fields["body"] = body.decode("utf-8", "replace")
            level = "warning" if entry.how in _BAD else "info"
            if self.style == "text":
                said = " ".join(f"{name}={_worded(value)}" for name, value in fields.items() if value is not None)
                return f"{_clock(at)} request {said}\n".encode()
            return _document({"time": _clock(at), "level": level, "event": "request", **fields})
        if self.style == "text":
            return f"{_escaped(entry)}\n".encode()
        known = entry if isinstance(entry, Notice) else Notice("notice", "info", entry)
        said_of_it = {"time": _clock(at), "level": known.level, "event": known.event, "message": str(entry)}
        return _document({**said_of_it, **known.fields})

    def _write(self, piece: bytes, lines: int) -> None:
        while piece:
            try:
                piece = piece[os.write(self.descriptor, piece) :]
            except BlockingIOError:
                # Somebody else has made the terminal or pipe one that does not wait.
                with contextlib.suppress(OSError, ValueError):
                    select.select([], [self.descriptor], [], _LAST_S)
                if self._thread.stopping:
                    break
            except OSError:
                # Closed, or its reader has gone: there is nobody to tell.
                self._unwritten += lines
                return


def request_fields(record: RequestRecord) -> dict[str, str | int | float | bool | None]:
    """What a log says of a request: all that is known of it but its text and its secrets."""
    return {
        "request_id": record.request_id.decode("ascii", "replace"),
        "trace_id": record.trace.id if record.trace is not None else trace_id(record.traceparent) or None,
        "key": record.key_id or None,
        "client": record.client or None,
        "path": record.path,
        "model": record.model or None,
        "class": record.class_name or None,
        "pool": record.pool or None,
        "backend": record.backend or None,
        **({"prefill": record.prefill} if record.prefill else {}),
        "status": record.status,
        "outcome": record.how,
        "code": record.code or None,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "counted": record.counted,
        "streamed": record.streamed,
        "waited_s": round(record.waited_s, 6),
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6),
        "seconds": round(record.seconds, 6),
        "usd": round(record.charged_usd, 9),
        "attempts": record.attempts,
        "resumed": record.resumed,
    }


def _clock(at: float) -> str:
    """RFC 3339, UTC, to the millisecond."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _document(fields: dict[str, Any]) -> bytes:
    """One line of ASCII, so that no client can begin another."""
    return json.dumps(fields, separators=(",", ":")).replace("\x7f", "\\u007f").encode("ascii") + b"\n"


def _worded(value: str | int | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) and not _CONTROL.search(value) else json.dumps(value)


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)
