"""An engine without a model: it answers at once, or as a stream at a set pace, for as little CPU as Python allows.

    python benchmarks/gateway/fake_backend.py --ports 9001 9002 [--chunks 64] [--interval-ms 20] [--in-step]

Both ports are one process, so that on a small machine the backends do not take turns with the gateway under
test. A request's `max_tokens` sets how many chunks its stream has. Streams keep the phase they started in
(engines that are not in step, the harder case for a gateway); `--in-step` sends all chunks of an interval
together, as one engine's step does.
"""

import argparse
import asyncio
import json
import signal
import socket
import time
from typing import Any, cast

import httptools
import msgspec
import uvloop

MODEL = "llama-3.1-8b"
HOST = "127.0.0.1"
WORD = " crosstie"
PROMPT_TOKENS = 16
JSON = "application/json"
TICK_S = 0.001


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Request(msgspec.Struct):
    """The few keys that matter here; msgspec skips the rest, so a long prompt costs no objects."""

    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream_options: StreamOptions | None = None


_decode = msgspec.json.Decoder(Request).decode


def usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
    }


def response(body: bytes, content_type: str = JSON, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def event(data: str) -> bytes:
    """One server-sent event in an HTTP chunk of its own."""
    body = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(body), body)


class Dialect:
    """What one of the two endpoints sends, made once: chat messages or plain text."""

    def __init__(self, chat: bool) -> None:
        self.chat = chat
        self.kind = "chat.completion" if chat else "text_completion"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": WORD}} if chat else {"text": WORD}
        self.whole = response(json.dumps(self._document(self.kind, [choice], usage=usage(1))).encode())
        self.first = self._chunk(None, {"role": "assistant", "content": WORD})
        self.middle = self._chunk(None, {"content": WORD})
        self.last = self._chunk("stop", {"content": WORD})

    def _document(self, kind: str, choices: list[dict[str, Any]], **more: object) -> dict[str, Any]:
        name = "chatcmpl-0" if self.chat else "cmpl-0"
        return {"id": name, "object": kind, "created": 1_700_000_000, "model": MODEL, "choices": choices, **more}

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else self.kind

    def _chunk(self, finish: str | None, delta: dict[str, str]) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": delta} if self.chat else {"text": delta["content"]}
        return event(json.dumps(self._document(self._chunk_kind(), [choice])))

    def end(self, tokens: int, with_usage: bool) -> bytes:
        """The last content chunk, the usage if it was asked for, the mark of the end."""
        counted = event(json.dumps(self._document(self._chunk_kind(), [], usage=usage(tokens)))) if with_usage else b""
        return self.last + counted + event("[DONE]") + b"0\r\n\r\n"


CHAT, TEXT = Dialect(chat=True), Dialect(chat=False)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)
# No path of a model or a tokenizer: sglang-router would look for it on a hub.
_MODEL_INFO = {"served_model_name": MODEL, "is_generation": True}
# For routers that ask what runs here.
DOCUMENTS: dict[str, object] = {
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "crosstie"}]},
    "/server_info": {**_MODEL_INFO, "model_id": MODEL, "tp_size": 1, "dp_size": 1, "max_running_requests": 4096},
    "/model_info": _MODEL_INFO,
    "/get_model_info": _MODEL_INFO,
    "/get_server_info": _MODEL_INFO,
    "/get_load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
    "/version": {"version": "0.0.0"},
}
FIXED = {path: response(json.dumps(document).encode()) for path, document in DOCUMENTS.items()}
FIXED |= {path: response(b"") for path in ("/health", "/health_generate", "/ping")}
NOT_FOUND = response(b'{"error":{"message":"not found","type":"not_found"}}', status="404 Not Found")
BAD_REQUEST = response(b'{"error":{"message":"not JSON","type":"bad_request"}}', status="400 Bad Request")


class Stream:
    __slots__ = ("dialect", "left", "server", "tokens", "with_usage")

    def __init__(self, server: "Server", dialect: Dialect, tokens: int, with_usage: bool) -> None:
        self.server, self.dialect, self.tokens, self.with_usage = server, dialect, tokens, with_usage
        self.left = tokens


class Wheel:
    """One timer for all streams: slots of a millisecond, each turned to once an interval."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_ms: int, in_step: bool) -> None:
        self.loop, self.in_step = loop, in_step
        self.slots: list[list[Stream]] = [[] for _ in range(interval_ms)]
        self.now = 0
        self.running = 0
        self.requests = 0
        self.tokens = 0
        self._next_s: float | None = None

    def add(self, stream: Stream) -> None:
        # The slot just passed comes round again after a whole interval.
        self.slots[0 if self.in_step else self.now].append(stream)
        self.running += 1
        if self._next_s is None:
            self._next_s = time.monotonic() + TICK_S
            self.loop.call_later(TICK_S, self._turn)

    def _turn(self) -> None:
        assert self._next_s is not None
        # A late timer catches up slot by slot, so the pace holds on average.
        clock = time.monotonic()
        while self._next_s <= clock:
            self.now = (self.now + 1) % len(self.slots)
            if due := self.slots[self.now]:
                self.slots[self.now] = [stream for stream in due if self._send(stream)]
            self._next_s += TICK_S
        if self.running:
            # Timers count in whole milliseconds: a shorter wait would be none, and the loop would spin.
            self.loop.call_later(TICK_S, self._turn)
        else:
            self._next_s = None

    def _send(self, stream: Stream) -> bool:
        transport = stream.server.transport
        if transport is None or transport.is_closing():
            self.running -= 1
            return False
        stream.left -= 1
        self.tokens += 1
        if stream.left:
            first = stream.left == stream.tokens - 1
            transport.write(stream.dialect.first if first else stream.dialect.middle)
            return True
        transport.write(stream.dialect.end(stream.tokens, stream.with_usage))
        self.running -= 1
        return False

    def metrics(self) -> bytes:
        label = f'{{engine="0",model_name="{MODEL}"}}'
        values = {
            "num_requests_running": ("gauge", self.running),
            "num_requests_waiting": ("gauge", 0),
            "kv_cache_usage_perc": ("gauge", min(1.0, self.running / 4096)),
            "prompt_tokens_total": ("counter", self.requests * PROMPT_TOKENS),
            "generation_tokens_total": ("counter", self.tokens),
            "num_preemptions_total": ("counter", 0),
        }
        lines = [f"# TYPE vllm:{name} {kind}\nvllm:{name}{label} {value}\n" for name, (kind, value) in values.items()]
        return response("".join(lines).encode(), "text/plain; version=0.0.4; charset=utf-8")


class Server(asyncio.Protocol):
    """One connection, kept alive, one request after the other."""

    def __init__(self, wheel: Wheel, chunks: int) -> None:
        self.wheel, self.chunks = wheel, chunks
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpRequestParser(self)
        self.path = ""
        self.body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self.transport is not None:
                self.transport.close()

    def on_message_begin(self) -> None:
        self.path, self.body = "", []

    def on_url(self, url: bytes) -> None:
        self.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        if self.transport is None:
            return
        path = self.path.partition("?")[0]
        if path == "/v1/chat/completions":
            self._complete(CHAT)
        elif path == "/v1/completions":
            self._complete(TEXT)
        elif path == "/metrics":
            self.transport.write(self.wheel.metrics())
        else:
            self.transport.write(FIXED.get(path, NOT_FOUND))

    def _complete(self, dialect: Dialect) -> None:
        assert self.transport is not None
        try:
            request = _decode(b"".join(self.body))
        except msgspec.MsgspecError:
            self.transport.write(BAD_REQUEST)
            return
        self.wheel.requests += 1
        if not request.stream:
            self.wheel.tokens += 1
            self.transport.write(dialect.whole)
            return
        tokens = request.max_tokens or request.max_completion_tokens or self.chunks
        options = request.stream_options
        self.transport.write(STREAM_HEAD)
        self.wheel.add(Stream(self, dialect, tokens, bool(options and options.include_usage)))


async def serve(ports: list[int], chunks: int, interval_ms: int, in_step: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop.set)
    # A backend answers for its own streams in /metrics, so every port has its wheel.
    for port in ports:
        wheel = Wheel(loop, interval_ms, in_step)
        await loop.create_server(lambda wheel=wheel: Server(wheel, chunks), HOST, port, backlog=4096)  # type: ignore[misc]
    print(f"fake backend on ports {', '.join(map(str, ports))}", flush=True)
    await stop.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ports", type=int, nargs="+", required=True)
    arguments.add_argument("--chunks", type=int, default=64, help="of a stream whose request has no max_tokens")
    arguments.add_argument("--interval-ms", type=int, default=20, help="between the chunks of a stream")
    arguments.add_argument("--in-step", action="store_true", help="all streams' chunks of an interval together")
    given = arguments.parse_args()
    if given.chunks < 1 or given.interval_ms < 1:
        arguments.error("--chunks and --interval-ms are 1 or more")
    uvloop.run(serve(given.ports, given.chunks, given.interval_ms, given.in_step))


if __name__ == "__main__":
    main()
