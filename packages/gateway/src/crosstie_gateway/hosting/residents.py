"""Which gateway decides what is loaded on shared replicas, and what it and the others tell each other about it.

One of all gateways of a fleet leads: it holds a lease. The others report what they are asked for and have in flight,
and do as it says. Rules, each for a fault that it stands against:

    lease    it is Redis' for HOLD_S, renewed every second; its holder stops counting on it a second earlier, by its own
             clock, from before it asked. So a leader that is cut off has stopped when the next one begins
    absence  who finds no lease watches for HOLD_S before it takes one: after a Redis that began anew, empty, the leader
             of before has put its lease back by then, or has stopped. One that ends well leaves the lease free
    claims   before a replica is touched it is claimed for as long as the load may take at most, by name, in Redis, and
             all are told. A load that goes on at the engine after its leader is gone is so waited for by the next one.
             Who knows of a claim that Redis has forgotten goes by it all the same, and puts it back. What was released
             is not gone from Redis but marked so, because who has not heard of it could not tell that from forgotten;
             who released it sees to it that the mark is there, as long as anybody may remember the claim
    number   every lease has a higher one than those before, and what a leader of a lower number says is not heard
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Annotated, Any, NamedTuple

import msgspec

from crosstie.route.load import State
from crosstie_gateway.share.board import SILENT_S
from crosstie_gateway.share.redis_share import RedisTalk

HOLD_S, _MARGIN_S = 6.0, 1.0
_Name = Annotated[str, msgspec.Meta(max_length=1024)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
# Gateways that are kept; and requests of one report that count.
_MOST_MACHINES, _MOST_ASKED = 1024, 1000
_FREE = b"free"
# Compared and changed in one step. What is not there is "".
_RENEW = "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end"
_SWAP = (
    "if (redis.call('get',KEYS[1]) or '')~=ARGV[1] then return 0 end "
    "redis.call('set',KEYS[1],ARGV[2],'px',ARGV[3]) return 1"
)
# The mark stays for as long as anybody may remember the claim, also in a Redis that has forgotten it.
_RELEASE = (
    "if (redis.call('get',KEYS[1]) or ARGV[1])~=ARGV[1] then return 0 end "
    "redis.call('set',KEYS[1],ARGV[2],'px',ARGV[3]) return 1"
)
# Where there is nothing, or a mark that is of before.
_PUT_BACK = (
    "local found=redis.call('get',KEYS[1]) "
    "if found and tonumber(string.match(found,'^free (%d+)$') or ARGV[1])>=tonumber(ARGV[1]) then return 0 end "
    "redis.call('set',KEYS[1],ARGV[1],'px',ARGV[2]) return 1"
)


class HostReport(msgspec.Struct, array_like=True):
    """What one gateway tells the others of its fleet. Replicas and slots by names that are the same to all."""

    machine: _Name
    leads: bool
    # A leader's own, and how often its states have changed; another's: of the leader that it obeys, and up to which.
    number: _Count
    revision: _Count
    # Requests by model since it began, a total; and models that somebody waits for.
    asked: dict[_Name, _Count]
    waiting: list[_Name]
    # By replica, after it has obeyed.
    in_flight: dict[_Name, _Count]
    # A leader's: by replica; by model that is loaded nowhere; and by slot, the seconds that it may take at most.
    states: dict[_Name, tuple[State, _Name]] = {}
    absent: dict[_Name, tuple[_Name, _Seconds]] = {}
    claims: dict[_Name, _Seconds] = {}
    leaving: bool = False


class ReplicaClaim(NamedTuple):
    """A leader's claim on a slot, with the leader's number: its load may go on until then."""

    until: float
    number: int

    @property
    def value(self) -> bytes:
        return b"%d" % self.number

    @property
    def released(self) -> bytes:
        return b"%b %d" % (_FREE, self.number)

    def is_over(self, value: bytes | None) -> bool:
        """By Redis' value: whether this claim or a later one was released."""
        mark, _, number = (value or b"").partition(b" ")
        return mark == _FREE and number.isdigit() and int(number) >= self.number


class Residents:
    """What is known of the other gateways. No input or output; `clock` is this machine's."""

    def __init__(self, machine: str, clock: Callable[[], float]):
        self.machine, self.clock = machine, clock
        # Of the others: when each was last heard of, and what it said.
        self._heard: dict[str, tuple[float, HostReport]] = {}
        self._leader: tuple[float, HostReport] | None = None
        # The highest that was heard of.
        self.number = 0
        # By slot, another's load that may go on there.
        self.claims: dict[str, ReplicaClaim] = {}
        self._asked: dict[str, dict[str, int]] = {}

    def hear(self, report: HostReport) -> dict[str, int]:
        """The requests by model of other gateways that are new in the report."""
        now = self.clock()
        if report.machine == self.machine:
            return {}
        if report.leaving:
            self._heard.pop(report.machine, None)
            if self._leader is not None and self._leader[1].machine == report.machine:
                self._leader = None
            return {}
        self.forget_silent()
        if report.machine not in self._heard and len(self._heard) >= _MOST_MACHINES:
            return {}
        self._heard[report.machine] = now, report
        if report.leads and report.number >= self.number:
            self.number, self._leader = report.number, (now, report)
            # Those that it has released are gone; those of a leader before it stay until their time is over.
            of_others = {slot: claim for slot, claim in self.claims.items() if claim.number != report.number}
            claims = {slot: ReplicaClaim(now + for_s, report.number) for slot, for_s in report.claims.items()}
            self.claims = {**of_others, **claims}
        # Of one that was never heard of it is not known when it was asked.
        before = self._asked.get(report.machine, report.asked)
        self._asked[report.machine] = report.asked
        more = {model: total - before.get(model, 0) for model, total in report.asked.items()}
        return {model: min(times, _MOST_ASKED) for model, times in more.items() if times > 0}

    def forget_silent(self) -> None:
        heard = self.clock() - SILENT_S
        for machine in [name for name, (at, _) in self._heard.items() if at < heard]:
            del self._heard[machine]
            self._asked.pop(machine, None)
        self.claims = {slot: claim for slot, claim in self.claims.items() if claim.until > self.clock()}

    def leader(self) -> HostReport | None:
        """What the leader said, while it is heard of."""
        if self._leader is None or self.clock() - self._leader[0] > SILENT_S:
            return None
        return self._leader[1]

    def others(self) -> list[HostReport]:
        heard = self.clock() - SILENT_S
        return [report for at, report in self._heard.values() if at >= heard]

    def in_flight(self, name: str) -> int:
        return sum(other.in_flight.get(name, 0) for other in self.others())

    def waiting(self) -> set[str]:
        return {model for other in self.others() for model in other.waiting}

    def all_obey(self, number: int, revision: int) -> bool:
        """Whether all others have obeyed up to this revision, and said what they have in flight."""
        return all((other.number, other.revision) >= (number, revision) for other in self.others())


class Lease:
    """Of one fleet, in Redis. Every step is short; nothing is held by hoping."""

    def __init__(self, fleet: str, machine: str, clock: Callable[[], float], hold_s: float = HOLD_S):
        self._at = f"crosstie:host:{fleet}"
        self._machine, self._clock, self._hold_s = machine, clock, hold_s
        self._until = -inf
        self.number = 0
        self._absent_since: float | None = None
        # By slot, this gateway's own; and those that it has released, until their time is over.
        self.claimed: dict[str, ReplicaClaim] = {}
        self._released: dict[str, ReplicaClaim] = {}
        # One at a time: a mark for a claim that was released must not come after the next claim of the same leader.
        self._claiming = asyncio.Lock()

    @property
    def held(self) -> bool:
        return self._clock() < self._until

    @property
    def _value(self) -> bytes:
        return f"{self._machine} {self.number}".encode()

    def lost_sight(self) -> None:
        """Redis was away: a lease that was absent may have been there since."""
        self._absent_since = None

    async def keep(self, client: Any, known: int, claims: Mapping[str, ReplicaClaim]) -> None:
        """Renews it, or takes it if it may; once a second. `known`: the highest number heard of. `claims`: of others,
        put back if Redis has lost them."""
        began, hold_ms = self._clock(), int(1000 * self._hold_s)
        # Redis may have been away, or begun anew, and others would go by the claim.
        async with self._claiming:
            await self._mark_released(client)
        if self.held:
            renewed = await client.eval(_RENEW, 1, self._at, self._value, hold_ms)
            if not renewed:
                renewed = await client.set(self._at, self._value, nx=True, px=hold_ms)
            self._until = began + self._hold_s - _margin(self._hold_s) if renewed else -inf
            await self._put_back(client, self.claimed)
            return
        value = await client.get(self._at)
        if value is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = began
        await self._put_back(client, claims)
        watched_s = began - self._absent_since if self._absent_since is not None else 0.0
        if value == _FREE or (value is None and watched_s >= self._hold_s):
            await self._take(client, value, known, hold_ms)

    async def _take(self, client: Any, value: bytes | None, known: int, hold_ms: int) -> None:
        number = await client.incr(f"{self._at}:number")
        before = max(known, self.number)
        if number <= before:
            # A Redis that began anew counts from 1 again.
            number = before + 1
            await client.set(f"{self._at}:number", number)
        self.number = number
        began = self._clock()
        if value is None:
            taken = await client.set(self._at, self._value, nx=True, px=hold_ms)
        else:
            taken = await client.eval(_SWAP, 1, self._at, _FREE, self._value, hold_ms)
        if taken:
            self._until = began + self._hold_s - _margin(self._hold_s)
            # Whenever it loses this one it watches anew.
            self._absent_since = None

    async def _put_back(self, client: Any, claims: Mapping[str, ReplicaClaim]) -> None:
        for slot, claim in claims.items():
            left_ms = int(1000 * (claim.until - self._clock()))
            if left_ms > 0:
                await client.eval(_PUT_BACK, 1, self._claim_at(slot), claim.value, left_ms)

    async def give_up(self, client: Any) -> None:
        """Frees the lease, so that the next leader need not wait; also one that this gateway no longer counts on."""
        self._until = -inf
        await client.eval(_SWAP, 1, self._at, self._value, _FREE, 86_400_000)

    async def claim(self, client: Any, slots: Collection[str], for_s: float, known: Mapping[str, ReplicaClaim]) -> bool:
        """Whether all of these are this gateway's for so long. `known`: of others, by slot."""
        async with self._claiming:
            for slot in slots:
                # By the clock of before it asked.
                claim = ReplicaClaim(self._clock() + for_s, self.number)
                value = await client.get(self._claim_at(slot))
                if not self.held or not self._may_claim(slot, value, known.get(slot)):
                    return False
                if not await client.eval(_SWAP, 1, self._claim_at(slot), value or b"", claim.value, int(1000 * for_s)):
                    return False
                self.claimed[slot] = claim
                self._released.pop(slot, None)
            return self.held

    def _may_claim(self, slot: str, value: bytes | None, known: ReplicaClaim | None) -> bool:
        """By Redis' value of that slot, and what others have told."""
        own = self.claimed.get(slot)
        if known is not None and known.until > self._clock():
            return known.is_over(value)
        return value is None or value.startswith(_FREE) or (own is not None and value == own.value)

    async def release(self, client: Any, slots: Collection[str]) -> None:
        async with self._claiming:
            self._released |= {slot: claim for slot in slots if (claim := self.claimed.pop(slot, None)) is not None}
            await self._mark_released(client)

    async def _mark_released(self, client: Any) -> None:
        now = self._clock()
        self._released = {slot: claim for slot, claim in self._released.items() if claim.until > now}
        for slot, claim in self._released.items():
            left_ms = max(int(1000 * (claim.until - now)), 1)
            await client.eval(_RELEASE, 1, self._claim_at(slot), claim.value, claim.released, left_ms)

    def _claim_at(self, slot: str) -> str:
        return f"{self._at}:claim:{slot}"


def _margin(hold_s: float) -> float:
    return min(_MARGIN_S, hold_s / 4.0)


# Over Redis


# What Redis may take to answer somebody who is about to load.
_PATIENCE_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HostReport).decode


class ResidentShare(RedisTalk):
    """`report`: what to tell now; `on_asked`: requests by model at other gateways; `on_news`: the leader's state has
    changed."""

    every_s = 0.05

    def __init__(
        self, client: Any, fleet: str, machine: str, clock: Callable[[], float], report: Callable[[], HostReport],
        on_asked: Callable[[str, int], None], on_news: Callable[[], None], hold_s: float = HOLD_S,
    ):  # fmt: skip
        super().__init__(client, lambda why: None)
        self.channel = f"crosstie:host:{fleet}"
        self.residents, self.lease = Residents(machine, clock), Lease(fleet, machine, clock, hold_s)
        self._report, self._on_asked, self._on_news = report, on_asked, on_news
        self._said: tuple[object, ...] = ()

    async def begin(self) -> None:
        self.lease.lost_sight()

    async def tell(self, whole: bool) -> None:
        if whole:
            self.residents.forget_silent()
            await self.lease.keep(self._client, self.residents.number, self.residents.claims)
        report = self._report()
        said = (
            report.leads, report.number, report.revision, report.waiting, report.in_flight, report.states,
            set(report.claims),
        )  # fmt: skip
        if whole or said != self._said:
            await self._client.publish(self.channel, _encode(report))
            self._said = said

    def hear(self, data: bytes) -> None:
        report = _decode(data)
        for model, times in self.residents.hear(report).items():
            self._on_asked(model, times)
        if report.leads or report.waiting:
            self._on_news()

    def silence(self) -> None:
        self.residents.forget_silent()
        self.lease.lost_sight()

    async def leave(self) -> None:
        await self.lease.give_up(self._client)
        bye = HostReport(self.residents.machine, False, 0, 0, {}, [], {}, leaving=True)
        await self._client.publish(self.channel, _encode(bye))

    async def claim(self, slots: Collection[str], for_s: float) -> bool:
        """Whether this gateway may change these for so long; False where nobody can say."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.lease.claim(self._client, slots, for_s, self.residents.claims)
        except Exception:  # noqa: BLE001 (whatever it was: without a word of Redis' nothing is touched)
            return False

    async def release(self, slots: Collection[str]) -> None:
        # What cannot be said is over when its time is.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.lease.release(self._client, slots), _PATIENCE_S)
