"""Plugins of other packages: what they are told, what their answers do, and that none can do more harm than it may."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.packages import ROOT
from tests.run.gateway.fakes import MODEL, Running, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.test_serving import CHAT

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, ServedClass
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.service.plugins import PluginProcesses

EXAMPLE = ROOT / "examples" / "plugin"
# One that does as its prompt says.
ODD = """
import os, sys, time

print("loading says something")

class Odd:
    patience_s, on_failure = 0.5, "{on_failure}"

    def check(self, request):
        print("so does a check")
        body = request["body"].decode()
        if "hang" in body:
            time.sleep(3600)
        if "spin" in body:
            sum(range(10**15))
        if "throw" in body:
            raise ValueError("a secret of the prompt's")
        if "exit" in body:
            os._exit(3)
        if "odd" in body:
            return 7
        return None
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """As pip would: a module, and the entry point that names it."""

    def installed(name: str, target: str, text: str) -> None:
        module = target.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{module}-0.1.dist-info"
        shutil.rmtree(info, ignore_errors=True)
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text(f"[crosstie.plugins]\n{name} = {target}\n")

    import os

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return installed


@asynccontextmanager
async def plugged(fleet: Fleet, *names: str) -> AsyncIterator[Running]:
    plugins = PluginProcesses(names)
    try:
        async with running(fleet, components=[plugins]) as at:
            yield at
    finally:
        await plugins.stop()


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def error_of(body: bytes) -> tuple[str, str]:
    error = json.loads(body)["error"]
    return error["code"], error["message"]


def test_the_example_masks_refuses_and_keeps_requests_in_the_house(install: Install) -> None:
    install("in-house", "in_house:InHouse", (EXAMPLE / "in_house.py").read_text())
    internal = ServedClass(
        name="internal", model=MODEL, requests_per_s=1.0, input_tokens=100.0, output_tokens=20.0, ttft=None, tpot=None,
        routes=(),
    )  # fmt: skip

    async def main() -> None:
        async with fakes(2) as [own, rented]:
            # The rented one is far cheaper.
            pools = (
                pool_of("own", own.url, usd_per_gpu_hour=9.0),
                pool_of("rented-a", rented.url, usd_per_gpu_hour=0.1),
            )
            fleet = fleet_of(*pools, classes=(CHAT, internal))
            async with plugged(fleet, "in-house") as at:
                masked = await at.ask(messages=said("write to ann@example.org"))
                assert (masked.status, dict(masked.headers)[b"x-crosstie-pool"]) == (200, b"rented-a")
                assert rented.hit[-1][1]["messages"] == said("write to (an e-mail address)")
                kept = await at.ask(headers={"x-crosstie-class": "internal"})
                assert (kept.status, dict(kept.headers)[b"x-crosstie-pool"]) == (200, b"own")
                refused = await at.ask(messages=said("4111 1111 1111 1111"))
                assert refused.status == 400
                assert error_of(refused.body) == ("plugin_refused", "a prompt must not have card numbers")
                assert await at.metric("crosstie_plugin_calls_total", plugin="in-house", outcome="refused") == 1
                assert await at.metric("crosstie_plugin_up", plugin="in-house") == 1
                assert len(own.hit) + len(rented.hit) == 2

    run_on_loop(main())


async def odd(install: Install, on_failure: str, then: Callable[[Running], Awaitable[None]]) -> None:
    install("odd", "odd_plugin:Odd", ODD.replace("{on_failure}", on_failure))
    async with fakes() as [fake], plugged(fleet_of(pool_of("p", fake.url)), "odd") as at:
        await then(at)


@pytest.mark.parametrize("what", ["throw", "odd"])
@pytest.mark.parametrize(("on_failure", "status"), [("refuse", 503), ("pass", 200)])
def test_a_plugin_that_throws_or_answers_nonsense_costs_its_own_answer(
    install: Install, what: str, on_failure: str, status: int
) -> None:
    async def then(at: Running) -> None:
        answer = await at.ask(messages=said(what))
        assert answer.status == status
        if status == 503:
            assert error_of(answer.body) == ("plugin_failed", "plugin odd gives no answer")
        assert (await at.ask()).status == 200
        assert await at.metric("crosstie_plugin_up") == 1

    run_on_loop(odd(install, on_failure, then))


@pytest.mark.parametrize("what", ["hang", "spin", "exit"])
@pytest.mark.slow
def test_a_plugin_that_hangs_spins_or_ends_is_bounded_and_started_again(install: Install, what: str) -> None:
    async def then(at: Running) -> None:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        turning = asyncio.ensure_future(turn())
        answer = await at.ask(messages=said(what))
        turning.cancel()
        # The loop went on meanwhile, however soon the end of a child was seen, and the request did not go on without its
        # guard.
        least = 1 if what == "exit" else 100
        assert (answer.status, error_of(answer.body)[0], turns > least) == (503, "plugin_failed", True)
        await until(lambda: any("plugin odd is lost" in str(one) for one in at.notices))
        await until(lambda: any("plugin odd is back" in str(one) for one in at.notices))
        assert (await at.ask()).status == 200

    run_on_loop(odd(install, "refuse", then))


def test_a_client_that_leaves_while_a_plugin_is_asked_leaves_nothing_behind(install: Install) -> None:
    async def then(at: Running) -> None:
        asked = asyncio.ensure_future(at.ask(messages=said("hang")))
        await until(lambda: at.gateway.exchanges)
        asked.cancel()
        await until(lambda: not at.gateway.exchanges)

    run_on_loop(odd(install, "pass", then))


def test_a_plugin_that_is_none_is_refused_at_the_start(install: Install) -> None:
    install("empty", "empty_plugin:Empty", "class Empty:\n    pass\n")

    async def main() -> None:
        with pytest.raises(BadInput, match="--plugin empty: ValueError: it has neither check nor pools"):
            async with plugged(fleet_of(pool_of("p", "http://127.0.0.1:1/v1")), "empty"):
                pass

    run_on_loop(main())
    with pytest.raises(BadInput, match=r"--plugin emty: no installed package .* Did you mean empty"):
        PluginProcesses(["emty"])
