"""How far a long command is: on a terminal's error stream, and nowhere else."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import click
from crosstie.cli.progress import progress

@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--unknown", is_flag=True)
def command(as_json, unknown):
    with progress("beginning") as on_progress:
        for done in range(3):
            on_progress(done, 3, "[bold]file.cu " * 20)
        if unknown:
            on_progress(0, 0, "nobody knows how long")

command()
"""


def told(*words: str, columns: int = 80, term: str = "xterm", no_color: str = "") -> str:
    """What a terminal of this kind is sent on the error stream."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": term, **({"NO_COLOR": no_color} if no_color else {})}
    running = subprocess.Popen([sys.executable, "-c", CODE, *words], stdout=subprocess.DEVNULL, stderr=theirs, env=env)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 65536):
            seen += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(ours)
    assert running.wait() == 0
    return seen.decode()


def lines(seen: str) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)) if line.strip()]


def test_a_terminal_sees_what_is_done_and_how_much_of_it() -> None:
    assert re.search(r"\[bold\]file\.cu.*\.\.\..* 2/3 .*0:00:0", lines(told())[-1])


def test_a_total_is_forgotten_where_the_next_is_not_known() -> None:
    last = lines(told("--unknown"))[-1]
    assert "nobody knows how" in last
    assert not re.search(r"\d/\d", last)


@pytest.mark.parametrize("columns", [80, 140])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    assert max(map(len, lines(told(columns=columns)))) <= columns


def test_no_color_has_no_colours() -> None:
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", told())
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", told(no_color="1"))


def test_json_dumb_terminals_and_pipes_see_nothing() -> None:
    assert told("--json") == ""
    assert told(term="dumb") == ""
    piped = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert (piped.stdout, piped.stderr) == ("", "")
