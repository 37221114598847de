"""Two machines' boards in one process and a real Redis between them, which is killed, hung, locked and filled."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from math import inf, nan
from pathlib import Path
from time import monotonic, time

import msgspec
import pytest
from tests.run.gateway.fakes import until
from tests.run.share.proxy import proxy
from tests.run.share.redis_server import RedisServer, redis_server
from tests.run.share.test_learnt import Site as Learning
from tests.waiting import LIMIT_S

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.route.prefix import prefix_hashes
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.peers import PeerReport, Peers
from crosstie_gateway.share.redis_share import LearntShare, RedisShare, connected
from crosstie_gateway.share.tally import BoardTally

pytestmark = pytest.mark.database

A = "http://a:1/v1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as made:
        yield made


class Site:
    def __init__(self, address: str, store: str = "s"):
        self.board = Board(1)
        self.machines = Peers(self.board, store, monotonic, monotonic)
        self.machines.replicas([A])
        self.cell = self.board.cells([A], 0)[A]
        self.tally = BoardTally(self.board, 0)
        self.told: list[str | None] = []
        self.share = RedisShare(connected(address), self.machines, self.told.append)
        self.share.start()

    def load(self, in_flight: int) -> None:
        self.cell.write((in_flight, *(0.0,) * 8, inf, 0.0, -inf))


@contextlib.asynccontextmanager
async def sites(*addresses: str) -> AsyncIterator[list[Site]]:
    made = [Site(address) for address in addresses]
    try:
        yield made
    finally:
        for one in made:
            await one.share.stop()
            one.board.close()


def total(site: Site, minute: int) -> int:
    return site.tally.total(7, minute)[0]


def test_load_and_limits_reach_the_other(server: RedisServer) -> None:
    async def scenario() -> None:
        minute = int(time() // 60)
        async with sites(server.url, server.url) as (one, two):
            one.load(3)
            one.tally.add(7, minute, 2, 10)
            await until(lambda: two.cell.in_flight_elsewhere() == 3)
            await until(lambda: two.tally.total(7, minute) == (2, 10))
            two.load(1)
            two.tally.add(7, minute, 1, 1)
            await until(lambda: one.cell.in_flight_elsewhere() == 1)
            await until(lambda: one.tally.total(7, minute) == two.tally.total(7, minute) == (3, 11))
            assert one.share.up
            assert len(one.machines) == 1
            # One that ends says so.
            await two.share.stop()
            await until(lambda: one.cell.in_flight_elsewhere() == 0)
            assert one.told == []

    asyncio.run(scenario())


def test_who_comes_later_knows_what_was_used(server: RedisServer) -> None:
    async def scenario() -> None:
        minute = int(time() // 60)
        async with sites(server.url) as (one,):
            one.tally.add(7, minute, 2, 10)
            await until(lambda: one.share.up)
            # Told a second time before it counts as settled: the first may have been under way.
            one.tally.add(7, minute, 1, 1)
            client = connected(server.url)
            key = f"crosstie:used:s:{minute}"
            field = f"{one.board.identity}/7"
            async with asyncio.timeout(LIMIT_S):
                while await client.hget(key, field) != b"3 11":
                    await asyncio.sleep(0.01)
            assert 0 < await client.ttl(key) <= 180
            await client.aclose()
        # The first has gone, what its keys used has not.
        async with sites(server.url) as (two,):
            await until(lambda: two.tally.total(7, minute) == (3, 11))

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_redis_lost_and_found(server: RedisServer, how: str) -> None:
    async def scenario() -> None:
        minute = int(time() // 60)
        async with sites(server.url, server.url) as (one, two):
            one.load(3)
            one.tally.add(7, minute, 1, 1)
            await until(lambda: two.cell.in_flight_elsewhere() == 3 and total(two, minute) == 1)
            await until(lambda: one.share.up and two.share.up)
            if how == "killed":
                server.kill()
            else:
                server.send(signal.SIGSTOP)
            await until(lambda: not one.share.up and not two.share.up)
            # Load is this machine's own; what is known to be used stays used.
            await until(lambda: two.cell.in_flight_elsewhere() == 0)
            assert total(two, minute) == 1
            one.load(4)
            one.tally.add(7, minute, 1, 1)
            two.tally.add(7, minute, 1, 1)
            assert (total(one, minute), total(two, minute)) == (2, 2)
            if how == "killed":
                server.start()
            else:
                server.send(signal.SIGCONT)
            await until(lambda: two.cell.in_flight_elsewhere() == 4)
            await until(lambda: total(one, minute) == total(two, minute) == 3)
            await until(lambda: one.share.up and two.share.up)
            # Also to one who comes now, though a Redis that was killed had forgotten it.
            async with sites(server.url) as (late,):
                await until(lambda: total(late, minute) == 3)
            for site in (one, two):
                assert len(site.told) == 2
                assert site.told[0]
                assert site.told[1] is None
                assert site.share.lost == 1

    asyncio.run(scenario())


def test_a_wrong_password_is_told_without_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        with redis_server(tmp_path, "--requirepass", "right-one") as server:
            wrong = server.url.replace("redis://", "redis://:not-this-one@")
            right = server.url.replace("redis://", "redis://:right-one@")
            async with sites(wrong, right) as (one, two):
                await until(lambda: one.told and two.share.up)
                assert not one.share.up
                assert one.told[0] is not None
                assert "AuthenticationError" in one.told[0]
                assert "not-this-one" not in one.told[0]
                assert two.told == []

    asyncio.run(scenario())


def test_a_redis_that_is_full_counts_as_lost(server: RedisServer) -> None:
    async def scenario() -> None:
        minute = int(time() // 60)
        async with sites(server.url) as (one,):
            await until(lambda: one.share.up)
            client = connected(server.url)
            await client.config_set("maxmemory", "1")
            one.tally.add(7, minute, 1, 1)
            await until(lambda: one.told)
            assert one.told[0] is not None
            assert "OutOfMemory" in one.told[0] or "OOM" in one.told[0]
            assert total(one, minute) == 1
            await client.config_set("maxmemory", "0")
            await until(lambda: one.share.up)
            async with asyncio.timeout(LIMIT_S):
                while await client.hget(f"crosstie:used:s:{minute}", f"{one.board.identity}/7") != b"1 1":
                    await asyncio.sleep(0.01)
            await client.aclose()

    asyncio.run(scenario())


def test_strangers_on_the_channel_are_not_understood(server: RedisServer) -> None:
    async def scenario() -> None:
        minute = int(time() // 60)
        async with sites(server.url, server.url) as (one, two):
            await until(lambda: one.share.up and two.share.up)
            client = connected(server.url)
            nonsense = [
                PeerReport("m", True, {A: (amount,) * 12}, "s", [(key_id, (minute, 1, 1))])
                for amount, key_id in ((-1.0, 1), (nan, 1), (inf, 1), (1e300, 1), (1.0, -5), (1.0, 2**60))
            ]
            for said in (b"", b"hello", b"\xff" * 100, b"\x91\x01", b"{}", *map(msgspec.msgpack.encode, nonsense)):
                await client.publish("crosstie:load", said)
            used = {"what": "ever", "a/b": "1 2", "a/1": "", "a/-7": "1 1", f"a/{2**70}": "1 1", "a/2": f"{10**30} 1"}
            await client.hset(f"crosstie:used:s:{minute}", mapping=used)
            await client.aclose()
            one.load(2)
            await until(lambda: two.cell.in_flight_elsewhere() == 2)
            assert one.told == two.told == []
            assert one.cell.in_flight_elsewhere() == 0
            # Nor in what is found at the start.
            async with sites(server.url) as (late,):
                await until(lambda: late.share.up)
                assert late.told == []
                assert late.tally.total(2, minute) == (0, 0)

    asyncio.run(scenario())


def test_one_that_is_cut_off_goes_by_itself_and_the_others_by_each_other(server: RedisServer) -> None:
    async def scenario() -> None:
        async with proxy(server.port) as between, sites(between.url, server.url, server.url) as (cut, one, two):
            for number, site in enumerate((cut, one, two), 1):
                site.load(number)
            await until(lambda: [site.cell.in_flight_elsewhere() for site in (cut, one, two)] == [5, 4, 3])
            between.cut()
            await until(lambda: [site.cell.in_flight_elsewhere() for site in (cut, one, two)] == [0, 3, 2])
            assert (cut.share.up, one.share.up, two.share.up) == (False, True, True)
            cut.load(7)
            between.mend()
            await until(lambda: [site.cell.in_flight_elsewhere() for site in (cut, one, two)] == [5, 10, 9])
            assert one.told == two.told == []

    asyncio.run(scenario())


def test_a_redis_that_swallows_every_word_counts_as_lost(server: RedisServer) -> None:
    async def scenario() -> None:
        async with proxy(server.port) as between, sites(between.url, server.url) as (one, two):
            two.load(2)
            await until(lambda: one.cell.in_flight_elsewhere() == 2)
            between.silent = True
            await until(lambda: one.told and not one.share.up)
            await until(lambda: one.cell.in_flight_elsewhere() == 0)
            between.mend()
            await until(lambda: one.cell.in_flight_elsewhere() == 2)

    asyncio.run(scenario())


def test_a_slow_redis_brings_everything_late_and_holds_nobody_up(server: RedisServer) -> None:
    async def scenario() -> None:
        async with proxy(server.port) as between, sites(between.url, server.url) as (one, two):
            await until(lambda: one.share.up)
            between.delay_s = 0.2
            two.load(2)
            # Nobody who asks waits: it is memory, and has been heard or has not.
            assert one.cell.in_flight_elsewhere() in (0, 2)
            await until(lambda: one.cell.in_flight_elsewhere() == 2)
            one.load(1)
            await until(lambda: two.cell.in_flight_elsewhere() == 1)

    asyncio.run(scenario())


def test_one_that_is_killed_is_forgotten_and_one_of_its_name_is_heard(server: RedisServer) -> None:
    async def scenario() -> None:
        async with sites(server.url, server.url) as (one, killed):
            killed.load(4)
            await until(lambda: one.cell.in_flight_elsewhere() == 4)
            # Without a word: as by kill -9.
            task = killed.share._task
            assert task is not None
            while not task.done():
                task.cancel()
                await asyncio.sleep(0.01)
            killed.share.up = False
            await until(lambda: one.cell.in_flight_elsewhere() == 0)
            assert len(one.machines) == 0
            again = Site(server.url)
            again.board.identity = killed.board.identity
            again.load(1)
            await until(lambda: one.cell.in_flight_elsewhere() == 1)
            await again.share.stop()
            again.board.close()

    asyncio.run(scenario())


def test_a_message_of_many_megabytes_is_not_read(server: RedisServer) -> None:
    async def scenario() -> None:
        async with sites(server.url, server.url) as (one, two):
            await until(lambda: one.share.up and two.share.up)
            client = connected(server.url)
            load = {f"http://{number}": (1.0,) * 12 for number in range(60_000)}
            huge = msgspec.msgpack.encode(PeerReport("m", True, {A: (9.0,) * 12, **load}, "s", []))
            assert len(huge) > 4 * 2**20
            await client.publish("crosstie:load", huge)
            await client.aclose()
            two.load(2)
            await until(lambda: one.cell.in_flight_elsewhere() == 2)
            assert one.share.up
            assert one.told == []

    asyncio.run(scenario())


def test_what_is_learnt_reaches_others_and_strangers_are_not_understood(server: RedisServer, catalog: Catalog) -> None:
    async def scenario() -> None:
        one, two = (Learning(name, catalog) for name in ("a", "b"))
        shares = [LearntShare(connected(server.url), each.learnt, lambda: 7.0) for each in (one, two)]
        for share in shares:
            share.start()
        try:
            await until(lambda: all(share.up for share in shares))
            client = connected(server.url)
            for said in (b"", b"hello", b"\xff" * 100, b"\x91\x01"):
                await client.publish("crosstie:learnt", said)
            await client.aclose()
            one.serve(prefix_hashes(b"x" * 9000))
            await until(lambda: two.learnt.heard == 4)
            assert sum(two.held(prefix_hashes(b"x" * 9000))) == 4
            server.kill()
            await until(lambda: not any(share.up for share in shares))
            one.serve()
            server.start()
            await until(lambda: all(share.up for share in shares))
            # What was seen while nobody could be told is not told late.
            one.serve(prefix_hashes(b"y" * 9000))
            await until(lambda: two.learnt.heard == 8)
        finally:
            for share in shares:
                await share.stop()

    asyncio.run(scenario())


def test_no_library_and_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"state.redis: is no address"):
        connected("http://user:secret@x")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(BadInput, match=r"pip install '\./packages/gateway\[redis\]'"):
        connected("redis://127.0.0.1")
