"""The lines of a batch's file: read, checked before anything runs, and answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
# As OpenAI has it.
MOST_LINES = 50_000
_MOST_ERRORS = 20


class BatchLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None


_decode = msgspec.json.Decoder(BatchLine).decode
_decode_body = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


def read_lines(file: Path) -> Iterator[BatchLine]:
    """Of a file that was found to be in order."""
    with file.open("rb") as opened:
        for line in opened:
            if line.strip():
                yield _decode(line)


def check_lines(file: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """How many requests a file has, and what is wrong with it, by line."""
    seen: set[str] = set()
    errors: list[dict[str, Any]] = []
    count = 0
    with file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            if not line.strip():
                continue
            count += 1
            why = _fault(line, endpoint, seen)
            if why is not None and len(errors) < _MOST_ERRORS:
                errors.append({"code": why[0], "message": why[1], "line": number, "param": None})
    if count > MOST_LINES:
        said = f"{count} requests, and a batch has at most {MOST_LINES}"
        errors.append({"code": "too_many_requests", "message": said, "line": None, "param": None})
    if not count:
        errors.append({"code": "empty_file", "message": "the file has no requests", "line": None, "param": None})
    return count, errors


def _fault(line: bytes, endpoint: str, seen: set[str]) -> tuple[str, str] | None:
    try:
        one = _decode(line)
        body = _decode_body(one.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "invalid_json_line", f"not as a line of a batch is: {error}"
    if one.custom_id in seen:
        return "duplicate_custom_id", f"custom_id '{one.custom_id}' was there before"
    seen.add(one.custom_id)
    if one.method != "POST":
        return "invalid_method", f"method '{one.method}': only POST is taken"
    if one.url != endpoint:
        return "mismatched_endpoint", f"url '{one.url}', and this batch is for {endpoint}"
    if body.stream:
        return "invalid_request", "stream: answers of a batch are not streamed"
    return None


def answer_line(batch_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = {"error": {"message": body[:1000].decode(errors="replace")}}
    response = {"status_code": status, "request_id": request_id, "body": said}
    return _line(batch_id, custom_id, response, None)


def expired_line(batch_id: str, custom_id: str) -> bytes:
    said = {"code": "batch_expired", "message": "the batch's completion window was over before this was run"}
    return _line(batch_id, custom_id, None, said)


def _line(batch_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    made = {"id": f"{batch_id}_{custom_id}", "custom_id": custom_id, "response": response, "error": error}
    return _encode(made) + b"\n"
