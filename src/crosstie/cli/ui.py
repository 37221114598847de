"""`crosstie ui`, a page on this machine that plans as one types: what it is served, and how a workload that was typed
becomes an answer.

Plans are made in a process of their own, which keeps the catalog: the newest that was typed counts, and those that
nobody waits for any more are dropped. A second process simulates, so that typing is not held up by it. How far each
is stands in memory that this one reads.

Whoever asks has a token, from the address that was printed and then from a cookie: other users and processes of this
machine reach the port too. Of files, only those are read that lie beside the workload or that it named.
"""

import hmac
import json
import re
import secrets
import signal
import sys
import tomllib
import webbrowser
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from ctypes import c_char
from email.message import Message
from functools import cache, lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, NamedTuple

import click

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_toml
from crosstie.catalog.traces import shipped_traces
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.catalog.writing import toml_document, write_text
from crosstie.cli.options import FILE, flag_option, json_option, whole_option
from crosstie.cli.plan_page import LEADING, plan_facts
from crosstie.cli.plan_show import plan_parts
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.decide.cost.prices import quotes
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import PLANNED_BY
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.report import document, mark_of
from crosstie.port.recipe.names import with_names
from crosstie.web.report import write_sections

_DATA = Path(__file__).parents[1] / "web" / "data"
_FILES = {
    "/": ("ui.html", "text/html; charset=utf-8"),
    "/ui.js": ("ui.js", "text/javascript; charset=utf-8"),
    "/ui.css": ("ui.css", "text/css; charset=utf-8"),
    "/report.css": ("report.css", "text/css; charset=utf-8"),
}
# The answer's own markup is escaped; should something slip through, nothing of it would run.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_TOKENLESS = b"open the address that crosstie ui printed: it has a token"
_MOST_BYTES = 2**20
# Distributions and the like are typed as TOML has them.
_TYPED = ("input", "output")
_PERCENTILES = ("p50", "p75", "p90", "p95", "p99")
# Of a workload, as messages begin: class[0].ttft_ms.
_KEY = re.compile(r"[a-z_]+(\[\d+\])?(\.[\w-]+)*")
# Planning and simulating happen in processes that share nothing with this one but a line each of how far they are.
_APART = get_context("spawn")
_MOST_WORDS = 240
_TOLD: list[Any] = []


class Page(NamedTuple):
    status: int
    body: bytes
    kind: str = "application/json"
    cookie: str = ""


class Explorer:
    def __init__(self, catalog: Catalog, workload: dict[str, Any], folder: Path):
        self._catalog, self._workload, self._folder = catalog, workload, folder
        self._progress = {path: _APART.Array(c_char, _MOST_WORDS) for path in ("/plan", "/simulate")}
        self._planning, self._simulating = map(_process, self._progress.values())
        self._waiting: Future[dict[str, Any]] | None = None
        self._server: ThreadingHTTPServer | None = None
        self.token = secrets.token_urlsafe(24)
        self._hosts: set[str] = set()
        self._cookie = ""
        named = [kind.get("trace") for kind in workload.get("class") or () if isinstance(kind, dict)]
        self._named = tuple(str(folder / name) for name in named if isinstance(name, str))

    def listen(self, port: int) -> int:
        """Answers in threads of its own, until `close`."""
        self._server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self.answer))
        at: int = self._server.server_address[1]
        self._hosts = {f"{name}:{at}" for name in ("127.0.0.1", "localhost")}
        # Browsers send the cookies of one port to all others.
        self._cookie = f"crosstie-ui-{at}={self.token}"
        # The browser that is about to open asks for it.
        self._planning.submit(answered, self._workload, str(self._folder), False, self._named)
        Thread(target=self._server.serve_forever, daemon=True).start()
        return at

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for executor in (self._planning, self._simulating):
            # Not asked to finish: nobody is there for its answer.
            for process in list((executor._processes or {}).values()):
                process.kill()
            executor.shutdown(wait=False, cancel_futures=True)

    def answer(self, method: str, target: str, headers: Message, body: bytes) -> Page:
        path, _, query = target.partition("?")
        if headers.get_all("host", []) not in [[host] for host in self._hosts]:
            # A name of somebody else's that was made to point here.
            return Page(421, b"asked for another host", "text/plain")
        cookie = ""
        if path == "/" and hmac.compare_digest(query.encode(), f"token={self.token}".encode()):
            cookie = f"{self._cookie}; Path=/; HttpOnly; SameSite=Strict"
        elif not self._has_cookie(headers):
            return Page(403, _TOKENLESS, "text/plain")
        if method == "GET" and path in _FILES:
            name, kind = _FILES[path]
            return Page(200, (_DATA / name).read_bytes(), kind, cookie)
        if method == "GET" and path == "/start":
            return _page(200, self._start())
        if method == "GET" and path == "/progress":
            return _page(200, {name: line.value.decode(errors="ignore") for name, line in self._progress.items()})
        if path in self._progress:
            origin = headers.get("origin")
            own = origin is None or origin.removeprefix("http://") in self._hosts
            typed = headers.get("content-type", "").startswith("application/json")
            if method != "POST" or not own or not typed:
                # Another page in the same browser can send neither this kind of content nor this origin.
                return _page(403, {"error": "only this page may ask"})
            return self._plan(path == "/simulate", body)
        return _page(404, {"error": "no such page"})

    def _has_cookie(self, headers: Message) -> bool:
        sent = headers.get("cookie", "").encode().split(b";")
        return any(hmac.compare_digest(cookie.strip(), self._cookie.encode()) for cookie in sent)

    def _start(self) -> dict[str, Any]:
        """What the page is filled with: the workload as the file has it, and what can be chosen."""
        catalog = self._catalog
        every = quotes(catalog.prices, list(catalog.accelerators), ["on-demand"], {})
        return {
            "workload": self._workload,
            "models": sorted(catalog.ids("models")),
            "traces": sorted(shipped_traces()),
            "kinds": list(PLANNED_BY),
            "percentiles": list(_PERCENTILES),
            "accelerators": [
                {"id": part.id, "vendor": part.vendor, "usd": every[part.id].usd if part.id in every else None}
                for part in catalog.accelerators.values()
            ],
        }

    def _plan(self, simulated: bool, body: bytes) -> Page:
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise ValueError
        except (ValueError, RecursionError):
            return _page(400, {"error": "no workload as JSON"})
        given = (asked, str(self._folder), simulated, self._named)
        if simulated:
            made = self._simulating.submit(answered, *given)
        else:
            if self._waiting is not None:
                self._waiting.cancel()
            made = self._waiting = self._planning.submit(answered, *given)
        try:
            answer = made.result()
        except CancelledError:
            return _page(409, {"error": "something newer was asked"})
        return _page(400 if "error" in answer else 200, answer)


class _Handler(BaseHTTPRequestHandler):
    # Of a browser that keeps a connection and says nothing.
    timeout = 60
    protocol_version = "HTTP/1.1"

    def __init__(self, answer: Callable[[str, str, Message, bytes], Page], *given: Any):
        self._answer = answer
        super().__init__(*given)

    def do_GET(self) -> None:
        length = self.headers.get("content-length", "0")
        if "transfer-encoding" in self.headers or not length.isascii() or not length.isdigit():
            return self._send(Page(400, b"a length is needed", "text/plain"), last=True)
        if int(length) > _MOST_BYTES:
            return self._send(Page(413, b"too long", "text/plain"), last=True)
        return self._send(self._answer(self.command, self.path, self.headers, self.rfile.read(int(length))))

    do_POST = do_GET  # noqa: N815

    def _send(self, page: Page, last: bool = False) -> None:
        self.send_response_only(page.status)
        for name, value in (*_HEADERS.items(), ("content-type", page.kind), ("content-length", str(len(page.body)))):
            self.send_header(name, value)
        if page.cookie:
            self.send_header("set-cookie", page.cookie)
        if last:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal has the address alone."""


def _process(line: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=_APART, initializer=_TOLD.append, initargs=(line,))


def _tell(done: int, total: int, what: str) -> None:
    """In a process that plans: how far it is, for the one that is asked."""
    for line in _TOLD:
        line.value = (f"{what}, {done:,} of {total:,}" if total else what).encode()[: _MOST_WORDS - 1]


def _page(status: int, content: dict[str, Any]) -> Page:
    return Page(status, json.dumps(content).encode())


@cache
def _catalog() -> Catalog:
    """Of this process, which makes one plan after another."""
    return Catalog()


def answered(asked: dict[str, Any], folder: str, confirm: bool, named: tuple[str, ...] = ()) -> dict[str, Any]:
    """A workload as it was typed to its plan, or to what is wrong with it, in the words of the command line. `named`:
    files outside the folder that may be read all the same."""
    try:
        return _answered(toml_document(_typed(asked, Path(folder), named)), confirm)
    except (CrosstieError, ValueError, TypeError) as error:
        return _refused(str(error))


def _refused(why: str) -> dict[str, Any]:
    """With the key that it is about, where the field is to be marked."""
    key, colon, _ = why.partition(": ")
    return {"error": why, "key": key if colon and _KEY.fullmatch(key) else ""}


@lru_cache(8)
def _answered(text: str, confirm: bool) -> dict[str, Any]:
    _tell(0, 0, "")
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "workload.toml"
        try:
            write_text(file, text)
            made = plan(_catalog(), read_workload(_catalog(), file), confirm=confirm, on_progress=_tell)
        except CrosstieError as error:
            return _refused(str(error).replace(f"{file}: ", "").replace(str(file), "workload"))
    facts = plan_facts(made)
    return {
        "feasible": made.answered,
        "simulated": made.confirmed is not None,
        "facts": [{"name": fact.name, "value": fact.value, "beside": fact.beside} for fact in facts],
        "html": write_sections(made.workload.name, (), list(plan_parts(made, verbose=True)), LEADING),
        "workload": text,
        "fleet": fleet_text(with_names(fleet_of(made))) if made.answered else None,
        "document": document(made, mark_of(_catalog().calibration)),
    }


def _typed(asked: dict[str, Any], folder: Path, named: tuple[str, ...]) -> dict[str, Any]:
    """Fields that hold TOML are read, and traces beside the file that was given are found from here too."""
    home = folder.resolve()
    classes = []
    for number, given in enumerate(asked.get("class") or []):
        entry = dict(given)
        for key in _TYPED:
            if isinstance(entry.get(key), str):
                try:
                    entry[key] = tomllib.loads(f"x = {entry[key]}")["x"]
                except (tomllib.TOMLDecodeError, KeyError):
                    raise ValueError(
                        f"class[{number}].{key}: is neither a number nor TOML such as {{ median = 1500, p95 = 6000 }}"
                    ) from None
        trace = entry.get("trace")
        if isinstance(trace, str) and trace not in shipped_traces():
            file = (folder / trace).resolve()
            if str(folder / trace) not in named and not (file.is_relative_to(home) and file.is_file()):
                raise ValueError(f"class[{number}].trace: is neither a shipped trace nor a file beside the workload")
            entry["trace"] = str(file)
        classes.append(entry)
    return {key: value for key, value in {**asked, "class": classes}.items() if value is not None and value != {}}


@click.command("ui")
@click.argument("workload", type=FILE, default=Path("assistant"), metavar="[WORKLOAD]")
@whole_option("--port", 0, 65535, "0: any that is free.", metavar=None, default=8470)
@flag_option("--open opens", "Open it in your browser.")
@json_option
def command(workload: Path, port: int, opens: bool, as_json: bool) -> int:
    """A page on this machine on which you change a workload and see the fleet move.

    \b
    crosstie ui
    crosstie ui workload.toml --open
    crosstie ui --port 0 --json

    Models, lengths, rates, targets, prices, discounts and accelerators are fields; the answer is what `plan --quick`
    says, and on request what `plan` says after simulation. Keep an answer to see the next one beside it. The address
    holds the state: send it to a colleague who runs this too. Saves the workload and the fleet file. Listens on
    127.0.0.1 alone, for whoever has the token in the printed address; reads no file but those beside WORKLOAD and
    those that it names, writes nothing, and ends with Ctrl-C. WORKLOAD is a file, or a shipped example [assistant].
    """
    catalog = Catalog()
    file = find_workload(workload)
    # What is wrong with the file is said here, and not on a page.
    read_workload(catalog, file)
    explorer = Explorer(catalog, read_toml(file), file.resolve().parent)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            at = explorer.listen(port)
        except OSError as error:
            raise BadInput(f"--port {port}: {error.strerror}; 0 takes any that is free") from None
        url = f"http://127.0.0.1:{at}/?token={explorer.token}"
        _say(url, as_json)
        if opens:
            webbrowser.open(url)
        Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        explorer.close()
    return 0


def _say(url: str, as_json: bool) -> None:
    click.echo(json.dumps({"ready": True, "url": url}) if as_json else f"{url}  (Ctrl-C ends it)")
    sys.stdout.flush()
