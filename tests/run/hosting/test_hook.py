"""Commands that load models: what they are given, what is kept of what they say, and that none outlives its time."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from tests.run.gateway.fakes import Fake, fleet_of, pool_of, running, until
from tests.run.hosting.shared import PATIENT
from tests.run.service.processes import gone

from crosstie.core.fleet import HostedModel, Pool
from crosstie_gateway.hosting.hosting import Hosting
from crosstie_gateway.wire.hook import HookFailed, run_hook
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

GIVEN = {"ACTION": "load", "MODEL": "m; touch x", "POOL": "p", "BACKEND": "http://a/v1", "REPLICA": "0"}


def script(folder: Path, text: str) -> str:
    """A command that runs this Python."""
    file = folder / "hook.py"
    file.write_text(text)
    return f"{sys.executable} {file} '$(touch made) `touch made`; touch made'"


def test_words_and_environment_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = script(
        tmp_path, "import os, sys; print(sys.argv[1:], *(os.environ['CROSSTIE_' + n] for n in ('ACTION', 'MODEL')))"
    )
    heard: list[str] = []
    asyncio.run(run_hook(command, GIVEN, 30, heard.append))
    (said,) = heard
    assert said == "['$(touch made) `touch made`; touch made'] load m; touch x"
    assert not (tmp_path / "made").exists()


def test_only_the_end_of_what_it_says_is_kept(tmp_path: Path) -> None:
    command = script(tmp_path, "print('x' * 10**6); print('\\x1b[31mthe \\n end')")
    heard: list[str] = []
    asyncio.run(run_hook(command, GIVEN, 30, heard.append))
    (said,) = heard
    assert len(said) == 300
    assert said.endswith("x ?[31mthe end")


def test_a_failure_has_its_status_and_last_words(tmp_path: Path) -> None:
    command = script(tmp_path, "import sys; print('no such GPU', file=sys.stderr); sys.exit(3)")
    heard: list[str] = []
    with pytest.raises(HookFailed, match=r"ended with status 3$"):
        asyncio.run(run_hook(command, GIVEN, 30, heard.append))
    assert heard == ["no such GPU"]
    with pytest.raises(HookFailed, match="cannot be run"):
        asyncio.run(run_hook("/nowhere/at/all", GIVEN, 30, heard.append))


CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
pathlib.Path({folder!r}, "pid").write_text(str(child.pid))
time.sleep({stays})
"""


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    command = script(tmp_path, CHILD.format(folder=str(tmp_path), stays=600))

    async def run() -> None:
        with pytest.raises(HookFailed, match="took longer than"):
            await run_hook(command, GIVEN, 3.0, print)
        await until(lambda: gone(int((tmp_path / "pid").read_text())))

    asyncio.run(run())


def test_one_that_is_given_up_is_ended_too(tmp_path: Path) -> None:
    command = script(tmp_path, CHILD.format(folder=str(tmp_path), stays=600))

    async def run() -> None:
        task = asyncio.create_task(run_hook(command, GIVEN, 600, print))
        await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: gone(int((tmp_path / "pid").read_text())))

    asyncio.run(run())


def test_a_server_that_it_leaves_behind_may_stay(tmp_path: Path) -> None:
    """It holds the command's output open, and is not waited for."""
    command = script(tmp_path, CHILD.format(folder=str(tmp_path), stays=0))
    asyncio.run(run_hook(command, GIVEN, 60, print))
    pid = int((tmp_path / "pid").read_text())
    assert not gone(pid)
    os.kill(pid, 9)


class Changing(Fake):
    """Serves what a file lists, one model to a line."""

    def __init__(self, file: Path):
        super().__init__("changing")
        self.file = file

    def _handle(self, request: Request, reply: Reply) -> None:
        if request.path == "/v1/models":
            data = ",".join(f'{{"id":"{name}"}}' for name in self.file.read_text().split())
            reply.send(200, f'{{"data":[{data}]}}'.encode())
        else:
            super()._handle(request, reply)


SWAP = """
import os, pathlib, sys
file = pathlib.Path({file!r})
names = set(file.read_text().split())
model, action = os.environ["CROSSTIE_MODEL"], os.environ["CROSSTIE_ACTION"]
assert os.environ["CROSSTIE_BACKEND"].endswith("/v1"), os.environ["CROSSTIE_BACKEND"]
if model == "broken":
    sys.exit("it does not fit")
(names.add if action == "load" else names.discard)(model)
file.write_text(" ".join(names))
print(action, model)
"""


def hooked(url: str, command: str) -> Pool:
    hosts = tuple(HostedModel(model=name, memory_gib=1.0, load_s=0.1) for name in ("one", "two", "broken"))
    return pool_of(
        "hooked", url, model="one", hosts=hosts, loading="hook", load_hook=command, host_memory_gib=1.5,
        max_context=10**6,
    )  # fmt: skip


@pytest.mark.slow
def test_models_that_a_command_swaps(tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_text("two")
    command = script(tmp_path, SWAP.format(file=str(listed)))

    async def run() -> None:
        fake = Changing(listed)
        await fake.start()
        hosting = Hosting()
        async with running(fleet_of(hooked(fake.url, command), serving=PATIENT), components=[hosting]) as one:
            # What the server has at the start is asked of it.
            assert ((await one.ask(model="two")).header(b"x-crosstie-reason") or b"").endswith(b"; loaded")
            answer = await one.ask(model="one")
            assert answer.status == 200
            assert b"for a load" in (answer.header(b"x-crosstie-reason") or b"")
            assert listed.read_text() == "one"
            said = [line for line in one.notices if "replica" in line]
            assert said == [
                "pool hooked: unload two on replica 0: unload two",
                "pool hooked: load one on replica 0: load one",
            ]
            assert await one.metric("crosstie_model_evictions_total", model="two") == 1
            asking = asyncio.create_task(one.ask(model="broken"))
            await until(lambda: any("it does not fit" in line for line in one.notices))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            # What the command wrote is in the log, and is told to no client.
            explained = await one.ask("/crosstie/explain", model="broken")
            for told in (str(hosting.absent("broken")), explained.body.decode()):
                assert "failed" in told
                assert "it does not fit" not in told
            await hosting.stop()
        fake.crash()

    asyncio.run(run())
