"""What an emulated replica tells of its cache, as vLLM does: numbered batches on a PUB socket, and a ROUTER that
repeats them."""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, MissingExtra

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
