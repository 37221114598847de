"""Carries what machines tell each other over Redis; without it each goes by what it knows itself.

Load is published within 5 ms of a change and whole every second, what was learnt within 20 ms. Usage of keys is kept
there for some minutes, for gateways that come later.
"""

import asyncio
import contextlib
from collections.abc import Callable
from os import urandom
from random import random
from time import time
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, MissingExtra
from crosstie_gateway.share.learnt import Learnt, LearntReport
from crosstie_gateway.share.peers import PeerReport, Peers

# How often there may be something to tell: of load, and of what was learnt; and how often all of it is told.
TELL_S, LEARN_S, WHOLE_S = 0.005, 0.02, 1.0
# What Redis may take to answer; and how long one's own words may take to come back before it counts as lost.
_PATIENCE_S, _DEAF_S = 1.0, 2.5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
# How long used minutes are kept there.
_KEPT_S = 180
_CHANNEL = "crosstie:load"
# No message of a gateway's is larger, and no number.
_MOST_BYTES = 4 * 2**20
_MOST = 2**53
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerReport).decode
_decode_learnt = msgspec.msgpack.Decoder(LearntReport).decode


def connected(address: str) -> Any:
    """A client of Redis that has not said anything yet. Raises BadInput."""
    try:
        from redis.asyncio import Redis
    except ImportError:
        raise MissingExtra("state.redis needs the package redis", "redis", "crosstie-gateway") from None
    try:
        return Redis.from_url(
            address, socket_timeout=_PATIENCE_S, socket_connect_timeout=_PATIENCE_S, client_name="crosstie",
            max_connections=4,
        )  # fmt: skip
    except ValueError:
        # Not repeated: it may hold a password.
        raise BadInput("state.redis: is no address such as redis://127.0.0.1:6379/0") from None


class RedisTalk:
    """A conversation over one channel, taken up again whenever it breaks; one's own echo says that it works.
    `on_change` is called with why it was lost, and with None when it is back, each once."""

    channel = ""
    every_s = LEARN_S

    def __init__(self, client: Any, on_change: Callable[[str | None], None]):
        self._client, self._on_change = client, on_change
        self.up = False
        self.lost = 0
        self._failing = False
        self._heard_at = 0.0
        self._echo = f"crosstie:echo:{urandom(8).hex()}"
        self._task: asyncio.Task[None] | None = None

    # What is said

    async def begin(self) -> None:
        """After it has been taken up, before anything is told or heard."""

    async def tell(self, whole: bool) -> None:
        """What there is to say; `whole`: once a second."""
        raise NotImplementedError

    def hear(self, data: bytes) -> None:
        """May raise msgspec.MsgspecError: of another version, or of no gateway at all."""
        raise NotImplementedError

    def silence(self) -> None:
        """Now and then while nothing can be said."""

    async def leave(self) -> None:
        """At the end, so that nobody waits to find out."""

    # How it is carried

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        while self._task is not None and not self._task.done():
            # Where an answer comes at the same moment, `wait_for` of Python 3.11 forgets that it was cancelled.
            self._task.cancel()
            await asyncio.wait([self._task], timeout=LEARN_S)
        if self.up:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.leave(), _PATIENCE_S)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._client.aclose(), _PATIENCE_S)

    async def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                await self._talk()
            except Exception as error:  # noqa: BLE001 (whatever it was: it is told, and tried again)
                if self.up:
                    wait_s = _FIRST_WAIT_S
                self._lose(error)
            # Not all gateways at once.
            await asyncio.sleep(wait_s * (0.5 + random()))
            wait_s = min(2.0 * wait_s, _LONGEST_WAIT_S)
            self.silence()

    def _lose(self, error: BaseException) -> None:
        self.lost += self.up
        self.up = False
        if not self._failing:
            self._failing = True
            self._on_change(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    async def _talk(self) -> None:
        """Until it goes wrong."""
        async with asyncio.timeout(2 * _PATIENCE_S):
            await self._client.ping()
            hearing = self._client.pubsub(ignore_subscribe_messages=True)
            await hearing.subscribe(self.channel, self._echo)
            await self.begin()
        try:
            self._heard_at = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._speak())
                both.create_task(self._hear(hearing))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(hearing.aclose(), _PATIENCE_S)
            with contextlib.suppress(Exception):
                # What was cut off may have left half an answer behind.
                await asyncio.wait_for(self._client.connection_pool.disconnect(), _PATIENCE_S)

    async def _speak(self) -> None:
        whole_at, loop = 0.0, asyncio.get_running_loop()
        while True:
            now = loop.time()
            whole = now >= whole_at
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self.tell(whole)
                    if whole:
                        await self._client.publish(self._echo, b"")
            except TimeoutError:
                raise TimeoutError(f"no answer within {_PATIENCE_S:g} s") from None
            if whole:
                whole_at = now + WHOLE_S
            if now - self._heard_at > _DEAF_S:
                raise TimeoutError("nothing comes back")
            await asyncio.sleep(self.every_s)

    async def _hear(self, hearing: Any) -> None:
        while True:
            message = await hearing.get_message(timeout=_PATIENCE_S)
            if message is None:
                continue
            if message["channel"] == self._echo.encode():
                self._echoed()
            elif len(message["data"]) <= _MOST_BYTES:
                with contextlib.suppress(msgspec.MsgspecError):
                    self.hear(message["data"])

    def _echoed(self) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        self.up = True
        if self._failing:
            self._failing = False
            self._on_change(None)


class RedisShare(RedisTalk):
    """Load, and what keys have used: of one machine."""

    channel = _CHANNEL
    every_s = TELL_S

    def __init__(self, client: Any, peers: Peers, on_change: Callable[[str | None], None]):
        super().__init__(client, on_change)
        self._peers = peers

    async def begin(self) -> None:
        await self._read_used()
        self._peers.all_is_news(_minute())

    def hear(self, data: bytes) -> None:
        self._peers.hear(_decode(data), _minute())

    def silence(self) -> None:
        self._peers.forget_silent(_minute())

    async def leave(self) -> None:
        bye = PeerReport(self._peers.board.identity, True, {}, "", [], leaving=True)
        await self._client.publish(self.channel, _encode(bye))

    async def tell(self, whole: bool) -> None:
        if whole:
            self._peers.forget_silent(_minute())
        report = self._peers.news(whole, _minute())
        if report is not None:
            try:
                await self._send(report)
            except BaseException:
                self._peers.take_back(report)
                raise

    async def _read_used(self) -> None:
        if not self._peers.store:
            return
        for minute in (_minute() - 1, _minute()):
            for field, value in (await self._client.hgetall(self._used_at(minute))).items():
                with contextlib.suppress(ValueError):
                    machine, key_id = field.decode().split("/")
                    requests, tokens = map(int, value.split())
                    if not 0 <= int(key_id) <= _MOST or max(abs(requests), abs(tokens)) > _MOST:
                        continue
                    self._peers.hear_used(machine, int(key_id), minute, requests, tokens)

    def _used_at(self, minute: int) -> str:
        return f"crosstie:used:{self._peers.store}:{minute}"

    async def _send(self, report: PeerReport) -> None:
        pipe = self._client.pipeline(transaction=False)
        minutes: dict[int, dict[str, str]] = {}
        for key_id, (minute, requests, tokens) in report.used:
            minutes.setdefault(minute, {})[f"{report.machine}/{key_id}"] = f"{requests} {tokens}"
        for minute, fields in minutes.items():
            pipe.hset(self._used_at(minute), mapping=fields)
            pipe.expire(self._used_at(minute), _KEPT_S)
        pipe.publish(_CHANNEL, _encode(report))
        await pipe.execute()


class LearntShare(RedisTalk):
    """What was learnt: of one process."""

    channel = "crosstie:learnt"

    def __init__(self, client: Any, learnt: Learnt, now: Callable[[], float]):
        super().__init__(client, lambda why: None)
        self._learnt, self._now = learnt, now

    async def begin(self) -> None:
        # What was seen while nobody could be told is old by now.
        self._learnt.observations.clear()

    async def tell(self, whole: bool) -> None:
        report = self._learnt.news()
        if report is not None:
            await self._client.publish(self.channel, _encode(report))

    def hear(self, data: bytes) -> None:
        self._learnt.hear(_decode_learnt(data), self._now())


def _minute() -> int:
    return int(time() // 60.0)
