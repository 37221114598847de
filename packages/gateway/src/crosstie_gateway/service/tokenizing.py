"""Prompts read as their engines do, where the fleet file gives the tokenizer of their model.

Short ones are read at once, others by two threads, one of them for ordinary lengths. Requests that would wait too long
go by the estimate.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.route.held import PromptTokens
from crosstie_gateway.gateway.errors import error_body
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.interfaces import CountedPrompt, Tokenizing
from crosstie_gateway.service.process import Component, GatewayProcess, file_stamp
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply
from crosstie_gateway.wire.tasks import Tasks

# Bodies up to here are read on the loop: a millisecond or two.
_AT_ONCE_BYTES = 2048
# Beyond here a body is long, and beyond there nobody reads it before its engine does.
_LONG_BYTES, _MOST_BYTES = 64 * 2**10, 2 * 2**20
# Bytes that may wait for a thread, and how long one request may.
_WAITING_BYTES = 16 * 2**20
_PATIENCE_S = 1.0

Said = Callable[[CountedPrompt | None], None]


class _Name(msgspec.Struct):
    model: str | None = None


_name = msgspec.json.Decoder(_Name).decode


class PromptReader(Tokenizing):
    """`tokenizers` by model."""

    def __init__(self, gateway: Gateway, patience_s: float):
        self._gateway, self._loop, self._patience_s = gateway, gateway.loop, patience_s
        self.tokenizers: dict[str, Tokenizer] = {}
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokens")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokens-long")
        self._waiting_bytes = 0
        self._tasks = Tasks()

    def read(self, request: Request, reply: Reply, go_on: Said) -> None:
        size = len(request.body)
        tokenizer = self._tokenizer(request) if size <= _MOST_BYTES else None
        if tokenizer is None or self._waiting_bytes + size > _WAITING_BYTES:
            go_on(None)
        elif size <= _AT_ONCE_BYTES:
            go_on(_counted(tokenizer, request.body, request.path))
        else:
            self._waiting_bytes += size
            thread = self._short if size <= _LONG_BYTES else self._long
            reading = thread.submit(_counted, tokenizer, request.body, request.path)
            # It holds its bytes until it has been read, also where its request no longer waits for that.
            reading.add_done_callback(lambda _: self._on_thread(size))
            self._tasks.spawn(self._go_on_after(reading, reply, go_on))

    async def _go_on_after(self, reading: "Future[CountedPrompt | None]", reply: Reply, go_on: Said) -> None:
        prompt = None
        # A request that waits too long, or cannot be read, goes by the estimate.
        with contextlib.suppress(Exception):
            prompt = await asyncio.wait_for(asyncio.wrap_future(reading), self._patience_s)
        try:
            go_on(prompt)
        except Exception as error:  # noqa: BLE001 (one request's failure is answered, as where it is served at once)
            self._loop.call_exception_handler({"message": "serving a request failed", "exception": error})
            if not reply.started:
                reply.send(500, error_body(500, "internal error"))
            elif not reply.done:
                reply.cut()

    def _tokenizer(self, request: Request) -> Tokenizer | None:
        name = request.model
        if name is None:
            try:
                name = _name(request.body).model
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                # What is wrong with it is for others to say.
                return None
        return self.tokenizers.get(self._gateway.live.names.get(name or "", ""))

    def _on_thread(self, size: int) -> None:
        # At the very end the loop may be gone.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_read, size)

    def _has_read(self, size: int) -> None:
        self._waiting_bytes -= size

    def close(self) -> None:
        for thread in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)


def _counted(tokenizer: Tokenizer, body: bytes, path: str) -> CountedPrompt | None:
    read = tokenizer.read(body, path)
    return None if read is None or not read[0] else CountedPrompt(PromptTokens(read[0]), read[1])


class TokenizerFiles(Component):
    """Reads the tokenizers that a fleet names; a file that has changed, or is named anew, with the next fleet."""

    def __init__(self, *, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._read: dict[tuple[object, ...], Tokenizer] = {}
        self.reader: PromptReader | None = None

    async def start(self, process: GatewayProcess) -> None:
        self._gateway = process.gateway
        self.check(process.fleet)
        self.reloaded(process.fleet)

    def check(self, fleet: Fleet) -> None:
        named = {_stamp(pool): pool for pool in fleet.pools if pool.tokenizer is not None}
        read = {key: self._read.get(key) or _tokenizer(pool) for key, pool in named.items()}
        by_model: dict[str, tuple[object, ...]] = {}
        for key, pool in named.items():
            if by_model.setdefault(pool.model, key) != key:
                raise BadInput(f"pool {pool.name}: tokenizer: another pool of {pool.model} has another")
        self._read = read

    def reloaded(self, fleet: Fleet) -> None:
        by_model = {pool.model: self._read[_stamp(pool)] for pool in fleet.pools if _stamp(pool) in self._read}
        if by_model and self.reader is None:
            self.reader = PromptReader(self._gateway, self._patience_s)
        if self.reader is not None:
            self.reader.tokenizers = by_model
        self._gateway.context.tokenizing = self.reader if by_model else None

    async def stop(self) -> None:
        if self.reader is not None:
            self.reader.close()


def _stamp(pool: Pool) -> tuple[object, ...]:
    """Of the files as they are now."""
    given = [None if name is None else Path(name) for name in (pool.tokenizer, pool.chat_template)]
    beside = given[0].parent if given[0] is not None else None
    more = [beside / name for name in ("tokenizer_config.json", "chat_template.jinja")] if beside is not None else []
    return tuple((str(file), file_stamp(file)) for file in [*given, *more] if file is not None)


def _tokenizer(pool: Pool) -> Tokenizer:
    try:
        return Tokenizer(Path(pool.tokenizer or ""), Path(pool.chat_template) if pool.chat_template else None)
    except CrosstieError as error:
        raise BadInput(f"pool {pool.name}: tokenizer: {error}") from None
