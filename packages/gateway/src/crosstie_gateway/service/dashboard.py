"""The page of operators at /crosstie/: the fleet as it is now, where requests went and why, drain and weight.

Each page holds one stream of events. About once a second, while one is open, the document of `crosstie admin pools
--json` is made once for all of them.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.resources import files
from math import isfinite
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from crosstie_gateway.gateway.errors import RequestRejected, error_body, retry_after
from crosstie_gateway.gateway.identity import Clients
from crosstie_gateway.gateway.interfaces import OwnPages
from crosstie_gateway.service.admin import Administration
from crosstie_gateway.service.admin_view import DecisionView, spread
from crosstie_gateway.service.door_keys import DashboardSession, DoorKeys, Sessions, WrongKeys, set_cookie
from crosstie_gateway.service.edge import json_object, outcome
from crosstie_gateway.service.history import MINUTE, SHORT_S, WINDOWS, SeriesRows, history_document, last_minute
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.service.worker_link import (
    DecisionsRequest,
    Done,
    HistoryAnswer,
    HistoryRequest,
    SessionEnded,
    WrongKey,
)
from crosstie_gateway.wire.request import BadRequest, Request
from crosstie_gateway.wire.server import GoneWatcher, Reply
from crosstie_gateway.wire.tasks import Tasks

ROOT = "/crosstie"
# Looking costs a few microseconds a replica: a second for up to a hundred, two for two hundred.
_EVERY_S, _REPLICAS_A_S = 1.0, 100
_MOST_OF_MOMENT = 40
_MOST_READERS = 32
# Decisions that are told at once, and those that a page which has just opened is given.
_AT_ONCE, _KEPT = 25, 50
_MOST_BODY = 16 * 1024
_CHANGES = {f"{ROOT}/{name}": name for name in ("drain", "undrain", "weight")}
_STATIC = {
    ROOT: ("index.html", b"text/html; charset=utf-8"),
    f"{ROOT}/app.js": ("app.js", b"text/javascript; charset=utf-8"),
    f"{ROOT}/charts.js": ("charts.js", b"text/javascript; charset=utf-8"),
    f"{ROOT}/style.css": ("style.css", b"text/css; charset=utf-8"),
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = (
    b"cache-control: no-store\r\nx-content-type-options: nosniff\r\nx-frame-options: DENY\r\n"
    b"referrer-policy: no-referrer\r\ncontent-security-policy: %b\r\n" % _POLICY
)
_ASKED = ("session", "live", "why", "history", "moment")
# Of paths that take another method than GET, or more.
_METHODS = {f"{ROOT}/session": ("GET", "DELETE"), **dict.fromkeys(_CHANGES, ("POST",))}
_encode = msgspec.json.Encoder().encode


class Dashboard(OwnPages):
    """`turned_away`: told why visitors were."""

    def __init__(
        self, process: GatewayProcess, admin: Administration, keys: DoorKeys, turned_away: Callable[[str], None]
    ):  # fmt: skip
        self._process, self._admin, self._keys, self._turned_away = process, admin, keys, turned_away
        self.sessions, self._wrong_keys = Sessions(keys.secret), WrongKeys()
        data = files("crosstie_gateway.service") / "data" / "dashboard"
        self._static = {path: ((data / name).read_bytes(), kind) for path, (name, kind) in _STATIC.items()}
        self.paths = frozenset((*_STATIC, *_CHANGES, *(f"{ROOT}/{name}" for name in _ASKED)))
        # Pages that are open, and who is signed in there.
        self._readers: dict[Reply, DashboardSession] = {}
        self._telling: asyncio.Task[None] | None = None
        self._working = Tasks()
        # What was last looked back on, by window: until its next point is there, the same for all pages.
        self._histories: dict[str, tuple[int, dict[str, Any]]] = {}
        self._minute: tuple[int, dict[str, Any]] = (0, {})
        # While one is open: the latest decisions, and how many of each worker are known.
        self._rows: deque[DecisionView] = deque(maxlen=_KEPT)
        self._after: dict[str, int] | None = None
        self._latest: dict[str, Any] | None = None
        # How often the document was made; a test counts it.
        self.made = 0
        process.on(SessionEnded, self._on_ended)
        process.on(WrongKey, self._on_wrong_key)

    async def stop(self) -> None:
        await self._working.cancel()
        for reply in list(self._readers):
            self._end(reply)

    def opens(self, request: Request) -> None:
        """Raises BadRequest for long bodies, key or not."""
        length = request.headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > _MOST_BODY:
            raise BadRequest(413, f"a body here has a content-length, of {_MOST_BODY} bytes at most")

    # Requests

    def handle(self, request: Request, reply: Reply) -> None:
        try:
            self._answer(request, reply)
        except RequestRejected as refused:
            self._refuse(reply, refused)

    def _answer(self, request: Request, reply: Reply) -> None:
        path, method = request.path, request.method
        if path in self._static:
            _check_method(request, "GET", "HEAD")
            body, kind = self._static[path]
            reply.send(200, body, _HEADERS, kind)
            return
        _check_origin(request)
        if path == f"{ROOT}/session" and method == "POST":
            self._sign_in(request, reply)
            return
        session = self.sessions.find(request.headers.get(b"cookie", b""))
        if session is None:
            raise RequestRejected(401, "sign in with an operator's or the administrator's key", "signed_out")
        _check_method(request, *_METHODS.get(path, ("GET",)))
        if path == f"{ROOT}/live":
            self._follow(session, reply)
        elif path == f"{ROOT}/why":
            self._later(reply, "a reason", self._why(_given(request, "request")))
        elif path == f"{ROOT}/history":
            window = _given(request, "window")
            if window not in WINDOWS:
                raise RequestRejected(400, f"window: must be one of {', '.join(WINDOWS)}", "bad_request")
            self._later(reply, "looking back", self._history(window))
        elif path == f"{ROOT}/moment":
            self._later(reply, "looking back", self._moment(_time(request, "from"), _time(request, "to")))
        elif method == "GET":
            self._send_session(session, reply)
        elif method == "DELETE":
            self._check_csrf(session, request)
            gone = set_cookie("", secure=_is_secure(request, reply), lasts_s=0)
            self._later(reply, "signing out", self._sign_out(session), gone)
        else:
            self._check_csrf(session, request)
            if session.role != "administrator":
                raise RequestRejected(403, "an operator looks; the administrator's key may change this", "read_only")
            action, given = _CHANGES[path], json_object(request)
            self._later(reply, action, self._admin.act(f"{self._keys.fingerprint} (page)", action, given))

    def _refuse(self, reply: Reply, refused: RequestRejected) -> None:
        body = error_body(refused.status, str(refused), refused.code)
        reply.send(refused.status, body, _HEADERS + retry_after(refused.retry_after_s))

    def _later(self, reply: Reply, doing: str, work: Awaitable[Any], more: bytes = b"") -> None:
        """Answers when the work is done, with its result."""
        self._working.spawn(self._finish(reply, doing, work, more))

    async def _finish(self, reply: Reply, doing: str, work: Awaitable[Any], more: bytes) -> None:
        try:
            answer = await outcome(self._process.gateway.loop, f"dashboard: {doing}", work)
            reply.send(200, _encode(answer), _HEADERS + more)
        except RequestRejected as refused:
            self._refuse(reply, refused)

    def _check_csrf(self, session: DashboardSession, request: Request) -> None:
        if not self.sessions.is_csrf(session, request.headers.get(b"x-crosstie-csrf", b"")):
            raise RequestRejected(403, "this request did not come from the page that is signed in", "wrong_csrf")

    # Who is there

    def _sign_in(self, request: Request, reply: Reply) -> None:
        given, gateway = json_object(request).get("key"), self._process.gateway
        # A server that keeps no log of clients has not looked.
        request.peer = request.peer or reply.connection.peer()
        address = Clients(gateway.serving.trusted_proxies).address(request)
        wait_s = self._wrong_keys.wait_s(address, gateway.loop.time())
        if wait_s > 0:
            # Not even the right one: who guesses must not learn from the answer that it was.
            self._turned_away("too_many_keys")
            why = f"too many wrong keys lately: try again in {max(round(wait_s + 0.5), 1)} s"
            raise RequestRejected(429, why, "too_many_keys", wait_s)
        role = self._keys.role_of(given)
        if role is None:
            self._turned_away("wrong_key")
            self._later(reply, "a wrong key", self._wrong_key(address))
            return
        session = self.sessions.begin(role)
        cookie = set_cookie(self.sessions.cookie_of(session), secure=_is_secure(request, reply))
        self._send_session(session, reply, cookie)

    def _send_session(self, session: DashboardSession, reply: Reply, more: bytes = b"") -> None:
        csrf = self.sessions.csrf_of(session)
        said = {"role": session.role, "ends_at": session.ends_at, "csrf": csrf}
        reply.send(200, _encode(said), _HEADERS + more)

    async def _wrong_key(self, address: str) -> None:
        """Tells all workers, since the next try may come to any of them."""
        said = WrongKey(address)
        self._on_wrong_key(said)
        await self._process.ask_others(said)
        raise RequestRejected(401, "no such key", "wrong_key")

    def _on_wrong_key(self, said: WrongKey) -> Done:
        self._wrong_keys.add(said.address, self._process.gateway.loop.time())
        return Done()

    async def _sign_out(self, session: DashboardSession) -> dict[str, Any]:
        ended = SessionEnded(session.name, session.ends_at)
        self._on_ended(ended)
        await self._process.ask_others(ended)
        return {}

    def _on_ended(self, ended: SessionEnded) -> Done:
        self.sessions.end(ended.name, ended.ends_at)
        for reply in [reply for reply, session in self._readers.items() if session.name == ended.name]:
            self._end(reply)
        return Done()

    # Reasons

    async def _why(self, request_id: str) -> DecisionView:
        """A decision that was taken, with what each pool would be worth to the same request now."""
        rows = await self._admin.rows(DecisionsRequest(1, why=request_id))
        if not rows:
            raise RequestRejected(404, "this decision is no longer kept: others have come since", "not_found")
        return rows[-1]

    async def _moment(self, since: float, until: float) -> dict[str, Any]:
        """The decisions of that time that are kept."""
        rows = await self._admin.rows(DecisionsRequest(_MOST_OF_MOMENT, moment=(since, until)))
        return {"decisions": spread(rows, _MOST_OF_MOMENT)}

    async def _history(self, window: str) -> dict[str, Any]:
        width_s, step, points = WINDOWS[window]
        end, turn, gateway = int(time() // (width_s * step)), int(time() // SHORT_S), self._process.gateway
        if self._histories.get(window, (0,))[0] != end:
            rows = await self._looked_back(HistoryRequest(width_s, end * step, points * step))
            self._histories[window] = end, history_document(*rows, window, end, gateway)
        if self._minute[0] != turn:
            self._minute = turn, last_minute(*await self._looked_back(HistoryRequest(SHORT_S, turn, MINUTE)), gateway)
        return self._histories[window][1] | {"minute": self._minute[1]}

    async def _looked_back(self, request: HistoryRequest) -> tuple[list[SeriesRows], list[SeriesRows]]:
        """Rows of all processes: of requests, and of pools."""
        answers = await self._process.ask_all(request, HistoryAnswer)
        return [row for answer in answers for row in answer.requests], [
            row for answer in answers for row in answer.pools
        ]

    # Events

    def _follow(self, session: DashboardSession, reply: Reply) -> None:
        if self._process.gateway.draining:
            raise RequestRejected(503, "the gateway is about to end", "draining")
        if len(self._readers) >= _MOST_READERS:
            raise RequestRejected(503, f"{_MOST_READERS} pages are open already", "too_many_pages")
        reply.start(200, b"content-type: text/event-stream; charset=utf-8\r\n" + _HEADERS, None)
        reply.flush()
        self._readers[reply] = session
        reply.watcher = GoneWatcher(lambda: self._readers.pop(reply, None))
        if self._latest is not None:
            reply.write(_event(self._latest | {"decisions": list(self._rows)}))
        if self._telling is None:
            self._telling = self._working.spawn(self._tell())

    async def _tell(self) -> None:
        loop = self._process.gateway.loop
        try:
            while self._readers:
                began = loop.time()
                self._latest = await self._look_again()
                event = _event(self._latest)
                for reply, session in list(self._readers.items()):
                    if reply.gone or self._process.gateway.draining or not self.sessions.holds(session):
                        self._end(reply)
                    elif not reply.slow:
                        reply.write(event)
                every_s = max(_EVERY_S, len(self._process.gateway.backends) / _REPLICAS_A_S)
                await asyncio.sleep(max(every_s - (loop.time() - began), 0.05))
        except Exception as error:  # noqa: BLE001 (the pages come back, and the log has the reason)
            loop.call_exception_handler({"message": "dashboard: looking failed", "exception": error})
            for reply in list(self._readers):
                self._end(reply)
        finally:
            self._telling = self._latest = self._after = None
            self._rows.clear()

    def _end(self, reply: Reply) -> None:
        self._readers.pop(reply, None)
        reply.end()

    async def _look_again(self) -> dict[str, Any]:
        self.made += 1
        view = await self._admin.look()
        first, fresh, skipped = self._after is None, list[DecisionView](), 0
        after: dict[str, int] = {}
        for answer in await self._admin.decisions(DecisionsRequest(_KEPT if first else _AT_ONCE, self._after)):
            after[answer.process] = answer.taken
            fresh += answer.rows
            skipped += answer.skipped
        self._after = after
        fresh.sort(key=lambda row: row.at)
        self._rows.extend(fresh)
        return {"at": time(), "fleet": self._admin.document(view), "decisions": fresh, "skipped": skipped}


def _event(said: dict[str, Any]) -> bytes:
    return b"event: fleet\ndata: " + _encode(said) + b"\n\n"


def _check_method(request: Request, *known: str) -> None:
    if request.method not in known:
        raise RequestRejected(405, f"{request.path} takes {', '.join(known)}", "method_not_allowed")


def _given(request: Request, name: str) -> str:
    return parse_qs(request.query).get(name, [""])[-1]


def _time(request: Request, name: str) -> float:
    """Seconds since the epoch. Raises RequestRejected."""
    try:
        seconds = float(_given(request, name))
    except ValueError:
        seconds = float("nan")
    if not isfinite(seconds):
        raise RequestRejected(400, f"{name}: must be a time, in seconds since the epoch", "bad_request")
    return seconds


def _check_origin(request: Request) -> None:
    """Only the page itself may ask. Browsers say where a request comes from; proxies may have changed its Host."""
    headers = request.headers
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None:
        is_own = site in (b"same-origin", b"none")
    else:
        is_own = origin is None or urlsplit(origin.decode("latin-1")).netloc == headers.get(b"host", b"").decode(
            "latin-1"
        )
    if not is_own:
        raise RequestRejected(403, "pages of other origins may not ask here", "wrong_origin")


def _is_secure(request: Request, reply: Reply) -> bool:
    """Whether the browser came by TLS, to this or to a proxy before it."""
    return reply.connection.server.tls is not None or request.headers.get(b"x-forwarded-proto") == b"https"
