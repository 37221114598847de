"""The lines of a batch's file: checked before anything runs, read some at a time, and answered.

A line costs as much to read as a request's body, and has the same limits. Long lines are outlined piece by piece, since
reading one at once blocks every thread.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from crosstie_gateway.wire.outline import LONG, Outline, left_out
from crosstie_gateway.wire.request import RequestLimits

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_MOST_ERRORS = 20
# Longer ones are outlined; and what is outlined, or read of a file, at once.
_PIECE = 2**16
# Lines that are read ahead of their turn: so many, or so many bytes.
_AHEAD, _AHEAD_BYTES = 16, 2**18


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None


class _Told(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_decode_told = msgspec.json.Decoder(_Told).decode
_encode = msgspec.json.Encoder().encode
_WRONG = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class BatchLine:
    """A request of a batch, on its way."""

    def __init__(self, number: int, line: bytes, limits: RequestLimits):
        outline = outlined(line, limits)
        read = _decode(line if outline is None else outline.text)
        self.number, self.custom_id, self.url, self.body = number, read.custom_id, read.url, bytes(read.body)
        self.outline: Outline | None = None
        if outline is not None:
            self.body, self.outline = outline.filled(self.body, line)
        self.attempts = 0


class LineReader:
    """Reads the unanswered lines of a file that was checked."""

    def __init__(self, file: Path, done: bytearray, limits: RequestLimits):
        self._file, self._done, self._limits = file, done, limits
        self._offset = self._number = 0
        self.at_end = False

    def more(self) -> list[BatchLine]:
        lines: list[BatchLine] = []
        size = 0
        with self._file.open("rb") as opened:
            opened.seek(self._offset)
            while len(lines) < _AHEAD and size < _AHEAD_BYTES:
                line = opened.readline()
                if not line:
                    self.at_end = True
                    break
                self._offset += len(line)
                if line.strip():
                    if not self._done[self._number]:
                        lines.append(BatchLine(self._number, line, self._limits))
                        size += len(line)
                    self._number += 1
        return lines


def custom_ids(file: Path, limits: RequestLimits) -> Iterator[str]:
    """Of all lines, in their order."""
    with file.open("rb") as opened:
        for line in opened:
            if line.strip():
                outline = outlined(line, limits)
                yield _decode_told(line if outline is None else outline.text).custom_id


def told_ids(file: Path) -> Iterator[tuple[str, int]]:
    """The custom ids in a file of answers, and where each line ends, up to the first broken line."""
    if not file.exists():
        return
    end = 0
    with file.open("rb") as opened:
        for line in opened:
            try:
                custom_id = _decode_told(line).custom_id
            except _WRONG:
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield custom_id, end


def check_lines(file: Path, endpoint: str, most: int, limits: RequestLimits) -> tuple[int, list[dict[str, Any]]]:
    """How many requests a file has, and what is wrong with it, by line."""
    seen: set[str] = set()
    errors: list[dict[str, Any]] = []
    count = 0
    with file.open("rb") as opened:
        number = 0
        while (line := opened.readline()) and len(errors) < _MOST_ERRORS and count <= most:
            number += 1
            if not line.strip():
                continue
            count += 1
            why = _fault(line, endpoint, seen, limits)
            if why is not None:
                errors.append({"code": why[0], "message": why[1], "line": number, "param": None})
    if count > most:
        said = f"more requests than the {most:,} that a batch may have (serve.max_batch_lines)"
        errors.append({"code": "too_many_requests", "message": said, "line": None, "param": None})
    if not count:
        errors.append({"code": "empty_file", "message": "the file has no requests", "line": None, "param": None})
    return count, errors


def _fault(line: bytes, endpoint: str, seen: set[str], limits: RequestLimits) -> tuple[str, str] | None:
    outline = outlined(line, limits)
    if (outline is not None and outline.is_dear) or len(line) > limits.body_bytes:
        said = f"more than a request may have: {limits.body_bytes:,} bytes, {limits.body_values:,} strings, objects and"
        return "line_too_large", f"{said} lists, {limits.body_plain_bytes:,} bytes of numbers between them"
    try:
        read = _decode(line if outline is None else outline.text)
        body = _decode_body(read.body)
    except _WRONG as error:
        return "invalid_json_line", f"not as a line of a batch is: {error}"
    if len(read.custom_id) > LONG or left_out(read.custom_id.encode(errors="replace")):
        return "invalid_custom_id", f"a custom_id of more than {LONG} characters"
    if read.custom_id in seen:
        return "duplicate_custom_id", f"custom_id '{read.custom_id}' was there before"
    seen.add(read.custom_id)
    if read.method != "POST":
        return "invalid_method", f"method '{read.method[:LONG]}': only POST is taken"
    if read.url != endpoint:
        return "mismatched_endpoint", f"url '{read.url[:LONG]}', and this batch is for {endpoint}"
    if body.stream:
        return "invalid_request", "stream: answers of a batch are not streamed"
    return None


def outlined(text: bytes, limits: RequestLimits) -> Outline | None:
    """None for what is short."""
    if len(text) <= _PIECE:
        return None
    outline = Outline(limits.body_values, limits.body_plain_bytes)
    for at in range(0, len(text), _PIECE):
        if not outline.feed(text[at : at + _PIECE]):
            break
    return outline


def answer_line(batch_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    said: Any
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        # Ends of lines are between values: within a string they would be none of JSON's.
        said = msgspec.Raw(body.decode().replace("\n", " ").replace("\r", " ").encode())
    except _WRONG:
        said = {"error": {"message": body[:1000].decode(errors="replace")}}
    response = {"status_code": status, "request_id": request_id, "body": said}
    return _line(batch_id, custom_id, response, None)


def unanswered_line(batch_id: str, custom_id: str, code: str, message: str) -> bytes:
    return _line(batch_id, custom_id, None, {"code": code, "message": message})


def _line(batch_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    made = {"id": f"{batch_id}_{custom_id}", "custom_id": custom_id, "response": response, "error": error}
    return _encode(made) + b"\n"
