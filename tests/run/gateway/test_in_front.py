"""HTTP/2 by what stands in front: the configurations of docs/edge.md, as they stand there."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.run.gateway.fakes import MODEL, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.pick.envoys import address, free_port, started
from tests.waiting import LIMIT_S
from tests.wire.certificates import pair

pytestmark = pytest.mark.engines
PAGE = Path(__file__).parents[3] / "docs" / "edge.md"


def shown(kind: str, changes: dict[str, str]) -> str:
    """A block of the page, with the places of this test."""
    found = PAGE.read_text().partition(f"```{kind}\n")[2].partition("```")[0]
    for before, after in changes.items():
        assert before in found
        found = found.replace(before, after)
    return found


async def by_http2(port: int, path: str, *more: str) -> str:
    """What curl says of an answer: its version and status, and below that the answer."""
    words = ("-sSk", "--http2", "--max-time", str(LIMIT_S), "-w", "\n%{http_version} %{http_code}", *more)
    process = await asyncio.create_subprocess_exec(
        "curl", *words, f"https://127.0.0.1:{port}{path}", stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


async def check(port: int) -> None:
    assert (await by_http2(port, "/v1/models")).endswith("\n2 200")
    asked = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "a"}}], "stream": true}}'
    said = await by_http2(port, "/v1/chat/completions", "-H", "content-type: application/json", "-d", asked)
    assert "data: [DONE]" in said
    assert said.endswith("\n2 200")


@asynccontextmanager
async def nginx(folder: Path, port: int, behind: int) -> AsyncIterator[None]:
    places = {"listen 443": f"listen {port}", "8080": str(behind)}
    files = {"server.pem": str(folder / "server.pem"), "server.key": str(folder / "server.key")}
    own = f"daemon off; pid {folder}/pid; error_log {folder}/log;\nevents {{}}\nhttp {{ access_log off;\n"
    file = folder / "nginx.conf"
    file.write_text(own + shown("nginx", places | files) + "}\n")
    process = await asyncio.create_subprocess_exec(str(shutil.which("nginx")), "-c", str(file))
    try:
        await until(lambda: (folder / "pid").exists())
        yield
    finally:
        process.terminate()
        await process.wait()


@in_folder
async def test_envoy_and_nginx_speak_it_for_the_gateway(folder: Path) -> None:
    pair(folder)
    port, admin = free_port(), free_port()
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        places = {"port_value: 443": f"port_value: {port}", "8080": str(at.port), "0.0.0.0": "127.0.0.1"}
        files = {"server.pem": str(folder / "server.pem"), "server.key": str(folder / "server.key")}
        settings: dict[str, Any] = yaml.safe_load(shown("yaml", places | files))
        async with started(folder, {"admin": address(admin), **settings}, admin):
            await check(port)
        # It is no package of Python's, and where it is not there Envoy has to do.
        if shutil.which("nginx"):
            async with nginx(folder, port, at.port):
                await check(port)
