"""A client that looks at how streams begin and end, byte by byte: real clients hide just that."""

import http.client
import json
import socket
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    status: int
    text: str


def get(url: str, path: str, timeout_s: float = 10) -> Answer:
    return _call(url, "GET", path, None, timeout_s)


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 60) -> Answer:
    return _call(url, "POST", path, json.dumps(body), timeout_s)


def _call(url: str, method: str, path: str, body: str | None, timeout_s: float) -> Answer:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return Answer(answer.status, answer.read().decode())
    finally:
        connection.close()


def refuses(url: str) -> bool:
    place = urlsplit(url)
    try:
        socket.create_connection((place.hostname or "", place.port or 0), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def metric(text: str, name: str) -> float:
    """One value of a text exposition, summed over labels."""
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    assert values, f"no {name}"
    return sum(map(float, values))


def metric_names(text: str) -> set[str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {line.split("{")[0].split(" ")[0] for line in lines}


def unchunked(body: bytes) -> tuple[bytes, bool]:
    """What a chunked body carries, and whether its end has come."""
    carried = b""
    while b"\r\n" in body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if length == 0:
            return carried, rest.startswith(b"\r\n")
        if len(rest) < length + 2:
            break
        carried, body = carried + rest[:length], rest[length + 2 :]
    return carried, False


class Stream:
    """One streamed chat. `read` takes what comes; `ending` says how it stands."""

    def __init__(
        self, url: str, model: str, tokens: int, prompt: str = "Tell me", headers: dict[str, str] | None = None,
        **fields: Any,
    ):  # fmt: skip
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        sent = json.dumps(body).encode()
        place = urlsplit(url)
        self.socket = socket.create_connection((place.hostname or "", place.port or 0), timeout=10)
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        self.socket.sendall(head.encode() + sent)
        self.received = b""
        self.closed = False

    def read(self, for_s: float, until_events: int | None = None) -> "Stream":
        """Reads until the stream ends, or has so many events, or the time is over."""
        deadline = time.monotonic() + for_s
        while not self.closed and not self.complete and (left := deadline - time.monotonic()) > 0:
            if until_events is not None and len(self.events) >= until_events:
                break
            self.socket.settimeout(left)
            try:
                more = self.socket.recv(1 << 16)
            except TimeoutError:
                break
            except ConnectionResetError:
                more = b""
            self.received += more
            self.closed = not more
        if self.closed or self.complete:
            self.leave()
        return self

    def leave(self) -> None:
        self.socket.close()

    @property
    def status(self) -> int | None:
        """The status code, once the headers are there."""
        return int(self.received.split(b" ", 2)[1]) if b"\r\n\r\n" in self.received else None

    def header(self, name: str) -> str | None:
        head = self.received.partition(b"\r\n\r\n")[0].decode("latin-1")
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
        return next((value for key, value in lines.items() if key.lower() == name), None)

    @property
    def complete(self) -> bool:
        """A chunked body with its end, or a plain one (of an error) of the length that it announced."""
        head, _, body = self.received.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return len(body) >= int(line.split(b":")[1])
        return unchunked(body)[1]

    @property
    def body(self) -> str:
        head, _, body = self.received.partition(b"\r\n\r\n")
        return (unchunked(body)[0] if b"chunked" in head.lower() else body).decode(errors="replace")

    @property
    def events(self) -> list[str]:
        whole = self.body.split("\n\n")[:-1]
        return [event.removeprefix("data: ") for event in whole if event.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def usage(self) -> dict[str, Any] | None:
        found = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return found[-1] if found else None

    @property
    def finish_reason(self) -> str | None:
        said = [choice.get("finish_reason") for chunk in self.chunks for choice in chunk.get("choices", [])]
        return next((reason for reason in said if reason), None)

    @property
    def ending(self) -> str:
        """`open`; `cut` (no proper end); `error` (an event that says so); else the reason that the engine gave."""
        if any("error" in chunk for chunk in self.chunks):
            return "error"
        if self.complete:
            return self.finish_reason or "nothing said"
        return "cut" if self.closed else "open"
