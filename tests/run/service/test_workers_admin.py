"""Workers, an administrator and a store together: what is changed through one worker holds in all, and stays."""

import asyncio
import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engines.streams import get
from tests.run.emulate.running import fleet, pool
from tests.run.service.processes import Running, comes_true, serving, started
from tests.run.service.test_process import pool_at
from tests.run.share.keys import asked, known_to_all, made_key

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Fleet, Pool, SharedState
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.service.worker_link import WorkerLink

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow

KEY = "the-key-of-these-tests"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
POOLS = {"amd": pool("amd"), "nvidia": pool("nvidia", accelerator="h100-sxm", usd_per_gpu_hour=2.5)}
# Whoever is accepted by the same worker for so many connections in a row is served by no other.
MANY = 12


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pool]]:
    folder = tmp_path_factory.mktemp("replicas")
    file = folder / "fleet.toml"
    file.write_text(fleet_text(fleet(*POOLS.values())))
    with started(folder, "emulate", file) as running:
        urls = {one["pool"]: one["url"] for one in running.said["replicas"]}
        yield [pool_at(one, urls[name]) for name, one in POOLS.items()]


@pytest.fixture
def administered(pools: list[Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    write(tmp_path, _fleet(pools))
    with serving(tmp_path, tmp_path / "fleet.toml", "--workers", "2", "--admin-port", "0") as running:
        yield running
        assert running.ends() == 0
        assert "Traceback" not in running.errors


def _fleet(pools: list[Pool], **changes: Any) -> Fleet:
    return fleet(*pools, policy="cheapest-meeting-target", **changes)


def write(folder: Path, what: Fleet) -> None:
    fresh = folder / "fleet.new"
    fresh.write_text(fleet_text(what))
    fresh.replace(folder / "fleet.toml")


def admin(running: Running, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Over a connection of its own, which either worker may take."""
    connection = http.client.HTTPConnection(running.said["admin_url"].removeprefix("http://"), timeout=60)
    method = "GET" if body is None else "POST"
    connection.request(method, f"/admin/v1/{action}", None if body is None else json.dumps(body), HEADERS)
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def views(running: Running) -> set[tuple[str, ...]]:
    """What changes the workers say there are."""
    return {tuple(sorted(admin(running, "pools")["changes"])) for _ in range(MANY)}


def test_changes_are_reported_and_the_gateway_goes_on(administered: Running) -> None:
    assert admin(administered, "drain", {"pool": "amd"})["processes"] == 2
    assert "error" in admin(administered, "drain", {"pool": "none"})
    assert comes_true(lambda: "drain: refused: there is no pool 'none'" in administered.errors)
    assert "drain pool amd: done" in administered.errors
    assert views(administered) == {("drain pool amd",)}


def test_a_worker_that_comes_later_takes_over_what_was_changed(administered: Running) -> None:
    admin(administered, "drain", {"pool": "amd"})
    for pid in administered.children():
        # One after the other, so that in the end neither has been told by anyone but the other worker.
        os.kill(pid, signal.SIGKILL)
        assert comes_true(partial(_replaced, administered, pid))
    assert views(administered) == {("drain pool amd",)}
    assert {admin(administered, "pools")["pools"][0]["state"] for _ in range(MANY)} == {"drained"}


def _replaced(running: Running, pid: int) -> bool:
    pids = running.children()
    return len(pids) == 2 and pid not in pids and admin(running, "pools").get("processes") == 2


def test_administrators_at_the_same_moment_come_one_after_the_other(administered: Running) -> None:
    said: list[dict[str, Any]] = []

    def change(name: str) -> None:
        for _ in range(MANY):
            said.extend(admin(administered, action, {"pool": name}) for action in ("undrain", "drain"))

    both = [threading.Thread(target=change, args=(name,)) for name in POOLS]
    for one in both:
        one.start()
    for one in both:
        one.join()
    assert [one["refused_by"] for one in said] == [[]] * 4 * MANY
    assert views(administered) == {("drain pool amd", "drain pool nvidia")}


def test_a_file_that_workers_refuse_is_served_by_none_that_comes_later(
    administered: Running, pools: list[Pool], tmp_path: Path
) -> None:
    """Neither one that the supervisor refuses, nor one that it can read and workers cannot serve."""
    keyed = _fleet(pools, state=SharedState(keys=True, store="keys.db"))
    unset = _fleet([msgspec.structs.replace(pools[0], api_key_env="NO_SUCH_VARIABLE")])
    for refused, why in ((keyed, "state.store: is another now"), (unset, "which is not set")):
        write(tmp_path, refused)
        assert comes_true(lambda why=why: why in administered.errors)  # type: ignore[misc]
        done = admin(administered, "drain", {"pool": "amd"})
        assert done.get("processes") == 2, (done, administered.errors)
        victim = administered.children()[0]
        os.kill(victim, signal.SIGKILL)
        assert comes_true(partial(_replaced, administered, victim))
        assert {get(administered.url, "/v1/models").status for _ in range(MANY)} == {200}
        assert "cannot start" not in administered.errors
        admin(administered, "reset", {})


def test_a_worker_that_comes_later_makes_no_store(pools: list[Pool], tmp_path: Path) -> None:
    """It would know no keys, where the others still know all."""
    write(tmp_path, _fleet(pools, state=SharedState(keys=True, store="keys.db")))
    key = made_key(tmp_path, "alice")
    with serving(tmp_path, tmp_path / "fleet.toml", "--workers", "2") as running:
        assert known_to_all([running], key)
        for one in tmp_path.glob("keys.db*"):
            one.rename(tmp_path / f"kept-{one.name}")
        victim = running.children()[0]
        os.kill(victim, signal.SIGKILL)
        assert comes_true(lambda: "worker 0 cannot start: " in running.errors)
        assert "there is no store" in running.errors
        assert not (tmp_path / "keys.db").exists()
        assert asked(running, key) == 200
        for one in tmp_path.glob("kept-keys.db*"):
            one.rename(tmp_path / one.name.removeprefix("kept-"))
        assert comes_true(lambda: victim not in running.children() and len(running.children()) == 2)
        assert known_to_all([running], key)
        assert running.ends() == 0
        assert "Traceback" not in running.errors


def test_a_turn_is_one_worker_s_and_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie_gateway.service.worker_link._TURN_S", 0.02)

    async def scenario() -> None:
        first, second = (WorkerLink(tmp_path, row, 2, {}) for row in range(2))
        async with first.turn():
            with pytest.raises(RequestRejected, match="another worker") as refused:
                async with second.turn():
                    pass
            # It was no mistake of who asked.
            assert (refused.value.status, refused.value.code) == (503, "busy")
        async with second.turn():
            pass

    asyncio.run(scenario())
