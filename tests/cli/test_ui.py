"""`crosstie ui`: what is typed is planned as the command line does it, and nobody but its own page may ask."""

import asyncio
import json
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.conftest import Command
from tests.small_workload import small_text

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import toml_document
from crosstie.cli import ui
from crosstie.cli.ui import Explorer, answered

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


def test_how_far_it_is_is_told_and_a_first_fleet_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Line:
        told: ClassVar[list[str]] = []

        def __setattr__(self, name: str, value: bytes) -> None:
            self.told.append(value.decode())

    monkeypatch.setattr(ui, "_TOLD", [Line()])
    assert answered({**SMALL, "name": "told"}, str(tmp_path), confirm=False)["feasible"]
    assert any(" an hour so far: " in one for one in Line.told)
    # The same again is not planned again.
    before = len(Line.told)
    answered({**SMALL, "name": "told", "prices": {}}, str(tmp_path), confirm=False)
    assert len(Line.told) == before


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
        port = explorer.listen(0)

        async def ask(
            line: str, *headers: str, body: bytes = b"", host: str = "", cookie: str | None = None
        ) -> tuple[int, bytes, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            cookie = f"crosstie-ui-{port}={explorer.token}" if cookie is None else cookie
            lines = [line, f"host: {host or f'127.0.0.1:{port}'}", "connection: close", f"cookie: {cookie}", *headers]
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
        assert (await ask("GET /../ui.py HTTP/1.1"))[0] in (400, 404)
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


def test_whoever_has_no_token_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie.cli.ui.secrets.token_urlsafe", lambda size: "the-token")

    async def scenario(port: int, ask: Asked) -> None:
        own = f"crosstie-ui-{port}=the-token"
        for cookie in ("", "a=b", f"crosstie-ui-{port}=", f"crosstie-ui-{port + 1}=the-token"):
            for line in ("GET / HTTP/1.1", "GET /?token=a HTTP/1.1", "GET /start HTTP/1.1", "POST /plan HTTP/1.1",
                         "GET /start?token=the-token HTTP/1.1"):  # fmt: skip
                status, head, said = await ask(line, "content-type: application/json", cookie=cookie, body=b"{}")
                assert (status, b"printed" in said, b"set-cookie" in head) == (403, True, False), line
        status, head, _ = await ask("GET /?token=the-token HTTP/1.1", cookie="")
        assert status == 200
        assert f"set-cookie: {own}; path=/; httponly; samesite=strict".encode() in head
        assert (await ask("GET /start HTTP/1.1", cookie=f"a=b; {own}"))[0] == 200

    served(scenario)


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2024-05-10 00:00:{second:02d}.0,{900 + second},{100 + second}\n" for second in range(60)
)


def test_only_files_beside_the_workload_and_those_that_it_names_are_read(tmp_path: Path) -> None:
    home, secret = tmp_path / "home", tmp_path / "secret.csv"
    home.mkdir()
    (home / "own.csv").write_text(TRACE)
    secret.write_text("the-secret-of-somebody\n")
    (home / "link.csv").symlink_to(secret)
    one = {key: value for key, value in SMALL["class"][0].items() if key not in ("input", "output")}

    def with_trace(name: str, *named: str) -> dict[str, Any]:
        asked = {**SMALL, "class": [{**one, "trace": name}]}
        return answered(asked, str(home), False, named)

    for name in (str(secret), "../secret.csv", "link.csv", "~/secret.csv", "no-such.csv"):
        found = with_trace(name)
        assert found == {
            "error": "class[0].trace: is neither a shipped trace nor a file beside the workload",
            "key": "class[0].trace",
        }, name
    assert "the-secret" in with_trace("../secret.csv", str(home / "../secret.csv"))["error"]
    assert "error" not in with_trace("own.csv")


def test_what_is_wrong_with_a_file_is_said_before_anything_listens(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "workload.toml"
    file.write_text(small_text(("llama-3.1-8b", "no-such")))
    said = crosstie("ui", str(file))
    assert said.status == 2
    assert "class[0].model" in said.err
