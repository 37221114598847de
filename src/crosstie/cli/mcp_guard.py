"""Holds a process to reading, and to reading beneath some folders.

By Python's audit events, so that it holds for every way to a file, also for the paths that stand inside of files which
an assistant names. What is refused raises what a file system without the right would, and is told as that is.
"""

import errno
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import crosstie

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_READS = ("open", "os.listdir", "os.scandir")
_STARTS = ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
_CHANGES = (
    "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate",
    "os.utime",
)  # fmt: skip


def code_folders() -> list[Path]:
    """Where what is imported later lies."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    return [*map(Path, [*sysconfig.get_paths().values(), *installed]), Path(crosstie.__file__).parent]


def read_only(folders: Iterable[Path]) -> None:
    """From here on nothing is written or started by this process, and nothing read that is not beneath `folders`.
    There is no way back."""
    sys.dont_write_bytecode = True
    beneath = tuple({os.path.realpath(folder) for folder in (*folders, *code_folders())})

    def refuse(why: str, path: object = None) -> None:
        raise PermissionError(errno.EACCES, why, *([os.fspath(path)] if isinstance(path, str | os.PathLike) else []))

    def heed(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS:
            refuse("`crosstie mcp` starts no processes")
        elif event in _CHANGES:
            refuse("`crosstie mcp` writes no files", arguments[0])
        elif event in _READS:
            path = arguments[0]
            # A descriptor that is open already, or the folder that one is in.
            if path is None or isinstance(path, int) or path == os.devnull:
                return
            if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
                refuse("`crosstie mcp` writes no files", path)
            real = os.path.realpath(os.fsdecode(path))
            if not any(real == folder or real.startswith(folder + os.sep) for folder in beneath):
                refuse("not beneath the folder that `crosstie mcp --root` names", path)

    sys.addaudithook(heed)
