"""`crosstie pick` as a process: what it says, what it heeds, and what it refuses."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.gateway.fakes import CALM, fakes, fleet_of, in_folder, pool_of
from tests.run.pick.envoys import envoy, free_port
from tests.run.pick.proxies import asked, changed, proxy
from tests.run.service.processes import Running, gone, put, started
from tests.waiting import LIMIT_S, until

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import Pool
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie_gateway.pick.messages import DESTINATION

MODEL = "llama-3.1-8b"
EMULATED = pool_of("amd", model=MODEL, accelerator="mi300x", precision="fp8", stack="vllm", replicas=2)


def written(folder: Path, *pools: Pool) -> Path:
    file = folder / "fleet.toml"
    put(file, fleet_text(fleet_of(*pools)))
    return file


@contextlib.asynccontextmanager
async def picker(folder: Path, *arguments: str | Path, port: int = 0) -> AsyncIterator[Running]:
    """Started from a thread: the engines that it asks are on this one's loop."""
    stack = contextlib.ExitStack()
    try:
        yield await asyncio.to_thread(stack.enter_context, started(folder, "pick", *arguments, "--port", str(port)))
    finally:
        await asyncio.to_thread(stack.close)


def port_of(running: Running) -> int:
    return int(running.said["address"].rpartition(":")[2])


async def destination(port: int) -> str:
    """Where a request would go."""
    async with proxy(port) as envoy_:
        call = envoy_.call()
        await call.head()
        await call.body(asked())
        message = await call.says()
        call.gone()
    return endpoints(message)


async def come_to_be_named(port: int, *wanted: str) -> None:
    """Asks until these are the endpoints, in any order: nobody may have looked yet whether each is well, and on a busy
    machine a first look may have taken too long."""
    async with asyncio.timeout(LIMIT_S):
        while sorted((await destination(port)).split(",")) != sorted(wanted):
            await asyncio.sleep(0.05)


def endpoints(message: Any) -> str:
    return changed(message.request_headers.response.header_mutation).get(DESTINATION.decode(), "")


@in_folder
async def test_emulated_replicas_are_picked_and_a_signal_ends_it(tmp_path: Path) -> None:
    async with picker(
        tmp_path, written(tmp_path, EMULATED), "--emulate", "--speed", "20", "--ops-port", "0"
    ) as running:
        said = running.said
        assert (said["emulated"], said["tls"], said["policy"]) == (True, False, "cheapest-meeting-target")
        addresses = [url.removeprefix("http://").removesuffix("/v1") for url in said["pools"]["amd"]]
        await come_to_be_named(port_of(running), *addresses)
        ops = Address(said["ops_url"])
        assert (await fetch_once(ops, "GET", "/ready", timeout_s=LIMIT_S)).status == 200
        page = (await fetch_once(ops, "GET", "/metrics", timeout_s=LIMIT_S)).body.decode()
        assert 'crosstie_backend_up{pool="amd"' in page
        # Requests of clients are not for it, and it says whose it is.
        here = Address(f"http://127.0.0.1:{port_of(running)}")
        refused = await fetch_once(here, "POST", "/v1/chat/completions", body=asked(), timeout_s=LIMIT_S)
        assert (refused.status, b"ext_proc" in refused.body) == (404, True)
        children = running.children()
        assert await asyncio.to_thread(running.ends, signal.SIGTERM) == 0
        await until(lambda: all(gone(child) for child in children))
        assert "Traceback" not in running.errors


@in_folder
async def test_a_fleet_file_is_read_again_when_told_to_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    async with fakes(2) as [one, two]:
        file = written(tmp_path, pool_of("p", one.url))
        async with picker(tmp_path, file) as running:
            assert await destination(port_of(running)) == f"127.0.0.1:{one.port}"
            put(file, file.read_text().replace(one.url, "http://a-name:80/v1"))
            running.send(signal.SIGHUP)
            await until(lambda: "is a name, and a picker names addresses" in running.errors)
            written(tmp_path, pool_of("p", two.url))
            running.send(signal.SIGHUP)
            await until(lambda: "fleet file read again" in running.errors)
            await come_to_be_named(port_of(running), f"127.0.0.1:{two.port}")
            assert await asyncio.to_thread(running.ends, signal.SIGINT) == 0


@pytest.mark.slow
@in_folder
async def test_workers_pick_together_and_all_of_them_end(tmp_path: Path) -> None:
    async with fakes(2) as [one, two]:
        fleet = fleet_of(pool_of("p", one.url, two.url, max_in_flight=1), serving=CALM)
        file = tmp_path / "fleet.toml"
        put(file, fleet_text(fleet))
        async with picker(tmp_path, file, "--workers", "2") as running, contextlib.AsyncExitStack() as stack:
            # Each takes what the other has left, though they are on connections, and perhaps in workers, of their own.
            found = set()
            for _ in range(2):
                call = (await stack.enter_async_context(proxy(port_of(running)))).call()
                await call.head()
                await call.body(asked())
                found.add(endpoints(await call.says()).split(",")[0])
                stack.callback(call.gone)
            assert found == {f"127.0.0.1:{one.port}", f"127.0.0.1:{two.port}"}
            await stack.aclose()
            children = running.children()
            assert await asyncio.to_thread(running.ends, signal.SIGTERM) == 0
            await until(lambda: all(gone(child) for child in children))
            assert "Traceback" not in running.errors


def test_a_dry_run_says_what_would_be_picked_from(tmp_path: Path, crosstie: Command) -> None:
    near = pool_of("near", "http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1")
    file = written(tmp_path, near, EMULATED)
    got = crosstie("pick", str(file), "--dry-run", "--emulate")
    assert (got.status, got.err) == (0, "")
    assert "EMULATED, no GPU runs: test: 2 pools" in got.out
    assert "near: 2 endpoints, http://10.0.0.1:8000/v1 ..." in got.out
    assert "amd: 2 endpoints, no address yet" in got.out
    said: dict[str, Any] = json.loads(crosstie("pick", str(file), "--dry-run", "--emulate", "--json").out)
    assert (said["address"], said["pools"]["near"][1]) == (None, "http://10.0.0.2:8000/v1")


@pytest.mark.parametrize(
    ("backend", "arguments", "why"),
    [
        ("http://engine.svc:80/v1", (), "pool p: .* is a name, and a picker names addresses: write it as dns[+]http"),
        ("http://10.0.0.1:80/v1", ("--speed", "2"), "--speed goes with --emulate"),
        ("http://10.0.0.1:80/v1", ("--tls-cert", "c.pem"), "--tls-cert and --tls-key go together"),
        ("http://10.0.0.1:80/v1", ("--fallbacks", "99"), "'--fallbacks': 99 is not in the range"),
        ("http://10.0.0.1:80/v1", ("--objective", "batch"), "--objective: 'batch' is no NAME=N with a whole number"),
        ("http://10.0.0.1:80/v1", ("--objective", "a=b"), "--objective: 'a=b' is no NAME=N with a whole number"),
        ("http://10.0.0.1:80/v1", ("--host", "192.0.2.1"), "cannot listen on 192.0.2.1:9002"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    tmp_path: Path, crosstie: Command, backend: str, arguments: tuple[str, ...], why: str
) -> None:
    got = crosstie("pick", str(written(tmp_path, pool_of("p", backend))), *arguments)
    assert (got.status, got.out) == (2, "")
    assert re.search(why, got.err), got.err
    assert got.err.count("\n") == 1


def test_a_fleet_that_is_not_there_is_named(tmp_path: Path, crosstie: Command) -> None:
    got = crosstie("pick", str(tmp_path / "none.toml"))
    assert (got.status, "none.toml: cannot be read" in got.err) == (2, True)


@pytest.mark.engines
@in_folder
async def test_a_picker_that_is_killed_costs_what_it_held_and_its_successor_goes_on(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        file, port = written(tmp_path, pool_of("p", fake.url)), free_port()
        async with envoy(tmp_path, port, [fake.url]) as url:

            async def status() -> int:
                said = await fetch_once(Address(url), "POST", "/v1/chat/completions", body=asked(), timeout_s=LIMIT_S)
                return said.status

            async def serves() -> None:
                # Envoy waits a while before it connects again.
                async with asyncio.timeout(LIMIT_S):
                    while await status() != 200:
                        await asyncio.sleep(0.1)

            async with picker(tmp_path, file, port=port) as first:
                await serves()
                fake.mode = "hang"
                holding = asyncio.ensure_future(status())
                await until(lambda: len(fake.hit) > 1)
                first.process.kill()
                assert await holding >= 500
                assert await status() >= 500
            fake.mode = "ok"
            async with picker(tmp_path, file, port=port):
                await serves()
