"""`crosstie mcp` by the SDK's own client, in memory: the same documents as --json, typed, short unless asked, bounded."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import click
import pytest
from tests.conftest import Command
from tests.lazily import Lazily
from tests.small_workload import small, small_text
from tests.waiting import comes_true

from crosstie.cli.mcp_tools import EXAMPLE, TOOLS, CatalogListAnswer, ExplainAnswer, Tool, schema_of
from crosstie.cli.progress import progress

if TYPE_CHECKING:
    import mcp
    import mcp_types

    from crosstie.cli import mcp_server
else:
    mcp, mcp_types = Lazily("mcp"), Lazily("mcp_types")
    mcp_server = Lazily("crosstie.cli.mcp_server")

pytestmark = pytest.mark.usefixtures("planned_once")
ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"
FLEET = str(ROOT / "examples" / "fleets" / "two_vendors.toml")


def called(name: str, arguments: dict[str, Any], gateway: str = NOWHERE, **options: Any) -> mcp_types.CallToolResult:
    async def call() -> mcp_types.CallToolResult:
        async with mcp.Client(mcp_server.make_server(gateway)) as client:
            return await client.call_tool(name, arguments, **options)

    return anyio.run(call)


def text_of(got: mcp_types.CallToolResult) -> str:
    (content,) = got.content
    assert isinstance(content, mcp_types.TextContent)
    return content.text


def answer(name: str, arguments: dict[str, Any], gateway: str = NOWHERE) -> dict[str, Any]:
    """The client has held it to the tool's schema by then."""
    got = called(name, arguments, gateway)
    assert not got.is_error, text_of(got)
    assert json.loads(text_of(got)) == got.structured_content
    found: dict[str, Any] = got.structured_content
    return found


def refusal(name: str, arguments: dict[str, Any], gateway: str = NOWHERE) -> str:
    got = called(name, arguments, gateway)
    assert (got.is_error, got.structured_content) == (True, None)
    assert "\n" not in text_of(got)
    return text_of(got)


@pytest.fixture(autouse=True)
def own_catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CROSSTIE_CATALOG", str(tmp_path / "user-catalog"))


def test_every_tool_is_described_typed_and_read_only() -> None:
    async def listed() -> Any:
        async with mcp.Client(mcp_server.make_server(NOWHERE)) as client:
            assert client.instructions is not None
            assert "--json" in client.instructions
            return (await client.list_tools()).tools

    tools = anyio.run(listed)
    assert [tool.name for tool in tools] == list(TOOLS)
    for tool in tools:
        assert (tool.annotations.read_only_hint, tool.annotations.destructive_hint) == (True, False)
        assert tool.annotations.open_world_hint is (tool.name == "explain")
        assert tool.description
        for schema in (tool.input_schema, tool.output_schema):
            assert schema["type"] == "object"
        assert tool.input_schema["additionalProperties"] is False


def test_an_answer_of_other_types_than_the_schema_says_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(TOOLS["catalog_show"], answers=CatalogListAnswer)
    monkeypatch.setitem(TOOLS, "catalog_show", wrong)
    with pytest.raises(ExceptionGroup) as caught:
        called("catalog_show", {"name": "mi300x"})
    assert caught.group_contains(RuntimeError, match="Invalid structured content")


# A tool, what it is asked, and the command that prints the same.
SAME: list[tuple[str, dict[str, Any], list[str]]] = [
    ("fit", {"model": "llama-3.1-70b", "on": ["mi300x", "h200"], "full": True},
     ["fit", "llama-3.1-70b", "--on", "mi300x,h200"]),
    ("fit", {"model": "deepseek-v3", "on": ["mi355x"], "precision": ["native", "bf16"], "context": 32768, "kv": "fp8",
             "tp": 8, "full": True},
     ["fit", "deepseek-v3", "--on", "mi355x", "--precision", "native,bf16", "--context", "32768", "--kv", "fp8", "--tp", "8"]),
    ("compare", {"model": "llama-3.1-70b", "on": ["mi300x", "h200"], "input": 2048, "concurrency": 16, "precision": "fp8"},
     ["compare", "llama-3.1-70b", "--on", "mi300x,h200", "--input", "2048", "--concurrency", "16", "--precision", "fp8"]),
    ("preflight", {"model": "deepseek-v3", "on": ["mi300x", "h200"], "env": {"VLLM_ROCM_USE_AITER": "1"}, "full": True},
     ["preflight", "deepseek-v3", "--on", "mi300x,h200", "--env", "VLLM_ROCM_USE_AITER=1"]),
    ("simulate", {"what": FLEET, "trace": "azure-2023-conversation", "rate": 40, "requests": 100, "kill": ["mi300x@1s+1s"], "seeds": 1, "full": True},
     ["simulate", FLEET, "--trace", "azure-2023-conversation", "--rate", "40", "--requests", "100", "--kill", "mi300x@1s+1s", "--seeds", "1"]),
    ("catalog_show", {"name": "mi300x"}, ["catalog", "show", "mi300x"]),
    ("catalog_show", {"name": "h200", "key": "price"}, ["catalog", "show", "h200", "price"]),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "asked", "command"), SAME, ids=[f"{one[0]}-{n}" for n, one in enumerate(SAME)])
def test_a_tool_says_what_the_command_prints(
    tool: str, asked: dict[str, Any], command: list[str], crosstie: Command
) -> None:
    assert answer(tool, asked) == json.loads(crosstie(*command, "--json").out)


def test_a_list_has_the_rows_of_the_command(crosstie: Command) -> None:
    whole = json.loads(crosstie("catalog", "list", "prices", "--json").out)
    assert answer("catalog_list", {"kind": "prices", "full": True}) == {"rows": whole}
    short = answer("catalog_list", {"kind": "prices"})
    assert short == {"rows": whole[:50], "shortened": [f"rows: {len(whole) - 50} more"]}
    found = answer("catalog_list", {"kind": "prices", "on": ["mi300x"], "search": "VULTR"})["rows"]
    assert found
    assert all(row["accelerator"] == "mi300x" and row["source"] and row["date"] for row in found)


def test_a_plan_of_a_text_is_that_of_the_file(crosstie: Command, tmp_path: Path) -> None:
    file = small(tmp_path)
    options = ["--price", "h200=1.5", "--discount", "AMD=10%", "--sure", "70", "--quick"]
    whole = json.loads(crosstie("plan", str(file), *options, "--json").out)
    asked = {"price": {"h200": 1.5}, "discount": {"AMD": 0.1}, "sure": 70, "quick": True}
    assert answer("plan", {"workload": str(file), "full": True, **asked}) == whole
    of_text = answer("plan", {"workload_toml": small_text(), "full": True, **asked})
    assert of_text["workload"].pop("file") == "workload_toml"
    whole["workload"].pop("file")
    assert of_text == whole


@pytest.mark.slow
def test_the_example_of_a_workload_can_be_planned() -> None:
    assert schema_of(TOOLS["plan"].question)["properties"]["workload_toml"]["anyOf"][0]["examples"] == [EXAMPLE]
    assert answer("plan", {"workload_toml": EXAMPLE, "quick": True})["feasible"]


@pytest.mark.slow
def test_a_plan_is_confirmed_and_tells_how_far_it_is(crosstie: Command, tmp_path: Path) -> None:
    told: list[tuple[float, str | None]] = []

    async def on_progress(done: float, total: float | None, message: str | None) -> None:
        told.append((done, message))

    file = small(tmp_path)
    got = called("plan", {"workload": str(file)}, progress_callback=on_progress)
    whole = json.loads(crosstie("plan", str(file), "--json").out)
    assert got.structured_content["confirmed"] == whole["confirmed"] is not None
    assert is_part(got.structured_content, whole)
    numbers = [number for number, _ in told]
    assert numbers == sorted(set(numbers))
    assert numbers
    assert all(message for _, message in told)


def is_part(short: Any, whole: Any) -> bool:
    """Whether every value of the one is in the other, under the same keys and in the same order."""
    if isinstance(short, dict):
        return all(key == "shortened" or (key in whole and is_part(value, whole[key])) for key, value in short.items())
    if isinstance(short, list):
        rest = iter(whole)
        return all(any(is_part(one, other) for other in rest) for one in short)
    return bool(short == whole)


@pytest.mark.parametrize(
    ("tool", "asked", "command", "gone"),
    [
        ("fit", {"model": "llama-3.1-70b"}, ["fit", "llama-3.1-70b"], "placements: "),
        ("preflight", {"model": "deepseek-v3", "on": ["mi300x"]}, ["preflight", "deepseek-v3", "--on", "mi300x"], "findings: "),
    ],
)  # fmt: skip
def test_a_short_answer_is_a_part_of_the_whole_and_says_what_it_left_out(
    tool: str, asked: dict[str, Any], command: list[str], gone: str, crosstie: Command
) -> None:
    short, whole = answer(tool, asked), json.loads(crosstie(*command, "--json").out)
    assert is_part(short, whole)
    assert len(json.dumps(short)) < len(json.dumps(whole)) / 2
    assert short["shortened"][0].startswith(gone)
    assert not is_part(whole, short)


# Bad questions, and the command that is as wrong.
WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("fit", {"model": "lama-3.1-70b"}, ["fit", "lama-3.1-70b"]),
    ("compare", {"model": "llama-3.1-8b", "on": ["h300"]}, ["compare", "llama-3.1-8b", "--on", "h300"]),
    ("fit", {"model": "llama-3.1-8b", "context": 10**6}, ["fit", "llama-3.1-8b", "--context", "1000000"]),
    ("plan", {"workload": "no-such"}, ["plan", "no-such"]),
    ("plan", {"workload": "demo", "price": {"h300": 1.0}}, ["plan", "demo", "--price", "h300=1.0"]),
    ("simulate", {"what": "no-such.toml"}, ["simulate", "no-such.toml"]),
    ("simulate", {"what": FLEET, "requests": 5}, ["simulate", FLEET, "--requests", "5"]),
    ("preflight", {"model": "deepseek-v3", "on": ["mi300x"], "engine": "tgi"}, ["preflight", "deepseek-v3", "--on", "mi300x", "--engine", "tgi"]),
    ("catalog_show", {"name": "mi300x", "key": "colour"}, ["catalog", "show", "mi300x", "colour"]),
    ("explain", {"model": "m"}, ["explain", "--model", "m", "--url", NOWHERE]),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "asked", "command"), WRONG, ids=[f"{one[0]}-{n}" for n, one in enumerate(WRONG)])
def test_bad_input_is_refused_in_the_words_of_the_command(
    tool: str, asked: dict[str, Any], command: list[str], crosstie: Command
) -> None:
    got = crosstie(*command)
    assert got.status == 2
    assert f"crosstie: {refusal(tool, asked)}\n" == got.err


@pytest.mark.parametrize(
    ("tool", "asked", "words"),
    [
        ("fitt", {}, "unknown tool 'fitt'. Did you mean fit?"),
        ("fit", {}, "Object missing required field `model`"),
        ("fit", {"model": "llama-3.1-8b", "contexts": 1}, "Object contains unknown field `contexts`"),
        ("fit", {"model": "llama-3.1-8b", "context": "8k"}, "at `$.context`"),
        ("simulate", {"what": FLEET, "seeds": 0}, ">= 1"),
        ("compare", {"model": "llama-3.1-8b", "on": ["h200"], "kv": "fp7"}, "Invalid enum value 'fp7' - at `$.kv`"),
        ("fit", {"model": "x" * 2000}, "length <= 1000"),
        ("plan", {}, "give workload or workload_toml: one of them"),
        ("plan", {"workload": "demo", "workload_toml": "x"}, "one of them"),
        ("plan", {"workload_toml": "x = 1"}, "workload_toml: x: unknown key"),
        ("plan", {"workload_toml": "x = "}, "workload_toml: not valid TOML"),
        ("plan", {"workload": "demo", "on": ["this"]}, "on this: no machine is looked at"),
        ("simulate", {"what": FLEET, "class": "chat"}, "--class is for a trace"),
        ("simulate", {"what": FLEET, "workload": "demo", "trace": "azure-2023-code"}, "from one of them"),
        ("simulate", {"what": FLEET, "policy": ["best"]}, "best"),
        ("preflight", {"model": "org/name", "on": ["mi300x"]}, "the hub is not asked from here"),
        ("explain", {"model": "m", "pool": "a\r\nx-other: b"}, "--pool: must be one line"),
        ("catalog_list", {"kind": "prizes"}, "Invalid enum value 'prizes' - at `$.kind`"),
        ("catalog_list", {"on": ["h200"]}, "--on goes with `list prices`"),
    ],
)  # fmt: skip
def test_what_no_command_could_be_asked_is_refused_in_one_line(tool: str, asked: dict[str, Any], words: str) -> None:
    assert words in refusal(tool, asked)


def test_an_answer_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie.cli.mcp_server._MOST", 1000)
    assert "more than 1,000: ask for less" in refusal("catalog_show", {"name": "mi300x"})
    assert answer("catalog_show", {"name": "mi300x", "key": "memory.capacity"})["facts"]


DECISION = {
    "outcome": "send", "pool": "a", "replica": "a/1", "policy": "fastest", "reason": "soonest", "request": {"model": "m"},
    "considered": [{"pool": "a", "replica": "a/1", "predicted": None, "dropped": None}],
}  # fmt: skip


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[tuple[str, dict[str, str], Any]]]]:
    """One that says the same to everybody, and keeps what it was asked."""
    asked: list[tuple[str, dict[str, str], Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, {key.lower(): value for key, value in self.headers.items()}, body))
            said = json.dumps(DECISION).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_explain_asks_the_gateway_that_the_server_was_started_for(
    gateway: tuple[str, list[tuple[str, dict[str, str], Any]]],
) -> None:
    url, asked = gateway
    question = {
        "model": "m",
        "input": 7,
        "output": 3,
        "class": "chat",
        "ttft_ms": 250,
        "priority": "high",
    }
    assert answer("explain", question, url) == DECISION
    ((path, headers, body),) = asked
    assert path == "/crosstie/explain"
    assert body == {"model": "m", "prompt": [1] * 7, "max_tokens": 3}
    hints = {key: value for key, value in headers.items() if key.startswith("x-crosstie-")}
    assert hints == {"x-crosstie-class": "chat", "x-crosstie-ttft-ms": "250.0", "x-crosstie-priority": "high"}
    # Another address would get the key of this one.
    assert "url" not in TOOLS["explain"].parameters


def test_work_that_nobody_waits_for_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[str] = []

    @click.command()
    @click.option("--json", is_flag=True)
    def endless(json: bool) -> None:
        states.append("began")
        try:
            with progress() as on_progress:
                while True:
                    on_progress(0, 0, "going on")
        finally:
            states.append("ended")

    monkeypatch.setitem(TOOLS, "endless", Tool("Goes on until somebody ends it.", endless, "", ExplainAnswer))

    async def cancelled() -> None:
        async with mcp.Client(mcp_server.make_server(NOWHERE)) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "endless", {})
            with anyio.fail_after(120):
                while not states:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    anyio.run(cancelled)
    assert comes_true(lambda: states == ["began", "ended"])


def one_line(err: str, words: str) -> bool:
    return err.startswith("crosstie: ") and err.count("\n") == 1 and words in err


def test_a_missing_library_is_named(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "crosstie.cli.mcp_server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    got = crosstie("mcp")
    assert (got.status, one_line(got.err, "pip install '.[mcp]'")) == (2, True), got.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda folder, port: ["--root", str(folder / "gone")], "gone: No such file or directory"),
        (lambda folder, port: ["--http", str(port)], "Address already in use"),
        (lambda folder, port: ["--json"], "--json goes with --tools"),
    ],
)
def test_what_a_server_cannot_be_started_with_is_one_line(
    options: Callable[[Path, int], list[str]], words: str, crosstie: Command, tmp_path: Path,
    gateway: tuple[str, list[tuple[str, dict[str, str], Any]]],
) -> None:  # fmt: skip
    got = crosstie("mcp", *options(tmp_path, int(gateway[0].rpartition(":")[2])))
    assert (got.status, one_line(got.err, words)) == (2, True), got.err


def test_the_tools_can_be_listed_without_a_client(crosstie: Command) -> None:
    assert all(name in crosstie("mcp", "--tools").out for name in TOOLS)
    listed = json.loads(crosstie("mcp", "--tools", "--json").out)
    assert [tool["name"] for tool in listed] == list(TOOLS)
    assert listed[0]["input_schema"]["required"] == ["model"]
