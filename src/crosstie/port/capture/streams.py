"""Streams and events: which of them are part of the capture, and whether all come back to where it began."""

import threading
from itertools import count
from typing import TYPE_CHECKING, Any

from crosstie.port.capture.device_tensor import DEVICE
from crosstie.port.capture.reasons import EVENT_QUERY, ISOLATION, LEGACY, STREAM_SYNC
from crosstie.port.capture.sites import Site

if TYPE_CHECKING:
    from crosstie.port.capture.device import Device


class Streams:
    """The current stream is a thread's own, as in CUDA: what another thread launches is not captured."""

    def __init__(self, device: "Device") -> None:
        # Classes of this device: user code calls them, and asks isinstance of them.
        self.stream_class = type("Stream", (Stream,), {"_of": device})
        self.event_class = type("Event", (Event,), {"_of": device})
        self._numbers = count()
        self.all: list[Stream] = []
        self.default: Stream = self.stream_class()
        self._current = threading.local()
        self._origin: Stream | None = None

    def enter(self, stream: "Stream") -> int:
        self.all.append(stream)
        return next(self._numbers)

    @property
    def current(self) -> "Stream":
        return getattr(self._current, "stream", self.default)

    @current.setter
    def current(self, stream: "Stream") -> None:
        self._current.stream = stream

    def begin_capture(self) -> None:
        self._origin = self.current = self.stream_class()
        self.current.captured = True

    def end_capture(self) -> "list[Stream]":
        """The streams with work that never joined."""
        unjoined = [s for s in self.all if s.captured and s is not self._origin and s.unjoined is not None]
        for stream in self.all:
            stream.captured = False
        self.current = self.default
        return unjoined


class Stream:
    _of: "Device"

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.captured = DEVICE, priority, False
        # Whether it has run operations before the capture, so that the allocator keeps memory for it.
        self.has_memory = False
        # Where it took on work that no other captured stream has waited for.
        self.unjoined: Site | None = None
        self.stream_id = self.cuda_stream = self._of.streams.enter(self) if hasattr(self._of, "streams") else 0
        self._outer: list[Stream] = []

    def wait_stream(self, stream: "Stream") -> None:
        self._wait(stream.captured, stream, f"{self}.wait_stream({stream})")

    def wait_event(self, event: "Event") -> None:
        # An event that was never recorded is waited for by nobody.
        if event.stream is not None:
            self._wait(event.captured, event.stream, f"{self}.wait_event(event of {event.stream})")

    def _wait(self, captured: bool, other: "Stream", said: str) -> None:
        if other is self:
            return
        if captured:
            if self is self._of.streams.default:
                self._of.hazard(LEGACY, said)
                return
            # What the other has not brought back is this one's to bring back.
            self.captured, self.unjoined = True, self.unjoined or other.unjoined
            other.unjoined = None
        elif self.captured:
            self._of.met(ISOLATION, said)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self._of.streams.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._of.met(STREAM_SYNC, "stream.synchronize()")

    def query(self) -> bool:
        self._of.met(EVENT_QUERY, "stream.query()")
        return True

    def is_capturing(self) -> bool:
        return self.captured

    def __enter__(self) -> "Stream":
        self._outer.append(self._of.streams.current)
        self._of.streams.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._of.streams.current = self._outer.pop()

    def __str__(self) -> str:
        return f"stream {self.stream_id}"


class Event:
    _of: "Device"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.captured, self.device = False, DEVICE
        self.stream: Stream | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = on = stream or self._of.streams.current
        self.captured = on.captured

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self._of.streams.current).wait_event(self)

    def synchronize(self) -> None:
        self._of.met(STREAM_SYNC, "event.synchronize()")

    def query(self) -> bool:
        self._of.met(EVENT_QUERY, "event.query()")
        return True

    def elapsed_time(self, end: "Event") -> float:
        self._of.met(EVENT_QUERY, "event.elapsed_time()")
        return 1.0
