"""Messages over a stream between processes of one gateway: msgpack behind its length."""

import asyncio
import struct
from typing import Any, BinaryIO

import msgspec

_LENGTH = struct.Struct(">I")
# Larger ones are none of a gateway's.
_MOST_BYTES = 2**27
# Not JSON, which has no infinity.
encode = msgspec.msgpack.Encoder().encode


def framed(message: Any) -> bytes:
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises EOFError."""
    return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size)))


def read_frame_now(stream: BinaryIO) -> bytes:
    """Waits for it; nothing where the stream has ended."""
    head = stream.read(_LENGTH.size)
    return stream.read(_length(head)) if len(head) == _LENGTH.size else b""


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > _MOST_BYTES:
        raise EOFError(f"{length} bytes are no message")
    return int(length)
