"""What a client has been sent of a stream, so that another engine may go on from there. Events are kept as sent,
compressed when they are many, and read only when an answer breaks off."""

import re
import zlib
from math import ceil
from typing import Final

import msgspec

from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.body import usage_of_fields
from crosstie_gateway.gateway.fields import (
    ChoiceFields,
    ChunkFields,
    DeltaFields,
    decode_chunk,
    decode_chunks,
    decode_parts,
)

# Bytes of events kept plain (250 a token, a twentieth when compressed); and of all: longer answers are not resumed.
_MOST_PLAIN: Final = 64 * 2**10
_MOST_BYTES: Final = 16 * 2**20
_QUICK: Final = 1
# What a call of a tool says, in the bytes in which it was written.
_CALL: Final = re.compile(rb'"(?:name|arguments)" ?: ?"([^"\\]*(?:\\.[^"\\]*)*)"')
# The last word of a stream, on a line of its own.
DONE: Final = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_END: Final = b"\n\n"
# An event of which the beginning is left out; no other begins so.
_BEGUN: Final = b'\n\n"'
_ABSENT: Final[tuple[bytes, ...]] = (b"", b"null", b"[]")
_encode: Final = msgspec.json.Encoder().encode


class Transcript:
    """`texts`: what each event added to the answer. `bytes_per_token`: of its model, for what nobody counts."""

    def __init__(self, bytes_per_token: float = 4.0) -> None:
        self._events: list[bytes] = []
        # What is left out of those among them that begin with a quote, up to that; and those that were, compressed.
        self._begin = b'"'
        self._compressed: list[tuple[bytes, bytes]] = []
        self._size = self._total = 0
        # The first event, which names the answer; how it ended, if it did; whether the last word after that has come.
        self.first: ChunkFields | None = None
        self.finish = ""
        self.done = False
        # Whether it is one of several answers at once.
        self.several = False
        self.texts: list[str] = []
        # The ids of its tokens, if every event told them.
        self.token_ids: list[int] | None = []
        # Tokens of the prompt, and of the answer up to an engine's latest count; events with text since then.
        self.given: int | None = None
        self._counted = self._since = 0
        # All events with something of the answer in them, and its bytes.
        self._pieces = self._bytes = 0
        self._bytes_per_token = bytes_per_token
        # Whether something passed that was not kept, and so is not among these.
        self.missed = False
        # What stands against going on from here, such as "tools".
        self.why_not = ""

    def add(self, events: bytes) -> None:
        """Whole events, in the bytes in which they came."""
        if events.startswith(b'"') or events.find(_BEGUN) >= 0:
            self._stop("unreadable")
        self._keep(events)

    def add_usual(self, begin: bytes, event: bytes) -> None:
        """A whole event that has this, to the quote before its text, in common with most others."""
        if begin != self._begin:
            if len(self._begin) > 1:
                self._compress()
            self._begin = begin
        self._keep(event[len(begin) - 1 :])

    def _keep(self, events: bytes) -> None:
        if self.why_not:
            self.missed = True
            return
        self._events.append(events)
        self._size += len(events)
        if self._size > _MOST_PLAIN:
            self._compress()

    def _compress(self) -> None:
        self._total += self._size
        if self._total > _MOST_BYTES:
            self.missed = True
            self._stop("length")
            return
        self._compressed.append((self._begin, zlib.compress(b"".join(self._events), _QUICK)))
        self._events, self._size = [], 0

    def read(self) -> None:
        """Makes text of the events that were kept."""
        kept = [(begin, zlib.decompress(piece)) for begin, piece in self._compressed]
        kept.append((self._begin, b"".join(self._events)))
        self._events, self._compressed, self._size = [], [], 0
        events = b"".join([(_END + piece).replace(_BEGUN, _END + begin)[len(_END) :] for begin, piece in kept])
        if not events:
            return
        try:
            self.done = self.done or is_done(events)
            for chunk in _chunks(events):
                self._note(chunk)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.missed = True
            self._stop("unreadable")

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def tokens(self) -> int:
        """As engines have counted them; since then by events, which have one each where an engine is not in a hurry."""
        return self._counted + self._since

    @property
    def seen_tokens(self) -> int:
        """Whatever engines have counted: by events, or by bytes where these come to more."""
        return max(self._pieces, ceil(self._bytes / self._bytes_per_token))

    def counted(self, tokens: int) -> None:
        """Somebody knows how many there are so far."""
        self._counted, self._since = tokens, 0

    def _note(self, chunk: ChunkFields) -> None:
        if self.first is None:
            self.first = chunk
        choices = chunk.choices
        if self.several or len(choices) > 1 or (choices and choices[0].index):
            # How one of them ended is not how all did.
            self.several, self.finish = True, ""
            self._stop("n")
            for choice in choices:
                self._measure(choice)
            # An engine that counts all along counts each of them by itself.
            return
        if choices:
            self._choice(choices[0])
        usage = usage_of_fields(chunk.usage) if chunk.usage is not None else None
        if usage is not None:
            self.given, made, _ = usage
            self.counted(made)

    def _choice(self, choice: ChoiceFields) -> None:
        self.finish = choice.finish_reason or self.finish
        text, delta, other = choice.text, choice.delta, ""
        if delta is not None:
            text, other = delta.content, _other_than_text(delta)
        self._measure(choice)
        if other:
            self._stop(other)
        if self.why_not:
            # Only its end matters any more.
            return
        if choice.token_ids is not None and self.token_ids is not None:
            self.token_ids += choice.token_ids
        elif text:
            self.token_ids = None
        if text:
            self.texts.append(text)

    def _measure(self, choice: ChoiceFields) -> None:
        size, delta = len((choice.text or "").encode()), choice.delta
        if delta is not None:
            for said in (delta.content, delta.reasoning_content or delta.reasoning, delta.refusal):
                size += len(said.encode()) if said else 0
            for raw in (delta.tool_calls, delta.function_call):
                size += sum(map(len, _CALL.findall(bytes(raw)))) if len(raw) else 0
        if size or (delta is not None and _other_than_text(delta)):
            self._since += 1
            self._pieces += 1
            self._bytes += size

    def _stop(self, why: str) -> None:
        """Nothing more is kept: it will not be used."""
        self.why_not = self.why_not or why
        self.texts, self._events, self._compressed = [], [], []


def is_done(events: bytes) -> bool:
    """Whether the last word is among them; as `DONE` finds it, and sooner."""
    lines = b"\n" + events
    return lines.find(b"\ndata: [DONE]") >= 0 or lines.find(b"\ndata:[DONE]") >= 0


def _other_than_text(delta: DeltaFields) -> str:
    if delta.reasoning_content or delta.reasoning:
        return "reasoning"
    if delta.refusal:
        return "refusal"
    return "tools" if any(_given(said) for said in (delta.tool_calls, delta.function_call, delta.audio)) else ""


def _given(said: msgspec.Raw) -> bool:
    return len(said) > 0 and bytes(said) not in _ABSENT


def _chunks(events: bytes) -> list[ChunkFields]:
    if events.startswith(b"data: {") and events.endswith(b"}\n\n"):
        # Nothing but plain events, as nearly always: all of them in one go, since many streams may break off at once.
        try:
            return decode_chunks(b"[" + events[6:-2].replace(b"\n\ndata: ", b",") + b"]")
        except msgspec.DecodeError:
            pass
    return [_chunk(payload) for payload in payloads(events) if payload != b"[DONE]"]


def _chunk(payload: bytes) -> ChunkFields:
    try:
        return decode_chunk(payload)
    except msgspec.ValidationError:
        # A count that is none says nothing against the text beside it.
        parts = decode_parts(payload)
        parts.pop("usage", None)
        return decode_chunk(_encode(parts))
