"""Emulated replicas on loopback, and a client that notes when what came."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from tests.waiting import LIMIT_S

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, Serving
from crosstie.wire.address import Address
from crosstie.wire.client import Headers, Origin
from crosstie.wire.fetch import Answer, fetch, request_bytes
from crosstie.wire.sse import payloads
from crosstie_gateway.emulate.fleet import EmulatedFleet, start

CATALOG = Catalog([])
SMALL, LARGE = "llama-3.1-8b", "llama-3.3-70b"
CHAT = "/v1/chat/completions"


def pool(name: str = "one", model: str = SMALL, **more: Any) -> Pool:
    usual: dict[str, Any] = {
        "accelerator": "mi300x", "parallelism": Parallelism(), "precision": "fp8", "kv_format": "bf16",
        "stack": "vllm", "replicas": 1, "usd_per_gpu_hour": 1.3, "max_in_flight": 256, "max_context": 32_000,
    }  # fmt: skip
    return Pool(name=name, model=model, **{**usual, **more})


def fleet(*pools: Pool, **more: Any) -> Fleet:
    # No balancer is to be waited for.
    serving = Serving(lame_duck_s=0.0)
    usual = {"name": "test", "planned": "", "policy": "round-robin", "classes": (), "serving": serving}
    return Fleet(pools=pools or (pool(),), **{**usual, **more})


class Events(NamedTuple):
    """A stream as it came: payloads, the loop's time of each, and whether it ended as it should."""

    status: int
    payloads: list[bytes]
    times: list[float]
    whole: bool
    raw: bytes

    @property
    def text(self) -> str:
        choices = [one["choices"] for one in self.documents]
        return "".join(c[0]["delta"].get("content", "") for c in choices if c)

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(one) for one in self.payloads if one != b"[DONE]"]


class _Reader:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[bool] = self.loop.create_future()
        self.status = 0
        self.headed = asyncio.Event()
        self.pieces: list[tuple[float, bytes]] = []

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headed.set()

    def on_body(self, data: bytes) -> None:
        self.pieces.append((self.loop.time(), data))

    def on_end(self) -> None:
        self.done.set_result(True)

    def on_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(False)


class Client:
    def __init__(self, url: str):
        self.origin = Origin(asyncio.get_running_loop(), Address(url))

    async def get(self, path: str, method: str = "GET") -> Answer:
        return await fetch(self.origin, method, path, timeout_s=LIMIT_S)

    async def post(self, path: str, body: Any, timeout_s: float = LIMIT_S) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await fetch(self.origin, "POST", path, body=raw, timeout_s=timeout_s)

    async def fault(self, **fault: Any) -> Answer:
        return await self.post("/emulate/fault", fault)

    async def begin(self, path: str, body: dict[str, Any]) -> tuple[Any, _Reader]:
        connection, reader = await self.origin.open(LIMIT_S), _Reader()
        data = json.dumps({"stream": True, **body}).encode()
        connection.send(request_bytes(self.origin, "POST", path, body=data), reader)
        return connection, reader

    async def stream(self, body: dict[str, Any], path: str = CHAT) -> Events:
        connection, reader = await self.begin(path, body)
        async with asyncio.timeout(LIMIT_S):
            whole = await reader.done
        connection.abort()
        times, found = [], []
        for at, data in reader.pieces:
            for one in payloads(data):
                times.append(at)
                found.append(one)
        return Events(reader.status, found, times, whole, b"".join(data for _, data in reader.pieces))

    async def metrics(self) -> dict[str, float]:
        """By name, labels left out; a name with several lines is their sum."""
        found: dict[str, float] = {}
        for line in (await self.get("/metrics")).body.decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


@asynccontextmanager
async def emulating(one: Fleet | None = None, **options: Any) -> AsyncIterator[tuple[EmulatedFleet, Client]]:
    """The fleet, and a client of its first replica."""
    made = await start(CATALOG, one or fleet(), **{"speed": 20.0, **options})
    client = Client(made.fleet.pools[0].backends[0])
    try:
        yield made, client
    finally:
        client.origin.close()
        await made.close()
        await asyncio.sleep(0.01)


@contextmanager
def emulated_beside(one: Fleet | None = None, speed: float = 20.0) -> Iterator[EmulatedFleet]:
    """Replicas on a loop of their own, as another process would have them."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = asyncio.run_coroutine_threadsafe(start(CATALOG, one or fleet(), speed=speed), loop).result(LIMIT_S)
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(made.close(), loop).result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()


def chat(content: Any = "Say something.", **more: Any) -> dict[str, Any]:
    return {"model": SMALL, "messages": [{"role": "user", "content": content}], **more}
