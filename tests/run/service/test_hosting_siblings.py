"""Several processes over the same shared pool: one decides, the others tell it and do as it says."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from tests.run.gateway.fakes import CATALOG, Running, fleet_of, running, until
from tests.run.service.shared import MODELS, PATIENT, SPEED, shared_pool, with_hosts

from crosstie.core.fleet import Fleet
from crosstie.run.emulate.fleet import start
from crosstie.run.service.hosting import Hosting
from crosstie.run.service.process import Serve

A, B, *_ = MODELS


class Link:
    """Siblings that hear each other by JSON, as over a socket; `lost` ones do not answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.serves: list[Serve] = []
        self.lost: list[Serve] = []

    def of(self, own: Serve) -> "_Ear":
        self.serves.append(own)
        return _Ear(self, own)


class _Ear:
    def __init__(self, link: Link, own: Serve):
        self.link, self.own, self.folder = link, own, link.folder

    async def ask(self, verb: str, what: dict[str, Any]) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        others = [one for one in self.link.serves if one is not self.own and one not in self.link.lost]
        said = json.dumps(what)
        return [json.loads(json.dumps(one.verbs[verb](json.loads(said)))) for one in others if verb in one.verbs]

    def turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()


class Linked:
    """The part that makes them siblings."""

    def __init__(self, link: Link):
        self.link = link

    async def start(self, serve: Serve) -> None:
        serve.siblings = self.link.of(serve)

    def reloaded(self, fleet: Fleet) -> None:
        pass

    async def stop(self) -> None:
        pass


async def asked(one: Running, model: str, **more: Any) -> tuple[int, str]:
    answer = await one.ask(model=model, **{"max_tokens": 4, **more})
    return answer.status, (answer.header(b"x-crosstie-reason") or b"").decode()


def test_a_model_that_a_sibling_still_waits_for_after_the_file_has_lost_it(tmp_path: Path) -> None:
    async def run() -> None:
        made = await start(CATALOG, fleet_of(shared_pool(A, B, replicas=1), serving=PATIENT), speed=SPEED)
        hosting = Hosting(every_s=0.02, verify_s=0.2)
        async with running(made.fleet, parts=[Linked(Link(tmp_path)), hosting], speed=SPEED) as one:
            one.serve.verbs["hosting"]({"process": 1, "asked": {B: 1}, "waiting": [B]})
            fleet = with_hosts(made.fleet, A)
            one.gateway.load(fleet)
            hosting.reloaded(fleet)
            await until(lambda: not hosting._again.is_set())
            assert (await asked(one, A))[0] == 200
            assert not [line for line in one.notices if "shared pools" in line]
            await hosting.stop()
        await made.close()

    asyncio.run(run())


def test_whatever_goes_wrong_once_models_are_loaded_afterwards(tmp_path: Path) -> None:
    async def run() -> None:
        made = await start(CATALOG, fleet_of(shared_pool(A, B, replicas=1), serving=PATIENT), speed=SPEED)
        hosting = Hosting(every_s=0.02, verify_s=0.2)
        async with running(made.fleet, parts=[Linked(Link(tmp_path)), hosting], speed=SPEED) as one:
            pool, looked = hosting.pools["shared"], hosting.pools["shared"].look
            failed = 0

            def fails_twice(waiting: Any) -> None:
                nonlocal failed
                failed += 1
                if failed <= 2:
                    raise ZeroDivisionError("once")
                looked(waiting)

            pool.look = fails_twice  # type: ignore[method-assign]
            assert (await asked(one, A))[0] == 200
            assert [line for line in one.notices if "shared pools" in line] == [
                "shared pools: ZeroDivisionError('once')"
            ]
            await hosting.stop()
        await made.close()

    asyncio.run(run())


def test_one_of_them_decides(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = fleet_of(shared_pool(A, B, replicas=1, memory_gib=25.0), serving=PATIENT)
        made = await start(CATALOG, fleet, speed=SPEED)
        link = Link(tmp_path)
        first, second = Hosting(every_s=0.02, verify_s=0.2), Hosting(every_s=0.02, verify_s=0.2)
        async with (
            running(made.fleet, parts=[Linked(link), first], speed=SPEED) as leader,
            running(made.fleet, parts=[Linked(link), second], speed=SPEED) as follower,
        ):
            assert (first.leads, second.leads) == (True, False)
            # Asked of the one that does not decide: it is loaded for it, and known to both.
            status, why = await asked(follower, A)
            assert (status, "for a load" in why) == (200, True)
            assert (await asked(leader, A))[1].endswith("; loaded")
            assert first.pools["shared"].residency.counts.asked == 2
            assert await leader.metric("crosstie_model_loads_total") == 1
            assert "crosstie_model_loads_total" not in (await follower.get("/metrics")).body.decode()
            # What the other has in flight is not put away.
            long = asyncio.create_task(follower.ask(model=A, max_tokens=4000, ignore_eos=True))
            await until(lambda: second.pools["shared"].replicas[0, A].in_flight == 1)
            other = asyncio.create_task(asked(leader, B))
            answer = await long
            assert answer.status == 200
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 4000
            assert (await other)[0] == 200
            assert first.pools["shared"].residency.counts.evictions == 1
            # The one that decides goes, and the other takes over, knowing what is there.
            await until(lambda: second.pools["shared"].replicas[0, B].presence.there)  # type: ignore[union-attr]
            link.lost.append(leader.serve)
            await first.stop()
            await until(lambda: second.leads)
            assert (await asked(follower, B))[1].endswith("; loaded")
            assert (await asked(follower, A))[0] == 200
            await second.stop()
        await made.close()

    asyncio.run(run())
