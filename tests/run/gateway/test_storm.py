"""A storm: many clients of every kind against backends of every kind, and afterwards nothing may be left of it.

CROSSTIE_STORM_S is how long each of them blows; CROSSTIE_STORM_SEED begins another series.
"""

import asyncio
import gc
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, MODEL, Fake, Running, fleet_of, pool_of, running, until

from crosstie.core.fleet import Fleet
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

pytestmark = pytest.mark.storm

STORM_S = float(os.environ.get("CROSSTIE_STORM_S", "5"))
SEED = int(os.environ.get("CROSSTIE_STORM_SEED", "1"))
CLIENTS = 24
SERVING = msgspec.structs.replace(
    CALM, connect_timeout_s=0.5, first_byte_timeout_s=0.5, idle_timeout_s=0.5, queue_s=0.3, max_queued=12,
    total_timeout_s=3.0, retries=2, drain_s=3.0,
)  # fmt: skip


class Mad(Fake):
    """Takes every request in another way. Whatever it says bears the request's own tag."""

    def __init__(self, name: str, seed: int):
        super().__init__(name)
        self.random = random.Random(seed)
        self.sane = False

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/health" and self.random.random() < 0.1 and not self.sane:
            self.loop.call_later(self.random.random(), reply.send, self.random.choice((200, 500)), b"{}")
        elif request.path.startswith("/v1/") and request.method == "POST":
            reply.watcher = self
            body = json.loads(request.body)
            tag = body["messages"][0]["content"]
            chance = 0.0 if self.sane else self.random.random()
            if chance < 0.6:
                self._answer(tag, body, reply)
            else:
                self.random.choice(self._ways())(tag, body, reply)
        else:
            super()._handle(request, reply)

    def _ways(self) -> list[Callable[[str, dict[str, Any], Reply], None]]:
        return [self._refuse, self._silent, self._cut_off, self._garbage, self._twice, self._endless, self._empty]

    def _answer(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        if body.get("stream"):
            self._say(self._pieces(tag, body), reply, polite=True)
        else:
            said = json.dumps({"tag": tag, "choices": [], "usage": self.usage, "pad": "p" * self._size()}).encode()
            self.loop.call_later(self.random.random() * 0.1, reply.send, 200, said)

    def _size(self) -> int:
        return self.random.choice((0, 10, 1000, 300_000))

    def _pieces(self, tag: str, body: dict[str, Any]) -> list[bytes]:
        """A whole stream, cut anywhere."""
        end = self.random.choice((b"\n\n", b"\r\n\r\n"))
        said: list[Any] = [
            {"tag": tag, "choices": [{"delta": {"content": f"w{i}" + "p" * self._size()}, "finish_reason": None}]}
            for i in range(self.random.randrange(1, 6))
        ]
        said.append({"tag": tag, "choices": [{"delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            said.append({"tag": tag, "choices": [], "usage": self.usage})
        events = b"".join(b"data: " + json.dumps(one).encode() + end for one in said) + b"data: [DONE]" + end
        cuts = sorted(self.random.sample(range(1, len(events)), self.random.randrange(0, 6)))
        return [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]

    def _say(self, pieces: list[bytes], reply: Reply, *, polite: bool, length: int | None = None) -> None:
        if reply.gone or reply.done:
            return
        if not reply.started:
            # Some engines end an answer by ending its connection.
            if self.random.random() < 0.2:
                reply.connection.http11 = False
            reply.start(200, b"content-type: text/event-stream\r\n", length)
        if pieces:
            reply.write(pieces[0])
            pause_s = self.random.choice((0.0, 0.0, 0.01, 0.05))
            self.loop.call_later(pause_s, lambda: self._say(pieces[1:], reply, polite=polite, length=length))
        elif polite:
            reply.end()
        else:
            reply.cut(after_written=self.random.random() < 0.5)

    def _refuse(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        status = self.random.choice((400, 404, 422, 429, 500, 503, 204, 304))
        reply.send(status, b"" if status in (204, 304) else json.dumps({"tag": tag, "error": "no"}).encode())

    def _silent(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        pass

    def _cut_off(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        pieces = self._pieces(tag, body)
        kept = pieces[: self.random.randrange(len(pieces))]
        self._say(kept, reply, polite=self.random.random() < 0.3)

    def _garbage(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        said = (b"\0\1\2", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 101 X\r\nupgrade: x\r\n\r\n")
        reply.connection.transport.write(self.random.choice(said))
        reply.cut(after_written=True)

    def _twice(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        """An answer, and in the same breath another one that nobody asked for. (Later, nobody could tell.)"""
        said = json.dumps({"tag": tag, "choices": []}).encode()
        evil = b'HTTP/1.1 200 OK\r\ncontent-length: 29\r\n\r\n{"tag": "evil", "choices":[]}'
        reply.connection.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(said), said) + evil)
        reply.end_message()

    def _endless(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        if not reply.started:
            reply.start(200, b"content-type: text/event-stream\r\n", None)
        if not reply.gone:
            if not reply.slow:
                reply.write(b"data: " + json.dumps({"tag": tag, "pad": "p" * 20_000}).encode() + b"\n\n")
            self.loop.call_later(0.02, self._endless, tag, body, reply)

    def _empty(self, tag: str, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", 0)
        reply.end()


class Client:
    """Asks, now patiently, now not, and looks at every byte that it gets."""

    def __init__(self, at: Running, seed: int, seen: Counter[str]):
        self.port, self.random, self.seen = at.port, random.Random(seed), seen
        self.name, self.asked = f"c{seed}", 0

    async def run(self, until_s: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)
            try:
                await self._talk(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                # Only those whom the gateway has given up on: cut while they did not read, or in a whole answer.
                self.seen["cut"] += 1
            finally:
                writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self.random.randrange(1, 5)):
            tags = [self._ask(writer) for _ in range(self.random.choice((1, 1, 1, 2, 5)))]
            await writer.drain()
            for tag in tags:
                mood = self.random.random()
                if mood < 0.1:
                    self.seen["left"] += 1
                    await asyncio.sleep(self.random.random() * 0.3)
                    return
                if mood < 0.13:
                    self.seen["stalled"] += 1
                    await asyncio.sleep(0.8)
                async with asyncio.timeout(8):
                    if not await self._read(reader, tag):
                        return

    def _ask(self, writer: asyncio.StreamWriter) -> str:
        self.asked += 1
        tag = f"{self.name}-{self.asked}-" + "q" * self.random.choice((0, 50, 5000))
        stream = self.random.random() < 0.7
        said: dict[str, Any] = {"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": tag}]}
        said["max_tokens"] = 2
        if self.random.random() < 0.2:
            said["stream_options"] = {"include_usage": True}
        body = json.dumps(said).encode()
        urgency = self.random.choice(("low", "normal", "high"))
        hints = f"x-crosstie-priority: {urgency}\r\nx-request-id: {tag[:20]}\r\n"
        if self.random.random() < 0.2:
            hints += "expect: 100-continue\r\n"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{hints}content-length: {len(body)}\r\n\r\n".encode()
        data = head + body
        cut = self.random.randrange(len(data))
        writer.write(data[:cut])
        writer.write(data[cut:])
        return tag

    async def _read(self, reader: asyncio.StreamReader, tag: str) -> bool:
        """One answer, to its proper end; whether the connection may be used again."""
        status, headers = 100, dict[str, str]()
        while status == 100:
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            assert lines[0].startswith("HTTP/1.1 "), lines
            status = int(lines[0].split()[1])
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        assert headers["x-request-id"] == tag[:20], (headers, tag)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            assert headers["transfer-encoding"] == "chunked"
            body = b""
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        self._check(tag, status, headers, body)
        return headers.get("connection") != "close"

    def _check(self, tag: str, status: int, headers: dict[str, str], body: bytes) -> None:
        streamed = headers.get("content-type", "").startswith("text/event-stream")
        said = [one for one in payloads(body) if one != b"[DONE]"] if streamed else [body] if body else []
        for one in map(json.loads, said):
            own = one.get("tag") == tag or (one.get("error") or {}).get("type")
            # What the gateway itself counts for a backend that broke off before it could.
            own = own or one.keys() == {"object", "choices", "usage"}
            assert own, (tag, one)
        if not streamed:
            self.seen[str(status)] += 1
            assert status in (200, 204, 304, 400, 404, 422, 429, 500, 502, 503, 504)
            return
        finished = b'"finish_reason": "stop"' in body
        # Some break off between the last token and the end.
        assert finished or b"upstream_cut" in body, body[-300:]
        self.seen["whole" if finished else "broken"] += 1


async def storm(fleet: Fleet, mad: list[Mad], seed: int) -> None:
    loop = asyncio.get_running_loop()
    seen: Counter[str] = Counter()
    async with running(fleet) as at:
        clients = [Client(at, seed * 1000 + i, seen) for i in range(CLIENTS)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run(loop.time() + STORM_S))
            group.create_task(_reloads(at, fleet, seed))
        gateway = at.gateway
        await until(lambda: not gateway.exchanges)
        assert not len(gateway.waiting)
        for replica in [*gateway.live.replicas(), *gateway.live.leaving]:
            assert (replica.in_flight, replica.waiting, len(replica.queue), replica.targets) == (0, 0, 0, {})
            assert replica.held_tokens == replica.decoding_tokens == 0.0
        await until(lambda: not at.process.server.connections)
        for backend in gateway.backends.values():
            # None but idle ones, and the one that asks after its health.
            assert backend.origin.connections - len(backend.origin._idle) <= 1
            assert len(backend.origin._connecting) == 0
        for one in mad:
            one.sane = True
        await until(lambda: all(replica.up for replica in gateway.live.replicas()))
        for _ in range(20):
            answer = await at.ask(stream=True)
            assert payloads(answer.body)[-1] == b"[DONE]", answer
        assert seen["whole"] > 20, seen
        assert seen["200"], seen


async def _reloads(at: Running, fleet: Fleet, seed: int) -> None:
    """The same backends in other pools, fewer, and back again."""
    chance = random.Random(seed)
    first, second = fleet.pools
    others = [
        fleet_of(first, serving=SERVING),
        fleet_of(
            pool_of("first", *second.backends, max_in_flight=2), pool_of("third", *first.backends), serving=SERVING
        ),
        fleet_of(first, pool_of("second", second.backends[0], max_in_flight=1), serving=SERVING),
        fleet,
    ]
    for _ in range(int(STORM_S * 2)):
        await asyncio.sleep(0.5)
        at.gateway.load(chance.choice(others))
    at.gateway.load(fleet)


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_after_a_storm_nothing_is_left(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        mad = [Mad(f"mad-{i}", seed * 10 + i) for i in range(4)]
        for one in mad:
            await one.start()
        fleet = fleet_of(
            pool_of("first", mad[0].url, mad[1].url, max_in_flight=3),
            pool_of("second", mad[2].url, mad[3].url, max_in_flight=4, usd_per_gpu_hour=2.0),
            serving=SERVING,
        )
        try:
            await storm(fleet, mad, seed)
        finally:
            for one in mad:
                one.crash()
        await asyncio.sleep(0.05)
        # What is left of tasks and exceptions shows itself.
        gc.collect()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not [task for task in left if not task.cancelling()], left

    run_on_loop(test())
    assert not caplog.records
