"""Health, readiness and metrics at a port of their own."""

import asyncio
import socket
from pathlib import Path

import pytest
from tests.engines.streams import get
from tests.run.gateway.fakes import fakes, fleet_of, pool_of, running
from tests.run.service.processes import comes_true, serving
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie_gateway.gateway.pages import OPS
from crosstie_gateway.service.edge import OpsDoor


@on_loop
async def test_whoever_watches_has_a_door_and_clients_have_theirs() -> None:
    async with fakes() as [fake]:
        door = OpsDoor("127.0.0.1", 0)
        async with running(fleet_of(pool_of("one", fake.url)), components=[door]) as at:
            there = Address(door.url)
            for path in OPS:
                assert (await fetch_once(there, "GET", path, timeout_s=LIMIT_S)).status == 200
                assert (await at.get(path)).status == 404
            assert (await at.ask()).status == 200
            said = await fetch_once(there, "GET", "/metrics", timeout_s=LIMIT_S)
            assert b"crosstie_requests_total{" in said.body
            assert (await fetch_once(there, "GET", "/v1/models", timeout_s=LIMIT_S)).status == 404
            assert (await fetch_once(there, "POST", "/v1/chat/completions", timeout_s=LIMIT_S)).status == 404
            assert (await fetch_once(there, "POST", "/metrics", timeout_s=LIMIT_S)).status == 405
            at.gateway.draining = True
            assert (await fetch_once(there, "GET", "/ready", timeout_s=LIMIT_S)).status == 503
            await door.stop()


@on_loop
async def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{port} for health and metrics"):
            await asyncio.to_thread(OpsDoor("127.0.0.1", port).listen)


@pytest.mark.slow
def test_it_is_one_door_of_all_workers(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet_of(pool_of("one", "http://127.0.0.1:9/v1"))))
    with serving(tmp_path, file, "--workers", "2", "--ops-port", "0") as running_gateway:
        there = f"{running_gateway.said['ops_url']}/v1"
        assert comes_true(lambda: "crosstie_workers 2" in get(there, "/metrics").text)
        assert (get(there, "/health").status, get(there, "/ready").status) == (200, 503)
        assert get(running_gateway.url, "/metrics").status == 404
        assert running_gateway.ends() == 0
