"""`crosstie serve --workers 2`: real processes that are killed, drained, reloaded and asked at random."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.streams import Stream, get, metric, refuses
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.service.processes import END_S, Running, comes_true, command, environment, gone, put, serving, started
from tests.run.service.test_process import assert_whole, pool_at, stream, write
from tests.run.share.keys import asked, known_to_all, made_key

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Pool
from crosstie_gateway.service.supervisor import Supervisor

pytestmark = pytest.mark.slow

POOLS = {"amd": pool("amd"), "nvidia": pool("nvidia", accelerator="h100-sxm", usd_per_gpu_hour=2.5)}


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pool]]:
    folder = tmp_path_factory.mktemp("replicas")
    file = folder / "fleet.toml"
    file.write_text(fleet_text(fleet(*POOLS.values())))
    with started(folder, "emulate", file) as running:
        urls = {one["pool"]: one["url"] for one in running.said["replicas"]}
        yield {name: pool_at(one, urls[name]) for name, one in POOLS.items()}


@contextlib.contextmanager
def workers(folder: Path, *pools: Pool, number: int = 2, **serve: Any) -> Iterator[Running]:
    file = folder / "fleet.toml"
    write(file, *pools, **serve)
    with serving(folder, file, "--workers", str(number)) as running:
        assert running.said["workers"] == number
        pids = running.children()
        assert len(pids) == number
        yield running
        assert "Traceback" not in running.errors
    assert comes_true(lambda: all(map(gone, pids)))


def figure(running: Running, name: str) -> float:
    return metric(get(running.url, "/metrics").text, name)


def test_one_gateway_to_whoever_asks(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"]) as running:
        short = [Stream(running.url, SMALL, 3).read(60) for _ in range(10)]
        assert [one.ending for one in short] == ["length"] * 10
        # Whichever worker is asked, it speaks for both.
        pages = [get(running.url, "/metrics").text for _ in range(6)]
        assert {metric(page, "crosstie_requests_total") for page in pages} == {10}
        assert {metric(page, "crosstie_workers") for page in pages} == {2}
        assert {metric(page, "crosstie_ttft_seconds_count") for page in pages} == {10}
        assert {metric(page, "crosstie_backend_up") for page in pages} == {1}
        assert all(page.count('crosstie_ttft_correction{pool="amd"') == 2 for page in pages)
        assert {get(running.url, "/ready").status for _ in range(6)} == {200}
        assert running.ends() == 0
        assert running.errors == ""


def test_clients_are_shared_out(pools: dict[str, Pool], tmp_path: Path) -> None:
    """Kept connections, made in one go, which the quickest worker would otherwise have nearly all."""
    with workers(tmp_path, pools["amd"]) as running:
        clients = [http.client.HTTPConnection("127.0.0.1", running.port, timeout=60) for _ in range(40)]
        for one in clients:
            one.connect()
        for one in clients:
            one.request("GET", "/health")
            assert one.getresponse().read()
        shares = [_clients(pid, running.port) for pid in running.children()]
        assert sum(shares) == 40
        # One that does not come to the door in time is passed over, so on a busy machine it is no even share.
        assert min(shares) >= 8
        for one in clients:
            one.close()


def _clients(pid: int, port: int) -> int:
    """Connections of clients that a process has open."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    accepted = {row[9] for row in rows if int(row[1].rpartition(":")[2], 16) == port and row[3] == "01"}
    return sum(os.readlink(one)[8:-1] in accepted for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink())


def test_a_worker_that_is_killed(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"]) as running:
        for _ in range(6):
            assert Stream(running.url, SMALL, 3).read(60).ending == "length"
        assert figure(running, "crosstie_requests_total") == 6
        flying = [stream(running) for _ in range(8)]
        assert figure(running, "crosstie_in_flight") == 8
        victim, other = running.children()
        os.kill(victim, signal.SIGKILL)
        # Before another has come: the one that is left serves, and what was counted still counts.
        assert Stream(running.url, SMALL, 3).read(60).ending == "length"
        assert figure(running, "crosstie_requests_total") >= 6
        assert comes_true(lambda: len(running.children()) == 2 and figure(running, "crosstie_workers") == 2)
        assert other in running.children()
        assert f"worker 0 (process {victim}) was killed by SIGKILL; another takes its place in" in running.errors
        for one in flying:
            one.read(120)
        whole = [one for one in flying if one.ending == "length"]
        assert 0 < len(whole) < 8
        for one in whole:
            assert_whole(one)
        # The dead one's requests are no longer in flight, and were never counted as served.
        assert figure(running, "crosstie_in_flight") == 0
        assert figure(running, "crosstie_requests_total") == 7 + len(whole)
        assert figure(running, "crosstie_worker_starts_total") == 3
        again = [stream(running, 20) for _ in range(4)]
        for one in again:
            assert_whole(one, 20)
        assert running.ends() == 0


def test_a_drain_answers_what_every_worker_has(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"]) as running:
        flying = [stream(running) for _ in range(6)]
        # As a service manager does, which signals all processes of a service: they are told once, not twice.
        for pid in running.children():
            os.kill(pid, signal.SIGTERM)
        running.send(signal.SIGTERM)
        assert comes_true(lambda: refuses(running.url))
        for one in flying:
            assert_whole(one)
        assert running.ends(None) == 0


def test_balancers_are_told_before_anybody_is_refused(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"], lame_duck_s=3600) as running:
        running.send(signal.SIGTERM)
        # Each of them, whoever is asked.
        assert comes_true(lambda: all(get(running.url, "/ready").status == 503 for _ in range(4)))
        assert_whole(Stream(running.url, SMALL, 5).read(60), 5)
        assert not refuses(running.url)
        assert running.ends() == 0


def test_a_drain_that_is_too_short(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"], drain_s=0.2) as running:
        flying = [stream(running) for _ in range(4)]
        assert running.ends() == 1
        assert "some requests were cut off" in running.errors
        for one in flying:
            one.read(60)
            assert "gateway_ended" in str(one.events)


def test_told_twice_it_ends_at_once(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"]) as running:
        flying = [stream(running) for _ in range(4)]
        running.send(signal.SIGINT)
        assert comes_true(lambda: refuses(running.url))
        assert running.ends(signal.SIGINT) == 1
        assert all(one.read(60).ending != "length" for one in flying)


def test_all_workers_read_the_file_again(pools: dict[str, Pool], tmp_path: Path) -> None:
    def served() -> set[tuple[str, ...]]:
        return {tuple(json.loads(get(running.url, "/ready").text)["pools"]) for _ in range(8)}

    with workers(tmp_path, pools["amd"]) as running:
        file = tmp_path / "fleet.toml"
        assert served() == {("amd",)}
        write(file, *pools.values())
        running.send(signal.SIGHUP)
        assert comes_true(lambda: served() == {("amd", "nvidia")})
        # A worker that comes later serves what the others serve, not what was served at the start.
        os.kill(running.children()[0], signal.SIGKILL)
        assert comes_true(lambda: figure(running, "crosstie_worker_starts_total") == 3)
        assert served() == {("amd", "nvidia")}
        lines = running.errors.splitlines()
        assert [line for line in lines if "fleet file" in line] == ["fleet file read again: 2 pools, 2 backends"]
        # Found by the change alone; one that is wrong is told of once and changes nothing.
        put(file, file.read_text().replace("h100-sxm", "h1000"))
        refused = "fleet file refused, the old one goes on: "
        assert comes_true(lambda: refused in running.errors)
        assert served() == {("amd", "nvidia")}
        write(file, pools["nvidia"])
        assert comes_true(lambda: served() == {("nvidia",)})
        assert comes_true(lambda: "fleet file read again: 1 pools, 1 backends" in running.errors)
        assert running.errors.count("fleet file read again: 1 pools, 1 backends") == 1
        assert running.errors.count(refused) == 1
        assert running.ends() == 0


def test_a_replica_s_limit_holds_for_all_workers(pools: dict[str, Pool], tmp_path: Path) -> None:
    tight = pool("amd", max_in_flight=3, backends=pools["amd"].backends)
    with workers(tmp_path, tight, queue_s=60.0) as running:
        flying = [stream(running) for _ in range(3)]
        waiting = [Stream(running.url, SMALL, 3) for _ in range(6)]
        assert comes_true(lambda: figure(running, "crosstie_queued") == 6)
        assert figure(running, "crosstie_in_flight") == 3
        engine = get(tight.backends[0], "/metrics").text
        assert metric(engine, "vllm:num_requests_running") + metric(engine, "vllm:num_requests_waiting") == 3
        said = _explained(running)
        assert [one["considered"][0]["dropped"] for one in said] == ["room: 3 in flight of 3"] * len(said)
        # Room that is made in one worker is taken by those who wait in the other as well.
        for one in [*flying, *waiting]:
            assert one.read(120).ending == "length"
        assert running.ends() == 0


def _explained(running: Running) -> list[dict[str, Any]]:
    """What each of some connections, and so each worker, would decide."""
    found = []
    body = json.dumps({"model": SMALL, "messages": [{"role": "user", "content": "hi"}]})
    for _ in range(6):
        one = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
        one.request("POST", "/crosstie/explain", body, {"Content-Type": "application/json"})
        found.append(json.loads(one.getresponse().read()))
        one.close()
    return found


def test_a_key_s_limit_holds_for_all_workers(pools: dict[str, Pool], tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    write(file, pools["amd"])
    file.write_text(file.read_text() + '\n[state]\nkeys = "required"\nstore = "keys.db"\n')
    with serving(tmp_path, file, "--workers", "2") as running:
        for attempt in range(3):
            key, minute = made_key(tmp_path, f"key-{attempt}"), time.time() // 60
            assert known_to_all([running], key)
            # A connection each, so that both workers are asked.
            answers = [asked(running, key) for _ in range(12)]
            if time.time() // 60 == minute:
                # The window slides by the minute; this one has not.
                assert answers == [200] * 10 + [429] * 2
                break
        else:
            pytest.fail("three minutes were not enough to ask twelve times within one")
        assert running.ends() == 0


def test_workers_end_with_their_supervisor(
    pools: dict[str, Pool], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(kept))
    with workers(tmp_path, pools["amd"]) as running:
        pids = running.children()
        assert len(list(kept.glob("crosstie-*/worker-*"))) == 2
        one = stream(running)
        running.process.kill()
        # What they have begun they end; nobody new is let in.
        assert_whole(one)
        assert comes_true(lambda: all(map(gone, pids)))
        assert refuses(running.url)
        assert not list(kept.iterdir())


def test_it_ends_with_whoever_started_it(pools: dict[str, Pool], tmp_path: Path) -> None:
    write(tmp_path / "fleet.toml", pools["amd"])
    arguments = command("serve", tmp_path / "fleet.toml", "--workers", "2", "--port", "0", "--with-parent", "--json")
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.read(1) == b"{"
        process.stdin.close()
        assert process.wait(END_S) == 0


@pytest.mark.parametrize("where", ["fleet", "port"])
def test_what_cannot_be_served_is_said_once(where: str, pools: dict[str, Pool], tmp_path: Path) -> None:
    write(tmp_path / "fleet.toml", pools["amd"] if where == "port" else pool("amd"))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(workers(tmp_path, pools["amd"])).port if where == "port" else 0
        write(tmp_path / "fleet.toml", pools["amd"] if where == "port" else pool("amd"))
        ended = subprocess.run(
            command("serve", tmp_path / "fleet.toml", "--workers", "2", "--port", str(port)),
            capture_output=True, text=True, env=environment(tmp_path), timeout=END_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert ("cannot listen on" if where == "port" else "pool amd has no backends") in line


def test_a_worker_that_cannot_live_is_not_started_all_the_time(pools: dict[str, Pool], tmp_path: Path) -> None:
    with workers(tmp_path, pools["amd"]) as running:
        first, other = running.children()
        latest = first
        for _ in range(3):
            os.kill(latest, signal.SIGKILL)
            known = {latest, other}
            assert comes_true(lambda known=known: len(set(running.children()) - known) == 1)  # type: ignore[misc]
            (latest,) = set(running.children()) - known
        waits = re.findall(r"worker 0 .* in ([0-9.]+) s$", running.errors, re.MULTILINE)
        assert len(waits) == 3
        assert float(waits[2]) == 2 * float(waits[1])
        # PeerReport to end while one of them has no successor yet: nobody was cut off by that.
        os.kill(latest, signal.SIGKILL)
        assert comes_true(lambda: running.errors.count("another takes its place") == 4)
        assert running.ends() == 0


def test_words_that_the_supervisor_does_not_know_are_passed_on() -> None:
    lines: list[str] = []
    supervisor = Supervisor(1, lambda place: 0, lines.append)
    (worker,) = supervisor.workers
    worker.line, theirs = socket.socketpair()
    worker.line.setblocking(False)
    with worker.line, theirs:
        theirs.sendall(b'{"type": "WorkerNotice", "text": "", "fields": {"x": []}}\n\xff\n{"type": "Ready"}\n{"type"')
        supervisor._listen(worker)
    supervisor.board.close()
    assert [line.partition(": ")[0] for line in lines] == ["worker 0", "worker 0"]
    assert worker.ready
    assert worker.heard == b'{"type"'
