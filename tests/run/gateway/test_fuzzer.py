"""The fuzzer by hand (benchmarks/fuzz) on servers that do what it looks for: each of its checks can fail."""

import asyncio
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.waiting import LIMIT_S
from tests.wire.sockets import scripted

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.multipart import read_form

FOLDER = Path(__file__).parents[3] / "benchmarks" / "fuzz"
NAMES = ("upstream", "clients", "run")
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b"


@pytest.fixture
def fuzzer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("run")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_marks_are_found_and_damaged_ones_are_none(fuzzer: ModuleType) -> None:
    upstream = sys.modules["upstream"]
    mark = upstream.mark("o", 3, 7)
    assert upstream.marks(b"x" + mark + b"y") == {mark}
    assert upstream.marks(mark.replace(b"o3", b"o4")) == set()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("own", ""),
        ("foreign", "besides its own"),
        ("none", "without its mark"),
        ("nothing", "0 answers to 1"),
        ("garbage", "no HTTP"),
        ("refused", "answered 400"),
    ],
)
def test_a_client_s_conversation_is_judged(fuzzer: ModuleType, answer: str, said: str) -> None:
    upstream, clients = sys.modules["upstream"], sys.modules["clients"]
    own, foreign = upstream.mark("o", 1, 1), upstream.mark("o", 2, 1)
    answers = {
        "own": OK % (len(own), own), "foreign": OK % (len(own + foreign), own + foreign), "none": OK % (2, b"{}"),
        "nothing": b"", "garbage": b"\0\0\0\0", "refused": (OK % (2, b"{}")).replace(b"200 OK", b"400 Bad Request"),
    }  # fmt: skip
    found = fuzzer.Found()

    class Staying(random.Random):
        """Neither leaves nor closes its side early."""

        def random(self) -> float:
            return 0.99

    async def test() -> None:
        generator = Staying(1)
        plan = clients.Planned(clients.good(generator, "m", own), {own}, 1, "good")
        # Closing on half a request would reset the connection, and the answer with it.
        talk = scripted(answers[answer], then_close=answer == "nothing")
        async with talk as (port, _), asyncio.timeout(LIMIT_S):
            await fuzzer.converse(port, plan, generator, found)

    run_on_loop(asyncio.wait_for(test(), LIMIT_S))
    if said:
        assert said in found.violations[0]
    else:
        assert not found.violations


@pytest.mark.parametrize(
    ("status", "ends", "said"),
    [
        ("completed", "01", ""),
        ("cancelled", "1", ""),
        ("completed", "0", "ended with"),
        ("completed", "001", "ended with"),
        ("failed", "01", "failed"),
        ("completed", "0f", "besides its own"),
    ],
)
def test_a_batch_is_judged(fuzzer: ModuleType, status: str, ends: str, said: str) -> None:
    mark = sys.modules["upstream"].mark
    own = [mark("o", 1, 1), mark("o", 1, 2)]
    foreign = mark("o", 2, 1)
    answered = {"f": b'{"custom_id":"1","said":"%b"}' % foreign}
    lines = [answered.get(end, b'{"custom_id":"%b"}' % end.encode()) for end in ends]
    found = fuzzer.Found()
    fuzzer.judge_batch(own, status, b"".join(line + b"\n" for line in lines), found)
    assert bool(found.violations) == bool(said)
    assert not said or said in found.violations[0]


@pytest.mark.parametrize(("status", "violations"), [(401, 0), (200, 1)])
def test_a_forged_credential_must_be_refused(fuzzer: ModuleType, status: int, violations: int) -> None:
    found, answers = fuzzer.Found(), fuzzer.Answers()
    answers.feed(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\n{}" % status)
    plan = sys.modules["clients"].Planned(b"", set(), 1, "forged")
    fuzzer.judge(plan, b"", answers, False, found)
    assert len(found.violations) == violations


def test_forms_that_are_sent_are_forms(fuzzer: ModuleType) -> None:
    """However much their files look like a boundary."""
    clients, generator = sys.modules["clients"], random.Random(1)
    for number in range(200):
        own = b"%d" % number
        boundary, body = clients.form(generator, "m", own)
        parts = read_form(b"multipart/form-data; boundary=" + boundary, body)
        assert {name: part.content(body) for name, part in parts.items() if name != "file"} == {
            "model": b"m",
            "prompt": own,
        }


def test_an_engine_notices_what_was_smuggled(fuzzer: ModuleType) -> None:
    upstream = sys.modules["upstream"]

    async def test() -> None:
        engine = upstream.Upstream("1", 0.0)
        await engine.start()
        inner = b'{"messages":[{"content":"%b"}]}' % upstream.mark("i", 1, 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"POST /v1/x HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(inner), inner))
        assert upstream.marks(await reader.readuntil(b":4}}")) == {upstream.mark("i", 1, 1)}
        assert engine.smuggled == [upstream.mark("i", 1, 1)]
        assert not engine.malformed
        writer.write(b"POST http://x/ HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}")
        await reader.readuntil(b":4}}")
        assert len(engine.malformed) == 1
        writer.close()
        engine.stop()
        await asyncio.sleep(0.01)

    run_on_loop(asyncio.wait_for(test(), LIMIT_S))
