"""What converts stretches: this process, and others that take one at a time and end with it.

Processes, because numpy's short calls let go of the interpreter's lock so often that threads mostly wait for it.
Each of the others is `python -m` this module: a stretch a line in, counts or a fault a line out.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.fp8 import Codes, Dialect
from crosstie_port.checkpoint.shard import Converter, Stretch


class _Reply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of these: what was counted, what is wrong with the data (file, key, reason), or with the system."""

    codes: Codes | None = None
    bad_data: tuple[str, str, str] | None = None
    # (number, words, file)
    os_error: tuple[int, str, str] | None = None


class _Remote:
    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process

    def pass_stretch(self, stretch: Stretch) -> Codes:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise BadInput("a converting process has no pipes")
        try:
            stdin.write(msgspec.json.encode(stretch) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            # What it has not taken would be flushed once more when it is stopped.
            with suppress(BrokenPipeError):
                stdin.close()
            status = self._process.wait()
            why = f"; {stretch.source} cannot be read, or became shorter" if status == -signal.SIGBUS else ""
            raise BadInput(f"a converting process ended with status {status}{why}; run it again, and it goes on")
        reply = msgspec.json.decode(line, type=_Reply)
        if reply.bad_data is not None:
            raise BadData(*reply.bad_data)
        if reply.os_error is not None:
            raise OSError(*reply.os_error)
        return reply.codes or Codes()


StretchConverter = Converter | _Remote


@contextmanager
def converters(to: Dialect, number: int) -> Iterator[list[StretchConverter]]:
    """This process first: it can begin while the others start."""
    with ExitStack() as stack:
        made: list[StretchConverter] = [Converter(to)]
        for _ in range(number - 1):
            # In a session of its own: Ctrl-C is for the parent, which lets them finish what they hold.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "crosstie_port.checkpoint.converters", to],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            # Leaving closes its pipes, which ends it once it has finished what it holds.
            stack.enter_context(process)
            made.append(_Remote(process))
        yield made


def _serve(to: Dialect) -> None:
    """Until standard input closes, which it does when the parent ends, however it ends."""
    converter = Converter(to, watched=True)
    for line in sys.stdin.buffer:
        reply = _Reply()
        try:
            reply.codes = converter.pass_stretch(msgspec.json.decode(line, type=Stretch))
        except BadData as error:
            reply.bad_data = (error.file, error.key, error.reason)
        except OSError as error:
            reply.os_error = (error.errno or 0, error.strerror or str(error), str(error.filename or ""))
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # Nobody is left to tell; and nothing is left to be flushed on the way out.
            os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])  # type: ignore[arg-type]
