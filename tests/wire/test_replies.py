"""Answers that leave early, are cut off, or never come because their handler failed."""

import asyncio

from tests.wire.sockets import said, serving

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

ASKED = b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n"


def handle(request: Request, reply: Reply) -> None:
    if request.path == "/fails":
        raise RuntimeError("a slip")
    reply.start(200, b"", None)
    if request.path == "/early":
        reply.flush()
        return
    reply.write(b"half of it")
    if request.path == "/fails-late":
        raise RuntimeError("a slip")
    reply.cut(after_written=True)


def test_a_handler_that_fails_is_a_500_and_is_told_to_the_loop() -> None:
    async def body() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        async with serving(handle) as (_, port):
            got = await said(port, ASKED % b"fails", until=b"internal error")
            assert got.startswith(b"HTTP/1.1 500 ")
            assert b"0\r\n\r\n" not in await said(port, ASKED % b"fails-late"), "one that has begun is cut"
        assert [str(error) for error in told] == ["a slip", "a slip"]

    run_on_loop(body())


def test_a_head_can_leave_before_its_body() -> None:
    async def body() -> None:
        async with serving(handle) as (_, port):
            got = await said(port, ASKED % b"early", until=b"\r\n\r\n")
            assert got.endswith(b"transfer-encoding: chunked\r\n\r\n")

    run_on_loop(body())


def test_what_was_written_before_a_cut_can_leave_first() -> None:
    async def body() -> None:
        async with serving(handle) as (_, port):
            got = await said(port, ASKED % b"cut")
            assert got.endswith(b"half of it\r\n"), "and no last chunk"

    run_on_loop(body())
