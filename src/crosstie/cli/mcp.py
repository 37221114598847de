"""`crosstie mcp`: the answers of this command line as tools for an assistant."""

import os
import socket
from pathlib import Path

import click

from crosstie.catalog.library import Catalog
from crosstie.catalog.releases import releases_folder
from crosstie.catalog.writing import in_words
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.mcp_guard import read_only
from crosstie.cli.mcp_tools import TOOLS, described
from crosstie.cli.options import FILE, whole_option
from crosstie.core.errors import BadInput, MissingExtra
from crosstie.web.parts import Table


@click.command("mcp")
@click.option("--root", type=FILE, metavar="DIR", help="Files beneath it may be read. [default: none]")
@click.option("--gateway", default="http://127.0.0.1:8080", show_default=True, metavar="URL", help="`explain` asks it.")
@whole_option("--http port", 0, 65535, "Streamable HTTP on 127.0.0.1, not stdio.", metavar="PORT")
@click.option("--tools", "listing", is_flag=True, help="List the tools and end; with --json their schemas.")
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
