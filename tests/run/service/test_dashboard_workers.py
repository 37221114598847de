"""The page of operators over a real gateway of two workers, a shared pool and a team with budgets: what it shows is what
the administrators' API says, and what it changes holds in every worker."""

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.run.service.processes import Running, comes_true, command, environment, serving
from tests.run.service.test_workers_admin import HEADERS, KEY, MANY

pytestmark = [pytest.mark.browser, pytest.mark.slow]
FLEET = Path(__file__).parents[3] / "examples" / "fleets" / "shared_pool.toml"
MODELS = ("llama-3.1-8b", "qwen3-32b", "gpt-oss-120b")


@pytest.fixture
def page() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": 960, "height": 900})
        made.set_default_timeout(120_000)
        yield made
        browser.close()


def asked(port: int, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> tuple[int, bytes]:
    """Over a connection of its own, which either worker may take."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    return answer.status, said


def test_two_workers_a_shared_pool_and_a_team_are_one_page(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", KEY)
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.read_text() + '\n[state]\nkeys = "required"\nstore = "keys.db"\n')

    def keys(*arguments: str) -> str:
        made = subprocess.run(
            command("keys", *arguments, "--fleet", file), capture_output=True, text=True, check=True,
            env=environment(tmp_path),
        )  # fmt: skip
        return made.stdout.strip()

    keys("team", "research", "--usd-per-day", "1")
    key = keys("create", "alice", "--team", "research")
    with serving(
        tmp_path, file, "--emulate", "--speed", "50", "--workers", "2", "--dashboard", "--admin-port", "0"
    ) as it:
        _look(page, it, {"authorization": f"Bearer {key}", "content-type": "application/json"})
        assert it.ends() == 0
        assert "Traceback" not in it.errors


def _look(page: Any, it: Running, headers: dict[str, str]) -> None:
    admin_port = int(it.said["admin_url"].rpartition(":")[2])

    def ask(model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        return asked(it.port, "/v1/chat/completions", body, headers)[0]

    def fleet() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(asked(admin_port, "/admin/v1/pools", None, HEADERS)[1])
        return found

    for _ in range(4):
        assert [ask(model) for model in MODELS] == [200, 200, 200]
    # Requests are counted when they have ended, in whichever worker had them.
    assert comes_true(lambda: fleet()["served"][0]["total"]["requests"] == 12)
    assert fleet()["processes"] == 2
    wrong: list[str] = []
    page.on("pageerror", lambda one: wrong.append(str(one)))
    page.goto(f"http://127.0.0.1:{it.port}/crosstie/")
    page.get_by_label("Operator's or administrator's key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_text("live", exact=True).wait_for()

    def cells(table: str, row: int) -> list[str]:
        found: list[str] = page.locator(f"#{table} tbody tr").nth(row).locator("th, td").all_inner_texts()
        return found

    said = fleet()
    assert [cells("pools", n)[1] for n in range(3)] == [one["model"] for one in said["pools"]] == list(MODELS)
    # What belongs to the whole pool is said once, and can be done once.
    assert [cells("pools", 1)[n] for n in (6, 9, 10, 11)] == ["as above"] * 4
    # A slot of both workers has ended.
    assert comes_true(
        lambda: sum(int(cells("latency", n)[2]) for n in range(page.locator("#latency tbody tr").count())) == 12
    )
    assert page.get_by_role("button", name="Drain pool shared", exact=True).count() == 1
    backends = [(pool["model"], one) for pool in said["pools"] for one in pool["backends"]]
    for n, (model, one) in enumerate(backends):
        assert cells("replicas", n)[8] == f"{model}: {one['residency']}"
    assert "resident" in {one["residency"] for _, one in backends}
    (team,) = said["teams"]
    assert cells("teams", 0)[:3] == ["research", f"{team['requests']:,}", f"{team['tokens']:,}"]
    assert cells("teams", 0)[4].endswith("of $1")
    assert team["requests"] == 12
    assert "2 processes" in page.locator("#about").inner_text()
    # At this width the table is wider than the screen; its buttons are not cut.
    cut = page.evaluate(
        "[...document.querySelectorAll('#pools button:not([hidden]), #replicas button:not([hidden])')]"
        ".filter(b => b.getBoundingClientRect().right > innerWidth).length"
    )
    assert cut == 0
    page.get_by_role("button", name="Drain pool shared", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    page.get_by_text("drain pool shared: done").wait_for()
    assert {ask("qwen3-32b") for _ in range(MANY)} == {503}
    assert comes_true(lambda: cells("pools", 2)[3] == "drained")
    page.get_by_role("button", name="Undrain pool shared", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
    page.get_by_text("undrain pool shared: done").wait_for()
    assert {ask("qwen3-32b") for _ in range(MANY)} == {200}
    # Wrong keys count in all workers, whichever they came to.
    tried = [asked(it.port, "/crosstie/session", {"key": "guess"}, {"content-type": "application/json"})[0]
             for _ in range(MANY)]  # fmt: skip
    assert tried == [401] * 8 + [429] * (MANY - 8)
    assert wrong == []
