"""Backends found by name: they come and go with its addresses, and no request is lost by that."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.run.gateway.fakes import Fake, Running, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.fronts import Certificates, tls_before

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie.core.fleet import BackendAccess, Fleet
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.service.admin import Administration
from crosstie_gateway.service.discovery import NameDiscovery, addresses_of
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.wire.server import Server


class Resolver:
    """As the test says it: addresses by name, or what goes wrong."""

    def __init__(self, *addresses: str):
        self.answer: tuple[str, ...] | OSError = addresses
        self.asked: list[tuple[str, int]] = []
        self.held = threading.Event()
        self.held.set()

    def __call__(self, host: str, port: int) -> tuple[str, ...]:
        self.asked.append((host, port))
        self.held.wait()
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer


@asynccontextmanager
async def machines(count: int) -> AsyncIterator[tuple[list[Fake], int]]:
    """Engines on addresses of their own, 127.0.0.1 and those after it, at one port."""
    made: list[Fake] = []
    try:
        for index in range(count):
            fake = Fake(f"fake-{index}")
            await fake.start() if index == 0 else await _start_at(fake, f"127.0.0.{index + 1}", made[0].port)
            made.append(fake)
        yield made, made[0].port
    finally:
        for fake in made:
            fake.crash()


async def _start_at(fake: Fake, host: str, port: int) -> None:
    fake.loop = asyncio.get_running_loop()
    fake.server = Server(fake.loop, fake._handle)
    fake.port = await fake.server.listen(host, port)


@asynccontextmanager
async def found(fleet: Fleet, resolver: Resolver, *others: Component, **settings: Any) -> AsyncIterator["Found"]:
    discovery = NameDiscovery(resolver, **settings)
    try:
        async with running(fleet, components=[discovery, *others]) as made:
            yield Found(made, discovery, resolver)
    finally:
        resolver.held.set()
        await discovery.stop()


class Found:
    def __init__(self, gateway: Running, discovery: NameDiscovery, resolver: Resolver):
        self.gateway, self.discovery, self.resolver = gateway, discovery, resolver
        self.backends = gateway.gateway.backends

    async def answers(self, answer: tuple[str, ...] | OSError) -> None:
        """The resolver says this from now on, and has been heard."""
        self.resolver.answer = answer
        before = len(self.resolver.asked)
        self.discovery.look_now()
        # The second one was asked after what came of the first had been passed on.
        await until(lambda: len(self.resolver.asked) > before)
        self.discovery.look_now()
        await until(lambda: len(self.resolver.asked) > before + 1)
        await asyncio.sleep(0)

    async def served_by(self) -> str:
        return str(json.loads((await self.gateway.ask()).body)["served_by"])


def named(port: int, **changes: Any) -> Fleet:
    return fleet_of(pool_of("a", f"dns+http://vllm.test:{port}/v1", **changes), policy="round-robin")


def test_a_name_stands_for_all_of_its_addresses() -> None:
    async def scenario() -> None:
        async with machines(2) as (fakes, port), found(named(port), Resolver("127.0.0.1", "127.0.0.2")) as at:
            assert at.resolver.asked[0] == ("vllm.test", port)
            url = f"dns+http://vllm.test:{port}/v1"
            assert list(at.backends) == [f"{url}#127.0.0.1", f"{url}#127.0.0.2"]
            assert {await at.served_by() for _ in range(4)} == {"fake-0", "fake-1"}
            # A name is what the engine is asked by, whatever its address.
            assert {request.headers[b"host"] for fake in fakes for request, _ in fake.hit} == {b"vllm.test:%d" % port}
            assert await at.gateway.metric("crosstie_backend_up", backend=f"{url}#127.0.0.2") == 1
            assert await at.gateway.metric("crosstie_discovered_addresses", backend=url) == 2
            # As a file it is what it was.
            assert f'backends = ["{url}"]' in fleet_text(at.gateway.gateway.live.fleet)

    run_on_loop(scenario())


def test_addresses_come_and_go_and_what_is_being_answered_is_finished() -> None:
    async def scenario() -> None:
        async with machines(2) as ([first, _], port), found(named(port), Resolver("127.0.0.1")) as at:
            first.mode = "hang"
            asked = asyncio.ensure_future(at.gateway.ask())
            await until(lambda: first.held)
            await at.answers(("127.0.0.2",))
            await until(lambda: list(at.backends) == [f"dns+http://vllm.test:{port}/v1#127.0.0.2"])
            assert [await at.served_by() for _ in range(3)] == ["fake-1"] * 3
            first._ok({}, first.held.pop())
            assert json.loads((await asked).body)["served_by"] == "fake-0"
            assert any("1 address: 1 came, 1 went" in line for line in at.gateway.notices)

    run_on_loop(scenario())


def test_what_was_known_goes_on_while_the_resolver_fails_or_says_nothing() -> None:
    async def scenario() -> None:
        async with machines(1) as (_, port), found(named(port), Resolver("127.0.0.1")) as at:
            url = f"dns+http://vllm.test:{port}/v1"
            for answer in (socket.gaierror(socket.EAI_AGAIN, "try again"), ()):
                await at.answers(answer)
                assert list(at.backends) == [f"{url}#127.0.0.1"]
                assert await at.served_by() == "fake-0"
            assert await at.gateway.metric("crosstie_discovery_failures_total", backend=url) >= 1
            said = [line for line in at.gateway.notices if line.startswith(url)]
            assert any("cannot be looked up (try again); its last known go on (1 address)" in line for line in said)
            assert any("has no address any more" in line for line in said)

    run_on_loop(scenario())


def test_after_its_grace_an_empty_name_has_nobody_until_it_has_somebody_again() -> None:
    async def scenario() -> None:
        async with machines(1) as (_, port), found(named(port), Resolver("127.0.0.1"), grace_s=0.0) as at:
            assert await at.served_by() == "fake-0"
            await at.answers(())
            await until(lambda: list(at.backends) == [f"dns+http://vllm.test:{port}/v1"])
            await until(lambda: not next(iter(at.backends.values())).replica.up)
            assert (await at.gateway.ask()).status in (502, 503)
            await at.answers(("127.0.0.1",))
            await until(lambda: next(iter(at.backends)).endswith("#127.0.0.1"))
            assert await at.served_by() == "fake-0"

    run_on_loop(scenario())


def test_a_gateway_starts_without_an_answer_and_takes_the_first() -> None:
    async def scenario() -> None:
        resolver = Resolver("127.0.0.1")
        resolver.held.clear()
        async with machines(1) as (_, port), found(named(port), resolver, first_s=0.0) as at:
            # The resolver hangs, and the gateway does not.
            assert (await at.gateway.get("/health")).status == 200
            assert list(at.backends) == [f"dns+http://vllm.test:{port}/v1"]
            resolver.held.set()
            at.discovery.look_now()
            await until(lambda: next(iter(at.backends)).endswith("#127.0.0.1"))
            assert await at.served_by() == "fake-0"

    run_on_loop(scenario())


@in_folder
async def test_certificates_are_held_to_the_name(folder: Path) -> None:
    made = Certificates(folder)
    async with machines(1) as ([fake], _), tls_before(fake.port, made.server("vllm.test")) as url:
        port = url.split(":")[2].split("/")[0]
        pool = pool_of("a", f"dns+https://vllm.test:{port}/v1", reach=BackendAccess(tls_ca=made.ca))
        async with found(fleet_of(pool), Resolver("127.0.0.1")) as at:
            assert await at.served_by() == "fake-0"


def test_an_administrator_drains_one_that_was_found() -> None:
    class Admin(Component):
        async def start(self, process: GatewayProcess) -> None:
            self.administration = Administration(process)

        def reloaded(self, fleet: Fleet) -> None:
            self.administration.reloaded()

    async def scenario() -> None:
        door = Admin()
        resolver = Resolver("127.0.0.1", "127.0.0.2")
        async with machines(3) as (_, port), found(named(port), resolver, door) as at:
            drained = f"dns+http://vllm.test:{port}/v1#127.0.0.1"
            await door.administration.act("k", "drain", {"backend": drained})
            assert {await at.served_by() for _ in range(4)} == {"fake-1"}
            # It stays drained when others come.
            await at.answers(("127.0.0.1", "127.0.0.2", "127.0.0.3"))
            await until(lambda: len(at.backends) == 3)
            assert {await at.served_by() for _ in range(6)} == {"fake-1", "fake-2"}
            # What is of this machine, or is told its secrets, is the file's to name.
            made = {"name": "b", "model": "m", "backends": ["https://10.0.0.1/v1"]}
            for asked, said in (
                ({"pool": "a", "backend": f"dns+http://other.test:{port}/v1"}, "are the fleet file's; give addresses"),
                ({"pool": "a", "backend": "unix:/run/docker.sock"}, "only the fleet file may name a socket"),
                ({"pool": {**made, "tls_ca": "/etc/shadow"}}, "pool.tls_ca: only the fleet file may name a file"),
                ({"pool": {**made, "proxy": "${SECRET}"}}, "pool.proxy: only the fleet file may name a proxy"),
            ):
                with pytest.raises(BadInput, match=re.escape(said)):
                    await door.administration.act("k", "add", asked)

    run_on_loop(scenario())


def test_the_system_is_asked_for_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(*_: Any, **__: Any) -> list[Any]:
        v4 = [(socket.AF_INET, 1, 6, "", (at, 80)) for at in ("10.0.0.2", "10.0.0.1", "10.0.0.1")]
        return [(socket.AF_INET6, 1, 6, "", ("fd00::1", 80, 0, 0)), *v4]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert addresses_of("a", 80) == ("10.0.0.1", "10.0.0.2")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both()[:1])
    assert addresses_of("a", 80) == ("fd00::1",)

    def fails(code: int) -> Any:
        def failing(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(code, "as it happens")

        return failing

    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.EAI_NONAME))
    assert addresses_of("a", 80) == ()
    monkeypatch.setattr(socket, "getaddrinfo", fails(socket.EAI_AGAIN))
    with pytest.raises(socket.gaierror):
        addresses_of("a", 80)
