"""`crosstie mcp`: the answers of this command line as tools for an assistant.

The process is held to reading, and to reading beneath some folders: by Python's audit events, so that it holds for
every way to a file, also for the paths that stand inside of files which an assistant names. What is refused raises what
a file system without the right would, and is told as that is.
"""

import errno
import os
import socket
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

import crosstie
from crosstie.catalog.library import Catalog
from crosstie.catalog.releases import releases_folder
from crosstie.catalog.writing import in_words
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.mcp_tools import TOOLS, described
from crosstie.cli.options import file_option, flag_option, text_option, whole_option
from crosstie.core.errors import BadInput, MissingExtra
from crosstie.web.parts import Table

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


@click.command("mcp")
@file_option("--root", "Files beneath it may be read. [default: none]", metavar="DIR")
@text_option("--gateway", "URL", "`explain` asks it.", default="http://127.0.0.1:8080", show_default=True)
@whole_option("--http port", 0, 65535, "Streamable HTTP on 127.0.0.1, not stdio.", metavar="PORT")
@flag_option("--tools listing", "List the tools and end; with --json their schemas.")
@answer_options()
def command(root: Path | None, gateway: str, port: int | None, listing: bool, wanted: Wanted) -> int:
    """Serves read-only tools to an assistant by the Model Context Protocol.

    \b
    crosstie mcp --tools
    crosstie mcp --root ./models-and-workloads
    crosstie mcp --http 8765

    An assistant starts it by its configuration and talks to it over stdin and stdout. The tools are fit,
    compare, plan, simulate, preflight, explain and the catalog with its sources; they answer with the same
    documents as --json. They write nothing and start nothing; they read the catalog and, with --root,
    models, workloads, fleets and traces beneath it. Needs the extra mcp.
    """
    if listing:
        wanted.give(lambda: list(map(described, TOOLS)), lambda _: [_tools()])
        return 0
    if wanted.as_json:
        raise BadInput("--json goes with --tools: a server speaks JSON anyway")
    try:
        from crosstie.cli.mcp_server import make_server, serve_http, serve_stdio
    except ModuleNotFoundError as error:
        raise MissingExtra(f"mcp needs the package {error.name}", "mcp") from None
    readable = [Path(folder) for folder in Catalog().directories]
    if (releases := releases_folder()) is not None:
        readable.append(releases)
    if root is not None:
        readable.append(_entered(root))
    server = make_server(gateway)
    listening = None if port is None else _listening(port)
    read_only(readable)
    if listening is None:
        serve_stdio(server)
    else:
        click.echo(f"listening on http://127.0.0.1:{listening.getsockname()[1]}/mcp", err=True)
        serve_http(server, listening)
    return 0


def _tools() -> Table:
    return Table(["tool", "~what it answers"], [[name, tool.says] for name, tool in TOOLS.items()])


def _entered(root: Path) -> Path:
    """Names of files are taken from there."""
    with in_words(f"--root {root}"):
        os.chdir(root)
    return Path.cwd()


def _listening(port: int) -> socket.socket:
    with in_words(f"--http {port}"):
        return socket.create_server(("127.0.0.1", port))
