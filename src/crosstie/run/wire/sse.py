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
        self.held = b""

    def whole(self, data: bytes) -> bytes:
        """All events that are complete now, in their own bytes."""
        if data.endswith(_END):
            # What nearly every read of a stream is.
            if not self.held:
                return data
            data, self.held = self.held + data, b""
            return data
        data = self.held + data if self.held else data
        # By `find`: `in` takes bytes for a number first, and makes an exception of it.
        if data.find(b"\r") >= 0 and data.find(b"\r\n\r\n") >= 0:
            end = max(data.rfind(b"\r\n\r\n") + 4, data.rfind(_END) + 2)
        else:
            end = data.rfind(_END) + 2
        if end < 2:
            end = len(data) if len(data) > MOST_HELD else 0
        self.held = data[end:]
        return data[:end]


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
