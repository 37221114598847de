"""A fleet emulated: its addresses, what cannot be emulated, and the command."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.emulate.running import CATALOG, Client, emulating, fleet, pool

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.fleet import start, start_emulated
from crosstie_gateway.emulate.kv_events import BLOCK_BYTES, block_keys
from crosstie_gateway.emulate.tokens import count, filler


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_every_replica_gets_an_address() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(replicas=2), pool("two", accelerator="h200"))) as (made, _):
            urls = [url for one in made.fleet.pools for url in one.backends]
            assert len(set(urls)) == 3
            assert [one.url for one in made.replicas] == urls
            for url, name in zip(urls, ("one/0", "one/1", "two/0"), strict=True):
                client = Client(url)
                assert (await client.get("/health")).header(b"x-crosstie-emulated").startswith(name.encode())  # type: ignore[union-attr]
                client.origin.close()

    run_on_loop(body())


def test_addresses_on_this_machine_are_kept_and_others_replaced() -> None:
    async def body() -> None:
        port = free_port()
        given = (f"http://localhost:{port}/llm/v1", "http://10.0.0.7:8000/v1")
        async with emulating(fleet(pool(replicas=3, backends=given))) as (made, client):
            first, second, third = made.fleet.pools[0].backends
            assert first == given[0]
            assert second.startswith("http://127.0.0.1:")
            assert third.startswith("http://127.0.0.1:")
            assert (await client.get("/llm/health")).status == 200
            assert (await client.get("/llm/v1/models")).status == 200

    run_on_loop(body())


def test_ports_are_given_out_in_order() -> None:
    async def body() -> None:
        port = free_port()
        async with emulating(fleet(pool()), first_port=port) as (made, _):
            assert made.fleet.pools[0].backends == (f"http://127.0.0.1:{port}/v1",)
            with pytest.raises(BadInput, match=f"one/0 cannot listen on 127.0.0.1:{port}: .*in use"):
                await start(CATALOG, fleet(pool()), first_port=port)

    run_on_loop(body())


def test_pipelines_and_attention_replicas_are_emulated_too() -> None:
    staged = pool(model="llama-3.3-70b", parallelism=Parallelism(tp=2, pp=2))
    spread = pool("spread", model="deepseek-v3", accelerator="mi300x", parallelism=Parallelism(tp=1, dp=8, ep=8))

    async def body() -> None:
        async with emulating(fleet(staged, spread), speed=100.0) as (made, _):
            for one in made.fleet.pools:
                client = Client(one.backends[0])
                asked = {"prompt": "x" * 4000, "max_tokens": 20, "ignore_eos": True}
                assert (await client.post("/v1/completions", asked)).status == 200
                client.origin.close()

    run_on_loop(body())


@pytest.mark.parametrize(
    ("made", "options", "says"),
    [
        (fleet(pool(accelerator=None)), {}, "pool 'one' cannot be emulated: it has no accelerator"),
        (fleet(pool(model="llama-3.3-70b", accelerator="h100-sxm", precision="bf16")), {}, "llama-3.3-70b does not fit on 1 x h100-sxm"),
        (fleet(pool(backends=("http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"))), {}, "2 backends for 1 replicas"),
        (fleet(pool(backends=("https://127.0.0.1:1/v1",))), {}, "http, not https"),
        (fleet(), {"speed": 0.0}, "speed 0: must be from"),
        (fleet(), {"speed": float("nan")}, "speed nan: must be from"),
        (fleet(pool(replicas=2)), {"first_port": 65535}, "there is no port 65536"),
        (fleet(), {"host": "192.0.2.1"}, "cannot listen on 192.0.2.1:0"),
    ],
)  # fmt: skip
def test_what_cannot_be_emulated(made: Fleet, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        run_on_loop(start(CATALOG, made, **options))


def test_blocks_of_a_prompt_are_told_apart_by_what_comes_before() -> None:
    text = bytes(range(256)) * 3
    assert len(block_keys(text + b"rest")) == 3
    assert block_keys(text)[:2] == block_keys(text[: 2 * BLOCK_BYTES] + b"other" * 100)[:2]
    assert not set(block_keys(text)) & set(block_keys(b"!" + text))
    assert block_keys(text) == block_keys(text[:256]) + block_keys(text[256:], block_keys(text[:256])[-1])


def test_filler_joins_up_whatever_the_pieces() -> None:
    whole = filler(0, 5000)
    assert len(whole) == 20_000
    assert "".join(filler(at, at + 7) for at in range(0, 4998, 7)) == filler(0, 4998) == whole[: 4 * 4998]
    assert json.loads(f'"{whole}"') == whole
    assert count(len(whole)) == 5000


# The command


def fleet_file(folder: Path, one: Fleet | None = None) -> Path:
    file = folder / "fleet.toml"
    file.write_text(fleet_text(one or fleet(pool(replicas=2))), encoding="utf-8")
    return file


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "crosstie", "emulate", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    written = tmp_path / "emulated.toml"
    process = started(str(fleet_file(tmp_path)), "--speed", "20", "--write", str(written))
    assert process.stdout is not None
    lines: list[bytes] = []
    while not lines or lines[-1] not in (b"ready\n", b""):
        lines.append(process.stdout.readline())
    said = b"".join(lines).decode()
    got = read_fleet(CATALOG, written)
    assert "emulated" in said
    assert all(url in said for url in got.pools[0].backends)

    async def health() -> int:
        client = Client(got.pools[0].backends[1])
        try:
            return (await client.get("/health")).status
        finally:
            client.origin.close()

    assert run_on_loop(health()) == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err.decode().strip()) == (0, f"fleet written to {written}")


def test_the_command_ends_with_its_parent(tmp_path: Path) -> None:
    with start_emulated(fleet_file(tmp_path), speed=20.0) as child:
        placed = child.placed(fleet(pool(replicas=2)))
        assert len(placed.pools[0].backends) == 2
        with pytest.raises(BadInput, match="start again"):
            child.placed(fleet(pool(replicas=3)))
    assert child.process.returncode == 0


def test_a_child_that_does_not_start_says_why(tmp_path: Path) -> None:
    file = fleet_file(tmp_path, fleet(pool(model="llama-3.3-70b", accelerator="h100-sxm", precision="bf16")))
    with pytest.raises(BadInput, match=r"cannot be emulated.*does not fit"):
        start_emulated(file)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fault", "one:melt"], "'melt' is no fault"),
        (["--fault", "two:crash"], "--fault two: no such pool; there are one"),
        (["--fault", "one/2:crash"], "the pool has 2 replicas"),
        (["--port", "70000"], "--port 70000"),
        (["--speed", "-1"], "speed -1: must be"),
        (["--write", "/nonexistent/fleet.toml"], "/nonexistent/fleet.toml: cannot be written"),
    ],
)  # fmt: skip
def test_slips_on_the_command_line(crosstie: Command, tmp_path: Path, arguments: list[str], says: str) -> None:
    got = crosstie("emulate", str(fleet_file(tmp_path)), *arguments)
    assert got.status == 2
    assert says in got.err
    asyncio.set_event_loop(None)


def test_a_port_that_no_replica_would_get_is_refused(crosstie: Command, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = fleet_file(tmp_path, fleet(pool(backends=(f"http://127.0.0.1:{port}/v1",))))
    got = crosstie("emulate", str(file), "--port", str(port + 1))
    assert got.status == 2
    assert f"--port {port + 1}: {file} has addresses of this machine for all, which are kept" in got.err
    asyncio.set_event_loop(None)
