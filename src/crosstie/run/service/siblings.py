"""Workers of one gateway ask each other: plain data over a socket each, in a folder that nobody else may enter."""

import asyncio
import contextlib
import fcntl
import os
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from crosstie.core.errors import BadInput, CrosstieError

# What a sibling may take to answer; one that is busy for longer is left out.
_PATIENCE_S = 2.0
# How long a change waits for that of another worker, and how often it looks.
_TURN_S, _LOOK_S = 15.0, 0.005
_MOST_BYTES = 64 * 2**20
_LENGTH = struct.Struct(">I")
_encode = msgspec.json.Encoder().encode


class _Asked(msgspec.Struct):
    verb: str
    what: dict[str, Any]


_decode_asked = msgspec.json.Decoder(_Asked).decode
_decode_answer = msgspec.json.Decoder(dict[str, Any]).decode


class Siblings:
    """The other workers. `verbs` is what this one can be asked, by name; they may be added later."""

    def __init__(
        self, folder: Path, row: int, workers: int, verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]
    ):
        self.folder, self._row, self._workers, self._verbs = folder, row, workers, verbs
        self._server: asyncio.Server | None = None

    def _at(self, row: int) -> str:
        return str(self.folder / f"worker-{row}")

    async def open(self) -> None:
        # What a worker in this place has left behind when it was killed.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(self._row))
        self._server = await asyncio.start_unix_server(self._answer, self._at(self._row))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            os.unlink(self._at(self._row))

    async def ask(self, verb: str, what: dict[str, Any]) -> list[dict[str, Any]]:
        """What each of them answers, in their order; those that do not are left out.

        One that refuses answers {"error": why}.
        """
        others = [row for row in range(self._workers) if row != self._row]
        said = await asyncio.gather(*(self._ask_one(row, verb, what) for row in others))
        return [one for one in said if one is not None]

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Only one of the workers at a time has it; the kernel takes it from one that dies."""
        with (self.folder / "turn").open("w") as file:
            deadline = monotonic() + _TURN_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if monotonic() > deadline:
                        raise BadInput("another worker is making a change and does not come to an end") from None
                    await asyncio.sleep(_LOOK_S)
            yield

    async def _ask_one(self, row: int, verb: str, what: dict[str, Any]) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(self._at(row))
                with contextlib.closing(writer):
                    writer.write(_framed(_Asked(verb, what)))
                    return _decode_answer(await _read(reader))
        except (OSError, EOFError, TimeoutError, msgspec.DecodeError):
            # Not there yet, gone, or not to be woken.
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, msgspec.DecodeError):
            asked = _decode_asked(await _read(reader))
            verb = self._verbs.get(asked.verb)
            try:
                answer = {"error": f"no {asked.verb} here"} if verb is None else verb(asked.what)
            except CrosstieError as error:
                answer = {"error": str(error)}
            writer.write(_framed(answer))
            await writer.drain()


def _framed(what: _Asked | dict[str, Any]) -> bytes:
    body = _encode(what)
    return _LENGTH.pack(len(body)) + body


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MOST_BYTES:
        raise EOFError(f"{length} bytes are no answer")
    return await reader.readexactly(length)
