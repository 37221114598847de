"""How an upstream's answer becomes the client's: a stream event by event, anything else whole. While `reply.started` is
false the request may still be tried elsewhere."""

import re
from collections.abc import Callable
from math import ceil
from typing import Final

from crosstie.wire.sse import Events, payloads
from crosstie_gateway.gateway.answers import Choices
from crosstie_gateway.gateway.body import Usage, read_answer, usage_in, usage_of
from crosstie_gateway.gateway.fields import AnswerFields
from crosstie_gateway.gateway.seam import Seam
from crosstie_gateway.gateway.transcript import DONE, Transcript, is_done
from crosstie_gateway.wire.server import Reply

_USAGE: Final = b'"usage":'
# As some engines write in every event but the last.
_NO_USAGE: Final = re.compile(rb'"usage": ?null')
# What a finished answer says of itself. vLLM gives `abort` to answers that its own end cuts short; to waiting requests
# it then gives an opening, no token, and a proper end.
_FINISHED: Final = re.compile(rb'"finish_reason" ?: ?"|"response\.(?:completed|incomplete|failed)"')
_ABORTED: Final = re.compile(rb'"finish_reason" ?: ?"abort"')
# A line of its own: what a model writes about such things has no line ends, only escaped ones.
_ERROR: Final = re.compile(rb'^(?:data: ?\{"(?:error"|object": ?"error")|event: ?error)', re.MULTILINE)
# An event with a text: up to that, the text, and what comes after it. Nothing is tried twice.
_WITH_TEXT: Final = re.compile(
    rb'(data: ?\{(?>[^\n]*?"choices": ?\[\{)(?>[^\n]*?"(?:content|text|reasoning_content|reasoning)": ?"))'
    rb'[^"\\\n]*+(?:\\.[^"\\\n]*+)*+("[^\n]*\}\n\n)\Z'
)
_COUNT: Final = b',"usage":{'
# What a text has only where it is more than that.
_QUOTE: Final = 34
_LINE_END: Final = 10
# The usage inside an event that has more to say; its details are objects of their own.
_USAGE_FIELD: Final = re.compile(rb',"usage":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
# An error that the engine lays at the client's door; 408 and 429 are its own.
_CLIENT_ERROR: Final = re.compile(rb'"code" ?: ?"?(4(?!08|29)\d\d)\b')
# What an event adds to an answer that is no chat and no completion: a response, or a message.
_DELTA: Final = re.compile(rb'"delta" ?: ?(?:\{ ?"type" ?: ?"\w+" ?, ?"\w+" ?: ?)?"([^"\\]*(?:\\.[^"\\]*)*)"')
# What a whole answer says, and calls tools with.
_SAID: Final = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|refusal|thinking|name|arguments)" ?: ?'
    rb'"([^"\\]*(?:\\.[^"\\]*)*)"'
)
# Of a longer answer all bytes are taken for what it says: looking for that would keep others waiting.
_MOST_LOOKED_AT: Final = 2**20
# An event without what it adds, as far as nobody has looked: its names and its punctuation.
_ENVELOPE: Final = 300
# The last of an answer that was passed through as it came, where its usage stands; and that in it.
_TAIL: Final = 2**14
_LAST_USAGE: Final = re.compile(rb'.*("usage" ?: ?\{.*)\Z', re.DOTALL)
_MOST_ERROR: Final = 2**20
# Beyond that it is a stream of openings without an end, for which there is no room here.
_MOST_OPENING: Final = 2**16
# Of keep-alives before it, what is kept for the client.
_MOST_PINGS: Final = 2**12
_EVENTS: Final = re.compile(rb".+?(?:\r\n\r\n|\n\n|\Z)", re.DOTALL)
# The first events of an answer, before there is any token: only that an assistant is going to speak.
_OPENING: Final = re.compile(
    rb'"delta" ?: ?\{ ?"role" ?: ?"assistant"(?: ?, ?"\w+" ?: ?(?:""|null))* ?\}'
    rb'|"type" ?: ?"response\.(?:created|queued|in_progress|output_item\.added|content_part\.added)"'
)
# Without such a line it is a comment, a keep-alive: it says that a connection is alive, not that an engine is.
_SAYS: Final = re.compile(rb"^(?:data|event: ?error)", re.MULTILINE)
# An answer that is not a stream is kept until it is whole, up to this size.
MOST_KEPT: Final = 64 * 2**20
# What an answer costs. Streams have none: it is known after the head, few clients and proxies keep HTTP trailers, and
# strict ones refuse more fields in a usage.
COST: Final = b"x-crosstie-cost-usd"


class StreamRelay:
    """Server-sent events, without the usage that only the gateway asked for.

    Nothing leaves before the first token, neither an opening nor an error, so that another backend may still try; nor
    does an error after it, as long as another may go on.
    """

    def __init__(
        self, reply: Reply, status: int, headers: bytes, *, hide_usage: bool, hide_continuous: bool = False,
        transcript: Transcript | None = None, seam: Seam | None = None, choices: Choices | None = None,
    ):  # fmt: skip
        self.reply, self.status, self.headers = reply, status, headers
        # Whether the last count, and those on the way to it, were the gateway's wish and not the client's.
        self.hide_usage, self.hide_continuous = hide_usage, hide_continuous
        self.transcript, self.seam = transcript, seam
        # Of an answer that has several.
        self.choices = choices
        self.usage: Usage | None = None
        # What the engine said instead of going on; the client has not seen it.
        self.unsaid = bytearray()
        self._counting = b""
        # Those that were sent on, and their bytes: about as many as tokens, where nobody counts these any more.
        self.events = self.passed = 0
        # Of an answer without a transcript: how often something was added to it, and how many bytes of text.
        self._added = self._text = 0
        # Whether the engine has told of an error itself.
        self.has_error = False
        # Its status, where the error was the client's and came in the place of an answer.
        self.client_error_status = 0
        self._events = Events()
        # The bytes before and after the text of usual events; whether a count follows; whether to learn these from the
        # next event.
        self._begin = self._end = b""
        self._counts = False
        self._learns = transcript is not None and seam is None and choices is None
        self._opening = bytearray()
        # The latest pieces: the end of an answer is spread over a few.
        self._last = self._before = self._before_that = b""

    def body(self, data: bytes) -> bool:
        """Whether something of the answer reached the client's side."""
        if self._begin and not self._events.held and not self.unsaid:
            usual = self._usual(data)
            if usual:
                self.reply.write(usual)
                self.events += 1
                self.passed += len(usual)
                return True
        data = self._events.whole(data)
        if data and not data.startswith(b"data") and _SAYS.search(data) is None:
            if self.reply.started:
                self.reply.write(data)
            elif len(self._opening) < _MOST_PINGS:
                self._opening += data
            return False
        if data and self.seam is not None:
            data = self.seam.joined(data)
        if not data:
            return False
        reply, transcript = self.reply, self.transcript
        if self.choices is not None:
            data = self._until_early_end(data, self.choices)
            if not data:
                return False
        if transcript is not None:
            # Bytes are searched by `find`: `in` takes them for a number first, and makes an exception of it each time.
            if reply.started and (self.unsaid or data.find(b'"abort"') >= 0 or data.find(b"error") >= 0):
                data = self._until_trouble(data)
                if not data:
                    return False
            transcript.add(data)
            if self._learns and reply.started:
                self._learn(data)
        if data.find(_USAGE) >= 0:
            data = self._without_usage(data)
            if not data:
                return False
        self._before_that, self._before, self._last = self._before, self._last, data
        if not reply.started:
            if not self._may_begin(data):
                return False
            data = bytes(self._opening) + data
            reply.start(self.status, self.headers, None)
        if self.seam is not None and self.seam.notice:
            reply.write(self.seam.notice)
            self.seam.notice = b""
        reply.write(data)
        self.events += data.count(b"\n\n")
        self.passed += len(data)
        if transcript is None:
            for added in _DELTA.findall(data):
                self._added += 1
                self._text += len(added)
        return True

    def _usual(self, data: bytes) -> bytes:
        """What to send of an event that differs from the last in its text alone; empty: it may be another kind. Slices
        are compared, since method calls take longer."""
        begin = len(self._begin)
        if data[:begin] != self._begin:
            return b""
        last, sent = self._end, data
        if self._counts:
            end = data.find(last, begin)
            if end < 0 or data[-4:] != b"}}\n\n" or data.find(b'},"', end + len(last)) >= 0:
                return b""
            if data.find(b"\n", end) != len(data) - 2:
                return b""
            # The last thing in it, as vLLM writes it.
            sent = data[: end + len(last) - len(_COUNT)] + b"}\n\n"
        else:
            end = len(data) - len(last)
            if end < begin or data[end:] != last:
                return b""
        text = data[begin:end]
        if _QUOTE in text or _LINE_END in text:
            return b""
        if self._counts:
            self._counting = data
        if self.transcript is not None:
            self.transcript.add_usual(self._begin, data)
        self._learns = True
        return sent

    def _learn(self, data: bytes) -> None:
        """From an event that is not like those before; the next but one if that helps nothing with the next."""
        self._learns = False
        match = _WITH_TEXT.match(data)
        if match is None:
            return
        begin, end = match[1], match[2]
        self._counts = self.hide_continuous and end.find(_COUNT) >= 0
        if self._counts:
            end = end[: end.find(_COUNT) + len(_COUNT)]
        known = begin + (end[: -len(_COUNT)] if self._counts else _NO_USAGE.sub(b"", end))
        if not any(known.find(said) >= 0 for said in (_USAGE, b'"abort"', b"error")) and not _FINISHED.search(known):
            self._begin, self._end = begin, end

    def _may_begin(self, data: bytes) -> bool:
        """Whether it holds a token, so that it may leave with what was kept; else it is kept too, and not looked at
        again."""
        opening = self._opening
        if self.has_error or _has_error(data):
            self.has_error = True
            match = None if self.client_error_status or len(opening) >= _MOST_ERROR else _CLIENT_ERROR.search(data)
            if match is not None:
                self.client_error_status = int(match[1])
        elif self.unsaid is opening or _ABORTED.search(data):
            # Its first token and its end at once: somebody else may have more time.
            self.unsaid = opening
        elif len(opening) + len(data) > _MOST_OPENING or not _says_nothing(data):
            return True
        _keep(opening, data)
        return False

    def _until_trouble(self, data: bytes) -> bytes:
        """What comes before an error or an abort; these, and all after them, are held back."""
        if self.unsaid:
            _keep(self.unsaid, data)
            return b""
        before: list[bytes] = []
        events = _events(data)
        for at, event in enumerate(events):
            if _ERROR.search(event) or _ABORTED.search(event):
                _keep(self.unsaid, b"".join(events[at:]))
                break
            before.append(event)
        return b"".join(before)

    def _until_early_end(self, data: bytes, choices: Choices) -> bytes:
        """What comes before the [DONE] of an engine that left a choice unfinished: clients would take it for the
        end."""
        choices.note(data)
        end = DONE.search(data)
        if end is None or choices.all_seen_ended:
            return data
        self.unsaid = bytearray(data[end.start() :])
        return data[: end.start()]

    def _without_usage(self, data: bytes) -> bytes:
        if _NO_USAGE.sub(b"", data).find(_USAGE) < 0:
            return data
        if self.hide_continuous and not (b'"choices":[]' in data or b'"choices": []' in data):
            # The latest is enough, and is read when the stream has broken off.
            self._counting = data
            return _USAGE_FIELD.sub(b"", data)
        for payload in payloads(data):
            if _USAGE in payload:
                self.usage = usage_of(payload) or self.usage
        if self.usage is None or not (self.hide_usage or self.hide_continuous):
            return data
        kept: list[bytes] = []
        events = _events(data)
        for event in events:
            if not _only_usage(event):
                kept.append(_USAGE_FIELD.sub(b"", event) if self.hide_continuous else event)
            elif not self.hide_usage:
                kept.append(event)
        return b"".join(kept)

    @property
    def counted(self) -> Usage | None:
        """The engine's last count, or the latest on the way to it."""
        usage = self.usage
        if usage is None and self._counting:
            for payload in payloads(self._counting):
                usage = usage_of(payload) or usage
        return usage

    def seen_tokens(self, bytes_per_token: float) -> int:
        """Tokens that passed, where nobody counted: by pieces, or by bytes where these come to more."""
        if self._added:
            return max(self._added, ceil(self._text / bytes_per_token))
        return max(self.events, ceil((self.passed - _ENVELOPE * self.events) / bytes_per_token))

    @property
    def aborted(self) -> bool:
        """Whether the engine was told to end, and did so in order."""
        return _ABORTED.search(self.unsaid) is not None

    @property
    def error(self) -> bytes:
        """The engine's own words for what went wrong, which the client has not seen."""
        return bytes(self.unsaid) if _ERROR.search(self.unsaid) else b""

    @property
    def latest(self) -> bytes:
        """The end of what it has said so far."""
        return self._before_that + self._before + self._last

    @property
    def complete(self) -> bool:
        """Whether the engine said that it had finished; an end without that is a cut in a good disguise."""
        latest = self.latest
        if self.unsaid:
            return False
        if _has_error(latest):
            self.has_error = True
            return False
        if latest.find(b'"abort"') >= 0 and _ABORTED.search(latest):
            return False
        done = self.reply.started and is_done(latest)
        if self.choices is not None:
            return self.choices.all_ended or (done and self.choices.all_seen_ended)
        return done or _FINISHED.search(latest) is not None

    def end(self) -> None:
        if not self.reply.started:
            self.reply.start(self.status, self.headers, None)
            self.reply.write(bytes(self._opening))
        self.reply.end()


def _keep(kept: bytearray, data: bytes) -> None:
    kept += data[: max(_MOST_ERROR - len(kept), 0)]


def _has_error(events: bytes) -> bool:
    # What a pattern cannot do without is found sooner than the pattern.
    return events.find(b"error") >= 0 and _ERROR.search(events) is not None


def _says_nothing(events: bytes) -> bool:
    """Whether there is no token in them: only comments, an opening, the usage, the end."""
    for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
        if _SAYS.search(event) and not (_OPENING.search(event) or _only_usage(event) or event == b"data: [DONE]"):
            return False
    return True


def _events(data: bytes) -> list[bytes]:
    if b"\r" in data:
        return _EVENTS.findall(data)
    events, at = [], 0
    while at < len(data):
        end = data.find(b"\n\n", at) + 2
        end = end if end > 1 else len(data)
        events.append(data[at:end])
        at = end
    return events


def _only_usage(event: bytes) -> bool:
    return _USAGE in event and (b'"choices":[]' in event or b'"choices": []' in event)


class WholeRelay:
    """An answer of one piece: nothing of it leaves before all of it has come."""

    def __init__(self, reply: Reply, status: int, headers: bytes, priced: Callable[[], float] | None = None):
        """`priced`: tells what it costs, once all of it has come."""
        self.reply, self.status, self.headers, self.priced = reply, status, headers, priced
        self.usage: Usage | None = None
        # Whether any of it has come, and all of it.
        self.begun = self.whole = False
        self._pieces: list[bytes] = []
        # What was read of it, once that was asked for.
        self._answer: AnswerFields | None = None
        self._was_read = False
        # Bytes of it so far, and the last of them where they are not kept.
        self.passed = 0
        self._tail = b""

    def body(self, data: bytes) -> bool:
        if not self.begun:
            # White space before it is how some servers say that they are still at it.
            data = data.lstrip()
            self.begun = bool(data)
        self.passed += len(data)
        if self.passed > MOST_KEPT and not self.reply.started:
            # Too much to hold: from here on it is passed through as it comes.
            self.reply.start(self.status, self.headers, None)
        if self.reply.started:
            for piece in (*self._pieces, data):
                self.reply.write(piece)
            self._pieces = []
            self._tail = (self._tail + data)[-_TAIL:]
            return True
        self._pieces.append(data)
        return False

    complete = True

    @property
    def content(self) -> bytes:
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def say(self, content: bytes) -> None:
        """This in its place, of which nothing has left."""
        self._pieces, self._was_read = [content], False

    def read(self) -> AnswerFields | None:
        """All of it that is read here, when all of it has come; None: it cannot be."""
        if not self._was_read:
            self._answer, self._was_read = read_answer(self.content), True
        return self._answer

    @property
    def is_bytes(self) -> bool:
        """Embeddings in bytes, where a client asks vLLM for them."""
        return b"application/octet-stream" in self.headers

    @property
    def is_json(self) -> bool:
        """Whether it begins as every answer of the API does; what was passed through as it came was not looked at."""
        if self.reply.started or (self._pieces and self._pieces[0].startswith(b"{")):
            return True
        return b"".join(self._pieces[:2]).lstrip()[:1] == b"{"

    def seen_tokens(self, bytes_per_token: float) -> int:
        """What it says, where its engine does not tell how much that is."""
        size = self.passed
        if size <= _MOST_LOOKED_AT:
            size = sum(map(len, _SAID.findall(self.content)))
        return ceil(size / bytes_per_token)

    def end(self) -> None:
        if self.reply.started:
            match = _LAST_USAGE.match(self._tail)
            self.usage = usage_of(b"{" + match[1]) if match is not None and self.status < 300 else None
            self.reply.end()
            return
        content = self.content
        headers = self.headers
        if self.status < 300:
            answer = self.read()
            self.usage = None if answer is None else usage_in(answer)
            if self.priced is not None:
                headers += b"%b: %.9f\r\n" % (COST, self.priced())
        self.reply.start(self.status, headers, len(content))
        self.reply.write(content)
        self.reply.end()
