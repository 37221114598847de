"""Who leads and who loads, in virtual time: a Redis that is made up, gateways that are cut off, stand still, die and
come back, and clocks that do not agree. At no moment do two lead, or load on one replica."""

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from crosstie_gateway.hosting import residents as module
from crosstie_gateway.hosting.residents import HOLD_S, HostReport, Lease, ReplicaClaim, Residents

SLOT = "http://a:1"
CLAIM_AT = f"crosstie:host:f:claim:{SLOT}"


class MadeUpRedis:
    """What a lease needs of it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.away = False
        self._kept: dict[str, tuple[bytes, float]] = {}

    def empty(self) -> None:
        self._kept = {}

    def read(self, key: str) -> bytes | None:
        value, until = self._kept.get(key, (b"", 0.0))
        return value if until > self.now else None

    def write(self, key: str, value: Any, px: int) -> None:
        self._kept[key] = (value if isinstance(value, bytes) else str(value).encode(), self.now + px / 1000.0)


class Client:
    def __init__(self, redis: MadeUpRedis):
        self.redis, self.cut = redis, False

    def _reach(self) -> MadeUpRedis:
        if self.cut or self.redis.away:
            raise ConnectionError("cut off")
        return self.redis

    async def get(self, key: str) -> bytes | None:
        return self._reach().read(key)

    async def set(self, key: str, value: Any, nx: bool = False, px: int = 10**12) -> bool:
        redis = self._reach()
        if nx and redis.read(key) is not None:
            return False
        redis.write(key, value, px)
        return True

    async def incr(self, key: str) -> int:
        redis = self._reach()
        redis.write(key, int(redis.read(key) or b"0") + 1, 10**12)
        return int(redis.read(key) or b"0")

    async def eval(self, script: str, keys: int, key: str, *given: Any) -> int:
        redis = self._reach()
        assert keys == 1
        first, *more = (one if isinstance(one, bytes) else str(one).encode() for one in given)
        found = redis.read(key)
        if script is module._PUT_BACK:
            older = found is not None and found.startswith(b"free ") and int(found[5:]) < int(first)
            if found is not None and not older:
                return 0
            redis.write(key, first, int(more[0]))
            return 1
        if (found or (first if script is module._RELEASE else b"")) != first:
            return 0
        if script is module._RENEW:
            redis.write(key, first, int(more[0]))
        else:
            assert script in (module._SWAP, module._RELEASE)
            redis.write(key, more[0], int(more[1]))
        return 1


class Site:
    """A gateway that loads whenever it may. `ahead_s`: of its clock."""

    def __init__(self, name: str, redis: MadeUpRedis, ahead_s: float):
        clock: Callable[[], float] = lambda: redis.now + ahead_s  # noqa: E731
        self.client = Client(redis)
        self.lease, self.residents = Lease("f", name, clock), Residents(name, clock)
        self.name, self.still_until = name, 0.0
        self.load_ends, self.loads_now = 0.0, False
        self.connected = False

    async def turn(self, everyone: "list[Site]") -> None:
        """What `ResidentShare` does each second."""
        try:
            if not self.connected:
                self.lease.lost_sight()
            await self.lease.keep(self.client, self.residents.number, self.residents.claims)
            self.connected = True
        except ConnectionError:
            self.connected = False
            return
        now = self.residents.clock()
        claims = {slot: one.until - now for slot, one in self.lease.claimed.items() if one.until > now}
        report = HostReport(self.name, self.lease.held, self.lease.number, 1, {}, [], {}, {}, {}, claims)
        for one in everyone:
            if one is not self and not one.client.cut and not self.client.cut:
                one.residents.hear(report)


def held(everyone: list[Site]) -> list[str]:
    return [one.name for one in everyone if one.lease.held]


async def passes(redis: MadeUpRedis, everyone: list[Site], seconds: float) -> None:
    for _ in range(round(seconds)):
        redis.now += 1.0
        for one in everyone:
            await one.turn(everyone)
        assert len(held(everyone)) <= 1


def test_one_leads_and_the_next_when_it_has_gone() -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        sites = [Site(name, redis, ahead) for name, ahead in (("a", 0.0), ("b", 1000.0), ("c", -500.0))]
        await passes(redis, sites, HOLD_S)
        assert held(sites) == [], "a Redis that knows of none may have forgotten one"
        await passes(redis, sites, 2)
        assert held(sites) == ["a"]
        await passes(redis, sites, 30)
        assert held(sites) == ["a"]
        # One that ends well says so.
        await sites[0].lease.give_up(sites[0].client)
        await passes(redis, sites[1:], 1)
        assert held(sites) == ["b"]
        assert sites[1].lease.number > sites[0].lease.number
        # One that was killed does not.
        gone = sites.pop(1)
        await passes(redis, [sites[1]], HOLD_S - 1)
        assert held([sites[1]]) == []
        await passes(redis, [sites[1]], HOLD_S + 3)
        assert held([sites[1]]) == ["c"]
        assert not gone.lease.held

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cut", "stands still"])
def test_a_leader_that_is_cut_off_has_stopped_before_the_next_begins(how: str) -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        a, b = Site("a", redis, 0.0), Site("b", redis, 77.0)
        await passes(redis, [a, b], HOLD_S + 3)
        assert held([a, b]) == ["a"]
        a.client.cut = how == "cut"
        await passes(redis, [a, b] if how == "cut" else [b], 2 * HOLD_S + 3)
        assert held([a, b]) == ["b"]
        a.client.cut = False
        await passes(redis, [a, b], 20)
        assert held([a, b]) == ["b"]

    asyncio.run(scenario())


def test_a_redis_that_began_anew_is_told_who_leads_and_what_is_loading() -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        a, b = Site("a", redis, 0.0), Site("b", redis, 0.0)
        await passes(redis, [a, b], HOLD_S + 3)
        assert await a.lease.claim(a.client, [SLOT], 60.0, {})
        number = a.lease.number
        await passes(redis, [a, b], 2)
        redis.empty()
        await passes(redis, [a, b], 2)
        assert held([a, b]) == ["a"]
        assert redis.read(CLAIM_AT) == b"%d" % number
        # And again, while nobody reaches it but who is not the leader: that one has heard of the load.
        a.client.cut = True
        redis.empty()
        await passes(redis, [a, b], 2 * HOLD_S)
        assert held([a, b]) == ["b"]
        assert b.lease.number > number, "it counts from where it was, not from 1"
        assert not await b.lease.claim(b.client, [SLOT], 60.0, b.residents.claims)
        # One that comes new and has heard nothing finds it in Redis, where the other has put it back.
        new = Site("c", redis, 5.0)
        await b.lease.give_up(b.client)
        await passes(redis, [new], 2)
        assert held([new]) == ["c"]
        assert not await new.lease.claim(new.client, [SLOT], 60.0, new.residents.claims)
        await passes(redis, [new], 60)
        assert await new.lease.claim(new.client, [SLOT], 60.0, new.residents.claims)
        await new.lease.release(new.client, [SLOT])
        assert redis.read(CLAIM_AT) == b"free %d" % new.lease.number

    asyncio.run(scenario())


def test_a_load_that_ended_is_not_waited_for_by_who_has_not_heard_of_its_end() -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        a, b = Site("a", redis, 0.0), Site("b", redis, 3.0)
        await passes(redis, [a, b], HOLD_S + 3)
        assert await a.lease.claim(a.client, [SLOT], 600.0, {})
        await passes(redis, [a, b], 1)
        # It says so to Redis, and is cut off before it has told the others.
        await a.lease.release(a.client, [SLOT])
        a.client.cut = True
        await passes(redis, [a, b], 2 * HOLD_S + 3)
        assert held([a, b]) == ["b"]
        assert SLOT in b.residents.claims
        assert await b.lease.claim(b.client, [SLOT], 600.0, b.residents.claims)
        # One that was not said to have ended is, and so is one of which Redis has only an older word.
        await passes(redis, [a, b], 2)
        a.client.cut, b.client.cut = False, True
        await passes(redis, [a, b], 2 * HOLD_S + 3)
        assert held([a, b]) == ["a"]
        assert not await a.lease.claim(a.client, [SLOT], 600.0, {SLOT: ReplicaClaim(redis.now + 500.0, b.lease.number)})
        redis.write(CLAIM_AT, b"free 1", 10**6)
        assert not await a.lease.claim(a.client, [SLOT], 600.0, {SLOT: ReplicaClaim(redis.now + 500.0, b.lease.number)})
        redis.write(CLAIM_AT, b"free %d" % (b.lease.number + 1), 10**6)
        assert await a.lease.claim(a.client, [SLOT], 600.0, {SLOT: ReplicaClaim(redis.now + 500.0, b.lease.number)})

    asyncio.run(scenario())


@pytest.mark.parametrize("forgets", [False, True])
def test_a_load_that_ended_while_redis_was_away_is_not_waited_for(forgets: bool) -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        a, b = Site("a", redis, 0.0), Site("b", redis, 3.0)
        await passes(redis, [a, b], HOLD_S + 3)
        assert await a.lease.claim(a.client, [SLOT], 600.0, {})
        await passes(redis, [a, b], 1)
        assert SLOT in b.residents.claims
        redis.away = True
        with contextlib.suppress(ConnectionError):
            await a.lease.release(a.client, [SLOT])
        await passes(redis, [a, b], HOLD_S)
        redis.away = False
        if forgets:
            redis.empty()
        # The other, who still remembers the claim, is the first to see Redis again, and puts it back.
        await b.turn([a, b])
        await a.turn([a, b])
        # It leads by then, without the first, and does not wait the ten minutes.
        await passes(redis, [b], 2 * HOLD_S + 3)
        assert held([b]) == ["b"]
        assert b.lease.number > a.lease.number
        assert await b.lease.claim(b.client, [SLOT], 600.0, b.residents.claims)

    asyncio.run(scenario())


def test_a_claim_is_put_back_over_the_mark_of_one_before_it() -> None:
    """A Redis that forgot both has the older one's mark first: a third, who heard of neither, keeps away."""

    async def scenario() -> None:
        redis = MadeUpRedis()
        a, b = Site("a", redis, 0.0), Site("b", redis, 3.0)
        await passes(redis, [a, b], HOLD_S + 3)
        assert await a.lease.claim(a.client, [SLOT], 600.0, {})
        await a.lease.release(a.client, [SLOT])
        await a.lease.give_up(a.client)
        await b.turn([a, b])
        assert held([a, b]) == ["b"]
        assert await b.lease.claim(b.client, [SLOT], 600.0, {})
        redis.empty()
        await a.lease.keep(a.client, 0, {})
        assert redis.read(CLAIM_AT) == b"free %d" % a.lease.number
        await b.lease.keep(b.client, 0, {})
        assert redis.read(CLAIM_AT) == b"%d" % b.lease.number
        # And not the other way round.
        await a.lease.keep(a.client, 0, {})
        assert redis.read(CLAIM_AT) == b"%d" % b.lease.number

    asyncio.run(scenario())


def test_a_mark_does_not_come_after_the_next_claim_of_the_same_leader() -> None:
    """Its number is the same, so that in Redis both claims look alike."""

    async def scenario() -> None:
        redis = MadeUpRedis()
        a = Site("a", redis, 0.0)
        await passes(redis, [a], HOLD_S + 3)
        assert await a.lease.claim(a.client, [SLOT], 600.0, {})
        await a.lease.release(a.client, [SLOT])
        redis.empty()
        under_way, go_on, at_once = asyncio.Event(), asyncio.Event(), a.client.eval

        async def slow(script: str, keys: int, key: str, *given: Any) -> int:
            if script is module._RELEASE:
                under_way.set()
                await go_on.wait()
            return await at_once(script, keys, key, *given)

        a.client.eval = slow  # type: ignore[method-assign]
        keeping = asyncio.create_task(a.lease.keep(a.client, 0, {}))
        await under_way.wait()
        claiming = asyncio.create_task(a.lease.claim(a.client, [SLOT], 600.0, {}))
        for _ in range(10):
            await asyncio.sleep(0)
        go_on.set()
        await keeping
        assert await claiming
        assert redis.read(CLAIM_AT) == b"%d" % a.lease.number

    asyncio.run(scenario())


def test_a_leader_that_leads_again_has_another_number() -> None:
    async def scenario() -> None:
        redis = MadeUpRedis()
        a = Site("a", redis, 0.0)
        await passes(redis, [a], HOLD_S + 3)
        first = a.lease.number
        assert a.lease.held
        redis.away = True
        await passes(redis, [a], HOLD_S + 1)
        assert not a.lease.held
        redis.away = False
        redis.empty()
        await passes(redis, [a], 2 * HOLD_S + 3)
        assert a.lease.held
        assert a.lease.number > first

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_one_leads_and_one_loads(seed: int) -> None:
    """Faults at random, the same every time: partitions, pauses, deaths, a Redis that is away or forgets; loads that go
    on at the engine whatever becomes of who began them."""

    async def scenario() -> None:
        rng, redis = Random(seed), MadeUpRedis()
        names = iter(range(10**6))
        sites = [Site(f"g{next(names)}", redis, rng.uniform(-1e4, 1e4)) for _ in range(4)]
        loading_until, loads, leaders = 0.0, 0, set[str]()
        for step in range(3000):
            redis.now = step / 4.0
            for one in sites:
                if redis.now < one.still_until:
                    continue
                if step % 4 == int(one.name[1:]) % 4:
                    await one.turn(sites)
                if one.loads_now and redis.now >= one.load_ends:
                    # Its end is said to Redis if that can be done; what is told to others may come late.
                    one.loads_now = False
                    with contextlib.suppress(ConnectionError):
                        await one.lease.release(one.client, [SLOT])
                if one.lease.held:
                    leaders.add(one.name)
                    # A claim is for what a load may take at most, which this one does take at times.
                    for_s = 20.0
                    try:
                        claimed = await one.lease.claim(one.client, [SLOT], for_s, one.residents.claims)
                    except ConnectionError:
                        continue
                    if claimed and redis.now >= one.load_ends:
                        assert redis.now >= loading_until, f"two loads at {redis.now}"
                        loads += 1
                        one.loads_now = True
                        one.load_ends = loading_until = redis.now + rng.uniform(1.0, for_s - 1.0)
            assert len(held(sites)) <= 1, f"two lead at {redis.now}"
            fault = rng.random()
            victim = rng.choice(sites)
            if fault < 0.01:
                victim.client.cut = not victim.client.cut
            elif fault < 0.015:
                victim.still_until = redis.now + rng.uniform(0.0, 20.0)
            elif fault < 0.018:
                sites.remove(victim)
                sites.append(Site(f"g{next(names)}", redis, rng.uniform(-1e4, 1e4)))
            elif fault < 0.022:
                redis.away = not redis.away
            elif fault < 0.024 and all(one.connected and redis.now >= one.still_until for one in sites):
                # What Redis forgets while those who know are cut off from it as well, nobody can know.
                redis.empty()
        assert loads > 5
        assert len(leaders) > 1

    asyncio.run(scenario())


# What they tell each other


def report(machine: str, number: int = 0, revision: int = 0, **more: Any) -> HostReport:
    values: dict[str, Any] = {"leads": False, "asked": {}, "waiting": [], "in_flight": {}, **more}
    return HostReport(machine=machine, number=number, revision=revision, **values)


def test_the_leader_of_the_higher_number_is_heard() -> None:
    now = [100.0]
    one = Residents("a", lambda: now[0])
    one.hear(report("b", 3, 1, leads=True, states={"x": ("resident", "")}))
    one.hear(report("c", 2, 9, leads=True, states={"x": ("asleep", "")}))
    leader = one.leader()
    assert leader is not None
    assert leader.states == {"x": ("resident", "")}
    now[0] += 3.1
    assert one.leader() is None
    assert one.others() == []
    # Its own words come back to it, and are no other's.
    one.hear(report("a", 9, 9, leads=True))
    assert one.leader() is None


def test_what_others_have_and_whether_they_obey() -> None:
    now = [100.0]
    one = Residents("a", lambda: now[0])
    assert one.hear(report("b", 3, 1, asked={"m": 10}, waiting=["m"], in_flight={"x": 2})) == {}
    assert one.hear(report("b", 3, 1, asked={"m": 12}, waiting=["m"], in_flight={"x": 2})) == {"m": 2}
    # What comes twice was asked once, and nobody is asked for more than can be.
    assert one.hear(report("b", 3, 1, asked={"m": 12}, in_flight={"x": 2})) == {}
    assert one.hear(report("b", 3, 1, asked={"m": 10**9}, in_flight={"x": 2})) == {"m": 1000}
    one.hear(report("c", 3, 2, waiting=["n"], in_flight={"x": 1}))
    assert one.in_flight("x") == 3
    assert one.waiting() == {"n"}
    assert one.all_obey(3, 1)
    assert not one.all_obey(3, 2)
    # Who has gone is not waited for, be it with a word or without.
    one.hear(report("b", leaving=True))
    assert one.all_obey(3, 2)
    one.hear(report("b", 3, 1))
    now[0] += 2.0
    one.hear(report("c", 3, 2))
    now[0] += 1.5
    assert one.all_obey(3, 2)


def test_strangers_without_end_are_not_all_kept() -> None:
    one = Residents("a", lambda: 1.0)
    for number in range(3000):
        one.hear(report(f"stranger {number}", asked={"m": 1}))
    assert len(one._heard) == 1024
    assert len(one._asked) == 1024


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"hello", b"\xff" * 60,
        msgspec.msgpack.encode(["a", False, 1]),
        msgspec.msgpack.encode(["a", True, -1, 0, {}, [], {}]),
        msgspec.msgpack.encode(["a", True, 1, 0, {}, [], {}, {"x": ["exploded", ""]}]),
        msgspec.msgpack.encode(["a", True, 1, 0, {}, [], {}, {}, {}, {"x": 1e12}]),
    ],
)  # fmt: skip
def test_what_is_no_report_is_not_read_as_one(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.Decoder(HostReport).decode(wrong)
