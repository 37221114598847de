"""Backends that misbehave on request, a gateway over them, and a client that reads what comes, all on one loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.waiting import LIMIT_S, until as until

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, ServedClass, Serving
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import Answer, fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.attempt import OWN_HEADERS
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server

MODEL = "llama-3.1-8b"
CATALOG = Catalog()
# Quick to notice and slow to give up: on a busy machine whoever is only late is not given up.
CALM = Serving(
    connect_timeout_s=30.0, first_byte_timeout_s=LIMIT_S, idle_timeout_s=LIMIT_S, total_timeout_s=2 * LIMIT_S,
    queue_s=LIMIT_S, health_every_s=0.2, metrics_every_s=0.1, slow_start_s=0.0, drain_s=30.0,
    lame_duck_s=0.0,
)  # fmt: skip
# For tests of those who are given up.
HASTY = msgspec.structs.replace(CALM, first_byte_timeout_s=1.0, idle_timeout_s=1.0, queue_s=1.0)


class Fake:
    """An OpenAI-compatible server. `mode` says how it takes the next requests; `hit` is what it was sent."""

    def __init__(self, name: str = "fake", tokens: int = 5):
        self.name, self.tokens = name, tokens
        self.mode = "ok"
        self.healthy = True
        self.hit: list[tuple[Request, dict[str, Any]]] = []
        self.gone = 0
        self.pause_s = 0.0
        self.metrics = b""
        self.held: list[Reply] = []
        self.streams = True
        self.full_headers = b""
        self.details: dict[str, Any] = {}
        self.script: list[tuple[int, str | None]] = []
        self.ending: tuple[str, ...] = ()
        self.flooded, self.slow, self.probes, self.scrapes, self.pings = 0, False, 0, 0, 0

    async def start(self, port: int = 0) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = Server(self.loop, self._handle)
        self.port = await self.server.listen("127.0.0.1", port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def crash(self) -> None:
        self.server.close()

    def on_client_gone(self) -> None:
        self.gone += 1

    def on_client_slow(self) -> None:
        pass

    def on_client_ready(self) -> None:
        pass

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/health":
            self.probes += 1
            reply.send(200 if self.healthy else 500, b"{}")
        elif request.path == "/metrics":
            self.scrapes += 1
            reply.send(200 if self.metrics else 404, self.metrics, content_type=b"text/plain")
        elif request.path == "/v1/models":
            reply.send(200, b'{"object":"list","data":[]}')
        else:
            body = json.loads(request.body)
            self.hit.append((request, body))
            reply.watcher = self
            answer: Callable[[dict[str, Any], Reply], None] = getattr(self, f"_{self.mode.replace('-', '_')}")
            answer(body, reply)

    def _ok(self, body: dict[str, Any], reply: Reply) -> None:
        if body.get("stream"):
            self._stream(body, reply, self.tokens)
        else:
            said = {"id": "x", "served_by": self.name, "choices": [{"message": {"content": "hi"}}], "usage": self.usage}
            self.loop.call_later(self.pause_s, reply.send, 200, json.dumps(said).encode())

    @property
    def usage(self) -> dict[str, Any]:
        said = {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 7 + self.tokens}
        return {**said, **self.details}

    def _stream(
        self, body: dict[str, Any], reply: Reply, until: int, *, at: int = 0, then: Sequence[Callable[[], None]] = ()
    ) -> None:
        """One event at a time, so that a test may come between them. `then`: how it breaks off after `until` tokens."""
        if not reply.started:
            # What only a gateway may say of an answer is said by a backend in vain.
            forged = b"".join(b"%b: forged\r\n" % name for name in (*OWN_HEADERS, b"access-control-allow-origin"))
            reply.start(200, b"content-type: text/event-stream\r\nx-engine: fake\r\n" + forged, None)
        if at < until:
            said = {"choices": [{"index": 0, "delta": {"content": f"w{at} "}, "finish_reason": None}]}
            reply.write(b"data: " + json.dumps(said).encode() + b"\n\n")
            self.loop.call_later(self.pause_s, lambda: self._stream(body, reply, until, at=at + 1, then=then))
            return
        if until < self.tokens:
            self._break_off(then)
            return
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        reply.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        if (body.get("stream_options") or {}).get("include_usage"):
            reply.write(
                b"data: " + json.dumps({"choices": [], "usage": self.usage}, separators=(",", ":")).encode() + b"\n\n"
            )
        reply.write(b"data: [DONE]\n\n")
        reply.end()

    def _break_off(self, then: Sequence[Callable[[], None]]) -> None:
        """One after the other, each in a packet of its own."""
        for at, do in enumerate(then, start=1):
            self.loop.call_later(0.05 * at, do)

    def _choices(self, body: dict[str, Any], reply: Reply) -> None:
        """As `script` says, an event each: the index of a choice and how it ends there; "done", "end" and "cut"."""
        if not body.get("stream"):
            choices = [{"index": index, "text": "hi", "finish_reason": finish} for index, finish in self.script]
            reply.send(200, json.dumps({"served_by": self.name, "choices": choices, "usage": self.usage}).encode())
            return
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for index, finish in self.script:
            said = {"choices": [{"index": index, "delta": {"content": "a"}, "text": "a", "finish_reason": finish}]}
            reply.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        if "done" in self.ending:
            reply.write(b"data: [DONE]\n\n")
        # In a packet of its own: what was written before a cut may be lost.
        self.loop.call_later(0.05, reply.cut if "cut" in self.ending else reply.end)

    def _error(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(500, b'{"error":{"message":"engine broke"}}')

    def _poisoned(self, body: dict[str, Any], reply: Reply) -> None:
        """An engine that is well, and breaks at certain requests."""
        (self._error if "poison" in json.dumps(body) else self._ok)(body, reply)

    def _poison_cuts(self, body: dict[str, Any], reply: Reply) -> None:
        (self._cut if "poison" in json.dumps(body) else self._ok)(body, reply)

    def _poison_in_a_stream(self, body: dict[str, Any], reply: Reply) -> None:
        (self._error_first if "poison" in json.dumps(body) else self._ok)(body, reply)

    def _unknown_key(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(401, b'{"error":{"message":"sk-inner is no key of mine"}}')

    def _unpaid(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(402, b'{"error":{"message":"insufficient balance"}}')

    def _no_model(self, body: dict[str, Any], reply: Reply) -> None:
        said = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "inner": True}
        reply.send(404, json.dumps({"object": "error", **said, "param": "model", "code": 404}).encode())

    def _no_such_path(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(404, b'{"detail":"Not Found, says the inner network"}')

    def _list(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(200, b'[{"inner": "not an answer"}]')

    def _without_choices(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(200, b'{"inner": "maintenance", "error": null}')

    def _error_in_200(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(200, b'{"error": {"message": "inner upstream is away", "code": 502}, "choices": []}')

    def _clients_error_in_200(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(200, b'{"error": {"message": "temperature must be positive", "code": "400"}}')

    def _login_page(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(200, b"<html>Sign in to the inner network</html>", content_type=b"text/html")

    def _full(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(503, b'{"error":{"message":"queue is full"}}', self.full_headers)

    def _limited(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(429, b'{"error":{"message":"slow down"}}', self.full_headers)

    def _unable(self, body: dict[str, Any], reply: Reply) -> None:
        """As llama.cpp answers to embeddings of a model that was not started for them."""
        reply.send(501, b'{"error":{"message":"no embeddings here"}}')

    def _bad(self, body: dict[str, Any], reply: Reply) -> None:
        reply.send(400, b'{"error":{"message":"temperature must be positive"}}')

    def _hang(self, body: dict[str, Any], reply: Reply) -> None:
        self.held.append(reply)

    def let_go(self, **asked: Any) -> None:
        """Those that were let hang are answered, as what they asked for, and so are all that come."""
        self.mode = "ok"
        for reply in self.held:
            self._ok(asked, reply)
        self.held.clear()

    def _cut(self, body: dict[str, Any], reply: Reply) -> None:
        reply.cut()

    def _head_then_cut(self, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b"data: {")
        self.loop.call_later(0.02, reply.cut)

    def _cut_mid_event(self, body: dict[str, Any], reply: Reply) -> None:
        self._stream(body, reply, 2, then=[lambda: reply.write(b'data: {"choices": [{"del'), reply.cut])

    def _polite_cut(self, body: dict[str, Any], reply: Reply) -> None:
        """As vLLM ends on SIGTERM: a proper end of the connection's stream, in the middle of the answer."""
        self._stream(body, reply, 2, then=[reply.end])

    def _aborted(self, body: dict[str, Any], reply: Reply) -> None:
        """As vLLM's engine ends: what runs is said to be aborted, with usage and all."""
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}
        said = b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
        self._stream(body, reply, 2, then=[lambda: reply.write(said), reply.end])

    def _empty_success(self, body: dict[str, Any], reply: Reply) -> None:
        """And to what waits it gives an opening, no token, usage and a proper end."""
        opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b"data: " + json.dumps(opening).encode() + b"\n\n")
        usage = json.dumps(
            {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}, separators=(",", ":")
        )
        self.loop.call_later(0.02, reply.write, b"data: " + usage.encode() + b"\n\ndata: [DONE]\n\n")
        self.loop.call_later(0.04, reply.end)

    def _error_first(self, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b'data: {"error": {"message": "engine died", "code": 500}}\n\ndata: [DONE]\n\n')
        reply.end()

    def _error_after_opening(self, body: dict[str, Any], reply: Reply) -> None:
        opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b"data: " + json.dumps(opening).encode() + b"\n\n")
        said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
        self.loop.call_later(0.05, reply.write, said)
        self.loop.call_later(0.1, reply.write, b"data: [DONE]\n\n")
        self.loop.call_later(0.15, reply.end)

    def _talks_of_errors(self, body: dict[str, Any], reply: Reply) -> None:
        """An answer about server-sent events."""
        words = {"choices": [{"index": 0, "delta": {"content": "then send event: error"}, "finish_reason": "stop"}]}
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b"data: " + json.dumps(words).encode() + b"\n\ndata: [DONE]\n\n")
        reply.end()

    def _error_later(self, body: dict[str, Any], reply: Reply) -> None:
        said = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
        self._stream(body, reply, 2, then=[lambda: reply.write(said), reply.end])

    def _half_then_silent(self, body: dict[str, Any], reply: Reply) -> None:
        self._stream(body, reply, 2)

    def _ping(self, reply: Reply) -> None:
        """As servers and proxies keep a connection alive, whatever has become of the engine behind them."""
        if reply.gone or reply.done:
            return
        self.pings += 1
        reply.write(b": ping\n\n" if self.streams else b"\n")
        self.loop.call_later(0.02, self._ping, reply)

    def _pings(self, body: dict[str, Any], reply: Reply) -> None:
        """Nothing else until a test sends the answer."""
        self.streams = bool(body.get("stream"))
        kind = b"text/event-stream" if self.streams else b"application/json"
        reply.start(200, b"content-type: %b\r\n" % kind, None)
        self.held.append(reply)
        self._ping(reply)

    def _pings_then_cut(self, body: dict[str, Any], reply: Reply) -> None:
        self._pings(body, reply)
        self.loop.call_later(0.1, reply.cut)

    def _half_then_pings(self, body: dict[str, Any], reply: Reply) -> None:
        self.streams = True
        self._stream(body, reply, 2, then=[lambda: self._ping(reply)])

    def _response_begun_then_cut(self, body: dict[str, Any], reply: Reply) -> None:
        """Of the Responses API: events before there is any token."""
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for name in ("response.created", "response.in_progress"):
            said = {"type": name, "response": {"id": "resp_1", "status": "in_progress", "usage": None}}
            reply.write(f"event: {name}\ndata: {json.dumps(said)}\n\n".encode())
        self.loop.call_later(0.05, reply.cut)

    def _responds(self, body: dict[str, Any], reply: Reply) -> None:
        """As the Responses API does, and keeps them: it goes on from no other's."""
        previous = body.get("previous_response_id")
        if previous is not None and not previous.startswith(f"resp_{self.name}_"):
            reply.send(404, b'{"error":{"message":"no such response here"}}')
            return
        response = {
            "object": "response",
            "id": f"resp_{self.name}_{len(self.hit)}",
            "status": "completed",
            "store": body.get("store"),
            "output": [{"type": "message", "role": "assistant", "content": f"answer {len(self.hit)}"}],
        }
        if not body.get("stream"):
            reply.send(200, json.dumps(response).encode())
            return
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for name, more in (
            ("created", {"response": {**response, "status": "in_progress"}}),
            ("output_text.delta", {"item_id": "msg_1", "delta": "hi"}),
            ("completed", {"response": response}),
        ):
            said = {"type": f"response.{name}", **more}
            reply.write(f"event: response.{name}\ndata: {json.dumps(said)}\n\n".encode())
        reply.end()

    def _half_body(self, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: application/json\r\n", 100)
        reply.write(b'{"half')
        self.loop.call_later(0.02, reply.cut)

    def _flood(self, body: dict[str, Any], reply: Reply) -> None:
        """As many bytes as the connection takes, and some more whenever it takes more."""
        if not reply.started:
            reply.start(200, b"content-type: text/event-stream\r\n", None)
        self.slow = reply.slow
        if reply.gone:
            return
        if not reply.slow:
            reply.write(b"data: " + b"x" * 65536 + b"\n\n")
            self.flooded += 65536
        self.loop.call_later(0.0005, self._flood, body, reply)


def pool_of(name: str, *backends: str, **changes: Any) -> Pool:
    """A pool of which only the address is known, unless told otherwise."""
    values: dict[str, Any] = {
        "name": name, "model": MODEL, "accelerator": None, "parallelism": Parallelism(), "precision": None,
        "kv_format": "bf16", "stack": None, "replicas": len(backends), "usd_per_gpu_hour": 1.0, "max_in_flight": 64,
        "max_context": 8192, "backends": backends,
    }  # fmt: skip
    return Pool(**{**values, **changes})


def fleet_of(*pools: Pool, classes: tuple[ServedClass, ...] = (), serving: Serving = CALM, **changes: Any) -> Fleet:
    made = Fleet(
        name="test", planned="", policy="cheapest-meeting-target", pools=pools, classes=classes, serving=serving
    )
    return msgspec.structs.replace(made, **changes)


class Running:
    def __init__(self, process: GatewayProcess, notices: list[str]):
        self.process, self.notices = process, notices
        self.gateway = process.gateway
        self.port = process.port
        self.origin = Origin(asyncio.get_running_loop(), Address(f"http://127.0.0.1:{process.port}/v1"))

    async def ask(
        self, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any
    ) -> Answer:
        said = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **body}
        lines = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        lines.append((b"content-type", b"application/json"))
        return await fetch(self.origin, "POST", path, headers=lines, body=json.dumps(said).encode(), timeout_s=LIMIT_S)

    async def get(self, path: str) -> Answer:
        return await fetch(self.origin, "GET", path, timeout_s=LIMIT_S)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels."""
        total = 0.0
        # With keys the page needs one; of several workers it is that of all.
        has_keys = self.gateway.context.guard is not None
        page = self.gateway.metrics_page() if has_keys else (await self.get("/metrics")).body.decode()
        for line in page.splitlines():
            if line.split("{")[0].split(" ")[0] == name and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total


@asynccontextmanager
async def running(fleet: Fleet, **settings: Any) -> AsyncIterator[Running]:
    notices: list[str] = []
    process = GatewayProcess(CATALOG, fleet, notify=notices.append, **settings)
    await process.start("127.0.0.1", 0)
    made = Running(process, notices)
    try:
        yield made
        made.origin.close()
        # Nothing may be left behind: not a request, not a place on a replica.
        await until(
            lambda: not process.gateway.exchanges and not any(r.in_flight for r in process.gateway.live.replicas())
        )
    finally:
        made.origin.close()
        process.server.close()
        process.gateway.close()


@asynccontextmanager
async def fakes(count: int = 1, **settings: Any) -> AsyncIterator[list[Fake]]:
    made = [Fake(f"fake-{i}", **settings) for i in range(count)]
    for fake in made:
        await fake.start()
    try:
        yield made
    finally:
        for fake in made:
            fake.crash()


def in_folder(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    """A test on a loop that has a folder of its own."""

    def runs(tmp_path: Path) -> None:
        run_on_loop(test(tmp_path))

    return runs
