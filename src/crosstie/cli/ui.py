"""`crosstie ui`: a page on this machine that plans as one types."""

import json
import signal
import sys
import webbrowser
from pathlib import Path
from threading import Event

import click

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_toml
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.cli.options import FILE, json_option, whole_option
from crosstie.cli.ui_server import Explorer
from crosstie.core.errors import BadInput


@click.command("ui")
@click.argument("workload", type=FILE, default=Path("assistant"), metavar="[WORKLOAD]")
@whole_option("--port", 0, 65535, "0: any that is free.", metavar=None, default=8470)
@click.option("--open", "opens", is_flag=True, help="Open it in your browser.")
@json_option
def command(workload: Path, port: int, opens: bool, as_json: bool) -> int:
    """A page on this machine on which you change a workload and see the fleet move.

    \b
    crosstie ui
    crosstie ui workload.toml --open
    crosstie ui --port 0 --json

    Models, lengths, rates, targets, prices, discounts and accelerators are fields; the answer is what `plan --quick`
    says, and on request what `plan` says after simulation. Keep an answer to see the next one beside it. The address
    holds the state: send it to a colleague who runs this too. Saves the workload and the fleet file. Listens on
    127.0.0.1 alone, for whoever has the token in the printed address; reads no file but those beside WORKLOAD and
    those that it names, writes nothing, and ends with Ctrl-C. WORKLOAD is a file, or a shipped example [assistant].
    """
    catalog = Catalog()
    file = find_workload(workload)
    # What is wrong with the file is said here, and not on a page.
    read_workload(catalog, file)
    explorer = Explorer(catalog, read_toml(file), file.resolve().parent)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            at = explorer.listen(port)
        except OSError as error:
            raise BadInput(f"--port {port}: {error.strerror}; 0 takes any that is free") from None
        url = f"http://127.0.0.1:{at}/?token={explorer.token}"
        _say(url, as_json)
        if opens:
            webbrowser.open(url)
        Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        explorer.close()
    return 0


def _say(url: str, as_json: bool) -> None:
    click.echo(json.dumps({"ready": True, "url": url}) if as_json else f"{url}  (Ctrl-C ends it)")
    sys.stdout.flush()
