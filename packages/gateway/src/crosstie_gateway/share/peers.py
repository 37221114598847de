"""What peers, gateways on other machines, have reported: kept by machine, and on the board as one sum. Totals are told,
never differences: repeated and late ones count once."""

import os
import socket
from collections.abc import Callable, Iterable
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, cast
from urllib.parse import urlsplit

import msgspec

from crosstie.route.load import LOAD_FIELDS, SharedLoad, combined
from crosstie_gateway.share.board import SILENT_S, Board, Cell
from crosstie_gateway.share.tally import BoardTally

# What is beyond these is no number of a gateway's.
_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Sum = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
# Of one replica, as `route.load` has it, but how long ago in the place of when: clocks need not agree.
Load = tuple[
    _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount
]  # fmt: skip
_MOMENTS = tuple(LOAD_FIELDS.index(name) for name in ("rate_at", "head_at", "first_at"))
# As long ago as never.
_LONG_AGO_S = 1e6
# Of one key: its minute, requests and tokens.
Used = tuple[_Count, _Sum, _Sum]


class PeerReport(msgspec.Struct, array_like=True):
    """What one machine tells its peers: what has changed, or, now and then, all of it."""

    machine: str
    whole: bool
    load: dict[str, Load]
    # By key, for those who have the same store.
    store: str
    used: list[tuple[_Count, Used]]
    leaving: bool = False
    # By key, dollars in flight: as announced, and how much more at the worst.
    held: list[tuple[_Count, tuple[_Amount, _Amount]]] = []


# Others that are kept, and keys of each: more are no gateways of one fleet.
_MOST_PEERS, _MOST_KEYS = 1024, 65_536


class _Peer:
    def __init__(self) -> None:
        self.heard_at = 0.0
        # By moments of the clock here.
        self.load: dict[str, SharedLoad] = {}
        self.held: dict[int, tuple[float, float]] = {}


class Peers:
    """`now` is the clock that rates on the board go by, `clock` the one that silence is measured with."""

    def __init__(self, board: Board, store: str, now: Callable[[], float], clock: Callable[[], float]):
        self.board, self.store, self._now, self._clock = board, store, now, clock
        self.tally = BoardTally(board, 0)
        self._peers: dict[str, _Peer] = {}
        # By name: where its load is summed up for all to read, and where this machine's own stands.
        self._of_peers: dict[str, Cell] = {}
        self._own: dict[str, Cell] = {}
        self._name_at: dict[int, str] = {}
        # By minute and key, what each other machine has used.
        self._used: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        self._changed: set[str] = set()
        # Keys of which there is news, and the minute in which there last was.
        self._keys: dict[int, None] = {}
        self._keys_lately: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(bool(peer.heard_at) for peer in self._peers.values())

    def replicas(self, urls: Iterable[str]) -> None:
        """Those that are served here."""
        names = {url: known_as(url) for url in urls}
        of_peers, own = (self.board.cells(list(names), row) for row in (self.board.workers, 0))
        self._of_peers = {names[url]: cell for url, cell in of_peers.items()}
        self._own = {names[url]: cell for url, cell in own.items()}
        self._name_at = {cell.at: name for name, cell in self._own.items()}
        for name in self._of_peers:
            self._write(name)

    # What is told

    def news(self, whole: bool, minute: int) -> PeerReport | None:
        """What has changed since the last call; `whole`: all load, and what was used lately."""
        self._changed |= {self._name_at[at] for at in self.board.changed_replicas() if at in self._name_at}
        for at in self.board.changed_keys():
            key_id = self.board.words[at] - 1
            self._keys[key_id], self._keys_lately[key_id] = None, minute
        if not whole and not self._changed and not self._keys:
            return None
        now = self._now()
        names = self._own if whole else [name for name in self._changed if name in self._own]
        load = {name: _told(self._own[name].of_this_machine(now), now) for name in names}
        self._changed = set()
        used: list[tuple[int, Used]] = []
        held = [(key_id, self.tally.own_held(key_id)) for key_id in self._keys]
        for key_id in self._keys:
            for used_in in (minute - 1, minute):
                requests, tokens = self.tally.own(key_id, used_in)
                if requests or tokens:
                    used.append((key_id, (used_in, requests, tokens)))
        self._keys = {}
        return PeerReport(self.board.identity, whole, load, self.store, used, held=held)

    def take_back(self, report: PeerReport) -> None:
        """Tells it again: it may not have arrived."""
        self._changed |= set(report.load)
        self._keys.update((key_id, None) for key_id, _ in (*report.used, *report.held))

    def all_is_news(self, minute: int) -> None:
        """Tells all keys again: Redis may have forgotten them."""
        self.forget_silent(minute)
        self._keys.update(dict.fromkeys(self._keys_lately))

    # What is heard

    def hear(self, report: PeerReport, minute: int) -> None:
        if report.machine == self.board.identity:
            # One's own voice: what carries it works.
            self.board.heard()
            return
        if report.machine not in self._peers and len(self._peers) >= _MOST_PEERS:
            return
        peer = self._peers.setdefault(report.machine, _Peer())
        peer.heard_at = self._clock()
        before, now = peer.load, self._now()
        # Of replicas that are served here: what another serves besides is told again once that changes.
        load = {name: _heard(told, now) for name, told in report.load.items() if name in self._of_peers}
        peer.load = load if report.whole else {**before, **load}
        if report.leaving:
            peer.load, peer.heard_at = {}, 0.0
        for name in {*load, *(before if report.whole or report.leaving else ())}:
            self._write(name)
        if report.store == self.store:
            for key_id, (of, requests, tokens) in report.used:
                # A machine with a wrong clock counts for itself alone.
                if abs(of - minute) <= 1:
                    self.hear_used(report.machine, key_id, of, requests, tokens)
            self._hear_held(peer, dict.fromkeys(peer.held, (0.0, 0.0)) if report.leaving else dict(report.held))
        if load:
            self.board.ring(-1)

    def _hear_held(self, peer: _Peer, held: dict[int, tuple[float, float]]) -> None:
        for key_id, usd in held.items():
            if key_id in peer.held or len(peer.held) < _MOST_KEYS:
                peer.held[key_id] = usd
        for key_id in held:
            of_all = [peer.held.get(key_id, (0.0, 0.0)) for peer in self._peers.values()]
            self.tally.set_peers_held(key_id, sum(usd for usd, _ in of_all), sum(more for _, more in of_all))

    def hear_used(self, machine: str, key_id: int, minute: int, requests: int, tokens: int) -> None:
        if machine == self.board.identity:
            return
        by_machine = self._used.setdefault((minute, key_id), {})
        # A negative count gives no key more than its own limit.
        by_machine[machine] = (max(requests, 0), max(tokens, 0))
        self.tally.set_peers(key_id, minute, *(sum(used[n] for used in by_machine.values()) for n in (0, 1)))

    def forget_silent(self, minute: int) -> None:
        """Forgets machines that have been silent, with all they have in flight."""
        for machine in [name for name, peer in self._peers.items() if self._clock() - peer.heard_at > SILENT_S]:
            gone = self._peers.pop(machine)
            self._hear_held(gone, dict.fromkeys(gone.held, (0.0, 0.0)))
            for name in gone.load:
                self._write(name)
        if self._used or self._keys_lately:
            self._keys_lately = {key_id: last for key_id, last in self._keys_lately.items() if last >= minute - 1}
            self._used = {at: used for at, used in self._used.items() if at[0] >= minute - 2}

    def _write(self, name: str) -> None:
        cell = self._of_peers.get(name)
        if cell is not None:
            loads = [peer.load[name] for peer in self._peers.values() if name in peer.load]
            cell.write(combined(loads, self._now()))


def _told(load: SharedLoad, now: float) -> Load:
    """How long ago, in the place of moments."""
    told = list(load)
    for at in _MOMENTS:
        told[at] = min(max(now - load[at], 0.0), _LONG_AGO_S) if isfinite(load[at]) else _LONG_AGO_S
    return cast(Load, tuple(told))


def _heard(told: Load, now: float) -> SharedLoad:
    load = [*told]
    for at, never in zip(_MOMENTS, (-inf, inf, -inf), strict=True):
        load[at] = now - told[at] if told[at] < _LONG_AGO_S else never
    return tuple(load)


def this_machine() -> str:
    """One network of loopback addresses: a host, or a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def known_as(url: str) -> str:
    """A replica's name among all machines; loopback addresses get their machine's name."""
    host = urlsplit(url).hostname or ""
    loopback = host == "localhost" or host.startswith("127.") or host == "::1"
    return f"{url} at {this_machine()}" if loopback else url


def store_name(place: str | None) -> str:
    """Keys have the same numbers only where they are kept in the same store; empty: there are none."""
    if place is None:
        return ""
    if "://" in place and not place.startswith("sqlite://"):
        # Not its host: machines may reach it by different ones.
        return f"postgresql/{urlsplit(place).path.strip('/')}"
    return f"{os.path.realpath(place.removeprefix('sqlite://'))} at {this_machine()}"
