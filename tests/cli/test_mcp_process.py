"""`crosstie mcp` as an assistant starts it: a process of its own, over stdio and HTTP, held to reading what it may."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp_types import CallToolResult
from tests.conftest import Command
from tests.run.emulate.running import SMALL, fleet
from tests.run.service.processes import serving
from tests.small_workload import small, small_text
from tests.waiting import LIMIT_S, comes_true

from crosstie.catalog.fleet_text import fleet_text

pytestmark = pytest.mark.slow

LINE = "not beneath the folder that `crosstie mcp --root` names"


def started(folder: Path, *options: str) -> StdioServerParameters:
    # The SDK hands down little of the environment: a source tree that is tested is named in it.
    tree = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    env = {"CROSSTIE_CATALOG": str(folder / "user-catalog"), "XDG_DATA_HOME": str(folder / "data"), **tree}
    return StdioServerParameters(command=sys.executable, args=["-m", "crosstie", "mcp", *options], env=env)


def asked(server: Any, *questions: tuple[str, dict[str, Any]]) -> list[CallToolResult]:
    async def ask() -> list[CallToolResult]:
        with anyio.fail_after(LIMIT_S * 2):
            async with Client(server) as client:
                return [await client.call_tool(*question) for question in questions]

    return anyio.run(ask)


def words(got: CallToolResult) -> str:
    return getattr(got.content[0], "text", "")


def test_over_stdio_the_numbers_are_those_of_the_command(crosstie: Command, tmp_path: Path) -> None:
    compared, unknown, plan = asked(
        started(tmp_path),
        ("compare", {"model": "llama-3.1-8b", "on": ["mi300x", "h200"]}),
        ("compare", {"model": "lama-3.1-8b", "on": ["mi300x", "h200"]}),
        ("plan", {"workload_toml": small_text(), "quick": True}),
    )
    said = json.loads(crosstie("compare", "llama-3.1-8b", "--on", "mi300x,h200", "--json").out)
    assert compared.structured_content == said
    assert unknown.is_error
    assert words(unknown).startswith("unknown model 'lama-3.1-8b'. Did you mean llama-3.1-8b")
    whole = json.loads(crosstie("plan", str(small(tmp_path)), "--quick", "--json").out)
    assert plan.structured_content["fleet"]["gpus"] == whole["fleet"]["gpus"]
    assert plan.structured_content["prices"] == whole["prices"]


def test_files_are_read_beneath_the_root_alone_and_none_is_written(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    small(root)
    secret = small(outside, name="secret.toml")
    (root / "way-out.toml").symlink_to(secret)
    trace = ("input = 1000\noutput = 200\n", f'trace = "{secret}"\n')
    before = sorted(tmp_path.rglob("*"))
    quick = {"quick": True}
    inside, absolute, up, link, traced, none = asked(
        started(tmp_path, "--root", str(root)),
        ("plan", {"workload": "small.toml", **quick}),
        ("plan", {"workload": str(secret), **quick}),
        ("plan", {"workload": "../outside/secret.toml", **quick}),
        ("plan", {"workload": "way-out.toml", **quick}),
        ("plan", {"workload_toml": small_text(trace), **quick}),
        ("fit", {"model": "/"}),
    )
    assert inside.structured_content["feasible"], words(inside)
    for got in (absolute, up, link, traced):
        assert (got.is_error, LINE in words(got)) == (True, True), words(got)
    assert none.is_error
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_root_no_file_is_read(tmp_path: Path) -> None:
    (got,) = asked(started(tmp_path), ("plan", {"workload": str(small(tmp_path)), "quick": True}))
    assert (got.is_error, LINE in words(got)) == (True, True)


GUARDED = """
import os, subprocess, sys
from pathlib import Path
from crosstie.cli.mcp import read_only
folder, outside = map(Path, sys.argv[1:])
read_only([folder])
assert (folder / "a").read_text() == "a" and os.listdir(folder) == ["a"]
assert open(os.devnull, "w").write("x")
import wave
tried = {
    "read": lambda: outside.read_text(), "list": lambda: os.listdir("/"), "scan": lambda: list(os.scandir("/")),
    "write": lambda: (folder / "a").write_text("b"), "append": lambda: open(folder / "a", "a"),
    "make": lambda: os.open(folder / "b", os.O_CREAT), "remove": lambda: (folder / "a").unlink(),
    "rename": lambda: os.rename(folder / "a", folder / "b"), "folder": lambda: (folder / "c").mkdir(),
    "start": lambda: subprocess.run(["true"]), "shell": lambda: os.system("true"), "fork": lambda: os.fork(),
}
for name, attempt in tried.items():
    try:
        attempt()
    except PermissionError as error:
        assert "crosstie mcp" in error.strerror, (name, error)
    else:
        print("allowed:", name)
"""


def test_the_guard_refuses_every_way_to_write_to_start_and_to_read_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("a")
    (tmp_path / "there").write_text("b")
    got = subprocess.run(
        [sys.executable, "-c", GUARDED, tmp_path / "here", tmp_path / "there"], capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert (got.returncode, got.stdout, got.stderr) == (0, "", "")
    assert (tmp_path / "here" / "a").read_text() == "a"


def test_over_http_on_this_machine_alone(tmp_path: Path) -> None:
    env = {**os.environ, "CROSSTIE_CATALOG": str(tmp_path)}
    log = tmp_path / "log"
    command = [sys.executable, "-m", "crosstie", "mcp", "--http", "0"]
    with log.open("w") as err, subprocess.Popen(command, stderr=err, env=env) as server:
        try:
            found: Callable[[], Any] = lambda: re.search(r"http://127\.0\.0\.1:\d+/mcp", log.read_text())  # noqa: E731
            assert comes_true(found), log.read_text()
            url = found()[0]
            (got,) = asked(url, ("catalog_show", {"name": "mi300x", "key": "memory.capacity"}))
            assert got.structured_content["facts"][0]["source"]
            for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json", **header})
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, timeout=LIMIT_S)
                assert refused.value.code in (403, 421)
                refused.value.close()
        finally:
            server.terminate()
            server.wait(LIMIT_S)


def test_explain_of_a_running_gateway_is_what_the_command_says(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet()))
    with serving(tmp_path, file, "--emulate", "--speed", "20") as running:
        (got,) = asked(started(tmp_path, "--gateway", running.url), ("explain", {"model": SMALL, "input": 3000}))
        said = json.loads(crosstie("explain", "--url", running.url, "--model", SMALL, "--input", "3000", "--json").out)
    assert not got.is_error, words(got)
    assert got.structured_content.keys() == said.keys()
    for key in ("outcome", "pool", "policy", "request"):
        assert got.structured_content[key] == said[key]
