"""What an answer really is, where its status says otherwise or too little: looked at before it counts."""

import re
from typing import Final

import msgspec

from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.fields import (
    ABSENT,
    AnswerFields,
    decode_any,
    decode_chunk,
    decode_ends,
    decode_parts,
    readable,
)

_ABSENT: Final = ABSENT
# With a value: engines also write that there is none. In a text the quotes would be escaped.
_ERROR: Final = re.compile(rb'"error"\s*:\s*(?!null\b|\s)')
_NO_MODEL: Final = re.compile(rb'"model_not_found"|"param"\s*:\s*"model"')
_NOT_FOUND: Final = re.compile(rb"does not exist|not found|is not available", re.IGNORECASE)
# How far before it stands what was not found, and how much of an answer is looked through for it.
_NEAR: Final = 305
_MOST_ERROR: Final = 2**16
# How a choice ends that is not finished.
_CUT: Final = (None, "abort")
# The client's own; 401, 403 and 404 are about what the gateway sends, 408 and 429 about the backend.
_CLIENTS: Final[tuple[int, ...]] = (400, 405, 406, 409, 410, 411, 412, 413, 414, 415, 422)


def oddity(path: str, content: bytes, answer: AnswerFields | None) -> tuple[str, int]:
    """What is wrong with an answer of a success status, in words, or the status that it should have had where the
    client is at fault; neither: nothing. `answer`: what was read of it, None where it cannot be."""
    chosen = path.endswith("/completions")
    if answer is not None and _is_absent(answer.error) and (answer.choices is not _ABSENT or not chosen):
        # What nearly every answer is.
        return "", 0
    if _ERROR.search(content):
        parts = readable(decode_parts, content)
        if parts is None:
            return "with something else than JSON", 0
        error = parts.get("error")
        if error is not None:
            status = _status(bytes(error))
            return ("", status) if status in _CLIENTS else ("with an error, and the status of success", 0)
    if chosen and b'"choices"' not in content:
        return "without any choices", 0
    return "", 0


def _is_absent(value: msgspec.Raw) -> bool:
    return value is _ABSENT or bytes(value) == b"null"


def _status(error: bytes) -> int:
    said = readable(decode_any, error)
    code = said.get("code", said.get("status")) if isinstance(said, dict) else None
    return int(code) if isinstance(code, int) or (isinstance(code, str) and code.isdecimal() and len(code) == 3) else 0


def lacks_model(path: str, content: bytes) -> bool:
    """Whether a 404 says that the backend lacks its model. Of a response's predecessor the client names the id, and so
    what the message says."""
    content = content[:_MOST_ERROR]
    if _NO_MODEL.search(content):
        return True
    if path.endswith("/responses"):
        return False
    places = [match.start() for match in _NOT_FOUND.finditer(content)]
    return any(content[max(at - _NEAR, 0) : at].lower().find(b"model") >= 0 for at in places)


class Choices:
    """Those of a stream: each ends by itself, and the answer when all of them have. `wanted`: how many were asked for;
    engines that know only one give that."""

    def __init__(self, wanted: int):
        self._wanted = wanted
        self._seen: set[int] = set()
        self._ended: set[int] = set()

    def note(self, events: bytes) -> None:
        """Whole events that have come."""
        for payload in payloads(events):
            chunk = readable(decode_chunk, payload)
            # What cannot be read is the last word, or an error.
            for choice in chunk.choices if chunk is not None else ():
                self._seen.add(choice.index)
                if choice.finish_reason:
                    self._ended.add(choice.index)

    @property
    def all_seen_ended(self) -> bool:
        """All that there was is complete: of an engine that says so, enough."""
        return bool(self._seen) and self._seen == self._ended

    @property
    def all_ended(self) -> bool:
        """Nothing can be missing, whatever else the engine might have said."""
        return self.all_seen_ended and len(self._ended) >= self._wanted


def has_cut_choice(answer: bytes) -> bool:
    """Whether one of a whole answer's choices was not finished."""
    ends = readable(decode_ends, answer)
    return ends is not None and any(choice.finish_reason in _CUT for choice in ends.choices)
