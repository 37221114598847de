"""The administrator's door: HTTP on a port and with a key of its own, on loopback unless told otherwise.

A page in a browser here can reach loopback, by a name that resolves to it too. So requests need this door's Host, no
other Origin, and JSON for changes, which a page may not send elsewhere without asking.
"""

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family
from crosstie.wire.address import is_loopback
from crosstie_gateway.gateway.errors import RequestRejected, error_body
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.roads import tidy_path
from crosstie_gateway.service.admin import ACTIONS, Administration
from crosstie_gateway.service.admin_view import MOST_DECISIONS, DecisionView
from crosstie_gateway.service.dashboard import Dashboard
from crosstie_gateway.service.door_keys import KEY_VARIABLE, DoorKeys
from crosstie_gateway.service.edge import Door, json_object, outcome
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.service.trials import TrialsService
from crosstie_gateway.service.worker_link import DecisionsRequest
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import GoneWatcher, Reply, Server
from crosstie_gateway.wire.tasks import Tasks

PREFIX = "/admin/v1/"
_MOST_BODY = 2**20
_LOOK_S = 0.2
# A client that closed only its own half may still read; a write shows whether it is gone.
_SIGN_OF_LIFE_S = 1.0
# What may be looked at.
_SHOWN = ("pools", "config", "decisions", "trials")
_MOST_FOLLOWERS = 16
# Refused visitors are told of at most so often.
_COMPLAIN_S = 1.0
_STREAM = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
_NO_STORE = b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
_encode = msgspec.json.Encoder().encode


class AdminDoor(Door):
    """`anywhere`: it may listen beyond loopback; `shown`: the page of operators is at the clients' port too."""

    def __init__(self, host: str, port: int, *, anywhere: bool = False, shown: bool = False):
        if not is_loopback(host) and not anywhere:
            raise BadInput(f"--admin-host {host}: is not loopback; add --admin-anywhere if others may reach it")
        super().__init__(host, port, " for administrators")
        self.key, self._shown = DoorKeys(), shown
        self._followers, self._tasks = Tasks(), Tasks()
        self._complained_at = float("-inf")
        self._unwelcome = 0

    async def start(self, process: GatewayProcess) -> None:
        self._loop = asyncio.get_running_loop()
        self.process, self.admin = process, Administration(process)
        self.dashboard = Dashboard(process, self.admin, self.key, self._complain)
        if self._shown:
            process.gateway.context.own_pages = self.dashboard
        self._trials = [part for part in process.components if isinstance(part, TrialsService)]
        await self.admin.join()
        limits = RequestLimits(body_bytes=_MOST_BODY, request_s=10.0)
        self._server = Server(self._loop, self._handle, limits, lambda status, why: error_body(status, why))
        self.open(self._server)
        where = f"its key is in {self.key.file}" if self.key.file else f"its key is that of {KEY_VARIABLE}"
        sentence = f"admin: listens on {self.url}; {where}, fingerprint {self.key.fingerprint}"
        process.notify(Notice("admin_listens", "info", sentence, url=self.url))

    def families(self) -> list[Family]:
        return self.admin.families()

    def reloaded(self, fleet: Fleet) -> None:
        self.admin.reloaded()

    async def stop(self) -> None:
        await self._followers.cancel()
        await self._tasks.cancel()
        await self.dashboard.stop()
        self.admin.close()
        self._server.close()

    def close(self) -> None:
        super().close()
        self.key.forget()

    # Requests

    def _handle(self, request: Request, reply: Reply) -> None:
        try:
            if tidy_path(request) in self.dashboard.paths:
                self._check_host(request)
                self.dashboard.handle(request, reply)
                return
            self._check_visitor(request)
            name = self._named(request)
            if name == "decisions" and _flag(request, "follow"):
                self._follow(reply, alternatives=_flag(request, "alternatives"))
                return
            body = json_object(request) if request.method == "POST" else {}
        except RequestRejected as refused:
            _refuse(reply, refused.status, str(refused), refused.code)
            return
        self._tasks.spawn(self._answer(reply, name, request, body))

    def _check_visitor(self, request: Request) -> None:
        """Raises RequestRejected for pages of other origins, and without the key."""
        headers = request.headers
        self._check_host(request)
        try:
            origin = headers.get(b"origin")
            elsewhere = origin is not None and not is_loopback(urlsplit(origin.decode("latin-1")).hostname or "")
            if elsewhere or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
                raise RequestRejected(403, "pages of other origins may not ask here", "wrong_origin")
            if not self.key.opens(headers.get(b"authorization", b"")):
                raise RequestRejected(
                    401, "this takes the administrator's key, as Authorization: Bearer KEY", "wrong_key"
                )
        except ValueError:
            raise RequestRejected(400, "the Origin of this request is malformed", "wrong_origin") from None
        except RequestRejected as refused:
            self._complain(refused.code)
            raise

    def _check_host(self, request: Request) -> None:
        try:
            host = urlsplit(f"//{request.headers.get(b'host', b'').decode('latin-1')}").hostname or ""
        except ValueError:
            raise RequestRejected(400, "the Host of this request is malformed", "wrong_host") from None
        if not self._answers_to(host):
            self._complain("wrong_host")
            raise RequestRejected(403, "the Host of this request is not this door's", "wrong_host")

    def _answers_to(self, host: str) -> bool:
        """Loopback; where it is open to others, its own names and plain addresses, which no name server can fake."""
        if is_loopback(host):
            return True
        if is_loopback(self.host):
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(host))
        return host in (self.host, socket.gethostname().lower(), socket.getfqdn().lower())

    def _complain(self, code: str) -> None:
        self._unwelcome += 1
        self.admin.counts["enter", "refused"] += 1
        now = self._loop.time()
        if now - self._complained_at >= _COMPLAIN_S:
            sentence = f"admin: {self._unwelcome} requests turned away at the door, the last for {code}"
            self.process.notify(Notice("admin_turned_away", "warning", sentence, requests=self._unwelcome, code=code))
            self._complained_at, self._unwelcome = now, 0

    def _named(self, request: Request) -> str:
        name = request.path.removeprefix(PREFIX)
        wanted = "POST" if name in ACTIONS else "GET" if name in _SHOWN else None
        if wanted is None or name == request.path:
            known = ", ".join((*_SHOWN, *ACTIONS))
            raise RequestRejected(
                404, f"there is nothing here of that name; under {PREFIX} there are {known}", "not_found"
            )
        if request.method != wanted:
            raise RequestRejected(405, f"{PREFIX}{name} takes {wanted}", "method_not_allowed")
        return name

    async def _answer(self, reply: Reply, name: str, request: Request, body: dict[str, Any]) -> None:
        try:
            answer = await outcome(self._loop, f"admin: {name}", self._said(name, request, body))
        except RequestRejected as refused:
            _refuse(reply, refused.status, str(refused), refused.code)
        else:
            is_text = isinstance(answer, str)
            kind = b"application/toml" if is_text else b"application/json"
            reply.send(200, answer.encode() if is_text else _encode(answer), _NO_STORE, kind)

    async def _said(self, name: str, request: Request, body: dict[str, Any]) -> str | dict[str, Any]:
        if name == "config":
            return self.admin.config()
        if name == "pools":
            return self.admin.document(await self.admin.look())
        if name == "trials":
            return {"trials": [view for trials in self._trials for view in await trials.of_all()]}
        if name == "decisions":
            last = _last(request)
            return {"decisions": (await self.admin.rows(DecisionsRequest(last)))[-last:]}
        return await self.admin.act(self.key.fingerprint, name, body)

    # Decisions

    def _follow(self, reply: Reply, *, alternatives: bool) -> None:
        if len(self._followers) >= _MOST_FOLLOWERS:
            raise RequestRejected(503, f"{_MOST_FOLLOWERS} are following already", "too_many_followers")
        reply.start(200, _STREAM, None)
        reply.flush()
        reply.watcher = GoneWatcher(self._followers.spawn(self._following(reply, alternatives)).cancel)

    async def _following(self, reply: Reply, alternatives: bool) -> None:
        """Looks for new ones a few times a second, so that requests do nothing for followers."""
        after: dict[str, int] = {}
        said_at, skipped = self._loop.time(), 0
        try:
            while not reply.gone:
                rows: list[DecisionView] = []
                request = DecisionsRequest(MOST_DECISIONS, after, explain=alternatives)
                for answer in await self.admin.decisions(request):
                    after[answer.process] = answer.taken
                    rows += answer.rows
                    skipped += answer.skipped
                now = self._loop.time()
                if reply.slow:
                    # A reader that does not read must not make this process remember.
                    skipped += len(rows)
                elif rows or skipped or now - said_at > _SIGN_OF_LIFE_S:
                    rows.sort(key=lambda row: row.at)
                    said = [b"event: decision\ndata: " + _encode(row) + b"\n\n" for row in rows]
                    if skipped:
                        said.append(b'event: skipped\ndata: {"skipped":%d}\n\n' % skipped)
                    reply.write(b"".join(said) or b": still here\n\n")
                    said_at, skipped = now, 0
                await asyncio.sleep(_LOOK_S)
        finally:
            reply.end()


def _refuse(reply: Reply, status: int, why: str, code: str) -> None:
    headers = b"www-authenticate: Bearer\r\n" if status == 401 else b""
    reply.send(status, error_body(status, why, code), headers + _NO_STORE)


def _flag(request: Request, name: str) -> bool:
    return parse_qs(request.query).get(name, ["0"])[-1] in ("1", "true", "yes")


def _last(request: Request) -> int:
    given = parse_qs(request.query).get("last", ["20"])[-1]
    if not (given.isascii() and given.isdigit() and 1 <= len(given) <= 4 and 1 <= int(given) <= MOST_DECISIONS):
        raise RequestRejected(400, f"last: must be from 1 to {MOST_DECISIONS}", "bad_request")
    return int(given)
