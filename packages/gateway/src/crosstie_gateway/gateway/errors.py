"""Refusals in the shape that OpenAI's clients understand."""

import re
from email.utils import parsedate_to_datetime
from time import time
from typing import Final

import msgspec

_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "internal_error",
    502: "upstream_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class RequestRejected(Exception):
    """A request that is answered with an error before anything is decided for it."""

    def __init__(
        self, status: int, why: str, code: str, retry_after_s: float = 0.0, headers: bytes = b"",
        param: str | None = None,
    ):  # fmt: skip
        super().__init__(why)
        # The field of the body that it is about.
        self.param = param
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        # Further lines of the answer's head.
        self.headers = headers


class AttemptFailure:
    """Why an attempt at a request has come to nothing. `fault`: the backend's own; `refused`: no connection was made;
    `wrong`: it is set up wrongly; `passed_on`: its words may go to the client; `code`: the error's."""

    def __init__(
        self, why: str, status: int, *, fault: bool = True, refused: bool = False, wrong: bool = False,
        passed_on: bool = True, code: str = "", retry_after_s: float = 0.0,
    ):  # fmt: skip
        self.why, self.status, self.fault, self.refused, self.wrong = why, status, fault, refused, wrong
        self.passed_on, self.code, self.retry_after_s = passed_on, code, retry_after_s


_ADDRESS: Final = re.compile(
    r" ?\('[^']*', \d+[^)]*\)|'[^']*' (?=is no host)|(?<=not valid) for '[^']*'|(?<=the proxy) '[^']*'"
)
_encode: Final = msgspec.json.Encoder().encode


def retry_after(seconds: float) -> bytes:
    """The header's line; none for no wait."""
    return b"retry-after: %d\r\n" % max(round(seconds + 0.5), 1) if seconds > 0 else b""


def asked_to_wait_s(headers: list[tuple[bytes, bytes]]) -> float:
    """What an answer's Retry-After says, in seconds or as a date; 0: nothing, or nothing that can be read."""
    for name, value in headers:
        if name == b"retry-after-ms" and value.isdigit():
            return min(float(value), 1e9) / 1e3
        if name == b"retry-after":
            if value.isdigit():
                return min(float(value), 1e9)
            try:
                return max(parsedate_to_datetime(value.decode("latin-1")).timestamp() - time(), 0.0)
            except (ValueError, OverflowError, TypeError, IndexError):
                return 0.0
    return 0.0


def without_address(error: Exception) -> str:
    """What went wrong, in words that clients may read: asyncio's also say where a backend is."""
    return _ADDRESS.sub("", str(error))


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    kind = _TYPES.get(status, "api_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(path: str, status: int, message: str, code: str) -> bytes:
    """The same as an event, for a stream that has begun."""
    if path.endswith("/responses"):
        said = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + _encode(said) + b"\n\n"
    return b"data: " + error_body(status, message, code) + b"\n\n"
