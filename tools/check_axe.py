"""What axe has against a folder's pages, by day and by night, at a desk and on a phone. A line a finding, and status 1.

check_axe.py site [page.html ...]
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from shutil import which
from threading import Thread
from typing import Any, Literal

LIGHTS: tuple[Literal["light", "dark"], ...] = ("light", "dark")


def axe() -> str | None:
    """Its source, which axe-playwright-python carries; None where that is not installed."""
    rules = find_spec("axe_playwright_python")
    return (Path(rules.origin).parent / "axe.min.js").read_text() if rules and rules.origin else None


def barriers(page: Any, widths: Sequence[int] = (390, 768, 1280)) -> list[str]:
    """With everything unfolded: what is wrong, at which width, by which light, and where."""
    page.evaluate(axe())
    # Colours are judged as they end, not on their way.
    page.add_style_tag(content="* { transition: none !important; animation: none !important; }")
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    wrong = []
    for light in LIGHTS:
        page.emulate_media(color_scheme=light)
        # By night a page has other colours, and nothing else that is new.
        rules = {"runOnly": ["color-contrast", "link-in-text-block"]} if light == "dark" else {}
        rules |= {"resultTypes": ["violations"]}
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            for said in page.evaluate("rules => axe.run(rules)", rules)["violations"]:
                nodes = said["nodes"]
                wrong.append(f"{said['id']} at {width}, {light}: {len(nodes)} times, first {nodes[0]['html'][:200]}")
    return wrong


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def missing() -> str | None:
    """What is to be installed first."""
    if axe() is None or find_spec("playwright") is None:
        return "pip install playwright axe-playwright-python"
    return None if which("chromium") else "apt-get install chromium"


def _of_page(address: str) -> list[str]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(bypass_csp=True)
        page.set_default_timeout(0)
        answer = page.goto(address)
        wrong = barriers(page) if answer is not None and answer.ok else ["is not there"]
        browser.close()
        return wrong


def main(folder: str, *names: str) -> int:
    if lacking := missing():
        print(f"axe needs a browser and its rules: {lacking}", file=sys.stderr)
        return 2
    # The page of errors begins its links at the root: so it is served, and not read from the disk.
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
    Thread(target=server.serve_forever, daemon=True).start()
    pages = names or sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.html"))
    faulty = 0
    # Each process has a browser, which keeps a core busy.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        judged = pool.map(_of_page, (f"http://127.0.0.1:{server.server_port}/{name}" for name in pages))
        for at, (name, wrong) in enumerate(zip(pages, judged, strict=True), 1):
            print(f"{at} of {len(pages)}: {name}", file=sys.stderr, flush=True)
            faulty += len(wrong)
            for line in wrong:
                print(f"{name}: {line}", flush=True)
    print(f"{len(pages)} pages, {faulty} findings", file=sys.stderr)
    return int(faulty > 0 or not pages)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
