"""The tools by the Model Context Protocol: its official SDK around `mcp_tools`."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import uvicorn
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from crosstie import __version__
from crosstie.cli.mcp_tools import TOOLS, described
from crosstie.core.errors import CrosstieError, did_you_mean, near_names
from crosstie.core.progress import OnProgress

INSTRUCTIONS = """Crosstie decides which AMD and NVIDIA accelerators to run LLM inference on. Its numbers are
predictions of a performance model, calibrated on published measurements, unless they say that they were measured:
quote intervals and `basis` with them, and of prices and specifications date and source (catalog_show). What preflight
finds was run on no AMD GPU. To argue a purchase: catalog_list and catalog_show for what is known, fit for what holds
the model, compare for one load, plan for the fleet and what would change the answer, preflight for whether it runs.
Answers are short forms of the commands' --json; `shortened` says what full=true adds."""
# Characters of an answer; whoever needs more runs the command.
_MOST = 1_000_000
# Plans and simulations at once; one more waits.
_AT_ONCE = 4
# Between two words on how far a call is.
_EVERY_S = 0.5


class _Gone(Exception):
    """Nobody waits for the answer any more."""


def make_server(gateway: str) -> Server[Any]:
    """`gateway`: the address that `explain` asks."""
    tools = list(map(_tool, TOOLS))
    schemas = {tool.name: tool.input_schema for tool in tools}
    room = anyio.CapacityLimiter(_AT_ONCE)

    async def list_tools(
        _context: ServerRequestContext[Any], _params: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(context: ServerRequestContext[Any], params: CallToolRequestParams) -> CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            return _refused(f"unknown tool '{params.name}'.{did_you_mean(near_names(params.name, TOOLS))}")
        try:
            answer = await _answered(partial(tool.answer, params.arguments or {}, gateway), context, room)
        except msgspec.ValidationError as error:
            return _refused(f"{params.name}: {error}")
        except CrosstieError as error:
            return _refused(str(error))
        except OSError as error:
            return _refused(f"{error.filename or params.name}: {error.strerror or error}")
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
        if len(text) > _MOST:
            return _refused(f"the answer has {len(text):,} characters, more than {_MOST:,}: ask for less of it")
        # Clients that know no structured content read the text.
        return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=json.loads(text))

    return Server(
        "crosstie", version=__version__, title="Crosstie", instructions=" ".join(INSTRUCTIONS.split()),
        get_tool_input_schema=schemas.get, on_list_tools=list_tools, on_call_tool=call_tool,
    )  # fmt: skip


def _tool(name: str) -> Tool:
    hints = ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=TOOLS[name].asks_others
    )
    return Tool(**described(name), annotations=hints)


def _refused(message: str) -> CallToolResult:
    """One line, whatever the message quotes, as the command line has it."""
    return CallToolResult(content=[TextContent(type="text", text=" ".join(message.split()))], is_error=True)


async def _answered(
    answer: Callable[[OnProgress], dict[str, Any]], context: ServerRequestContext[Any], room: anyio.CapacityLimiter
) -> dict[str, Any]:
    """In a thread, which tells how far it is, and ends at its next word once the call was cancelled."""
    loop, gone = asyncio.get_running_loop(), threading.Event()
    told, last = 0, float("-inf")

    def on_progress(done: int, total: int, what: str) -> None:
        nonlocal told, last
        if gone.is_set():
            raise _Gone
        if (now := time.monotonic()) - last < _EVERY_S:
            return
        # The protocol wants numbers that only grow, and totals of a plan begin again with each of its parts.
        told, last = told + 1, now
        said = f"{what}: {done:,} of {total:,}" if total else what
        asyncio.run_coroutine_threadsafe(context.session.report_progress(told, None, said), loop)

    try:
        return await anyio.to_thread.run_sync(answer, on_progress, abandon_on_cancel=True, limiter=room)
    finally:
        gone.set()


def serve_stdio(server: Server[Any]) -> None:
    async def run() -> None:
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(run)


def serve_http(server: Server[Any], listening: socket.socket) -> None:
    """On /mcp. The SDK refuses hosts and origins that are not of this machine, so that no web page can ask."""
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
