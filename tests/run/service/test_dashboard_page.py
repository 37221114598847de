"""The page of operators in Chromium, over a gateway whose replicas say that they are emulated."""

import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import pytest
from tests.run.gateway.fakes import MODEL, Fake, fleet_of, pool_of, until
from tests.run.service.test_dashboard import shown
from tests.waiting import LIMIT_S, comes_true
from tests.web.test_in_browser import barriers

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

pytestmark = pytest.mark.browser
KEY, OPERATOR = "an-administrators-own-key", "an-operators-own-key"
WIDTHS = (360, 390, 768, 1280, 1920)
HOSTILE = "<img src=x onerror=\"document.title='taken';window.taken=1\"><script>window.taken=1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        made = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


class Emulated(Fake):
    """Says of itself that no GPU runs."""

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            reply.send(200, b'{"data":[{"id":"m","owned_by":"crosstie-emulated"}]}')
        else:
            super()._handle(request, reply)


class Served(NamedTuple):
    url: str
    admin_url: str


async def _serve(ready: "Queue[Served]", stop: threading.Event) -> None:
    backends = [Emulated(f"fake-{n}") for n in range(3)]
    for one in backends:
        await one.start()
    # A model of any name, and a fleet's own name, are not read as markup.
    made = fleet_of(
        pool_of("amd", *(one.url for one in backends[:2])), pool_of("nvidia", backends[2].url, usd_per_gpu_hour=2.9),
        pool_of("other", "http://127.0.0.1:9/v1", model=HOSTILE), name=HOSTILE,
    )  # fmt: skip
    async with shown(made) as gateway:
        await until(lambda: [one.engine for one in gateway.running.gateway.backends.values()].count("emulated") == 3)
        ready.put(Served(f"http://127.0.0.1:{gateway.running.port}", gateway.door.url))
        await until(stop.is_set, 3600.0)
    for one in backends:
        one.crash()


@pytest.fixture(scope="module")
def gateway() -> Iterator[Served]:
    """On a thread of its own: Playwright has the first one."""
    ready: Queue[Served] = Queue()
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTIE_ADMIN_KEY", KEY)
        patch.setenv("CROSSTIE_OPERATOR_KEY", OPERATOR)
        thread = threading.Thread(target=lambda: run_on_loop(_serve(ready, stop)), daemon=True)
        thread.start()
        yield ready.get(timeout=LIMIT_S)
        stop.set()
        thread.join(LIMIT_S)


class Watched:
    """A page, with all that it asked for and all that went wrong."""

    def __init__(self, browser: Any, gateway: Served, **settings: Any):
        self.root = gateway.url
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda one: self.asked.append(one.url))
        self.page.on("console", lambda one: self.wrong.append(one.text) if one.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda one: self.wrong.append(str(one)))

    def sign_in(self, key: str) -> Any:
        self.page.goto(f"{self.root}/crosstie/")
        self.page.get_by_label("Operator's or administrator's key").fill(key)
        self.page.keyboard.press("Enter")
        self.page.get_by_text("live", exact=True).wait_for()
        return self.page


def ask(gateway: Served, **body: Any) -> int:
    said = {"model": MODEL, "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 4, **body}
    request = urllib.request.Request(
        f"{gateway.url}/v1/chat/completions", json.dumps(said).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            # Who leaves before the end was not served.
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def pools(gateway: Served) -> dict[str, Any]:
    request = urllib.request.Request(f"{gateway.admin_url}/admin/v1/pools", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_it_loads_alone_shows_what_the_admin_json_says_and_runs_nothing(browser: Any, gateway: Served) -> None:
    for _ in range(4):
        assert ask(gateway) == 200
    assert ask(gateway, model=HOSTILE) == 503
    watched = Watched(browser, gateway)
    page = watched.sign_in(OPERATOR)
    said = pools(gateway)
    for row in said["pools"]:
        line = page.locator("#pools tbody tr", has=page.get_by_role("rowheader", name=row["pool"], exact=True))
        cells = line.locator("td").all_inner_texts()
        assert cells[0] == row["model"]
        assert cells[2] == row["state"]
        up = [one["state"] for one in row["backends"]].count("up")
        assert cells[3] == f"{up} of {len(row['backends'])}"
    assert page.locator("#replicas tbody tr").count() == 4
    assert page.locator("#decisions li").count() >= 4
    assert page.locator("#emulated").inner_text().startswith("EMULATED: 3 of 4 replicas are emulated")
    assert comes_true(lambda: "$" in page.locator("#facts").inner_text())
    # Everything that came from outside stands there as text.
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE
    assert page.evaluate("[window.taken === undefined, document.images.length, document.scripts.length]") == [
        True,
        0,
        1,
    ]
    assert {url.removeprefix(watched.root).partition("?")[0] for url in watched.asked} <= {
        "/crosstie/", "/crosstie/app.js", "/crosstie/charts.js", "/crosstie/style.css", "/crosstie/session",
        "/crosstie/live", "/crosstie/history", "data:,",
    }  # fmt: skip
    # The first look at a session finds none, which Chromium reports as an error.
    assert [one for one in watched.wrong if "401" not in one] == []
    assert page.get_by_role("button", name="Drain pool amd").count() == 0, "an operator changes nothing"
    watched.context.close()


def test_a_decision_says_why_when_it_is_opened(browser: Any, gateway: Served) -> None:
    assert ask(gateway) == 200
    watched = Watched(browser, gateway)
    page = watched.sign_in(OPERATOR)
    # Not whichever is on top until the page has the newest: another test's may be of a model that has no pool.
    opened = page.locator("#decisions li", has=page.locator("summary", has_text=MODEL)).first
    opened.locator("summary").click()
    opened.get_by_text("Why:").wait_for()
    opened.get_by_role("rowheader", name="nvidia").wait_for()
    assert "Predicted TTFT" in opened.inner_text()
    watched.context.close()


def test_a_moment_is_chosen_over_a_chart_or_by_keyboard_and_says_why(browser: Any, gateway: Served) -> None:
    watched = Watched(browser, gateway)
    page = watched.sign_in(OPERATOR)
    for _ in range(3):
        assert ask(gateway, stream=True) == 200
    charts = page.locator("#charts figure")
    # As soon as the slot has ended in which they were answered.
    assert comes_true(
        lambda: "amd" in (charts.nth(2).locator("svg").get_attribute("aria-label") or "").partition("p95")[2]
    )
    assert comes_true(lambda: "at p95" in page.locator("#latency tbody").inner_text())
    assert charts.count() == 7
    assert page.locator("#charts").inner_text().count("mean") == 0
    box = charts.first.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 7, box["y"] + 50)
    page.mouse.up()
    page.locator("#moments li", has_text=MODEL).first.locator("summary").click()
    page.locator("#moments").get_by_text("It came to: served").first.wait_for()
    page.locator("#moments").get_by_text("The pools as they were when it was decided").first.wait_for()
    page.get_by_role("slider", name="Moment").focus()
    page.keyboard.press("Home")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("No decision is kept of this time").wait_for()
    assert page.evaluate("document.activeElement.id") == "h-moment"
    page.get_by_role("button", name="amd", exact=True).press("Enter")
    assert page.locator("#replicas tbody tr").count() == 2
    assert [one for one in watched.wrong if "401" not in one] == []
    watched.context.close()


def test_on_a_phone_every_cell_is_there_and_says_what_it_is(browser: Any, gateway: Served) -> None:
    watched = Watched(browser, gateway)
    page = watched.sign_in(KEY)
    page.set_viewport_size({"width": 390, "height": 844})
    out = page.evaluate(
        "[...document.querySelectorAll('tbody :is(th, td), #charts svg')].filter(one => one.offsetParent)"
        ".filter(one => { const at = one.getBoundingClientRect(); return at.left < 0 || at.right > innerWidth })"
        ".map(one => one.outerHTML)"
    )
    assert out == []
    heads = page.evaluate(
        "[...document.querySelectorAll('#pools tr:first-child td')].map(one => getComputedStyle(one, '::before').content)"
    )
    assert '"$/M today"' in heads
    assert page.get_by_text("Nothing has gone wrong since").or_(page.locator("#faults tbody tr")).first.is_visible()
    assert page.get_by_text("No teams: they come with keys").is_visible()
    watched.context.close()


def test_an_administrator_drains_by_keyboard_and_takes_it_back(browser: Any, gateway: Served) -> None:
    watched = Watched(browser, gateway)
    page = watched.sign_in(KEY)
    page.get_by_role("button", name="Drain pool amd").focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog", name="Drain pool amd?").wait_for()
    page.keyboard.press("Escape")
    assert pools(gateway)["changes"] == []
    page.get_by_role("button", name="Drain pool amd").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    page.get_by_text("drain pool amd: done").wait_for()
    assert pools(gateway)["changes"] == ["drain pool amd"]
    page.get_by_role("button", name="Undrain pool amd").click()
    page.get_by_role("dialog").get_by_role("button", name="Undrain").click()
    page.get_by_text("undrain pool amd: done").wait_for()
    assert pools(gateway)["changes"] == []
    page.get_by_role("button", name="Weight of pool amd").click()
    page.get_by_role("spinbutton", name="Weight").fill("3")
    page.get_by_role("dialog").get_by_role("button", name="Set").click()
    page.get_by_text("amd", exact=False).first.wait_for()
    assert comes_true(lambda: pools(gateway)["pools"][0]["weight"] == 3.0)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    assert [one for one in watched.wrong if "401" not in one] == []
    watched.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_and_names_what_it_has(browser: Any, gateway: Served, scheme: str, tmp_path: Path) -> None:
    watched = Watched(browser, gateway, color_scheme=scheme)
    page = watched.sign_in(KEY)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{overflow} pixels stick out at {width}"
        page.screenshot(path=str(tmp_path / f"{scheme}-{width}.png"), full_page=True)
    for name in ("Pools", "Replicas", "Where requests went, and why", "Budgets by team"):
        assert page.get_by_role("heading", name=name).count() == 1
    assert page.get_by_role("region", name="Replicas").get_by_role("columnheader", name="state").count() == 1
    unnamed = page.evaluate("[...document.querySelectorAll('button')].filter(b => !b.hidden && !b.textContent).length")
    assert unnamed <= 1, "the dialog's button has its name when it opens"
    # By keyboard alone one gets to a replica's button.
    page.get_by_role("searchbox", name="Show only").focus()
    page.keyboard.type("nvidia")
    assert comes_true(lambda: page.locator("#replicas tbody tr").count() == 1)
    for _ in range(2):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("Drain replica 127.0.0.1")
    watched.context.close()


def test_axe_finds_nothing(browser: Any, gateway: Served) -> None:
    for key in ("", KEY):
        watched = Watched(browser, gateway, bypass_csp=True)
        if key:
            assert ask(gateway) == 200
            watched.sign_in(key).locator("#decisions li").first.wait_for()
        else:
            watched.page.goto(f"{gateway.url}/crosstie/")
            watched.page.get_by_label("Operator's or administrator's key").wait_for()
        assert barriers(watched.page) == []
        watched.context.close()


def test_an_address_with_a_key_signs_in_and_forgets_it(browser: Any, gateway: Served) -> None:
    watched = Watched(browser, gateway)
    watched.page.goto(f"{watched.root}/crosstie/#key={OPERATOR}")
    watched.page.get_by_text("live", exact=True).wait_for()
    assert watched.page.url == f"{watched.root}/crosstie/"
    assert not any(OPERATOR in url for url in watched.asked)
    watched.page.goto("about:blank")
    watched.page.goto(f"{watched.root}/crosstie/#key=wrong")
    assert comes_true(lambda: watched.page.url == f"{watched.root}/crosstie/")
    watched.context.close()


def test_a_key_that_opens_nothing_is_said_to_the_one_who_typed_it(browser: Any, gateway: Served) -> None:
    watched = Watched(browser, gateway)
    watched.page.goto(f"{watched.root}/crosstie/")
    watched.page.get_by_label("Operator's or administrator's key").fill("wrong")
    watched.page.get_by_role("button", name="Sign in").click()
    watched.page.get_by_role("alert").get_by_text("not a key").wait_for()
    assert watched.page.locator("#board").is_hidden()
    watched.context.close()
