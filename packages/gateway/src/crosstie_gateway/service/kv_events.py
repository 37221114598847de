"""Follows what engines tell of their caches: a thread that subscribes to every replica whose fleet file says where.

Batches are numbered. A missing one is asked for again. Where it cannot be had, or the connection was lost, what was
known is forgotten, and routing goes by what was sent there until the engine holds nothing or begins anew.
"""

import threading
from importlib import import_module
from time import monotonic
from typing import Any, NamedTuple

from crosstie.catalog.addresses import endpoint
from crosstie.core.errors import MissingExtra
from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family, Samples
from crosstie.route.held import HeldBlocks
from crosstie.route.live import Replica
from crosstie.wire.address import Address
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.service.kv_batches import BadBatch, take
from crosstie_gateway.service.process import Component, GatewayProcess

# No step of an engine has more to tell; and messages that may wait to be read, from each of them.
_MOST_BYTES, _MOST_WAITING = 8 * 2**20, 16
# How long the answer to a replay may take to begin or go on, how much it may be, and how long until the next is asked.
_REPLAY_S, _MOST_REPLAYED, _AGAIN_S = 5.0, 100_000, 1.0
# How often the thread looks whether it is to follow others.
_LOOK_S = 0.1
# The most that it works of the time, even for an engine that publishes without end.
_SHARE = 0.25
_LONGEST_REST_S = 0.5
# Messages of one replica before the next has its turn.
_TURN = 16


class EventAddress(NamedTuple):
    """Where a replica tells what it holds."""

    events: str
    replay: str | None
    topic: str


class Following:
    """One replica's events: which number comes next, and what to do about another. It changes `held`; sockets are
    somebody else's. `wants_replay`: the number from which batches are to be asked for again."""

    def __init__(self, held: HeldBlocks, *, can_replay: bool):
        self.held, self._can_replay = held, can_replay
        # The number that comes next; None: any may, since nothing has come yet.
        self._next: int | None = None
        # The last that came by itself: numbers go up, unless the engine has begun anew.
        self._last: int | None = None
        self.wants_replay: int | None = None
        self._asked_for = 0
        # Whether its beginning was asked for in vain: it is gone on with from wherever it is.
        self._joins = not can_replay
        self.refused = 0

    def connected(self) -> None:
        """To an engine that may be another than before."""
        self._next = self._last = None
        self.held.forget(complete=False)
        if self._can_replay:
            self.wants_replay, self._joins = 0, False

    def lost(self) -> None:
        """The engine or the way to it is gone: what it holds is unknown."""
        self.wants_replay = None
        self.held.forget(complete=False)

    def came(self, number: int, payload: bytes) -> None:
        """A published batch; not to be called while a replay is wanted or under way."""
        last, self._last = self._last, number
        if last is not None and number <= last:
            self._begun_anew(number)
        elif self._next is None:
            if number and not self._joins:
                self.wants_replay = 0
                return
            self.held.forget(complete=number == 0)
            self._next = number
        elif number > self._next:
            if self._can_replay:
                self.wants_replay = self._next
                return
            self.held.forget(complete=False)
            self._next = number
        if self._next == number:
            self._take(payload)

    def _begun_anew(self, number: int) -> None:
        self.held.forget(complete=number == 0)
        self._next = number
        if number and self._can_replay:
            self._next, self.wants_replay = 0, 0

    def replay_asked(self) -> None:
        self._asked_for = self.wants_replay or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """A batch that was asked for, or -1 after the last; whether the replay is over."""
        if number < 0:
            self.wants_replay = None
            if self._next is None:
                # Nothing was ever told: the engine holds nothing.
                self.held.forget(complete=True)
                self._next = 0
            elif self._last is not None and self._next <= self._last:
                # What was missing is not kept any more.
                self.replay_failed()
            return True
        if number == self._asked_for == 0 or (self._next is None and number >= self._asked_for):
            self.held.forget(complete=number == 0)
            self._next = number
        elif self._next is not None and number > self._next:
            self.held.forget(complete=False)
            self._next = number
        if number == self._next:
            self._take(payload)
        return False

    def replay_failed(self) -> None:
        """Goes on with what comes next, whichever number it has."""
        self.wants_replay, self._joins = None, True
        self.held.forget(complete=False)
        self._next = None if self._last is None else self._last + 1

    def _take(self, payload: bytes) -> None:
        self._next = (self._next or 0) + 1
        try:
            take(self.held, payload)
        except BadBatch:
            self.refused += 1
            self.held.forget(complete=False)


class _Stream:
    """The sockets of one replica."""

    def __init__(self, zmq: Any, context: Any, place: EventAddress, held: HeldBlocks):
        self.place, self._zmq, self._context = place, zmq, context
        self.following = Following(held, can_replay=place.replay is not None)
        self.events = self._socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, place.topic.encode())
        self.monitor = self.events.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.events.connect(place.events)
        self.replay: Any = None
        # Until when a replay may take, and from when on one may be asked for.
        self.patient_until = self.again_at = 0.0
        self._replayed = 0

    def _socket(self, kind: int) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVHWM, _MOST_WAITING)
        made.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        made.setsockopt(zmq.RECONNECT_IVL, 50)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        # A machine that has vanished says nothing.
        made.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return made

    def work(self, now: float) -> None:
        """Takes a few messages; what waits further has its turn after others."""
        self._watch()
        following = self.following
        if following.wants_replay is not None and self.replay is None and now >= self.again_at:
            self.ask_replay(now)
        if self.replay is not None:
            self._take_replay(now)
            return
        for _ in range(_TURN):
            if following.wants_replay is not None:
                return
            frames = self._receive(self.events)
            if frames is None:
                return
            if len(frames) == 3 and len(frames[1]) == 8:
                following.came(int.from_bytes(frames[1], "big"), frames[2])
            else:
                following.refused += 1

    def _watch(self) -> None:
        while (frames := self._receive(self.monitor)) is not None:
            if int.from_bytes(frames[0][:2], "little") == self._zmq.EVENT_DISCONNECTED:
                self.end_replay()
                self.following.lost()
            else:
                self.following.connected()

    def ask_replay(self, now: float) -> None:
        self.replay = self._socket(self._zmq.DEALER)
        self.replay.connect(self.place.replay)
        self.following.replay_asked()
        self.replay.send_multipart([b"", (self.following.wants_replay or 0).to_bytes(8, "big")])
        self.patient_until, self.again_at, self._replayed = now + _REPLAY_S, now + _AGAIN_S, 0

    def _take_replay(self, now: float) -> None:
        for _ in range(_TURN):
            frames = self._receive(self.replay)
            if frames is None:
                if now < self.patient_until:
                    return
                break
            self.patient_until, self._replayed = now + _REPLAY_S, self._replayed + 1
            # Newer vLLM (0.32 does) has the topic before the number, as where it publishes.
            if len(frames) not in (3, 4) or len(frames[-2]) != 8 or self._replayed > _MOST_REPLAYED:
                break
            if self.following.replayed(int.from_bytes(frames[-2], "big", signed=True), frames[-1]):
                self.end_replay()
                return
        else:
            return
        self.end_replay()
        self.following.replay_failed()

    def end_replay(self) -> None:
        if self.replay is not None:
            self.replay.close()
            self.replay = None

    def _receive(self, socket: Any) -> list[bytes] | None:
        try:
            frames: list[bytes] = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        return frames

    @property
    def sockets(self) -> list[Any]:
        return [self.monitor, self.events] if self.replay is None else [self.monitor, self.replay]

    def close(self) -> None:
        self.end_replay()
        self.events.disable_monitor()
        self.monitor.close()
        self.events.close()
        self.following.held.forget(complete=False)


class Subscriber:
    """The thread. `follow` says which replicas; it writes to the `HeldBlocks` given with them."""

    def __init__(self, zmq: Any):
        self._zmq = zmq
        self._wanted: dict[str, tuple[EventAddress, HeldBlocks]] = {}
        self._streams: dict[str, _Stream] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def follow(self, wanted: dict[str, tuple[EventAddress, HeldBlocks]]) -> None:
        self._wanted = wanted

    @property
    def refused(self) -> dict[str, int]:
        """Messages of each replica that were no batches of events."""
        return {key: stream.following.refused for key, stream in list(self._streams.items())}

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        context = self._zmq.Context()
        try:
            while not self._ending.is_set():
                self._go_to(context)
                poller = self._zmq.Poller()
                for stream in self._streams.values():
                    for socket in stream.sockets:
                        poller.register(socket, self._zmq.POLLIN)
                poller.poll(_LOOK_S * 1e3)
                began = monotonic()
                for stream in self._streams.values():
                    stream.work(began)
                spent = monotonic() - began
                self._ending.wait(min(spent * (1.0 - _SHARE) / _SHARE, _LONGEST_REST_S))
        finally:
            for stream in self._streams.values():
                stream.close()
            context.destroy(linger=0)

    def _go_to(self, context: Any) -> None:
        wanted = self._wanted
        for key, stream in list(self._streams.items()):
            if key not in wanted or wanted[key] != (stream.place, stream.following.held):
                self._streams.pop(key).close()
        for key, (place, held) in wanted.items():
            if key not in self._streams:
                self._streams[key] = _Stream(self._zmq, context, place, held)


class KvEvents(Component):
    """Follows the replicas of a fleet that tell of their caches; nothing where none does."""

    def __init__(self) -> None:
        self._subscriber: Subscriber | None = None
        self._known: dict[str, tuple[EventAddress, HeldBlocks]] = {}
        self._said: set[str] = set()

    async def start(self, process: GatewayProcess) -> None:
        self._gateway = process.gateway
        self.check(process.fleet)
        self.reloaded(process.fleet)

    def check(self, fleet: Fleet) -> None:
        if any(pool.kv_events for pool in fleet.pools):
            _library()

    def reloaded(self, fleet: Fleet) -> None:
        known: dict[str, tuple[EventAddress, HeldBlocks]] = {}
        for replica, place in _places(self._gateway):
            before = self._known.get(replica.key)
            held = before[1] if before is not None and before[0] == place else HeldBlocks()
            known[replica.key] = (place, held)
        for replica in self._gateway.live.replicas():
            replica.held = known[replica.key][1] if replica.key in known else None
        self._known = known
        if known and self._subscriber is None:
            self._subscriber = Subscriber(_library())
            self._look()
        if self._subscriber is not None:
            self._subscriber.follow(known)

    def families(self) -> list[Family]:
        if not self._known:
            return []
        held = [({"backend": key}, blocks) for key, (_, blocks) in self._known.items()]
        blocks: Samples = [(at, len(known)) for at, known in held]
        known: Samples = [(at, int(known.complete)) for at, known in held]
        counts = self._subscriber.refused if self._subscriber is not None else {}
        refused: Samples = [({"backend": key}, count) for key, count in counts.items()]
        return [
            ("crosstie_kv_blocks", "gauge", "Blocks that an engine says it holds.", blocks),
            ("crosstie_kv_known", "gauge", "1 where an engine has told of everything that it holds.", known),
            ("crosstie_kv_refused_total", "counter", "Messages in the place of KV events that were none.", refused),
        ]

    def _look(self) -> None:
        """Reports each replica once that publishes something else than events."""
        if self._subscriber is None:
            return
        self._looking = self._gateway.loop.call_later(1.0, self._look)
        for key, refused in self._subscriber.refused.items():
            if refused and key not in self._said:
                self._said.add(key)
                at = self._known[key][0].events if key in self._known else key
                sentence = f"{at} publishes what are no KV events: what {key} holds is not known"
                self._gateway.notify(Notice("kv_events_refused", "warning", sentence, backend=key))

    async def stop(self) -> None:
        if self._subscriber is not None:
            self._looking.cancel()
            self._subscriber.close()
            self._subscriber = None


def _library() -> Any:
    try:
        return import_module("zmq")
    except ImportError:
        raise MissingExtra("kv_events need the package pyzmq", "kv-events", "crosstie-gateway") from None


def _places(gateway: Gateway) -> list[tuple[Replica, EventAddress]]:
    places = []
    for live in gateway.live.pools:
        pool = live.pool
        for index, replica in enumerate(live.replicas):
            host = Address(replica.key).dials
            events = endpoint(pool.kv_events, index, host)
            if events is not None:
                places.append((replica, EventAddress(events, endpoint(pool.kv_replay, index, host), pool.kv_topic)))
    return places
