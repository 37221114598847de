"""The gateway's process while streams are in flight: its file changes, and it is told to end."""

import contextlib
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.streams import Stream, get, metric, post, refuses
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.service.processes import Running, comes_true, put, serving, started

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Pool, Serving

# Some five seconds of an emulated replica: longer than anything here takes to happen to it.
LONG = 900
POOLS = {
    "amd": pool("amd"),
    "nvidia": pool("nvidia", accelerator="h100-sxm", usd_per_gpu_hour=2.5),
    "spare": pool("spare", usd_per_gpu_hour=0.1),
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pool]]:
    """Emulated replicas that outlive every gateway of this module, as their fleet file would name them."""
    folder = tmp_path_factory.mktemp("replicas")
    file = folder / "fleet.toml"
    file.write_text(fleet_text(fleet(*POOLS.values())))
    with started(folder, "emulate", file) as running:
        urls = {one["pool"]: one["url"] for one in running.said["replicas"]}
        yield {name: pool_at(one, urls[name]) for name, one in POOLS.items()}
        assert running.ends(signal.SIGTERM) == 0


def pool_at(one: Pool, url: str) -> Pool:
    return pool(one.name, accelerator=one.accelerator, usd_per_gpu_hour=one.usd_per_gpu_hour, backends=(url,))


def write(file: Path, *pools: Pool, **serve: Any) -> None:
    serving = Serving(**{"slow_start_s": 0.0, "lame_duck_s": 0.0, **serve})
    put(file, fleet_text(fleet(*pools, policy="cheapest-meeting-target", serving=serving)))


@contextlib.contextmanager
def gateway(folder: Path, *pools: Pool, **serve: Any) -> Iterator[Running]:
    file = folder / "fleet.toml"
    write(file, *pools, **serve)
    with serving(folder, file) as running:
        yield running
        assert "Traceback" not in running.errors


def stream(running: Running, tokens: int = LONG) -> Stream:
    """A stream that has begun."""
    made = Stream(running.url, SMALL, tokens).read(60, until_events=2)
    assert made.status == 200
    return made


def assert_whole(one: Stream, tokens: int = LONG) -> None:
    one.read(120)
    assert one.ending == "length"
    assert one.events[-1] == "[DONE]"
    assert one.usage is not None
    assert one.usage["completion_tokens"] == tokens


def pool_of(running: Running, **headers: str) -> str | None:
    """Where a short request goes."""
    one = Stream(running.url, SMALL, 3, headers=headers).read(60)
    assert one.ending == "length", one.received
    return one.header("x-crosstie-pool")


def in_flight(running: Running) -> float:
    return metric(get(running.url, "/metrics").text, "crosstie_exchanges")


@pytest.mark.slow
def test_streams_survive_every_reload(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], pools["nvidia"]) as running:
        file = tmp_path / "fleet.toml"
        assert pool_of(running) == "amd"
        flying = [stream(running), Stream(running.url, SMALL, LONG, headers={"x-crosstie-pool": "nvidia"})]
        # A pool more, found by the change alone.
        write(file, *pools.values())
        assert comes_true(lambda: "fleet file read again: 3 pools, 3 backends" in running.errors)
        assert pool_of(running) == "spare"
        # A file that is wrong, found on SIGHUP: nothing changes.
        put(file, file.read_text().replace('accelerator = "h100-sxm"', 'accelerator = "h1000"'))
        running.send(signal.SIGHUP)
        refused = "fleet file refused, the old one goes on: "
        assert comes_true(lambda: refused in running.errors)
        (line,) = [line for line in running.errors.splitlines() if line.startswith(refused)]
        assert f"{file}: pool[1].accelerator: " in line
        assert "h1000" in line
        assert pool_of(running) == "spare"
        assert pool_of(running, **{"x-crosstie-pool": "nvidia"}) == "nvidia"
        # Two pools fewer, with a stream on each.
        write(file, pools["spare"])
        running.send(signal.SIGHUP)
        assert comes_true(lambda: "fleet file read again: 1 pools, 1 backends" in running.errors)
        assert pool_of(running) == "spare"
        said = post(running.url, "/v1/completions", {"model": SMALL, "prompt": "a", "max_tokens": 1})
        assert said.status == 200
        assert list(json.loads(get(running.url, "/ready").text)["pools"]) == ["spare"]
        assert in_flight(running) == 2
        for one, name in zip(flying, ("amd", "nvidia"), strict=True):
            assert_whole(one)
            assert one.header("x-crosstie-pool") == name
        # And back again: what was removed is used as if it were new.
        write(file, pools["nvidia"])
        running.send(signal.SIGHUP)
        assert comes_true(lambda: pool_of(running) == "nvidia")
        assert running.ends() == 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("", "fleet.toml: format: missing"),
        (None, "fleet.toml: "),
        # Each waits until the file has been looked at twice.
        pytest.param("format = 1\n[[pool", "fleet.toml: ", marks=pytest.mark.slow),
        pytest.param("backends", "fleet.toml: pool spare has no backends", marks=pytest.mark.slow),
        pytest.param(
            "words", "fleet.toml: pool[0].max_in_flight: 'many' must be a whole number", marks=pytest.mark.slow
        ),
    ],
)
def test_no_file_is_bad_enough_to_end_it(
    running_on_spare: Running, pools: dict[str, Pool], broken: str | None, said: str
) -> None:
    file = Path(running_on_spare.said["file"])
    before = running_on_spare.errors.count("refused")
    if broken is None:
        file.unlink()
    elif broken == "backends":
        write(file, POOLS["spare"])
    elif broken == "words":
        put(file, file.read_text().replace("max_in_flight = 256", 'max_in_flight = "many"'))
    else:
        put(file, broken)
    assert comes_true(lambda: running_on_spare.errors.count("refused") > before)
    assert said in [line for line in running_on_spare.errors.splitlines() if "refused" in line][-1]
    assert pool_of(running_on_spare) == "spare"
    read = running_on_spare.errors.count("read again")
    write(file, pools["spare"])
    assert comes_true(lambda: running_on_spare.errors.count("read again") > read)


@pytest.fixture(scope="module")
def running_on_spare(tmp_path_factory: pytest.TempPathFactory, pools: dict[str, Pool]) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("spare")
    with gateway(folder, pools["spare"]) as running:
        running.said["file"] = str(folder / "fleet.toml")
        yield running
        assert running.ends() == 0


@pytest.mark.slow
def test_sigterm_answers_everything_that_has_come(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], pools["nvidia"], drain_s=60) as running:
        flying = [stream(running, 400) for _ in range(20)]
        raced = Stream(running.url, SMALL, 5)
        # The rest of these comes when the gateway has stopped to listen.
        with half_a_request(running, b"GET /ready HTTP/1.1\r\nhost: x\r\n") as ready:
            body = json.dumps({"model": SMALL, "prompt": "Once", "max_tokens": 3}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            with half_a_request(running, head + body[:10]) as late:
                running.send(signal.SIGTERM)
                racing = Stream(running.url, SMALL, 5)
                assert comes_true(lambda: refuses(running.url))
                assert b"HTTP/1.1 503 " in finished(ready, b"\r\n")
                answer = finished(late, body[10:])
        assert b"HTTP/1.1 200 " in answer
        assert b"connection: close" in answer
        for one in (raced, racing):
            assert_whole(one, 5)
        for one in flying:
            assert_whole(one, 400)
        assert running.ends(None) == 0
        assert "draining: " in running.errors


@contextlib.contextmanager
def half_a_request(running: Running, begun: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as made:
        made.sendall(begun)
        yield made


def finished(made: socket.socket, rest: bytes) -> bytes:
    """What comes until the other side closes."""
    made.sendall(rest)
    received = b""
    while more := made.recv(65536):
        received += more
    return received


@pytest.mark.slow
def test_balancers_are_told_before_anybody_is_refused(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], lame_duck_s=3600, drain_s=60) as running:
        running.send(signal.SIGTERM)
        assert comes_true(lambda: get(running.url, "/ready").status == 503)
        # Who has not heard of it yet is served.
        assert_whole(Stream(running.url, SMALL, 5).read(60), 5)
        assert not refuses(running.url)
        # Told twice it waits no longer.
        assert running.ends() == 0


@pytest.mark.slow
def test_without_a_service_manager_it_leaves_at_once(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], lame_duck_s=3600) as running:
        assert running.ends(signal.SIGINT) == 0


@pytest.mark.slow
def test_a_drain_that_is_too_short_is_status_1_and_a_line(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], drain_s=0.4) as running:
        flying = [stream(running) for _ in range(3)]
        assert running.ends() == 1
        assert "some requests were cut off: they took longer than serve.drain_s" in running.errors
        # And those whom it cost their answer are told, as of any other failure.
        for one in flying:
            assert one.read(120).ending == "error"
            assert one.complete
            assert one.chunks[-1]["error"]["code"] == "gateway_ended"


@pytest.mark.slow
def test_told_twice_it_ends_at_once_and_says_what_that_cost(pools: dict[str, Pool], tmp_path: Path) -> None:
    with gateway(tmp_path, pools["amd"], drain_s=60) as running:
        one = stream(running)
        running.send(signal.SIGTERM)
        assert comes_true(lambda: "draining: 1 requests" in running.errors)
        assert running.ends() == 1
        assert "some requests were cut off" in running.errors
        assert one.read(120).ending in ("cut", "error")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_as_soon_as_it_is_ready_ends_it_well(
    pools: dict[str, Pool], tmp_path: Path, number: signal.Signals
) -> None:
    with gateway(tmp_path, pools["amd"]) as running:
        assert running.ends(number) == 0


@pytest.mark.slow
def test_requests_that_keep_coming_while_it_ends_are_answered_or_refused(
    pools: dict[str, Pool], tmp_path: Path
) -> None:
    """Nobody is let in and then left without an answer."""
    lost: list[str] = []
    answered: list[int] = []

    def keep_asking(port: int) -> None:
        body = json.dumps({"model": SMALL, "prompt": "Once", "max_tokens": 1}).encode()
        asked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        while True:
            try:
                made = socket.create_connection(("127.0.0.1", port), timeout=60)
            except ConnectionError:
                return
            with made:
                try:
                    made.sendall(asked)
                    received = made.recv(65536)
                except ConnectionError as error:
                    received = str(error).encode()
                if received.startswith(b"HTTP/1.1 200 "):
                    answered.append(1)
                else:
                    lost.append(received.decode())

    with gateway(tmp_path, pools["amd"]) as running:
        clients = [threading.Thread(target=keep_asking, args=(running.port,)) for _ in range(4)]
        for one in clients:
            one.start()
        assert comes_true(lambda: len(answered) > 20)
        status = running.ends()
        for one in clients:
            one.join(60)
    assert status == 0
    assert lost == []
