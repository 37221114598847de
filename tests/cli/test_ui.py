"""`crosstie ui`: what is typed is planned as the command line does it, and nobody but its own page may ask."""

import asyncio
import json
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.small_workload import small_text

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import toml_document
from crosstie.cli.ui_server import Explorer, answered

pytestmark = pytest.mark.usefixtures("planned_once")
SMALL: dict[str, Any] = tomllib.loads(small_text())
HOSTILE = "<img src=x onerror=alert(1)>"


def changed(**of_class: Any) -> dict[str, Any]:
    return {**SMALL, "class": [{**SMALL["class"][0], **of_class}]}


def test_the_answer_is_that_of_the_command_line(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "workload.toml"
    file.write_text(small_text())
    printed = json.loads(crosstie("plan", str(file), "--quick", "--json").out)
    found = json.loads(json.dumps(answered(SMALL, str(tmp_path), confirm=False)))
    for key in ("fleet", "single_vendor", "flips", "target_prices", "prices"):
        assert found["document"][key] == printed[key], key
    assert {one["name"]: one["value"] for one in found["facts"]}[
        "an hour"
    ] == f"${printed['fleet']['usd_per_hour']:,.2f}"
    # What can be saved gives the same again.
    again = tmp_path / "saved.toml"
    again.write_text(found["workload"])
    assert json.loads(crosstie("plan", str(again), "--quick", "--json").out)["fleet"] == printed["fleet"]
    assert "[[pool]]" in found["fleet"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (changed(model="no-such"), "class[0].model: unknown model 'no-such'"),
        (changed(input="{ median = "), "class[0].input: is neither a number nor TOML"),
        (changed(ttft_ms={"p95": -1}), "class[0].ttft_ms"),
        ({**SMALL, "constraints": {"accelerators": ["none chosen"]}}, "none chosen"),
        ({**SMALL, "unknown": 1}, "unknown"),
        ({**SMALL, "traffic": {"requests_per_s": "many"}}, "requests_per_s"),
        ({"class": [7]}, ""),
        ({"name": None, "class": None}, "class"),
    ],
)
def test_what_is_mistyped_is_said_as_the_command_line_says_it(asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = answered(asked, str(tmp_path), confirm=False)
    assert said in found["error"]
    assert str(tmp_path) not in found["error"]
    assert "/tmp" not in found["error"]


def test_lengths_may_be_typed_as_toml_has_them(tmp_path: Path) -> None:
    found = answered(changed(input="{ median = 1500, p95 = 6000 }", output="300"), str(tmp_path), confirm=False)
    assert found["feasible"]
    assert "input = { median = 1500, p95 = 6000 }" in found["workload"]


def test_names_are_words_and_never_markup(tmp_path: Path) -> None:
    found = answered({**SMALL, "name": HOSTILE}, str(tmp_path), confirm=False)
    assert "<img" not in found["html"]
    assert "&lt;img" in found["html"]


@pytest.mark.parametrize("name", ["assistant", "demo"])
def test_a_file_survives_being_written_again(name: str) -> None:
    file = Path(__file__).parents[2] / "src/crosstie/catalog/data/workloads" / f"{name}.toml"
    content = tomllib.loads(file.read_text())
    assert tomllib.loads(toml_document(content)) == content


Asked = Callable[..., Coroutine[Any, Any, tuple[int, bytes, bytes]]]


def served(scenario: Callable[[int, Asked], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        explorer = Explorer(Catalog(), SMALL, Path())
        port = await explorer.listen(asyncio.get_running_loop(), 0)

        async def ask(line: str, *headers: str, body: bytes = b"", host: str = "") -> tuple[int, bytes, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines = [line, f"host: {host or f'127.0.0.1:{port}'}", "connection: close", *headers]
            lines += [f"content-length: {len(body)}"] if body else []
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            got = await reader.read(-1)
            writer.close()
            head, _, rest = got.partition(b"\r\n\r\n")
            return int(head.split()[1]), head.lower(), rest

        try:
            await scenario(port, ask)
        finally:
            explorer.close()

    asyncio.run(run())


@pytest.mark.slow
def test_only_its_own_page_may_ask() -> None:
    body = json.dumps(SMALL).encode()

    async def scenario(port: int, ask: Asked) -> None:
        json_type = "content-type: application/json"
        own, other = f"origin: http://127.0.0.1:{port}", "origin: http://evil.example"
        assert (await ask("GET / HTTP/1.1", host="evil.example"))[0] == 421
        assert (await ask("POST /plan HTTP/1.1", json_type, other, body=body))[0] == 403
        assert (await ask("POST /plan HTTP/1.1", "content-type: text/plain", own, body=body))[0] == 403
        assert (await ask("GET /plan HTTP/1.1"))[0] == 403
        assert (await ask("POST /plan HTTP/1.1", json_type, own, body=b"[1]"))[0] == 400
        assert (await ask("GET /../ui_server.py HTTP/1.1"))[0] in (400, 404)
        status, _, answer = await ask("POST /plan HTTP/1.1", json_type, own, body=body)
        assert (status, json.loads(answer)["feasible"]) == (200, True)

    served(scenario)


def test_pages_say_what_may_run_in_them() -> None:
    async def scenario(_port: int, ask: Asked) -> None:
        for path in ("/", "/ui.js", "/ui.css", "/report.css", "/start"):
            status, head, _ = await ask(f"GET {path} HTTP/1.1")
            assert status == 200
            assert b"content-security-policy: default-src 'none'; script-src 'self'" in head
            assert b"x-frame-options: deny" in head

    served(scenario)


def test_what_is_wrong_with_a_file_is_said_before_anything_listens(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "workload.toml"
    file.write_text(small_text(("llama-3.1-8b", "no-such")))
    said = crosstie("ui", str(file))
    assert said.status == 2
    assert "class[0].model" in said.err
