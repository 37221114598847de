"""RFC 9112 read a second time, slowly and by other means: which requests these bytes are, and what follows the last.

Nothing here is shared with the server. It takes all bytes at once, goes through them one line at a time, and is as
strict as the standard allows: a server may refuse more than it does, and must see nothing that it does not see.
"""

import string
from typing import NamedTuple

TCHAR = set(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~")
TARGET = set(string.ascii_letters + string.digits + "-._~:/?@!$&'()*+,;=%")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ONCE = ("host", "content-length", "transfer-encoding", "content-type", "authorization", "x-request-id")


class Seen(NamedTuple):
    method: str
    target: str
    body: bytes


class Bad(Exception):
    """No request: 400 or worse, and nothing behind it counts."""


class More(Exception):
    """The bytes end before the request does."""


class Bytes:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise More
        self.at += count
        return self.data[self.at - count : self.at]

    def line(self) -> str:
        """Up to CR LF; neither of the two may be alone."""
        taken = ""
        while True:
            one = self.take(1).decode("latin-1")
            if one == "\r":
                if self.take(1) != b"\n":
                    raise Bad("bare CR")
                return taken
            if one == "\n":
                raise Bad("bare LF")
            taken += one


def read(data: bytes) -> tuple[list[Seen], str]:
    """All requests up to the first that is none or asks to close, and how it ended: `bad`, `more`, `close`."""
    rest, seen = Bytes(data), list[Seen]()
    try:
        while True:
            request, keep = _request(rest)
            seen.append(request)
            if not keep:
                return seen, "close"
    except Bad:
        return seen, "bad"
    except More:
        return seen, "more"


def _request(rest: Bytes) -> tuple[Seen, bool]:
    line = rest.line() or rest.line()
    words = line.split(" ")
    if len(words) != 3 or words[0] not in METHODS or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise Bad("request line")
    fields: list[tuple[str, str]] = []
    while header := rest.line():
        name, colon, value = header.partition(":")
        value = value.strip(" \t")
        if (
            not colon
            or not name
            or not set(name) <= TCHAR
            or any((ord(c) < 32 and c != "\t") or c == "\x7f" for c in value)
        ):
            raise Bad("header")
        fields.append((name.lower(), value))
    for name in ONCE:
        if sum(name == one for one, _ in fields) > 1:
            raise Bad(f"two {name}")
    names = dict(fields)
    http11 = words[2] == "HTTP/1.1"
    target = _target(words[0], words[1], names.get("host"), http11)
    body = _body(rest, names, http11)
    options = [one.strip(" \t").lower() for name, value in fields if name == "connection" for one in value.split(",")]
    keep = "close" not in options and (http11 or "keep-alive" in options)
    return Seen(words[0], target, body), keep


def _target(method: str, target: str, host: str | None, http11: bool) -> str:
    if host is None and http11:
        raise Bad("no host")
    if host is not None and not set(host) <= TARGET | {"[", "]"} - {"/", "?", "@"}:
        raise Bad("host")
    if target == "*":
        if method != "OPTIONS":
            raise Bad("asterisk form")
        return target
    scheme, _, after = target.partition("://")
    if scheme.lower() in ("http", "https") and not target.startswith("/"):
        end = min([after.find(c) for c in "/?" if c in after], default=len(after))
        if not after[:end] or after[:end].lower() != (host or "").lower():
            raise Bad("another host")
        target = after[end:] if after[end:].startswith("/") else "/" + after[end:]
    if not target.startswith("/") or not set(target) <= TARGET:
        raise Bad("target")
    for piece in target.split("%")[1:]:
        if len(piece) < 2 or not set(piece[:2]) <= set(string.hexdigits):
            raise Bad("percent")
    return target


def _body(rest: Bytes, names: dict[str, str], http11: bool) -> bytes:
    length, coding = names.get("content-length"), names.get("transfer-encoding")
    if coding is None:
        if length is None:
            return b""
        if not length or not set(length) <= set(string.digits):
            raise Bad("length")
        return rest.take(int(length))
    if length is not None or not http11 or coding.lower() != "chunked":
        raise Bad("transfer-encoding")
    body = b""
    while size := _chunk_size(rest.line()):
        body += rest.take(size)
        if rest.take(2) != b"\r\n":
            raise Bad("chunk without an end")
    while trailer := rest.line():
        name, colon, value = trailer.partition(":")
        if (
            not colon
            or not name
            or not set(name) <= TCHAR
            or any((ord(c) < 32 and c != "\t") or c == "\x7f" for c in value)
        ):
            raise Bad("trailer")
    return body


def _chunk_size(line: str) -> int:
    size, _, extensions = line.partition(";")
    digits = size.rstrip(" \t") if ";" in line else size
    if not digits or not set(digits) <= set(string.hexdigits):
        raise Bad("chunk size")
    if any((ord(c) < 32 and c != "\t") or c == "\x7f" for c in extensions):
        raise Bad("chunk extension")
    return int(digits, 16)
