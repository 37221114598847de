"""The log on stderr, request ids and trace context: what is written, what never is, and whom it may not hold up."""

import ast
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.conftest import Command
from tests.engines.streams import post
from tests.needs import one_in
from tests.packages import SOURCES
from tests.run.gateway.fakes import CALM, MODEL, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.test_serving import CHAT
from tests.run.service.processes import comes_true, command, environment, put, serving
from tests.wire.test_server import on_loop

from crosstie.catalog.fleet_text import fleet_text
from crosstie.route.ask import Ask
from crosstie_gateway.gateway.identity import is_id, is_tracestate, trace_context
from crosstie_gateway.gateway.interfaces import HostedModels
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.service import logs
from crosstie_gateway.service.logs import Log
from crosstie_gateway.service.process import watchdog_s

ROOT = Path(__file__).parents[3]
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
SECRET = "sk-live-4242424242"
PROMPT = "my landlord is called Ebenezer"


@contextmanager
def logged(folder: Path, style: logs.Style = "json", **settings: Any) -> Iterator[tuple[Log, Path]]:
    path = folder / "log"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = Log(style, descriptor=file, **settings)
    try:
        yield log, path
    finally:
        log.close()
        os.close(file)


def documents(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@in_folder
async def test_a_request_is_one_line_that_says_all_but_its_text_and_its_secrets(tmp_path: Path) -> None:
    with logged(tmp_path, requests=True) as (log, path):
        async with (
            fakes() as [fake],
            running(fleet_of(pool_of("one", fake.url), classes=(CHAT,)), components=[log]) as at,
        ):
            headers = {"x-request-id": "mine-7", "traceparent": PARENT, "authorization": f"Bearer {SECRET}"}
            asked = [{"role": "user", "content": PROMPT}]
            await at.ask(stream=True, messages=asked, headers=headers, user="ebenezer@example.com")
            await at.ask(model="gpt-9", messages=asked)
            fake.mode = "cut_mid_event"
            await at.ask(stream=True)
            await until(lambda: len(path.read_text().splitlines()) >= 3)
        served, refused, cut = documents(path)[:3]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", served["time"])
    expected = {
        "level": "info", "event": "request", "request_id": "mine-7", "trace_id": PARENT[3:35], "key": None,
        "client": "127.0.0.1",
        "path": "/v1/chat/completions", "model": MODEL, "class": "chat", "pool": "one", "backend": fake.url,
        "status": 200, "outcome": "served", "code": None, "input_tokens": 7, "output_tokens": 5, "counted": True,
        "streamed": True, "attempts": 1, "resumed": 0,
    }  # fmt: skip
    assert {name: served[name] for name in expected} == expected
    assert 0 < served["ttft_s"] <= served["seconds"]
    assert served["waited_s"] >= 0
    assert served["usd"] > 0
    assert (refused["status"], refused["outcome"], refused["code"]) == (404, "refused", "model_not_found")
    assert refused["request_id"].startswith("req-")
    assert (cut["outcome"], cut["level"], cut["code"]) == ("cut", "warning", "upstream_cut")
    for secret in (PROMPT, "Ebenezer", "ebenezer", SECRET, "4242", "w0"):
        assert secret not in path.read_text()


@in_folder
async def test_the_client_of_a_trusted_proxy_is_whom_it_names(tmp_path: Path) -> None:
    with logged(tmp_path, requests=True) as (log, path):
        serving = msgspec.structs.replace(CALM, trusted_proxies=("127.0.0.0/8",))
        async with (
            fakes() as [fake],
            running(fleet_of(pool_of("one", fake.url), serving=serving), components=[log]) as at,
        ):
            for model in (MODEL, "gpt-9"):
                await at.ask(model=model, headers={"x-forwarded-for": "203.0.113.5"})
            await until(lambda: len(path.read_text().splitlines()) >= 2)
        # Whether it was served or refused.
        assert [one["client"] for one in documents(path)] == ["203.0.113.5", "203.0.113.5"]


@in_folder
async def test_prompts_are_logged_where_that_was_asked_for_and_loudly(tmp_path: Path) -> None:
    with logged(tmp_path, requests=True, prompts=True) as (log, path):
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[log]) as at:
            await at.ask(messages=[{"role": "user", "content": PROMPT}], headers={"authorization": f"Bearer {SECRET}"})
            await until(lambda: len(path.read_text().splitlines()) >= 2)
        loud, line = documents(path)
    assert (loud["event"], loud["level"]) == ("prompts_logged", "warning")
    assert "PROMPTS ARE WRITTEN" in loud["message"]
    assert json.loads(line["body"])["messages"][0]["content"] == PROMPT
    assert SECRET not in path.read_text()


@in_folder
async def test_notices_are_events_with_names_levels_and_fields(tmp_path: Path) -> None:
    with logged(tmp_path) as (log, path):
        async with (
            fakes(2) as [one, other],
            running(fleet_of(pool_of("one", one.url, other.url)), components=[log]) as at,
        ):
            at.process.gateway.notify = log.notice
            one.crash()
            await until(lambda: "backend_down" in path.read_text())
        log.notice("said by somebody who knows of no events\nand in two lines")
        await until(lambda: len(documents(path)) >= 2)
        down, plain = documents(path)
    assert (down["event"], down["level"], down["pool"], down["backend"]) == ("backend_down", "warning", "one", one.url)
    assert down["why"] in down["message"]
    assert (plain["event"], plain["level"]) == ("notice", "info")
    assert plain["message"].endswith("\nand in two lines")


HOSTILE = 'a"b\\c\r\nlevel=info event=request forged \x1b[2J\x00\x7f\x85\u2028\u2029 end'


@pytest.mark.parametrize("style", ["text", "json"])
def test_nothing_that_a_client_sends_begins_a_second_line_or_moves_a_cursor(style: logs.Style, tmp_path: Path) -> None:
    with logged(tmp_path, style) as (log, path):
        log.notice(Notice("fleet_refused", "error", f"refused: {HOSTILE}", why=HOSTILE))
        log.notice(HOSTILE)
    text = path.read_bytes()
    assert text.count(b"\n") == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text.decode())
    if style == "json":
        assert documents(path)[0]["why"] == HOSTILE


@in_folder
async def test_text_for_people_has_the_same_in_one_line(tmp_path: Path) -> None:
    with logged(tmp_path, "text", requests=True) as (log, path):
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[log]) as at:
            await at.ask(headers={"x-request-id": 'it\'s="mine"'})
            await until(lambda: path.read_text())
        (line,) = path.read_text().splitlines()
    assert re.match(r"\S+Z request request_id=\"it's=\\\"mine\\\"\" client=127.0.0.1 path=/v1/chat/completions", line)
    assert " status=200 outcome=served " in line


class Breaks:
    def asked(self, ask: Ask) -> tuple[str, float] | None:
        raise KeyError(PROMPT)


@in_folder
async def test_a_fault_of_the_gateway_s_own_is_an_event_that_tells_where_and_no_text(tmp_path: Path) -> None:
    with logged(tmp_path, requests=True) as (log, path):
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[log]) as at:
            at.gateway.context.hosted = cast(HostedModels, Breaks())
            assert (await at.ask()).status == 500
            await until(lambda: "internal_error" in path.read_text())
        found = [one for one in documents(path) if one["event"] == "internal_error"]
    assert len(found) == 1
    assert found[0]["kind"] == "KeyError"
    assert "test_logs.py" in found[0]["where"]
    assert PROMPT not in path.read_text()


@on_loop
async def test_a_reader_that_does_not_read_holds_nobody_up_and_what_is_lost_is_counted() -> None:
    reading, writing = os.pipe()
    log = Log("json", requests=True, descriptor=writing)
    try:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[log]) as at:
            for number in range(logs._MOST_LINES + 600):
                log.notice(f"{number} " + "x" * 200)
            for _ in range(3):
                assert (await at.ask()).status == 200
            assert await at.metric("crosstie_log_dropped_total") > 0
            lost = log.lost
            # Somebody reads at last: it is told that something is missing.
            os.set_blocking(reading, False)
            got = b""

            def told_of_loss() -> bool:
                nonlocal got
                with suppress(BlockingIOError):
                    got += os.read(reading, 1 << 20)
                return b'"event":"log_dropped"' in got

            await until(told_of_loss)
            assert json.loads(next(line for line in got.splitlines() if b"log_dropped" in line))["lines"] == lost
    finally:
        log.close()
        os.close(reading)
        os.close(writing)


@on_loop
async def test_a_reader_that_has_gone_is_survived() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log = Log("json", requests=True, descriptor=writing)
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[log]) as at:
        assert (await at.ask()).status == 200
        await until(lambda: log.lost == 1)
        assert (await at.ask()).status == 200
    log.close()
    os.close(writing)


# Who a request is


@pytest.mark.parametrize("given", [b"a", b"x" * 128, b"!~", b"2f1c-77"])
def test_a_client_s_own_id_is_kept(given: bytes) -> None:
    assert is_id(given)


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"two words", b"tab\there", b"\xe9", b"bell\x07", b"a\nb"])
def test_an_id_that_could_be_more_than_one_is_not(given: bytes) -> None:
    assert not is_id(given)


@on_loop
async def test_an_id_is_passed_on_and_returned_and_a_bad_one_replaced() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        answer = await at.ask(headers={"x-request-id": "mine-7"})
        assert answer.header(b"x-request-id") == fake.hit[0][0].headers[b"x-request-id"] == b"mine-7"
        for bad in ("x" * 129, "two words"):
            for model in (MODEL, "unknown"):
                answer = await at.ask(headers={"x-request-id": bad}, model=model)
                assert (answer.header(b"x-request-id") or b"").startswith(b"req-")
        assert all(request.headers[b"x-request-id"].startswith(b"req-") for request, _ in fake.hit[1:])


@on_loop
async def test_trace_context_is_passed_on_where_it_is_valid_and_none_is_invented() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        await at.ask(headers={"traceparent": PARENT, "tracestate": "vendor=a,other@sys=b"})
        await at.ask(headers={"traceparent": PARENT, "tracestate": "no state"})
        await at.ask(headers={"traceparent": PARENT.upper(), "tracestate": "vendor=a"})
        await at.ask(headers={"tracestate": "vendor=a"})
        heard = [(request.headers.get(b"traceparent"), request.headers.get(b"tracestate")) for request, _ in fake.hit]
        parent = PARENT.encode()
        assert heard == [(parent, b"vendor=a,other@sys=b"), (parent, None), (None, None), (None, None)]


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        (PARENT, True),
        (PARENT[:-2] + "00", True),
        ("cc" + PARENT[2:] + "-what-comes-later", True),
        ("cc" + PARENT[2:], True),
        ("ff" + PARENT[2:], False),
        (PARENT + "-more", False),
        ("cc" + PARENT[2:] + "more", False),
        (PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32), False),
        (PARENT.replace("00f067aa0ba902b7", "0" * 16), False),
        (PARENT.upper(), False),
        (PARENT[:-1], False),
        (" " + PARENT, False),
        (PARENT + "\n", False),
        (PARENT.replace("-", "_"), False),
        ("", False),
        ("cc" + PARENT[2:] + "-" + "x" * 600, False),
    ],
)
def test_traceparent_by_its_specification(given: str, valid: bool) -> None:
    parent, lines = trace_context(given.encode(), b"a=b")
    assert bool(parent) is bool(lines) is valid
    if valid:
        assert lines == f"traceparent: {given}\r\ntracestate: a=b\r\n".encode()


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ("a=1", True),
        ("a=1, b=2 ,,c=3", True),
        ("tenant@vendor=x y", True),
        (",".join(f"k{number}=v" for number in range(32)), True),
        (",".join(f"k{number}=v" for number in range(33)), False),
        ("a=1,a=2", False),
        ("A=1", False),
        ("a", False),
        ("a=", False),
        ("a=b=c", False),
        ("a=\x07", False),
        ("", False),
    ],
)
def test_tracestate_by_its_specification(given: str, valid: bool) -> None:
    assert is_tracestate(given.encode()) is valid


# As a process


def test_a_process_logs_json_and_tells_systemd(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        file = tmp_path / "fleet.toml"
        file.write_text(fleet_text(fleet_of(pool_of("one", "http://127.0.0.1:9/v1"))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
            patch.setenv("WATCHDOG_USEC", "3000000")
            patch.delenv("WATCHDOG_PID", raising=False)
            with serving(tmp_path, file, "--log-format", "json", "--log-requests") as gateway:
                ready = systemd.recv(4096).decode()
                assert ready.startswith("READY=1\nSTATUS=1 pools, 1 backends")
                assert systemd.recv(4096) == b"WATCHDOG=1"
                assert post(gateway.url, "/v1/chat/completions", {"model": MODEL, "messages": []}).status == 503
                assert comes_true(lambda: '"event":"request"' in gateway.errors)
                put(file, "format = 2\n")
                assert comes_true(lambda: '"event":"fleet_refused"' in gateway.errors)
                assert gateway.ends(signal.SIGTERM) == 0
                said = [json.loads(line) for line in gateway.errors.splitlines()]
        events = {one["event"] for one in said}
        assert {"backend_down", "request", "fleet_refused"} <= events
        (request,) = [one for one in said if one["event"] == "request"]
        assert (request["status"], request["code"], request["attempts"]) == (503, "no_backend", 0)
        left: list[bytes] = []
        # All of it was sent before the process ended.
        systemd.setblocking(False)
        while not left or not left[-1].startswith(b"STOPPING=1"):
            left.append(systemd.recv(4096))


@pytest.mark.parametrize("workers", one_in(2, ("1", "2")))
def test_a_stderr_that_was_closed_is_nobody_else_s(workers: str, tmp_path: Path) -> None:
    """Its number would be that of the next file, or client, and get what is logged."""
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet_of(pool_of("one", "http://127.0.0.1:9/v1"))))
    arguments = command("serve", str(file), "--port", "0", "--log-requests", "--workers", workers)
    with subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *arguments], env=environment(tmp_path), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        where = os.readlink(f"/proc/{process.pid}/fd/2")
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert (process.wait(60), where) == (0, os.devnull)
        assert said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--log-prompts"], "--log-prompts goes with --log-requests"),
        (["--record-keep", "3"], "--record-max-mib and --record-keep go with --record"),
    ],
)
def test_options_that_go_with_others(crosstie: Command, arguments: list[str], why: str) -> None:
    done = crosstie("serve", *arguments)
    assert done.status == 2
    assert why in done.err
    assert "Traceback" not in done.err


def test_a_watchdog_of_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_s() == 2.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() == 0.0
    monkeypatch.delenv("WATCHDOG_PID")
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    assert watchdog_s() == 0.0


def events_of(text: str) -> set[str]:
    """First arguments of `Notice` and of what passes them on, both sides of a choice included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in (
            "Notice",
            "_tell",
        ):
            for first in node.args[:1]:
                sides = (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,)
                found |= {one.value for one in sides if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def test_every_event_is_on_the_page_that_promises_their_names() -> None:
    files = [
        *(SOURCES["crosstie_gateway"] / "gateway").glob("*.py"),
        *(SOURCES["crosstie_gateway"] / "service").glob("*.py"),
        *(SOURCES["crosstie_gateway"] / "cli").glob("*.py"),
    ]
    texts = [text for file in files if "Notice(" in (text := file.read_text()) or "_tell(" in text]
    events = set().union(*(events_of(text) for text in texts))
    assert {"backend_down", "record_failed", "telemetry_resumed", "worker_ended"} <= events
    page = (ROOT / "docs" / "operations.md").read_text()
    assert {event for event in events if f"`{event}`" not in page} == set()
