"""Server-sent events: bytes as they come in, whole events out.

An event that is cut in two by the network, or for good by a server that dies, is never passed on in part.
"""

from typing import Final

_END: Final = b"\n\n"
# An event of more than this is passed on as it comes; nothing that an engine sends is that long.
MOST_HELD: Final = 4 * 2**20


class Events:
    """Holds back the beginning of an event until its end has come."""

    def __init__(self) -> None:
        # No end is in it; grown in place, since an event may come in the smallest pieces.
        self.held = bytearray()

    def whole(self, data: bytes) -> bytes:
        """All events that are complete now, in their own bytes."""
        held = self.held
        if not held and data.endswith(_END):
            # What nearly every read of a stream is.
            return data
        # Of what is held only the last bytes can belong to an end.
        seen = bytes(held[-3:]) + data
        # By `find`: `in` takes bytes for a number first, and makes an exception of it.
        end = _behind(seen, _END)
        if seen.find(b"\r") >= 0:
            end = max(end, _behind(seen, b"\r\n\r\n"))
        held += data
        if not end:
            if len(held) <= MOST_HELD:
                return b""
            end = len(seen)
        self.held = bytearray(seen[end:])
        return bytes(held[: len(held) - len(self.held)])


def _behind(data: bytes, last: bytes) -> int:
    """Where the last of these ends; 0: there is none."""
    at = data.rfind(last)
    return at + len(last) if at >= 0 else 0


def payloads(events: bytes) -> list[bytes]:
    """What the `data` fields of whole events say, one for each event that has any."""
    found = []
    for event in events.replace(b"\r\n", b"\n").split(_END):
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            found.append(b"\n".join(lines))
    return found


def event(payload: bytes) -> bytes:
    return b"data: " + payload + _END
