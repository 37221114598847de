"""Refusals in the shape that OpenAI's clients understand."""

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "internal_error",
    502: "upstream_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_encode = msgspec.json.Encoder().encode


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    kind = _TYPES.get(status, "api_error")
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(path: str, status: int, message: str, code: str) -> bytes:
    """The same inside a stream that has begun, where the status can no longer say it."""
    if path.endswith("/responses"):
        said = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + _encode(said) + b"\n\n"
    return b"data: " + error_body(status, message, code) + b"\n\n"
