"""Reports and charts on the site as the commands make them today, not as somebody once pasted them.

A hook of mkdocs (mkdocs.yml). `<!-- live: NAME -->` on a page becomes the report, in a frame that can be opened by
itself, or the chart, by day and by night. A command that fails fails the build.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

import click

FOLDER = "live"
_MARK = re.compile(r"<!-- live: ([\w-]+) -->")
# A model and lengths that others have published results of, on both vendors.
_COMPARE = "compare gpt-oss-120b --on mi355x,b200,h200 --input 1024 --output 1024"


class Shown(NamedTuple):
    """`says`: the words for who does not see it."""

    command: str
    option: str
    says: str


REPORTS = {
    "plan": Shown("plan assistant --quick", "--html", "A plan's report: the fleet, its cost, what would change it"),
    "scorecard": Shown("scorecard", "--html", "The scorecard of accelerators; each cell opens its source"),
    "compare": Shown(_COMPARE, "--html", "One model on three accelerators, with the curve of each"),
}
CHARTS = {
    "curves": Shown(_COMPARE, "--plot", "Throughput of a GPU against the speed of a user, with published points"),
    "costs": Shown(_COMPARE, "--plot-cost", "Dollars a million tokens against the time of a token"),
    "contexts": Shown(_COMPARE, "--plot-context", "Dollars a million tokens over the length of prompts"),
    "roofline": Shown(_COMPARE, "--plot-roofline", "The operations of a prefill and a decode step under the roofline"),
    "memory": Shown("fit llama-3.1-70b --on mi300x,h200,h100-sxm", "--plot", "What fills the memory of a replica"),
    "tax": Shown("tax --accelerator mi300x,h100-sxm", "--plot", "What software delivers of the roofline, by release"),
}


def commands() -> Iterator[list[str]]:
    """As few as can be: what one command gives of reports and of charts is asked of it at once."""
    by_command: dict[tuple[str, bool], list[str]] = {}
    for name, one in REPORTS.items():
        by_command.setdefault((one.command, False), []).extend((one.option, f"{name}.html"))
    for name, one in CHARTS.items():
        for dark in (False, True):
            file = f"{name}-{'dark' if dark else 'light'}.svg"
            by_command.setdefault((one.command, dark), []).extend((one.option, file))
    for (command, dark), options in by_command.items():
        yield [*command.split(), *options, *(["--dark"] if dark else [])]


def run(arguments: list[str], folder: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "crosstie", *arguments], capture_output=True, text=True, check=False, cwd=folder
    )
    if made.returncode:
        raise click.ClickException(f"crosstie {' '.join(arguments)}: status {made.returncode}: {made.stderr.strip()}")


@cache
def generated() -> Path:
    """Once, however often the pages are built anew while somebody writes them."""
    folder = Path(tempfile.mkdtemp(prefix="crosstie-live-"))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: run(one, folder), commands()))
    return folder


def on_files(files: Any, config: Any) -> Any:
    # Here, so that tests without mkdocs can read this file.
    from mkdocs.structure.files import File, InclusionLevel

    for file in sorted(generated().iterdir()):
        uri = f"{FOLDER}/{file.name}"
        files.append(File.generated(config, uri, abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return _MARK.sub(lambda mark: shown(mark[1], page.file.src_uri), markdown)


def shown(name: str, page: str) -> str:
    """What stands for the mark on a page."""
    to = relpath(FOLDER, Path(page).parent)
    if name in REPORTS:
        one = REPORTS[name]
        return (
            f'<p class="live"><code>crosstie {one.command} {one.option} FILE</code>, as it is today: '
            f'<a href="{to}/{name}.html" target="_blank">open it by itself</a></p>\n'
            f'<iframe class="live" src="{to}/{name}.html" title="{one.says}" loading="lazy"></iframe>'
        )
    if name not in CHARTS:
        raise click.ClickException(f"{page}: there is no live '{name}'; known are {', '.join([*REPORTS, *CHARTS])}")
    one = CHARTS[name]
    said = f"`crosstie {one.command} {one.option} FILE`, as it is today:"
    return f"{said}\n\n![{one.says}]({to}/{name}-light.svg#only-light)![{one.says}]({to}/{name}-dark.svg#only-dark)"
