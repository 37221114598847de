"""A command of the user's that loads or unloads a model: its words as they are, no shell, and an end to everything.

What it should do is in its environment: CROSSTIE_ACTION (load or unload), _MODEL, _POOL, _BACKEND and _REPLICA.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import subprocess

_MOST_SAID = 300
_KEPT_BYTES = 4096
# Between being asked to end and being killed.
_GRACE_S = 2.0


class HookFailed(Exception):
    """In one line, for people; `said` is the end of what it wrote, which is the operator's alone."""

    def __init__(self, why: str, said: str = ""):
        super().__init__(why)
        self.said = said


async def run_hook(command: str, given: dict[str, str], patience_s: float) -> str:
    """The end of what it wrote, on one line. Raises HookFailed where it fails, cannot be started or takes too long."""
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
            # In a session of its own, so that all it starts can be ended with it; its output by a pipe that nobody
            # waits for, because a server that it leaves behind may hold it open.
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
    said = _one_line(bytes(written))
    if status != 0:
        how = f"status {status}" if status > 0 else f"signal {-status}"
        raise HookFailed(f"{words[0]} ended with {how}", said)
    return said


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


def _one_line(written: bytes) -> str:
    text = " ".join(written.decode("utf-8", "replace").split())
    return "".join(sign if sign.isprintable() else "?" for sign in text)[-_MOST_SAID:]
