"""A chat's answer turned into one of Anthropic's Messages on its way to the client. The gateway writes chats to it,
whole or event by event."""

from typing import Any, Final

import msgspec

from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.fields import UsageFields, readable
from crosstie_gateway.gateway.messages import (
    ChatAnswer,
    ChatChoice,
    SaidFields,
    chat_for,
    decode_chat,
    error_message,
    message_head,
    message_of,
    stopped,
    usage_fields,
)
from crosstie_gateway.wire.outline import Filling
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

_encode: Final = msgspec.json.Encoder().encode
_DONE: Final = b"[DONE]"
# More than any message has.
_MOST_KEPT: Final = 64 * 2**20


class MessagesReply(Reply):
    """Answers in the place of the reply that it is made of."""

    def __init__(self, reply: Reply):
        super().__init__(reply.connection)
        self.lines = reply.lines
        reply.connection.current = self
        # Whether the client asked for a stream; an error comes whole all the same.
        self._streamed = False
        self._status = 0
        self._headers = b""
        self._whole = False
        self._kept: list[bytes] = []
        self._size = 0
        # Of a stream: whether it has begun, which block is open (its number, and what it is; -1: none), and its end.
        self._begun = self._ended = False
        self._block = -1
        self._kind = ""
        self._call = -1
        self._last = ChatChoice()
        self._usage: UsageFields | None = None

    def chat_for(self, request: Request) -> tuple[Request, Filling | None]:
        """What the client asked for, as a chat, and how its long strings come into it. Raises RequestRejected."""
        made, chat = chat_for(request)
        self._streamed = chat.get("stream") is True
        outline = request.outline
        return made, None if outline is None else outline.filling(made.body, request.body)

    def send(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        super().send(status, error_message(status, body) if status >= 400 else body, headers, content_type)

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        self._status, self._headers = status, headers
        self._whole = not self._streamed or status >= 300
        if self._whole:
            # Nothing leaves before all of it is there, though from now on it is this answer's.
            self.started = True
        else:
            super().start(status, headers, None)

    def write(self, data: bytes) -> None:
        if self._whole:
            self._size += len(data)
            if self._size > _MOST_KEPT:
                self.cut()
            else:
                self._kept.append(data)
            return
        events = [self._said(payload) for payload in payloads(data)]
        # Without any data it is a comment, which keeps the connection alive and means nothing.
        super().write(b"".join(events) if events else data)

    def end(self) -> None:
        if self.done:
            return
        if self._whole:
            body = self._translated(b"".join(self._kept))
            self._kept.clear()
            super().start(self._status, self._headers, len(body))
            super().write(body)
        else:
            super().write(self._ending())
        super().end()

    def _translated(self, body: bytes) -> bytes:
        if self._status >= 300:
            return error_message(self._status, body)
        chat = readable(decode_chat, body)
        if chat is not None:
            return message_of(chat)
        self._status = 502
        return error_message(502, b'{"error":{"message":"the engine\'s answer is none to a chat"}}')

    # A stream

    def _said(self, payload: bytes) -> bytes:
        if payload == _DONE:
            return self._ending()
        chunk = readable(decode_chat, payload)
        if chunk is None:
            return b""
        if len(chunk.error):
            self._ended = True
            return _event("error", msgspec.json.decode(error_message(502, payload)))
        out: list[bytes] = []
        if not self._begun:
            out.append(self._opening(chunk))
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta is not None:
                self._delta(choice.delta, out)
            if choice.finish_reason is not None:
                self._last = choice
        return b"".join(out)

    def _opening(self, chunk: ChatAnswer) -> bytes:
        self._begun = True
        # How many tokens came in is known at the end.
        head = {**message_head(chunk), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": {**head, "usage": usage_fields(None)}})

    def _delta(self, said: SaidFields, out: list[bytes]) -> None:
        thought = said.reasoning_content or said.reasoning
        if thought:
            self._open("thinking", {"thinking": "", "signature": ""}, out)
            out.append(self._more({"type": "thinking_delta", "thinking": thought}))
        text = said.content or said.refusal
        if text:
            self._open("text", {"text": ""}, out)
            out.append(self._more({"type": "text_delta", "text": text}))
        for call in said.tool_calls or []:
            function = call.function
            if call.index != self._call or self._kind != "tool_use":
                name = function.name if function is not None else None
                self._close(out)
                self._call = call.index
                self._open("tool_use", {"id": call.id, "name": name, "input": {}}, out)
            if function is not None and function.arguments:
                out.append(self._more({"type": "input_json_delta", "partial_json": function.arguments}))

    def _open(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        if self._kind == kind:
            return
        self._close(out)
        self._kind = kind
        self._block += 1
        out.append(_event("content_block_start", {"index": self._block, "content_block": {"type": kind, **block}}))

    def _more(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta})

    def _close(self, out: list[bytes]) -> None:
        if self._kind:
            out.append(_event("content_block_stop", {"index": self._block}))
            self._kind = ""

    def _ending(self) -> bytes:
        if self._ended or not self._begun:
            return b""
        self._ended = True
        out: list[bytes] = []
        self._close(out)
        out.append(_event("message_delta", {"delta": stopped(self._last), "usage": usage_fields(self._usage)}))
        out.append(_event("message_stop", {}))
        return b"".join(out)


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))
