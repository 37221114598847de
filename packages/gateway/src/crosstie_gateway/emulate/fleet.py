"""A fleet without its accelerators: every replica of every pool emulated, each on a port of its own."""

import asyncio
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.tokenizer import Tokenizer
from crosstie.catalog.writing import in_words
from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.core.fleet import BackendAccess, Fleet, Pool
from crosstie.perf.memory import memory_plan
from crosstie.perf.tabulated import StepTimes
from crosstie.route import build
from crosstie.route.hosted_sizes import sizes
from crosstie.wire.address import Address, is_loopback
from crosstie_gateway.emulate.disaggregated import sides
from crosstie_gateway.emulate.faults import ScriptedFault
from crosstie_gateway.emulate.hosted import EmulatedMachine, EmulatedRouter, HostedEngine, SharedReplica, SleepingServer
from crosstie_gateway.emulate.kv_events import KvPublisher
from crosstie_gateway.emulate.replica import Emulated, EmulatedReplica
from crosstie_gateway.emulate.server import EmulatedServer
from crosstie_gateway.wire.child import Child, start_crosstie

# What a request is taken to be like where no class says so.
_USUAL_INPUT, _USUAL_OUTPUT = 1024.0, 256.0
_FASTEST = 1000.0


class EmulatedFleet:
    """`fleet` is the one that was asked for, with the addresses of its replicas filled in."""

    def __init__(self, fleet: Fleet, replicas: list[EmulatedServer], timers: list[asyncio.TimerHandle]):
        self.fleet, self.replicas, self._timers = fleet, replicas, timers

    def replica(self, pool: str, index: int = 0, model: str | None = None) -> EmulatedServer:
        """`model`: of a pool whose models have servers of their own."""
        name = f"{pool}/{index}" if model is None else f"{pool}/{index}/{model}"
        return next(server for server in self.replicas if server.name == name)

    async def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for server in self.replicas:
            server.close()
        # Connections that were aborted are told so in the loop's next rounds.
        await asyncio.sleep(0)


async def start(
    catalog: Catalog,
    fleet: Fleet,
    *,
    host: str = "127.0.0.1",
    first_port: int = 0,
    speed: float = 1.0,
    seed: int = 0,
    faults: Sequence[ScriptedFault] = (),
    max_waiting: int = 1024,
) -> EmulatedFleet:
    """Keeps addresses of this machine that the fleet has, and replaces others by `first_port` and those after it (0:
    free ones). Raises BadInput for what cannot be emulated, or listened on."""
    if not 0.001 <= speed <= _FASTEST:
        raise BadInput(f"speed {speed:g}: must be from 0.001 to {_FASTEST:g}")
    _check_faults(fleet, faults)
    emulated = [[_emulated(catalog, fleet, part) for part in pool.by_model()] for pool in fleet.pools]
    loop = asyncio.get_running_loop()
    servers: list[EmulatedServer] = []
    pools, port = [], first_port

    async def open_door(server: EmulatedServer, given: Address | None) -> None:
        nonlocal port
        servers.append(server)
        if given is not None:
            server.root, server.url = given.root, given.url
            await _listen(server, given.host, given.port)
        else:
            await _listen(server, host, port)
            port = port + 1 if port else 0
            server.url = f"http://{_reached_at(host)}:{server.port}/v1"

    try:
        for pool, emulates in zip(fleet.pools, emulated, strict=True):
            machines: list[list[EmulatedServer]] = []
            made_of: dict[str, Any] = {"speed": speed, "max_waiting": max_waiting}
            if pool.apart is not None and pool.apart.is_led:
                engines = _engines(loop, pool, emulates[0], None, seed, made_of)
                for server in engines:
                    side = pool.apart.prefill if server.role == "prefill" else pool.apart.decode
                    await open_door(server, _kept(msgspec.structs.replace(pool, backends=side.backends), server.index))
                roles = ("prefill", "decode")
                urls = {role: tuple(server.url for server in engines if server.role == role) for role in roles}
                pools.append(placed_sides(pool, **urls))
                continue
            for index in range(pool.replicas):
                if pool.hosts:
                    doors = _hosted(catalog, loop, pool, emulates, index, seed, made_of)
                else:
                    tells = None
                    if pool.kv_events and not pool.apart:
                        tells = KvPublisher(loop, _reached_at(host).strip("[]"), pool.kv_topic)
                    replica = EmulatedReplica(loop, emulates[0], **made_of, publisher=tells)
                    doors = [EmulatedServer(replica, index, seed=seed)]
                behind = [pool] if pool.loading == "llamacpp-router" else pool.by_model()
                for door, at in zip(doors, behind, strict=True):
                    await open_door(door, _kept(at, index))
                machines.append(doors)
                for engine in _engines(loop, pool, emulates[0], index, seed, made_of):
                    await open_door(engine, None)
            publishers = [doors[0].replica.publisher for doors in machines]
            places = [(publisher.events, publisher.replay) for publisher in publishers if publisher is not None]
            addresses = list(zip(*([door.url for door in doors] for doors in machines), strict=True))
            pools.append(placed(telling(pool, places), addresses))
    except BaseException:
        for server in servers:
            server.close()
        raise
    timers = [
        loop.call_later(scripted.start_s / speed, server.inject, scripted.fault)
        for scripted in faults
        for server in servers
        if server.replica.emulated.pool == scripted.pool
        and scripted.replica in (None, server.index)
        and scripted.role in ("", server.role)
    ]
    return EmulatedFleet(msgspec.structs.replace(fleet, pools=tuple(pools)), servers, timers)


def _engines(
    loop: asyncio.AbstractEventLoop, pool: Pool, emulates: Emulated, index: int | None, seed: int,
    made_of: dict[str, Any],
) -> list[EmulatedServer]:  # fmt: skip
    """The engines behind a service's proxy, where they speak vLLM's protocol. `index`: of the service; None: all
    engines of a pool that a gateway leads from prefill to decode."""
    service, apart = emulates.service, pool.apart
    if service is None or apart is None or (index is not None and service.connector.stacks != ("vllm",)):
        return []
    name, counts = f"{emulates.pool}/{index}", (service.prefill_replicas, service.decode_replicas)
    if index is None:
        name, counts = emulates.pool, (len(apart.prefill.backends), len(apart.decode.backends))
    prefill, decode = (
        replace(emulates, deployment=engine, times=StepTimes(engine, emulates.context), service=None)
        for engine in (service.prefill, service.decode)
    )
    return sides(loop, emulates, (prefill, decode), name, counts, index, seed, made_of)


def placed_sides(pool: Pool, prefill: tuple[str, ...], decode: tuple[str, ...]) -> Pool:
    """A pool with the addresses of its emulated prefill and decode engines."""
    apart = pool.apart
    assert apart is not None
    sides = {
        "prefill": msgspec.structs.replace(apart.prefill, backends=prefill),
        "decode": msgspec.structs.replace(apart.decode, backends=decode),
    }
    return msgspec.structs.replace(pool, apart=msgspec.structs.replace(apart, **sides))


def _hosted(
    catalog: Catalog, loop: asyncio.AbstractEventLoop, pool: Pool, emulates: list[Emulated], index: int, seed: int,
    made_of: dict[str, Any],
) -> list[EmulatedServer]:  # fmt: skip
    """One machine: a server for each model that sleeps and wakes, or a router for all of them."""
    takes, capacity = sizes(catalog, pool)
    machine = EmulatedMachine(capacity)
    routed = pool.loading == "llamacpp-router"
    kind, replicas = (
        (HostedEngine if routed else SleepingServer),
        [SharedReplica(loop, model, **made_of) for model in emulates],
    )
    engines = [kind(replica, index, machine, size, seed=seed) for replica, size in zip(replicas, takes, strict=True)]
    return [EmulatedRouter(engines, index)] if routed else [*engines]


def telling(pool: Pool, places: Sequence[tuple[str, str]]) -> Pool:
    """A pool with the addresses of its replicas' KV events, and of replays if the file has any."""
    replay = tuple(replay for _, replay in places) if pool.kv_replay else ()
    return msgspec.structs.replace(pool, kv_events=tuple(events for events, _ in places), kv_replay=replay)


def placed(pool: Pool, addresses: Sequence[tuple[str, ...]]) -> Pool:
    """A pool with the addresses of its emulated replicas; where each model has its own servers, these sleep and
    wake."""
    if not pool.hosts or pool.loading == "llamacpp-router":
        return msgspec.structs.replace(pool, backends=addresses[0], reach=BackendAccess())
    pairs = zip(pool.hosts, addresses, strict=True)
    hosts = tuple(msgspec.structs.replace(hosted, backends=at) for hosted, at in pairs)
    asleep: dict[str, Any] = {"backends": (), "loading": "vllm-sleep", "load_hook": None, "reach": BackendAccess()}
    return msgspec.structs.replace(pool, hosts=hosts, **asleep)


def deployment_of(catalog: Catalog, pool: Pool) -> Deployment:
    """A pool's replica as the performance model knows it. Raises BadInput where nothing is known of its speed."""
    known = build.deployment_of(catalog, pool)
    if known is None:
        raise BadInput(f"pool '{pool.name}' cannot be emulated: it has no accelerator, so nothing says how fast it is")
    return known


def _emulated(catalog: Catalog, fleet: Fleet, pool: Pool) -> Emulated:
    deployment = deployment_of(catalog, pool)
    if not memory_plan(deployment).fits:
        raise BadInput(
            f"pool '{pool.name}' cannot be emulated: {deployment.model.id} does not fit on {deployment.label}; "
            "`crosstie fit` says on how many it does"
        )
    if len(pool.backends) > pool.replicas and not pool.led_backends:
        raise BadInput(f"pool '{pool.name}' has {len(pool.backends)} backends for {pool.replicas} replicas")
    inputs, outputs = _usual_lengths(fleet, pool)
    context = min(inputs + 0.5 * outputs, float(pool.max_context))
    times = StepTimes(deployment, context)
    service = build.service_of(catalog, pool)
    if service is not None and not memory_plan(service.prefill).fits:
        raise BadInput(
            f"pool '{pool.name}' cannot be emulated: {deployment.model.id} does not fit on {service.prefill.label}"
        )
    template = Path(pool.chat_template) if pool.chat_template else None
    tokenizer = Tokenizer(Path(pool.tokenizer), template) if pool.tokenizer else None
    return Emulated(
        pool.name, pool.served_as or pool.model, deployment, context, times, pool.max_context, outputs, service, inputs,
        tokenizer, pool.keeps_sessions,
    )  # fmt: skip


def _usual_lengths(fleet: Fleet, pool: Pool) -> tuple[float, float]:
    """Mean tokens in and out of the requests that the fleet sends to a pool."""
    total = inputs = outputs = 0.0
    for served in fleet.classes:
        weight = sum(route.share for route in served.routes if route.pool == pool.name) * max(
            served.requests_per_s, 1e-9
        )
        total, inputs = total + weight, inputs + weight * served.input_tokens
        outputs += weight * served.output_tokens
    return (inputs / total, outputs / total) if total else (_USUAL_INPUT, _USUAL_OUTPUT)


def _kept(pool: Pool, index: int) -> Address | None:
    """The address that a replica has already, if it is one of this machine's own."""
    if index >= len(pool.backends):
        return None
    address = Address(pool.backends[index])
    if address.by_name or address.socket or not is_loopback(address.host):
        return None
    if address.secure:
        raise BadInput(f"pool '{pool.name}': {address.url}: emulated replicas speak http, not https")
    return address


def _reached_at(host: str) -> str:
    """A host to connect to for one to listen on."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1" if host != "::" else "[::1]"
    return f"[{host}]" if ":" in host else host


async def _listen(server: EmulatedServer, host: str, port: int) -> None:
    if not 0 <= port <= 65535:
        raise BadInput(f"{server.name}: there is no port {port}")
    with in_words(f"{server.name} cannot listen on {host}:{port}"):
        await server.listen(host, port)


def _check_faults(fleet: Fleet, faults: Sequence[ScriptedFault]) -> None:
    pools = {pool.name: pool for pool in fleet.pools}
    for scripted in faults:
        if scripted.pool not in pools:
            raise BadInput(f"--fault {scripted.pool}: no such pool; there are {', '.join(pools)}")
        pool = pools[scripted.pool]
        count, kind = pool.replicas, "replicas"
        if scripted.role:
            if not pool.led_backends or pool.apart is None:
                raise BadInput(f"--fault {scripted.pool}/{scripted.role}: the pool has no prefill and decode backends")
            count = len((pool.apart.prefill if scripted.role == "prefill" else pool.apart.decode).backends)
            kind = f"{scripted.role} backends"
        elif pool.led_backends and scripted.replica is not None:
            where, index = scripted.pool, scripted.replica
            raise BadInput(f"--fault {where}/{index}: which side? write {where}/prefill/{index}")
        if scripted.replica is not None and scripted.replica >= count:
            raise BadInput(f"--fault {scripted.pool}/{scripted.replica}: the pool has {count} {kind}, from 0")


# In a process of their own, so that their arithmetic takes no time from the gateway


class EmulatedChild(Child):
    """`crosstie emulate` as a child, with the addresses of its replicas by pool."""

    def __init__(
        self, process: subprocess.Popen[bytes], backends: dict[tuple[str, str | None], tuple[str, ...]],
        publishers: dict[str, list[tuple[str, str]]],
    ):  # fmt: skip
        """`backends`: by pool, and by model where models have addresses of their own. `publishers`: by pool."""
        super().__init__(process)
        self.backends, self._told = backends, publishers

    def placed(self, fleet: Fleet) -> Fleet:
        """The fleet with the addresses of its emulated replicas."""
        return msgspec.structs.replace(fleet, pools=tuple(map(self._placed, fleet.pools)))

    def _placed(self, pool: Pool) -> Pool:
        if pool.apart is not None and pool.apart.is_led:
            there = [self.backends.get((pool.name, f"/{role}"), ()) for role in ("prefill", "decode")]
            wanted = [len(side.backends) for side in (pool.apart.prefill, pool.apart.decode)]
            if [len(urls) for urls in there] != wanted:
                raise BadInput(f"pool {pool.name}: its engines are not all being emulated; start again for that")
            return placed_sides(pool, there[0], there[1])
        own = pool.hosts and pool.loading != "llamacpp-router"
        addresses = [self.backends.get((pool.name, part.model if own else None), ()) for part in pool.by_model()]
        if any(len(urls) != pool.replicas for urls in addresses):
            raise BadInput(f"pool {pool.name}: {pool.replicas} replicas are not being emulated; start again for that")
        if pool.kv_events and not pool.apart and len(self._told.get(pool.name, ())) != pool.replicas:
            raise BadInput(f"pool {pool.name}: kv_events are not being emulated; start again for that")
        return placed(telling(pool, self._told.get(pool.name, ()) if pool.kv_events else ()), addresses)


def start_emulated(file: Path, *, speed: float = 1.0, options: tuple[str, ...] = ()) -> EmulatedChild:
    """Emulates the fleet of a file; returns when its replicas answer."""
    arguments = ["emulate", str(file), "--speed", str(speed), *options]
    process, said = start_crosstie(arguments, "the fleet cannot be emulated")
    backends: dict[tuple[str, str | None], tuple[str, ...]] = {}
    publishers: dict[str, list[tuple[str, str]]] = {}
    for replica in said["replicas"]:
        # Those behind the proxy of a service are not asked for: it is asked in their place.
        key = replica["pool"], f"/{replica['role']}" if replica["role"] else replica["hosted"]
        backends[key] = (*backends.get(key, ()), replica["url"])
        if replica["kv_events"] is not None:
            publishers.setdefault(replica["pool"], []).append((replica["kv_events"], replica["kv_replay"]))
    return EmulatedChild(process, backends, publishers)
