"""Two gateways that know of each other by a real Redis alone: limits, load, and Redis lost while clients ask."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from tests.engines.streams import Stream, get, metric, post
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.service.processes import Running, comes_true, serving, started
from tests.run.service.test_process import pool_at, stream, write
from tests.run.share.keys import asked, known_to_all, made_key
from tests.run.share.redis_server import RedisServer, redis_server

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Pool

pytestmark = pytest.mark.database


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("replicas")
    file = folder / "fleet.toml"
    file.write_text(fleet_text(fleet(pool("amd"))))
    with started(folder, "emulate", file) as running:
        yield pool_at(pool("amd"), running.said["replicas"][0]["url"])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as made:
        yield made


@contextlib.contextmanager
def gateways(
    folder: Path, replica: Pool, redis: RedisServer, *options: str, keys: bool = False, **serve: Any
) -> Iterator[list[Running]]:
    file = folder / "fleet.toml"
    write(file, replica, **serve)
    state = 'keys = "required"\nstore = "keys.db"\n' if keys else ""
    file.write_text(f'{file.read_text()}\n[state]\n{state}redis = "{redis.url}"\n')
    own = ("--ops-port", "0")
    with serving(folder, file, *options, *own) as one, serving(folder, file, *own) as two:
        for running in (one, two):
            assert comes_true(lambda running=running: figure(running, "crosstie_share_machines") == 1)  # type: ignore[misc]
        yield [one, two]
        for running in (one, two):
            assert "Traceback" not in running.errors
            assert running.ends() == 0


def figure(running: Running, name: str) -> float:
    return metric(get(running.said.get("ops_url", running.url), "/metrics").text, name)


def explained(running: Running) -> str:
    said = post(running.url, "/crosstie/explain", {"model": SMALL, "messages": [{"role": "user", "content": "hi"}]})
    return str(json.loads(said.text)["considered"][0]["dropped"])


def test_load_of_one_is_seen_by_the_other(replica: Pool, redis: RedisServer, tmp_path: Path) -> None:
    tight = pool("amd", max_in_flight=3, backends=replica.backends)
    with gateways(tmp_path, tight, redis, "--workers", "2", queue_s=60.0) as (one, two):
        flying = [stream(one) for _ in range(3)]
        assert comes_true(lambda: explained(two) == "room: 3 in flight of 3")
        waiting = [Stream(two.url, SMALL, 3) for _ in range(2)]
        assert comes_true(lambda: figure(two, "crosstie_queued") == 2)
        # Room that is made on the one machine is taken on the other.
        for each in [*flying, *waiting]:
            assert each.read(120).ending == "length"


def test_a_limit_holds_over_both(replica: Pool, redis: RedisServer, tmp_path: Path) -> None:
    with gateways(tmp_path, replica, redis, "--workers", "2", keys=True) as both:
        for attempt in range(3):
            key, minute = made_key(tmp_path, f"key-{attempt}"), time.time() // 60
            # Known to all that will be asked, before any is asked for something that counts.
            assert known_to_all(both, key)
            assert [asked(both[0], key) for _ in range(6)] == [200] * 6
            settled(redis)
            answers = [asked(both[1], key) for _ in range(6)]
            if time.time() // 60 == minute:
                # The window slides by the minute; this one has not.
                assert answers == [200] * 4 + [429] * 2
                settled(redis)
                assert asked(both[0], key) == 429
                return
        pytest.fail("three minutes were not enough to ask twelve times within one")


def settled(server: RedisServer) -> None:
    """Both have spoken twice since: each hears while it speaks, so what was told before has been heard by now."""
    with Redis(port=server.port) as client, client.pubsub(ignore_subscribe_messages=True) as hearing:
        hearing.subscribe("crosstie:load")
        spoken: dict[bytes, int] = {}
        deadline = time.monotonic() + 60.0
        while len(spoken) < 2 or min(spoken.values()) < 3:
            assert time.monotonic() < deadline
            message = hearing.get_message(timeout=1.0)
            if message is not None:
                # An array whose first part is a machine's name of 16 letters.
                machine = message["data"][2:18]
                spoken[machine] = spoken.get(machine, 0) + 1


def test_redis_lost_while_clients_ask(replica: Pool, redis: RedisServer, tmp_path: Path) -> None:
    with gateways(tmp_path, replica, redis) as both:
        endings: list[str | None] = []
        stop = threading.Event()

        def clients(running: Running) -> None:
            while not stop.is_set():
                endings.append(Stream(running.url, SMALL, 5).read(60).ending)

        asking = [threading.Thread(target=clients, args=(running,)) for running in both]
        for one in asking:
            one.start()
        try:
            assert comes_true(lambda: len(endings) >= 10)
            redis.kill()
            assert comes_true(lambda: all("Redis is lost" in running.errors for running in both))
            assert all(figure(running, "crosstie_share_up") == 0 for running in both)
            so_far = len(endings)
            assert comes_true(lambda: len(endings) >= so_far + 10)
            redis.start()
            assert comes_true(lambda: all("Redis is back" in running.errors for running in both))
            so_far = len(endings)
            assert comes_true(lambda: len(endings) >= so_far + 10)
        finally:
            stop.set()
            for one in asking:
                one.join()
        assert set(endings) == {"length"}
        for running in both:
            assert figure(running, "crosstie_share_up") == 1
            assert figure(running, "crosstie_share_lost_total") == 1
            assert running.errors.count("Redis is lost") == 1
            assert running.errors.count("Redis is back") == 1


def test_a_gateway_starts_without_its_redis(replica: Pool, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    write(file, replica)
    file.write_text(f'{file.read_text()}\n[state]\nredis = "redis://127.0.0.1:1/0"\n')
    with serving(tmp_path, file) as running:
        assert Stream(running.url, SMALL, 3).read(60).ending == "length"
        assert comes_true(lambda: "Redis is lost, load and limits are this machine's own" in running.errors)
        assert figure(running, "crosstie_share_up") == 0
        assert running.ends() == 0
