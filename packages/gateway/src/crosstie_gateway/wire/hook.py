"""A command of the user's, as a hook: its words as they are, no shell, its task in its environment, and an end to all
it starts."""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable

# How much of a command's output is kept and told; and the time between asking it to end and killing it.
_KEPT_BYTES, _MOST_TOLD = 4096, 300
_GRACE_S = 2.0


class HookFailed(Exception):
    """In one line, for people."""


async def run_hook(command: str, given: dict[str, str], patience_s: float, on_output: Callable[[str], object]) -> None:
    """`on_output`: told the end of its output on one line, for the operator alone. Raises HookFailed."""
    words = shlex.split(command)
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    written = bytearray()

    def read() -> None:
        piece = b""
        with contextlib.suppress(BlockingIOError):
            piece = os.read(reading, 65536)
            if not piece:
                loop.remove_reader(reading)
        written.extend(piece)
        del written[:-_KEPT_BYTES]

    try:
        try:
            # In a session of its own, so that all it starts ends with it. Its output goes to a pipe that nobody waits
            # for: a server left behind may hold it open.
            process = await asyncio.create_subprocess_exec(
                *words, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing, start_new_session=True,
                env={**os.environ, **{f"CROSSTIE_{name}": value for name, value in given.items()}},
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise HookFailed(f"{words[0]} cannot be run: {error}") from None
        finally:
            os.close(writing)
        loop.add_reader(reading, read)
        try:
            async with asyncio.timeout(patience_s):
                status = await process.wait()
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                raise HookFailed(f"{words[0]} was ended: it took longer than {patience_s:g} s") from None
            raise
        read()
    finally:
        loop.remove_reader(reading)
        os.close(reading)
    text = " ".join(written.decode("utf-8", "replace").split())
    if text:
        on_output("".join(sign if sign.isprintable() else "?" for sign in text)[-_MOST_TOLD:])
    if status != 0:
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise HookFailed(f"{words[0]} ended with {how}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it has started: they are asked first."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
