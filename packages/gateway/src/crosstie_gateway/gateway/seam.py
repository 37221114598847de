"""Where two engines' events meet in one stream: one id, time and model, one opening, one end, and a count of both
parts."""

from typing import Any

import msgspec

from crosstie.wire.sse import event, payloads
from crosstie_gateway.gateway.body import Usage
from crosstie_gateway.gateway.fields import ChunkFields, decode_any, readable

_CHAT_CHUNK = "chat.completion.chunk"
_NAMES = ("id", "created", "model", "system_fingerprint")
_DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class Seam:
    """`made`: tokens of the answer so far; `given`: of the prompt, None: unknown. `raw`: the second engine completes
    what is a chat to the client. `trimmed`: white space at the seam that its template may have removed, so that it
    comes again."""

    def __init__(
        self,
        pool: str,
        first: ChunkFields | None,
        *,
        made: int,
        given: int | None,
        raw: bool = False,
        trimmed: str = "",
    ):
        # Clients skip comments; nothing but a comment can be added to a stream without disturbing any.
        self.notice = f": crosstie resumed on pool {pool}\n\n".encode("ascii", "replace")
        self._names = _names(first)
        self._made, self._given, self._raw = made, given, raw
        self._trimmed, self._again = trimmed, ""

    def joined(self, events: bytes) -> bytes:
        joined: list[bytes] = []
        for payload in payloads(events):
            said = readable(decode_any, payload)
            if isinstance(said, dict) and isinstance(said.get("choices"), list):
                joined += self._joined(said)
            else:
                # The end, or an error.
                joined.append(event(payload))
        return b"".join(joined)

    def _joined(self, said: Json) -> list[bytes]:
        for key in (*_NAMES, "timings", "prompt_token_ids"):
            said.pop(key, None)
        about = {**self._names, **said}
        if self._raw:
            about["object"] = _CHAT_CHUNK
        usage, choices = about.pop("usage", None), about.pop("choices")
        counted = {"usage": self._usage(usage)} if isinstance(usage, dict) else {}
        if not choices:
            return [event(_encode({**about, "choices": [], **counted}))] if counted else []
        choice = self._choice(choices[0]) if isinstance(choices[0], dict) else None
        if choice is None:
            return []
        if not self._raw:
            return [event(_encode({**about, "choices": [choice], **counted}))]
        # A completion's last event has both; a chat has one of its own for the count.
        joined = [event(_encode({**about, "choices": [choice]}))]
        return joined + ([event(_encode({**about, "choices": [], **counted}))] if counted else [])

    def _choice(self, choice: Json) -> Json | None:
        """None where it adds nothing."""
        finish = choice.get("finish_reason")
        choice.pop("prompt_token_ids", None)
        delta = choice.get("delta")
        if isinstance(delta, dict):
            delta.pop("role", None)
            text = self._once(delta.pop("content", None) or "", finish)
            if text:
                delta["content"] = text
            return choice if finish or any(delta.values()) else None
        text = self._once(choice.get("text") or "", finish)
        if not text and not finish:
            return None
        if self._raw:
            return {"index": 0, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish}
        choice["text"] = text
        return choice

    def _once(self, text: str, finish: object) -> str:
        """Without the white space that the client has already, if it is made again."""
        if not self._trimmed:
            return text
        self._again += text
        if self._again.startswith(self._trimmed):
            text = self._again[len(self._trimmed) :]
        elif self._trimmed.startswith(self._again) and not finish:
            return ""
        else:
            text = self._again
        self._trimmed = self._again = ""
        return text

    def _usage(self, usage: Json) -> Json:
        """Of both parts: the prompt as it came, the answer as it left."""
        given, made = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(given) is not int or type(made) is not int:
            return usage
        if self._given is None:
            self._given = max(given - self._made, 0)
        given, made = self._given, made + self._made
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
            details["cached_tokens"] = min(details["cached_tokens"], given)
        return {**usage, "prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _names(first: ChunkFields | None) -> Json:
    """What all events of an answer say of themselves, in the first one's bytes."""
    if first is None:
        return {}
    given = {key: getattr(first, key) for key in _NAMES}
    return {key: raw for key, raw in given.items() if bytes(raw)}


def ending(first: ChunkFields | None, chat: bool, finish: str, usage: Usage | None) -> bytes:
    """An answer's last events, where its engine could not send them. `finish`: how it ended, "": that was said;
    `usage`: where the client waits for it."""
    about = {**_names(first), "object": _CHAT_CHUNK if chat else "text_completion"}
    events = b""
    if finish:
        said: Json = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
        choice = {**said, "logprobs": None, "finish_reason": finish}
        events = event(_encode({**about, "choices": [choice]}))
    if usage is not None:
        given, made, _ = usage
        counted = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
        events += event(_encode({**about, "choices": [], "usage": counted}))
    return events + _DONE
