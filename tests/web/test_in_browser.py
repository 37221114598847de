"""Pages in a real browser: they load without errors or requests, fit every width, and print on A4 uncut."""

import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.port.preflight.test_gguf_model import SHAPES, tensors, write as write_gguf
from tests.prove.calibration.rows import row, written
from tests.prove.parity.fake_engine import Engine, served
from tests.small_workload import small_text

from crosstie.decide.cost.curves import Curve
from crosstie.web.chart import curves_picture
from crosstie.web.parts import CommandLine, Heading, Part, Table
from crosstie.web.report import KeyNumber, Report, write_report

pytestmark = pytest.mark.browser
WIDTHS = (360, 768, 1280, 1920)
AXE = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "check_axe.py"))
HOSTILE = "<img src=http://127.0.0.1:9/x onerror=document.title='taken'>"


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


@pytest.fixture
def report(tmp_path: Path) -> Path:
    rows = [[f"pool-{n}-{'x' * 20}", f"{n:,}.00", "words that wrap " * 6] for n in range(80)]
    parts: list[Part] = [
        f"an answer for {HOSTILE}",
        Table(["pool", ">$/h", "~why"], rows, "A table"),
        Heading("A wide one"),
        Table([f"column {n}" for n in range(14)], [["some words"] * 14] * 3),
        CommandLine("crosstie plan workload.toml --price " + "mi300x=1.99," * 30),
    ]
    made = Report(
        title="A report", command="crosstie x", made="2026-01-01", version="1", parts=parts,
        facts=[KeyNumber("an hour", "$1.00", "$0.90 to $1.10")], document={"name": HOSTILE},
    )  # fmt: skip
    file = tmp_path / "report.html"
    file.write_text(write_report(made))
    return file


def test_a_report_loads_alone_and_fits_every_width(browser: Any, report: Path) -> None:
    page = browser.new_page()
    asked, wrong = [], []
    page.on("request", lambda one: asked.append(one.url))
    page.on("console", lambda one: wrong.append(one.text) if one.type in ("error", "warning") else None)
    page.on("pageerror", lambda one: wrong.append(str(one)))
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(report.as_uri())
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, f"{overflow} pixels stick out at {width}"
    assert page.title() == "A report"
    assert {url for url in asked if not url.startswith("file:")} == set()
    assert wrong == []
    # A list of what a screen reader says: headings in order, tables with named columns.
    assert page.locator("h1").count() == 1
    assert page.get_by_role("columnheader", name="pool").count() == 1
    assert page.get_by_role("heading", name="A wide one").count() == 1
    page.close()


def barriers(page: Any) -> list[str]:
    if AXE["axe"]() is None:
        pytest.skip("needs axe-playwright-python, which carries axe")
    found: list[str] = AXE["barriers"](page)
    return found


# A command a page; `small.toml`, `plan.json`, `rows.csv` and `small.gguf` are in its folder.
PAGES = {
    "plan": "plan small.toml --quick --save plan.json --html",
    "plan-plot": "plan small.toml --quick --plot",
    "simulate": "simulate plan.json --html",
    "simulate-plot": "simulate plan.json --plot",
    "review": "review plan.json --checklist --html",
    "compare": "compare llama-3.1-8b --on mi300x,h200 --html",
    "cost": "compare llama-3.1-8b --on mi300x,h200 --plot-cost",
    "fit": "fit llama-3.1-8b --on mi300x,h200 --plot",
    "tco": "tco llama-3.1-8b --on mi300x,h200 --html",
    "scorecard": "scorecard --on mi300x,h200 --html",
    "tax": "tax rows.csv --plot",
    "validate": "validate rows.csv --html",
    "preflight": "preflight model llama-3.1-8b --on mi300x --html",
    "doctor": "doctor --html",
    "port": "port small.gguf --from h200 --to mi300x --engine llama.cpp --html",
}


@pytest.mark.slow
def test_axe_finds_nothing_on_any_page_that_a_command_writes(
    browser: Any, report: Path, crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(small_text())
    written(Path("rows.csv"), row(), row(engine_version="0.9.0", date="2026-02-01", value="400"))
    write_gguf(Path("small.gguf"), *tensors(SHAPES))
    for name, command in PAGES.items():
        assert crosstie(*command.split(), f"{name}.html").status in (0, 1), name
    with served(Engine()) as a, served(Engine()) as b:
        # In a process of its own: it has a loop, and Playwright has this thread's.
        asked = ("parity", a.url, b.url, "--limit", "1", "--tokens", "2", "--html", "parity.html")
        subprocess.run([sys.executable, "-m", "crosstie", *asked], check=False, capture_output=True)
    for file in [report, *(tmp_path / f"{name}.html" for name in (*PAGES, "parity"))]:
        page = browser.new_page(bypass_csp=True)
        page.goto(file.as_uri())
        assert (file.name, barriers(page)) == (file.name, [])
        page.close()


def test_axe_finds_what_is_wrong_and_where(browser: Any) -> None:
    page = browser.new_page()
    page.set_content("<html lang=en><title>T</title><main><h1>T</h1><p style='color:#777;background:#888'>pale</main>")
    wrong = barriers(page)
    assert len(wrong) == 6
    assert wrong[0].startswith("color-contrast at 390, light: 1 times, first <p")
    page.close()


@pytest.mark.parametrize(
    ("library", "browser", "remedy"),
    [
        (None, "/usr/bin/chromium", "pip install playwright axe-playwright-python"),
        ("rules", None, "apt-get install chromium"),
        ("rules", "/usr/bin/chromium", None),
    ],
)
def test_check_axe_says_what_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch, library: str | None, browser: str | None, remedy: str | None
) -> None:
    monkeypatch.setitem(AXE["missing"].__globals__, "axe", lambda: library)
    monkeypatch.setitem(AXE["missing"].__globals__, "which", lambda _: browser)
    assert AXE["missing"]() == remedy
    if remedy:
        assert AXE["main"]("site") == 2


def test_words_in_charts_are_told_from_the_page_by_night(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.html"
    curves_picture([Curve("1 x h200", "h200", [1, 2], [0.1, 0.2], [50.0, 40.0], [50.0, 80.0])], "T").draw(file)
    page = browser.new_page(color_scheme="dark")
    page.goto(file.as_uri())
    for width, shown in ((1280, "wide"), (390, "narrow")):
        page.set_viewport_size({"width": width, "height": 900})
        fills = page.evaluate(
            f"[...document.querySelectorAll('svg.{shown} text')].map(one => getComputedStyle(one).fill)"
        )
        assert len(fills) > 5
        assert "rgb(0, 0, 0)" not in fills
        # Words of a chart are as large as those of the page on a phone too.
        assert page.locator(f"svg.{shown} text").first.bounding_box()["height"] > 8
    page.close()


def test_on_a4_nothing_is_cut(browser: Any, report: Path, tmp_path: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    # A sheet of A4 less its margins, at 96 dots an inch.
    page.set_viewport_size({"width": int((210 - 28) / 25.4 * 96), "height": 1000})
    wide = page.evaluate(
        "[...document.querySelectorAll('table, .block, pre, .facts')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1 || e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    paper = tmp_path / "report.pdf"
    page.pdf(path=str(paper), prefer_css_page_size=True)
    assert paper.read_bytes().startswith(b"%PDF")
    page.close()
