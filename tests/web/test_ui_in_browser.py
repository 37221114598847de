"""The page of `crosstie ui` in a real browser: numbers are the JSON's, typing moves them, the address keeps them."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from tests.small_workload import small_text
from tests.waiting import LIMIT_S
from tests.web.test_in_browser import WIDTHS, barriers, browser

__all__ = ["browser"]
pytestmark = pytest.mark.browser
HOSTILE = "<img src=x onerror=document.title='taken'>"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("ui") / "workload.toml"
    file.write_text(small_text())
    command = [sys.executable, "-m", "crosstie", "ui", str(file), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            assert process.wait(LIMIT_S) == 0


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    made = browser.new_page(accept_downloads=True)
    made.set_default_timeout(LIMIT_S * 1000)
    made.wrong, made.asked = [], []
    made.on("request", lambda one: made.asked.append(one.url))
    made.on("pageerror", lambda one: made.wrong.append(str(one)))
    made.on("console", lambda one: made.wrong.append(one.text) if one.type == "error" else None)
    made.goto(address)
    made.wait_for_selector("#now .facts")
    yield made
    made.close()


def planned(page: Any, type_it: Any) -> dict[str, Any]:
    """What the page was answered to what is typed."""
    with page.expect_response(lambda one: one.url.endswith("/plan") and one.status != 409) as answer:
        type_it()
    return dict(answer.value.json())


def test_on_a_narrow_screen_what_became_of_it_is_in_sight_while_one_types(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.reload()
    page.wait_for_selector("#now .facts")
    page.get_by_text("Change the workload").click()
    found = planned(page, lambda: page.get_by_label("requests/s at the peak").fill("300"))
    said = f"${found['document']['fleet']['usd_per_hour']:.2f} an hour"
    page.wait_for_function("said => document.querySelector('#state').textContent.startsWith(said)", arg=said)
    box = page.locator("#state").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 800
    page.set_viewport_size({"width": 1280, "height": 800})


def test_typing_moves_the_fleet_and_numbers_are_the_answers(page: Any, address: str) -> None:
    page.get_by_role("button", name="Keep beside").click()
    found = planned(page, lambda: page.get_by_label("requests/s at the peak").fill("400"))
    page.wait_for_selector("text=400 requests/s")
    now = page.locator("#now").inner_text()
    assert f"${found['document']['fleet']['usd_per_hour']:,.2f}" in now
    for fact in found["facts"]:
        assert fact["value"] in now
    kept = page.locator("#kept").inner_text()
    assert "5 requests/s" in kept
    assert "against the kept one" in now
    # Charts before words; and the same size for whether it was simulated as for the money.
    assert page.locator("#now section").first.locator(":scope > *").first.evaluate("e => e.tagName") == "FIGURE"
    assert page.locator("#now .facts dt").all_inner_texts().count("simulated") == 1
    assert page.wrong == []
    home = address.partition("?")[0]
    assert "token" not in page.url
    assert {url for url in page.asked if not url.startswith((home, "data:", "blob:"))} == set()


def test_the_address_keeps_what_was_typed(page: Any, browser: Any, address: str) -> None:
    planned(page, lambda: page.get_by_label("requests/s at the peak").fill("77"))
    other = browser.new_page()
    other.goto(f"{address}#{page.url.partition('#')[2]}")
    other.wait_for_selector("text=77 requests/s", timeout=LIMIT_S * 1000)
    other.close()


def test_a_mistake_is_said_and_the_last_answer_stays(page: Any) -> None:
    model = page.locator("[data-key='class[0].model']")
    assert not model.is_visible()
    page.locator("form summary", has_text="Class").click()
    planned(page, lambda: model.fill("no-such"))
    page.wait_for_selector("#error:not([hidden])")
    assert model.get_attribute("aria-invalid") == "true"
    assert "unknown model" in page.locator("#wrong").inner_text()
    assert "class[0].model: unknown model 'no-such'" in page.locator("#error").inner_text()
    assert page.locator("#now .facts").count() == 1
    assert page.locator("#save-fleet").is_disabled()


def test_who_waits_sees_that_it_goes_on(page: Any) -> None:
    page.evaluate(
        "window.told = []; new MutationObserver(() => told.push(document.querySelector('#state').textContent))"
        ".observe(document.querySelector('#state'), { childList: true })"
    )
    planned(page, lambda: page.get_by_label("requests/s at the peak").fill("1234"))
    page.wait_for_function("told.length > 1")
    assert page.evaluate("told[0]").startswith("planning…")


def test_shares_are_typed_as_percentages(page: Any) -> None:
    planned(page, lambda: page.get_by_label("growth a year, %").fill("25"))
    assert '"growth_per_year":0.25' in unquote(page.url)


def test_files_are_saved_as_the_commands_take_them(page: Any, tmp_path: Path) -> None:
    for button, key in (("Save workload", "class"), ("Save fleet", "pool")):
        with page.expect_download() as saved:
            page.get_by_role("button", name=button).click()
        file = tmp_path / saved.value.suggested_filename
        saved.value.save_as(file)
        assert tomllib.loads(file.read_text())[key]


def test_axe_finds_nothing(browser: Any, address: str) -> None:
    page = browser.new_page(bypass_csp=True)
    page.goto(address)
    page.wait_for_selector("#now .facts", timeout=LIMIT_S * 1000)
    page.get_by_role("button", name="Keep beside").click()
    assert barriers(page) == []
    page.close()


def test_names_are_never_run(page: Any) -> None:
    planned(page, lambda: page.get_by_label("name").first.fill(HOSTILE))
    page.wait_for_selector("text=onerror")
    assert page.title() == "Crosstie: explore a fleet"
    assert page.locator("img").count() == 0


def test_it_fits_and_goes_by_keyboard(page: Any) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select, button')].filter(e => e.offsetParent !== null"
        " && !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim()).length"
    )
    assert unnamed == 0
    page.locator("body").press("Tab")
    seen = set()
    for _ in range(200):
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        page.keyboard.press("Tab")
    assert {"simulate", "keep", "save-workload", "save-fleet", "link"} <= seen
