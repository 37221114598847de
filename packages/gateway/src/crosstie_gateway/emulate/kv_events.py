"""The cache of an emulated replica, by the bytes of prompts' beginnings, and what it tells of it, as vLLM does:
numbered batches on a PUB socket, and a ROUTER that repeats them."""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, MissingExtra
from crosstie.sim.prefix_cache import ENGINE_BLOCK, PrefixCache
from crosstie_gateway.emulate.tokens import BYTES_PER_TOKEN

# Batches that are kept to be sent again, as many as vLLM keeps.
_KEPT = 10_000
_TRIES = 500
_END = (-1).to_bytes(8, "big", signed=True)
_encode = msgspec.msgpack.Encoder().encode


class KvPublisher:
    """One replica's. `host`: where it is listened on, at free ports."""

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, topic: str = ""):
        try:
            self._zmq: Any = import_module("zmq")
        except ImportError:
            raise MissingExtra("kv_events need the package pyzmq", "kv-events", "crosstie-gateway") from None
        self._loop, self._topic = loop, topic.encode()
        self._context = self._zmq.Context()
        self._place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        # Before the number of a batch that is sent again: its topic, as newer vLLM has it; with older ones, nothing.
        self.replays_with: tuple[bytes, ...] = (self._topic,)
        # Whether batches get lost on their way; they are kept all the same.
        self.losing = False
        self.events = self.replay = f"{self._place}:*"
        self._open()

    def _open(self) -> None:
        """Numbers begin at 0: it has told nothing."""
        self._number, self._kept = 0, deque[tuple[int, bytes]](maxlen=_KEPT)
        self._out, self._again = (self._context.socket(kind) for kind in (self._zmq.PUB, self._zmq.ROUTER))
        for socket, place in ((self._out, self.events), (self._again, self.replay)):
            socket.setsockopt(self._zmq.LINGER, 0)
            if self._place.startswith("tcp://["):
                socket.setsockopt(self._zmq.IPV6, 1)
            self._bind(socket, place)
        self.events = self._out.getsockopt_string(self._zmq.LAST_ENDPOINT)
        self.replay = self._again.getsockopt_string(self._zmq.LAST_ENDPOINT)
        self._loop.add_reader(self._again.getsockopt(self._zmq.FD), self._answer)

    def _bind(self, socket: Any, place: str) -> None:
        """Tries again, since its former port may become free a moment later."""
        for left in range(_TRIES - 1, -1, -1):
            try:
                socket.bind(place)
                return
            except self._zmq.ZMQError as error:
                if not left or error.errno != self._zmq.EADDRINUSE:
                    raise BadInput(f"cannot publish at {place}: {error}") from None
                time.sleep(0.01)

    def _shut(self) -> None:
        self._loop.remove_reader(self._again.getsockopt(self._zmq.FD))
        for socket in (self._out, self._again):
            socket.close()

    def restart(self) -> None:
        """As an engine that has crashed and is back at the same address."""
        self._shut()
        self._open()

    def close(self) -> None:
        self._shut()
        self._context.destroy(linger=0)

    def stored(self, keys: Sequence[int], after: int | None, ids: bytes, block_tokens: int) -> None:
        said = array("I", ids).tolist()
        names = [key & (2**64 - 1) for key in keys]
        parent = None if after is None else after & (2**64 - 1)
        fields = {"block_hashes": names, "parent_block_hash": parent, "token_ids": said, "block_size": block_tokens}
        self._publish({"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None})

    def removed(self, keys: Sequence[int]) -> None:
        self._publish({"type": "BlockRemoved", "block_hashes": [key & (2**64 - 1) for key in keys], "medium": "GPU"})

    def cleared(self) -> None:
        self._publish({"type": "AllBlocksCleared"})

    def _publish(self, event: dict[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        payload = _encode([time.time(), [event], 0])
        if not self.losing:
            self._out.send_multipart((self._topic, number.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        self._kept.append((number, payload))
        # Readiness of these sockets is told once for all that waits.
        self._answer()

    def _answer(self) -> None:
        while True:
            try:
                frames = self._again.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) == 3:
                self._send_again(frames[0], int.from_bytes(frames[2], "big"))

    def _send_again(self, to: bytes, first: int) -> None:
        for number, payload in self._kept:
            if number >= first:
                self._send((to, b"", *self.replays_with, number.to_bytes(8, "big"), payload))
        self._send((to, b"", *self.replays_with, _END, b""))

    def _send(self, frames: tuple[bytes, ...]) -> None:
        self._again.send_multipart(frames, self._zmq.NOBLOCK)


# 64 tokens. Engines keep 16 to a block; four times as many hashes would buy a hit 24 tokens longer on average.
BLOCK_BYTES = 256
# For prompts cut into tokens, with ids of four bytes each: an engine's block.
ID_BLOCK_BYTES = ENGINE_BLOCK * 4


def block_keys(text: bytes, after: int = 0, size: int = BLOCK_BYTES) -> list[int]:
    """Keys of a text's whole blocks, which follow the block with the key `after`; each covers all that lies before it.
    They are Python's own hashes and differ from run to run."""
    keys, key = [], after
    for start in range(0, len(text) - size + 1, size):
        key = hash((key, text[start : start + size]))
        keys.append(key)
    return keys


class TellingCache:
    """A cache of prefixes whose owner may tell others of it."""

    def __init__(self, capacity_tokens: float, block_bytes: int, publisher: KvPublisher | None):
        self.block_bytes, self._publisher = block_bytes, publisher
        self.blocks = PrefixCache(capacity_tokens, block_bytes // BYTES_PER_TOKEN, ENGINE_BLOCK)
        if publisher is not None:
            self.blocks.dropped = []
        # By session, blocks that it refers to; and those that were closed, which none opens again.
        self.sessions: dict[str, dict[int, None]] = {}
        self._closed: set[str] = set()

    def refer(self, session: str, keys: list[int]) -> None:
        """What no session refers to goes first, as with SGLang's --enable-session-radix-cache."""
        if session not in self._closed:
            self.sessions.setdefault(session, {}).update(dict.fromkeys(keys))

    def close_session(self, session: str) -> None:
        self._closed.add(session)
        self.sessions.pop(session, None)

    def keep(self, keys: list[int], text: bytes) -> None:
        """Keeps a text's blocks, and publishes what was stored and dropped."""
        blocks, publisher, size = self.blocks, self._publisher, self.block_bytes
        known = next((place for place, key in enumerate(keys) if key not in blocks), len(keys)) if publisher else 0
        for held in self.sessions.values():
            blocks.touch(list(held))
        blocks.keep(keys, len(keys) * blocks.block_tokens)
        if publisher is None:
            return
        if known < len(keys):
            after = keys[known - 1] if known else None
            publisher.stored(keys[known:], after, text[known * size : len(keys) * size], blocks.block_tokens)
        if blocks.dropped:
            publisher.removed([key for key in blocks.dropped if isinstance(key, int)])
            blocks.dropped.clear()
