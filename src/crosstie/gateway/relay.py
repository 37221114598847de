"""How an upstream's answer becomes the client's: a stream event by event, anything else whole.

A relay keeps what it must not send yet. As long as `reply.started` is false the request may still be tried elsewhere.
"""

import re

from crosstie.gateway.body import Usage, usage_of
from crosstie.wire.reply import Reply
from crosstie.wire.sse import Events, payloads

_USAGE = b'"usage":'
# What a finished answer says of itself. `abort` is what vLLM gives to those whom its own end cuts short; to those
# who still wait then it gives an opening, no token, and a proper end.
_FINISHED = re.compile(rb'"finish_reason" ?: ?"|"response\.(?:completed|incomplete|failed)"')
_ABORTED = re.compile(rb'"finish_reason" ?: ?"abort"')
# Lines of their own: what a model writes about such things has no line ends, only escaped ones.
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_ERROR = re.compile(rb'^(?:data: ?\{"(?:error"|object": ?"error")|event: ?error)', re.MULTILINE)
# An error that the engine lays at the client's door; 408 and 429 are its own.
_CLIENT_S = re.compile(rb'"code" ?: ?"?(4(?!08|29)\d\d)\b')
_MOST_ERROR = 2**20
_EVENTS = re.compile(rb".+?(?:\r\n\r\n|\n\n|\Z)", re.DOTALL)
# The first event of a chat, before there is any token: only that an assistant is going to speak.
_OPENING = re.compile(rb'"delta" ?: ?\{ ?"role" ?: ?"assistant"(?: ?, ?"\w+" ?: ?(?:""|null))* ?\}')
# An answer that is not a stream is kept until it is whole, up to this size.
MOST_KEPT = 64 * 2**20


class StreamRelay:
    """Server-sent events; those that only carry the usage which the gateway asked for go no further.

    Nothing leaves before the first token: neither an opening without one nor an engine's error in its place, so that
    another backend may still try.
    """

    def __init__(self, reply: Reply, status: int, headers: bytes, *, hide_usage: bool):
        self.reply, self.status, self.headers = reply, status, headers
        self.hide_usage = hide_usage
        self.usage: Usage | None = None
        # Whether the engine has told of an error itself.
        self.told_error = False
        # Its status, where the error was the client's and came in the place of an answer.
        self.client_s_error = 0
        self._events = Events()
        self._opening = b""
        # The latest pieces: the end of an answer is spread over a few.
        self._last = self._before = self._before_that = b""

    def body(self, data: bytes) -> bool:
        """Whether something reached the client's side."""
        data = self._events.whole(data)
        if not data:
            return False
        if _USAGE in data:
            data = self._without_usage(data)
            if not data:
                return False
        self._before_that, self._before, self._last = self._before, self._last, data
        reply = self.reply
        if not reply.started:
            data = self._opening + data
            if self.told_error or _ERROR.search(data):
                self.told_error = True
                self._opening = data[:_MOST_ERROR]
                found = _CLIENT_S.search(data)
                self.client_s_error = int(found[1]) if found else 0
                return False
            if _says_nothing(data):
                self._opening = data
                return False
            reply.start(self.status, self.headers, None)
        reply.write(data)
        return True

    def _without_usage(self, data: bytes) -> bytes:
        for payload in payloads(data):
            if _USAGE in payload:
                self.usage = usage_of(payload) or self.usage
        if not self.hide_usage or self.usage is None:
            return data
        events: list[bytes] = _EVENTS.findall(data)
        return b"".join([event for event in events if not _only_usage(event)])

    @property
    def complete(self) -> bool:
        """Whether the engine said that it had finished; an end without that is a cut in a good disguise."""
        latest = self._before_that + self._before + self._last
        if _ERROR.search(latest):
            self.told_error = True
            return False
        if _ABORTED.search(latest):
            return False
        return _FINISHED.search(latest) is not None or (self.reply.started and _DONE.search(latest) is not None)

    def end(self) -> None:
        if not self.reply.started:
            self.reply.start(self.status, self.headers, None)
            self.reply.write(self._opening)
        self.reply.end()


def _says_nothing(events: bytes) -> bool:
    """Whether there is no token in them: only an opening, the usage, the end."""
    for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
        if event and not (_OPENING.search(event) or _only_usage(event) or event == b"data: [DONE]"):
            return False
    return True


def _only_usage(event: bytes) -> bool:
    return _USAGE in event and (b'"choices":[]' in event or b'"choices": []' in event)


class WholeRelay:
    """An answer of one piece: nothing of it leaves before all of it has come."""

    def __init__(self, reply: Reply, status: int, headers: bytes):
        self.reply, self.status, self.headers = reply, status, headers
        self.usage: Usage | None = None
        # Whether all of it has come.
        self.whole = False
        self._pieces: list[bytes] = []
        self._kept = 0

    def body(self, data: bytes) -> bool:
        self._kept += len(data)
        if self._kept > MOST_KEPT and not self.reply.started:
            # Too much to hold: from here on it is passed through as it comes.
            self.reply.start(self.status, self.headers, None)
        if self.reply.started:
            for piece in (*self._pieces, data):
                self.reply.write(piece)
            self._pieces = []
            return True
        self._pieces.append(data)
        return False

    complete = True

    @property
    def content(self) -> bytes:
        return b"".join(self._pieces)

    def end(self) -> None:
        if self.reply.started:
            self.reply.end()
            return
        content = self.content
        self.usage = usage_of(content) if self.status < 300 else None
        self.reply.start(self.status, self.headers, len(content))
        self.reply.write(content)
        self.reply.end()
