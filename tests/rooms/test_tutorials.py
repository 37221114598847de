"""Every tutorial is run from its first command to its last, in one shell, and prints what it shows."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
# The port that pages name; each run takes a free one in its place.
PORT = "8080"


def steps(page: str) -> list[tuple[str, str]]:
    """Commands of a page in order, each with what it is said to print; a block of Python is one command."""
    found = []
    for language, body in re.findall(r"^```(console|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            found.append((f"python - <<'END'\n{body}END", ""))
        else:
            # A command goes on after a backslash at the end of its line.
            found += re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)
    return found


def is_shown(shown: str, got: str) -> bool:
    """`...` on a line stands for lines left out, `…` for a part of a line; white space does not count."""
    wanted, lines = ([line.strip() for line in text.splitlines() if line.strip()] for text in (shown, got))
    at, left_out = 0, None
    line = 0
    while line < len(lines):
        if at < len(wanted) and wanted[at] == "...":
            left_out = (at, line)
            at += 1
        elif at < len(wanted) and re.fullmatch(".*".join(map(re.escape, wanted[at].split("…"))), lines[line]):
            at, line = at + 1, line + 1
        elif left_out:
            # One line more than before was left out.
            left_out = (left_out[0], left_out[1] + 1)
            at, line = left_out[0] + 1, left_out[1]
        else:
            return False
    return all(one == "..." for one in wanted[at:])


def output_of(commands: list[str], folder: Path) -> list[tuple[str, int]]:
    """What each command prints, and its status, in a shell that they share, where background jobs go on."""
    mark = "==== status"
    script = "\n".join(f"{command}\necho '{mark}' $?" for command in commands)
    bin_folder = Path(sys.executable).parent
    tools = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "CROSSTIE_CATALOG": str(folder / "none"), "COLUMNS": "80"}
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **tools},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=300)
    finally:
        # Whatever it has left behind.
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    parts = re.split(rf"{mark} (\d+)\n", printed)
    return [(text, int(status)) for text, status in zip(parts[::2], parts[1::2], strict=False)]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = steps(page.read_text().replace(PORT, port))
    printed = output_of([command for command, _ in done], tmp_path)
    assert len(printed) == len(done), printed
    for (command, shown), (got, status) in zip(done, printed, strict=True):
        # A command that shows something may have found something, which is status 1.
        as_shown = is_shown(shown, got) and status < 2 if shown else status == 0
        assert as_shown, f"{page.name}: `{command}` ends with status {status} and prints\n{got}"


def test_what_is_shown_is_compared() -> None:
    assert is_shown("one\n...\nthree …\n", "one\ntwo\nthree and four")
    assert is_shown("...\nthree\n...\n", "one\nthree\nthree\nfour")
    assert not is_shown("one\nthree\n", "one\ntwo\nthree")
    assert not is_shown("one\n", "one\ntwo")
    assert not is_shown("one\n...\nfour\n", "one\ntwo\nthree")
    # What differs is found in one pass, however much is left out.
    assert not is_shown("...\nx …\n" * 40 + "end\n", "x y\n" * 4000)


def test_there_is_a_tutorial_for_each_of_the_four() -> None:
    assert [page.stem for page in TUTORIALS] == ["feedback", "port", "purchase", "serve"]
