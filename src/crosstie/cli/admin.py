"""`crosstie admin`: a running gateway looked at and changed through its administrator's port."""

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from crosstie.catalog.addresses import read_address
from crosstie.catalog.reading import only_keys, read_toml
from crosstie.catalog.writing import write_text
from crosstie.cli.assignments import amount, assigned
from crosstie.cli.options import FILE, file_option, flag_option, json_option, option_group, real_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import print_json, show
from crosstie.core.errors import BadData, BadInput
from crosstie.core.figures import number, seconds, significant
from crosstie.web.parts import Parts, Table
from crosstie.wire.address import Address

_KEY = "CROSSTIE_ADMIN_KEY"
_PATIENCE_S = 30.0
# A stream gives a sign of life more often than this.
_SILENCE_S = 60.0
_LOOK_S = 0.5


class AdminRejected(Exception):
    """The gateway has understood and said no."""


class AdminPort:
    """The administrator's port of a gateway."""

    def __init__(self, url: str, key: str):
        try:
            self._at = Address(url)
        except BadInput as error:
            raise BadInput(f"--url {error}") from None
        self.url, self._key = url, key

    def get(self, name: str, **query: object) -> bytes:
        with self._asked("GET", name, query, None, _PATIENCE_S) as answer:
            return answer.read()

    def post(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._asked("POST", name, {}, json.dumps(body).encode(), _PATIENCE_S) as answer:
            said: dict[str, Any] = json.loads(answer.read())
            return said

    def follow(self, name: str, **query: object) -> Iterator[dict[str, Any]]:
        """What a stream's events say, until it ends."""
        with self._asked("GET", name, {**query, "follow": 1}, None, _SILENCE_S) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

    def _asked(
        self, method: str, name: str, query: dict[str, object], body: bytes | None, patience_s: float
    ) -> http.client.HTTPResponse:
        made = http.client.HTTPSConnection if self._at.secure else http.client.HTTPConnection
        connection = made(self._at.host, self._at.port, timeout=patience_s)
        path = f"{self._at.base}/admin/v1/{name}" + (f"?{urlencode(query)}" if query else "")
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json", "connection": "close"}
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise BadInput(
                f"{self.url}: no gateway answers there: {getattr(error, 'strerror', None) or error}"
            ) from None
        if answer.status == 200:
            return answer
        said = _error(answer.read())
        if said.get("code") == "refused":
            raise AdminRejected(said["message"])
        why = said.get("message") or f"answered {answer.status}; is it a gateway's --admin-port?"
        raise BadInput(f"{self.url}: {why}")


def _error(body: bytes) -> dict[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def reach(url: str, key_file: Path | None) -> AdminPort:
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{key_file}: cannot be read: {getattr(error, 'strerror', None) or 'no key'}") from None
    else:
        key = os.environ.get(_KEY, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise BadInput(f"no key: set {_KEY}, or give --key-file")
    return AdminPort(url, key)


def _at_port(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options that say where the port is, and the port in the place of them; and --json."""

    @wraps(function)
    def reached(*, url: str, key_file: Path | None, **given: Any) -> Any:
        return function(port=reach(url, key_file), **given)

    return option_group(
        click.option("--url", default="http://127.0.0.1:8081", show_default=True, envvar="CROSSTIE_ADMIN_URL",
                     help="The gateway's --admin-port."),
        click.option("--key-file", type=FILE, metavar="FILE",
                     help=f"Where the key is, if not in {_KEY}; serve says where it put it."),
        json_option,
    )(reached)  # fmt: skip


@click.group("admin")
def command() -> None:
    """A running gateway looked at and changed: `crosstie serve FLEET.toml --admin-port 8081` opens the port.

    \b
    export CROSSTIE_ADMIN_KEY=...            # the same for serve and for these
    crosstie admin pools
    crosstie admin drain chat-mi300x --wait  # a pool, or a backend by address
    crosstie admin decisions --follow

    Changes lie over the fleet file until they are undone or reset; a restart forgets them, and
    `crosstie admin config --save FILE` makes a fleet file of them. docs/admin.md has the rest.

    Exit status: 0 done, 1 the gateway said no, or not in time, 2 the question was wrong or nobody answered.
    """


def _answered(port: AdminPort, action: str, body: dict[str, Any], as_json: bool) -> int:
    try:
        done = port.post(action, body)
    except AdminRejected as rejected:
        click.echo(f"crosstie: {action}: refused: {' '.join(str(rejected).split())}", err=True)
        return 1
    print_json(done) if as_json else show_done(done)
    return 1 if done["refused_by"] else 0


def _target(target: str) -> dict[str, Any]:
    """A pool's name, or a backend's address in the form that fleets have it in."""
    return {"backend": read_address(Path("URL"), "", target)} if "://" in target else {"pool": target}


@command.command("pools", epilog="Example: crosstie admin pools")
@_at_port
def pools(port: AdminPort, as_json: bool) -> int:
    """Every pool and backend: up or why not, drained or draining, in flight, how far from predictions."""
    said = json.loads(port.get("pools"))
    print_json(said) if as_json else show(pools_parts(said))
    return 0


@command.command("trials", epilog="Example: crosstie admin trials")
@_at_port
def trials(port: AdminPort, as_json: bool) -> int:
    """Is a pool on trial (`shadow`, `canary`) ready for its model's traffic? Status 1: one is not, or not yet."""
    said = json.loads(port.get("trials"))
    print_json(said) if as_json else show(trials_parts(said))
    return 0 if said["trials"] and all(trial["ready"] == "yes" for trial in said["trials"]) else 1


@command.command("drain", epilog="Example: crosstie admin drain chat-mi300x --wait")
@click.argument("target", metavar="POOL|URL")
@flag_option("--wait", "Until nothing is in flight there.")
@real_option("--within", 0.1, None, "With --wait: status 1 if it took longer.", metavar="S", default=3600.0)
@_at_port
def drain(target: str, wait: bool, within: float, port: AdminPort, as_json: bool) -> int:
    """Sends a pool or a backend nothing new; what is in flight finishes. `drained`, in `pools`: it has."""
    wanted = _target(target)
    status = _answered(port, "drain", wanted, as_json)
    return status or (_wait(port, wanted, within) if wait else 0)


def _wait(port: AdminPort, wanted: dict[str, Any], within_s: float) -> int:
    ((_, target),) = wanted.items()
    deadline = time.monotonic() + within_s
    with progress() as on_progress:
        while True:
            pools = json.loads(port.get("pools"))["pools"]
            rows = [row for pool in pools for row in pool["backends"] if target in (pool["pool"], row["backend"])]
            left = sum(row["in_flight"] for row in rows)
            if not left:
                return 0
            if time.monotonic() > deadline:
                click.echo(f"crosstie: {target}: {left} requests are still in flight after {within_s:g} s", err=True)
                return 1
            on_progress(0, 0, f"{target}: {left} requests in flight")
            time.sleep(_LOOK_S)


def _posting(name: str, what: str, *, about: str = "") -> None:
    """A command that asks for one change, of the pool or backend `about` or of the whole gateway."""

    def post(port: AdminPort, as_json: bool, target: str = "") -> int:
        return _answered(port, name, _target(target) if target else {}, as_json)

    asked = click.argument("target", metavar="POOL|URL")(post) if about else post
    epilog = f"Example: crosstie admin {name} {about}".rstrip()
    command.command(name, epilog=epilog, help=what)(_at_port(asked))


_posting("undrain", "Lets a drained pool or backend have requests again.", about="chat-mi300x")
_posting("remove", "Takes a pool or a backend out of the fleet; what is in flight there finishes.",
         about="http://10.0.0.7:8000")  # fmt: skip
_posting("reload", "Has the fleet file read again. Status 1: it is refused, with the reason, and the old one goes on.")
_posting("reset", "Takes all changes back: the fleet is again what its file says.")


@command.command("add", epilog="Example: crosstie admin add chat-mi300x http://10.0.0.7:8000")
@click.argument("pool", required=False)
@click.argument("backend", required=False, metavar="[URL]")
@file_option("--file", "A new pool: TOML with one [[pool]].")
@_at_port
def add(pool: str | None, backend: str | None, file: Path | None, port: AdminPort, as_json: bool) -> int:
    """Adds a backend to a pool, or with --file a new pool as a fleet file would have it."""
    if (file is None) == (pool is None) or (pool is None) != (backend is None):
        raise BadInput("name a pool and the address of its new backend, or a --file with a new pool")
    body: dict[str, Any] = {"pool": pool, "backend": backend} if file is None else {"pool": _pool_table(file)}
    return _answered(port, "add", body, as_json)


def _pool_table(file: Path) -> dict[str, Any]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"format", "pool"})
    pools = raw.get("pool")
    if not isinstance(pools, list) or len(pools) != 1 or not isinstance(pools[0], dict):
        raise BadData(file, "pool", "must be there once: one [[pool]] is added at a time")
    return pools[0]


@command.command("weight", epilog="Example: crosstie admin weight chat-mi300x=3 chat-h200=1")
@click.argument("weights", nargs=-1, required=True, metavar="POOL=WEIGHT...")
@_at_port
def weight(weights: tuple[str, ...], port: AdminPort, as_json: bool) -> int:
    """Sets pools' parts of the traffic under the `weighted` policy."""
    return _answered(port, "weight", {"weights": assigned("weight", weights, amount)}, as_json)


@command.command("decisions", epilog="Example: crosstie admin decisions --follow --alternatives")
@whole_option("--last", 1, 500, "How many of the latest.", default=20)
@flag_option("--follow", "As they are taken, until interrupted.")
@flag_option("--alternatives", "With --follow: what every other pool scored, or what dropped it.")
@_at_port
def decisions(last: int, follow: bool, alternatives: bool, port: AdminPort, as_json: bool) -> int:
    """Where requests were sent and why: lengths, predictions and reasons, never what they say or whose they are."""
    if alternatives and not follow:
        raise BadInput("--alternatives goes with --follow: they are worked out only while someone asks for them")
    if not follow:
        said = json.loads(port.get("decisions", last=last))
        if as_json:
            print_json(said)
        else:
            for row in said["decisions"]:
                show_decision(row)
        return 0
    for row in port.follow("decisions", alternatives=int(alternatives)):
        if as_json:
            click.echo(json.dumps(row))
        elif "skipped" in row:
            click.echo(f"({row['skipped']} more came too fast to be shown)")
        else:
            show_decision(row)
    click.echo(f"crosstie: {port.url}: the gateway has ended", err=True)
    return 1


@command.command("config", epilog="Example: crosstie admin config --save fleet.toml")
@file_option("--save", "Write it there, whole or not at all.")
@_at_port
def config(save: Path | None, port: AdminPort, as_json: bool) -> int:
    """The fleet as it is served now, changes included, as a fleet file."""
    text = port.get("config").decode()
    if save is not None:
        write_text(save, text)
    if as_json:
        print_json({"saved": str(save) if save else None, "config": text})
    elif save is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"written to {save}")
    return 0


def pools_parts(said: dict[str, Any]) -> Parts:
    processes = f", {said['processes']} processes" if said["processes"] > 1 else ""
    yield f"{said['fleet']}: {said['policy']}, {said['exchanges']} requests, {said['queued']} queued{processes}"
    columns = [
        "backend", "pool", "state", ">in flight", ">engine runs", ">waits", "breaker", ">TTFT x", ">TPOT x", ">weight",
        "model", "~why",
    ]  # fmt: skip
    rows = []
    for pool in said["pools"]:
        for row in pool["backends"]:
            load = row["reported"] or {}
            rows.append([
                row["backend"] + (" (added)" if row["from"] == "admin" else ""),
                pool["pool"] + (f"/{side}" if (side := row.get("side")) else ""), row["state"],
                str(row["in_flight"]), number(load.get("running")), number(load.get("waiting")), row["breaker"],
                f"{row['ttft_correction']:.2f}", f"{row['tpot_correction']:.2f}", number(pool["weight"]), pool["model"],
                row["why_down"],
            ])  # fmt: skip
    yield Table(columns, rows)
    for replica in said["leaving"]:
        yield f"removed, still answering {replica['in_flight']}: {replica['backend']} of {replica['pool']}"
    yield from (f"changed: {words}" for words in said["changes"])
    yield from (f"dropped: {change['change']}: {change['why']}" for change in said["dropped"])


def trials_parts(said: dict[str, Any]) -> Parts:
    if not said["trials"]:
        yield "no pool is on trial: give one `shadow` or `canary` in the fleet file"
    for trial in said["trials"]:
        whose = f"{trial['model']}, class {trial['class_name']}" if trial["class_name"] else trial["model"]
        yield f"{trial['pool']}: ready for {whose}: {trial['ready'].upper()}"
        yield from (f"  {reason}" for reason in trial["why"])
        copies = ", ".join(f"{count} {outcome}" for outcome, count in sorted(trial["copies"].items())) or "none yet"
        slower = f"; an answer takes {trial['slower']:.2f} times as long" if trial["slower"] is not None else ""
        yield f"copies ({trial['shadow']:.1%} of requests): {copies}{slower}"
        if trial["gauges"]:
            yield Table(
                ["distance", ">in service", ">on trial", ">allowed", "says"],
                [
                    [
                        gauge["name"],
                        *(significant(gauge[key], 3) for key in ("floor", "value", "allowed")),
                        gauge["says"],
                    ]
                    for gauge in trial["gauges"]
                ],
            )
        if trial["canary"] is not None:
            yield (
                f"canary ({trial['canary']:.1%} of requests): {trial['served']} served, {trial['faults']} faults"
                + "".join(
                    f", {what} {trial[key]:.2f} times as long"
                    for what, key in (("first tokens", "ttft_ratio"), ("tokens", "token_ratio"))
                    if trial[key] is not None
                )
            )


def show_done(done: dict[str, Any]) -> None:
    click.echo(f"{done['what']}: {'done' if done['changed'] else 'nothing to change'}")
    for words in done["dropped"]:
        click.echo(f"dropped with it: {words}")
    for words in done["warnings"]:
        click.echo(f"warning: {words}", err=True)
    for why in done["refused_by"]:
        click.echo(f"one of its processes refused: {why}", err=True)


def show_decision(row: dict[str, Any]) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(row["at"]))
    where = row["pool"] or row["outcome"].upper()
    again = f", attempt {row['attempt']}" if row["attempt"] > 1 else ""
    told = row["predicted"]
    predicted = f", TTFT {seconds(told['ttft_s'])}, TPOT {seconds(told['tpot_s'])}" if told else ""
    click.echo(
        _plain(
            f"{at} {row['request_id']} {row['model']} {row['class'] or '-'} {row['input_tokens']}+"
            f"{row['expected_output_tokens']} -> {where}{again}{predicted}: {row['reason']}"
        )
    )
    for pool in row["considered"]:
        score = "-" if pool["score"] is None else significant(pool["score"], 4)
        click.echo(_plain(f"         {pool['pool']}: score {score} {pool['dropped'] or ''}".rstrip()))


def _plain(text: str) -> str:
    """Request ids are the clients' own: what they hold must not steer a terminal."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)
