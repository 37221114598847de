"""What goes wrong: drawn from the seed, one after another, on engines, on the gateway's configuration, or on itself."""

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic

from ground import ADMIN_KEY, Engine, Ground

from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import Answer, fetch

# Of the emulated engines, so many stay well at any moment.
_WELL = 0.5
# After a fault has ended, what the gateway needs to see that; requests of that time are not called undisturbed.
_AFTERMATH_S = 1.0
# By then the gateway has followed the last change of its configuration.
_SETTLED_S = 3.0
# How long a change is asked for again where the gateway says that it is busy with another.
_BUSY_S = 120.0
_KILL = "kill -9 of the gateway"


class Trouble:
    """`gap_s`: the mean time between two troubles. `speed`: emulated seconds a second, which faults are told in."""

    def __init__(self, ground: Ground, seed: int, *, gap_s: float, speed: float, kill_gateway: bool):
        self.ground, self.gap_s, self.speed, self.kill_gateway = ground, gap_s, speed, kill_gateway
        self.draw = random.Random(seed + 1)
        self.counts: Counter[str] = Counter()
        # By address, from when to when it was disturbed; and when the gateway was down, killed and not yet back.
        self.windows: dict[str, list[tuple[float, float]]] = {}
        self.downs: list[list[float]] = []
        self._no_kill_until = 0.0
        self._disturbed: set[str] = set()
        self._admin_busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures: list[str] = []
        self._kinds: list[tuple[str, float, Callable[[], Awaitable[None]]]] = [
            ("fault", 8, self._fault), ("kill", 3, self._kill), ("freeze", 3, self._freeze),
            ("drain pool", 1, self._drain_pool), ("drain backend", 2, self._drain_backend), ("add", 1, self._add),
            ("reload", 2, self._reload), ("broken file", 1, self._broken_file), ("poison", 1, self._poison),
            ("no files left", 1, self._exhaust),
        ]  # fmt: skip

    def gateway_killed(self, start: float, end: float) -> bool:
        """Whether it was down at any time between."""
        return any(down <= end + 0.5 and start <= up for down, up in self.downs)

    @property
    def _gateway_down(self) -> bool:
        return bool(self.downs) and self.downs[-1][1] == float("inf")

    async def run(self) -> None:
        """Until it is cancelled; what has begun is then brought to its end."""
        names, weights, actions = zip(*self._kinds, strict=True)
        try:
            while True:
                await asyncio.sleep(self.draw.expovariate(1.0 / self.gap_s))
                (index,) = self.draw.choices(range(len(names)), weights)
                self._begin(names[index], actions[index])
                if self.kill_gateway and self.draw.random() < 0.3 and monotonic() > self._no_kill_until:
                    self._begin(_KILL, self._kill_gateway)
        finally:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, name: str, action: Callable[[], Awaitable[None]]) -> None:
        began = monotonic()

        async def guarded() -> None:
            try:
                await action()
            except Exception as error:  # noqa: BLE001 (reported as a failure of the run, with its kind)
                # With the gateway gone, nobody is there to be asked.
                if name == _KILL or not self.gateway_killed(began, monotonic()):
                    self.failures.append(f"{name}: {type(error).__name__}: {error}")

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Engines

    def _victim(self) -> Engine | None:
        """One that is well, if enough others of its kind stay so."""
        well = [engine for engine in self.ground.main if engine.url not in self._disturbed]
        emulated = [engine for engine in well if engine.emulated]
        local = [engine for engine in well if not engine.emulated]
        least = _WELL * sum(engine.emulated for engine in self.ground.main)
        able = (emulated if len(emulated) > least else []) + (local if len(local) > 1 else [])
        return self.draw.choice(able) if able else None

    @contextlib.asynccontextmanager
    async def _disturbing(self, engine: Engine, name: str):  # type: ignore[no-untyped-def]
        self.counts[name] += 1
        self._disturbed.add(engine.url)
        began = monotonic()
        try:
            yield
        finally:
            self.windows.setdefault(engine.url, []).append((began, monotonic() + _AFTERMATH_S))
            await asyncio.sleep(_AFTERMATH_S)
            self._disturbed.discard(engine.url)

    async def _fault(self) -> None:
        engine, draw = self._victim(), self.draw
        if engine is None or not engine.emulated:
            return
        for_s = draw.uniform(0.3, 3.0)
        fault = draw.choice((
            {"kind": "crash"}, {"kind": "hang"}, {"kind": "hang", "share": 0.3, "health": True},
            {"kind": "slow", "factor": draw.uniform(2, 8)}, {"kind": "refuse", "share": 0.5},
            {"kind": "cut", "share": draw.choice((0.2, 0.5, 1.0)), "after_tokens": draw.randrange(40)},
            {"kind": "cut", "share": 0.5, "after_tokens": draw.randrange(40), "mid_event": True},
            {"kind": "error", "share": 0.5, "status": draw.choice((401, 403, 404, 500, 502))},
            {"kind": "reject", "share": 0.5}, {"kind": "login", "share": draw.choice((0.3, 1.0))}, {"kind": "ping"},
        ))  # fmt: skip
        async with self._disturbing(engine, f"emulated {fault['kind']}"):
            asked = {**fault, "for_s": for_s * self.speed}
            answer = await _post(f"http://127.0.0.1:{engine.port}/emulate/fault", asked)
            if answer.status != 200:
                raise ValueError(f"the emulator answered {answer.status}: {answer.body[:200]!r}")
            await asyncio.sleep(for_s)

    async def _poison(self) -> None:
        """Every emulated engine fails over some prompts from now on; who is started again has to be told so again."""
        self.counts["poison for every engine"] += 1
        for engine in self.ground.main:
            if engine.emulated and engine.url not in self._disturbed:
                with contextlib.suppress(OSError, TimeoutError):
                    await _post(f"http://127.0.0.1:{engine.port}/emulate/fault", {"kind": "poison"})

    async def _exhaust(self) -> None:
        """The gateway's processes may open no file more for a while, nor take a connection."""
        # (A fleet that changes meanwhile would be given as few connections as there are files.)
        if self._admin_busy or self._gateway_down:
            return
        self._admin_busy |= {"file", "add", "drain"}
        await asyncio.sleep(_SETTLED_S)
        self.counts["no files left for the gateway"] += 1
        before = {pid: resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in self.ground.gateway.pids}
        try:
            for pid, (_, hard) in before.items():
                with contextlib.suppress(OSError):
                    open_now = len(os.listdir(f"/proc/{pid}/fd"))
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 2, hard))
            await asyncio.sleep(self.draw.uniform(0.2, 1.5))
        finally:
            for pid, limits in before.items():
                with contextlib.suppress(OSError):
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            self._admin_busy.clear()

    async def _kill(self) -> None:
        engine = self._victim()
        if engine is None:
            return
        pause_s = self.draw.uniform(0.2, 2.0)
        async with self._disturbing(engine, "kill -9 of an engine" if engine.emulated else "kill -9 of llama.cpp"):
            await asyncio.to_thread(engine.kill)
            await asyncio.sleep(pause_s)
            engine.start()
            await asyncio.to_thread(engine.wait)

    async def _freeze(self) -> None:
        engine = self._victim()
        if engine is None:
            return
        pause_s = self.draw.uniform(0.3, 4.0)
        async with self._disturbing(engine, "SIGSTOP of an engine" if engine.emulated else "SIGSTOP of llama.cpp"):
            engine.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(pause_s)
            finally:
                engine.send(signal.SIGCONT)

    # The gateway's configuration

    async def _drain_pool(self) -> None:
        await self._drained({"pool": self.draw.choice(("amd", "nvidia"))}, "drain of a pool")

    async def _drain_backend(self) -> None:
        engine = self.draw.choice(self.ground.main)
        await self._drained({"backend": engine.url}, "drain of a backend")

    async def _drained(self, target: dict[str, str], name: str) -> None:
        # One pool or backend at a time: what remains must be able to carry the load.
        if "drain" in self._admin_busy:
            return
        self._admin_busy.add("drain")
        self.counts[name] += 1
        try:
            await self._admin("drain", target)
            await asyncio.sleep(self.draw.uniform(0.5, 3.0))
            await self._admin("undrain", target)
        finally:
            self._admin_busy.discard("drain")

    async def _add(self) -> None:
        if "add" in self._admin_busy:
            return
        self._admin_busy.add("add")
        self.counts["add and remove of a backend"] += 1
        url = self.ground.of("spare")[0].url
        try:
            await self._admin("add", {"pool": "amd", "backend": url})
            await asyncio.sleep(self.draw.uniform(0.5, 4.0))
            await self._admin("remove", {"backend": url})
        finally:
            self._admin_busy.discard("add")

    async def _reload(self) -> None:
        if "file" in self._admin_busy:
            return
        self._admin_busy.add("file")
        self.counts["reload with a pool more or less"] += 1
        try:
            self.ground.retries = self.draw.choice((1, 2, 3))
            self.ground.write_fleet(extra=self.draw.random() < 0.5, amd_weight=self.draw.choice((0.5, 1.0, 2.0)))
            way = self.draw.choice(("seen", "signal", "asked"))
            if way == "signal" and not self._gateway_down:
                # (One that is being started has not said yet what it does on SIGHUP, and would end.)
                self.ground.gateway.process.send_signal(signal.SIGHUP)  # type: ignore[union-attr]
            elif way == "asked":
                await self._admin("reload", {})
            else:
                await asyncio.sleep(1.2)
        finally:
            self._admin_busy.discard("file")

    async def _broken_file(self) -> None:
        if "file" in self._admin_busy:
            return
        self._admin_busy.add("file")
        self.counts["broken fleet file"] += 1
        try:
            if self._gateway_down:
                # It could not start, which is as it should be and not what is looked for here.
                return
            self.ground.write("format = 1\n[[pool]]\nname = 7\n")
            await asyncio.sleep(1.2)
        finally:
            self.ground.write_fleet()
            self._admin_busy.discard("file")

    async def _admin(self, action: str, body: dict[str, object] | dict[str, str]) -> None:
        at = f"http://127.0.0.1:{self.ground.gateway.admin_port}/admin/v1/{action}"
        answer = await _post(at, body, ADMIN_KEY)
        deadline = monotonic() + _BUSY_S
        while answer.status == 503 and b'"busy"' in answer.body and monotonic() < deadline:
            # Its processes get too little of the machine to come to an end: they say so, and are asked again.
            answer = await _post(at, body, ADMIN_KEY)
        if answer.status != 200:
            raise ValueError(f"{action} {body}: {answer.status} {answer.body[:300]!r}")
        if refused := json.loads(answer.body)["refused_by"]:
            raise ValueError(f"{action} {body}: not everywhere: {refused}")

    async def _kill_gateway(self) -> None:
        self.counts[_KILL] += 1
        gateway, down = self.ground.gateway, [monotonic(), float("inf")]
        self._no_kill_until = float("inf")
        while "file" in self._admin_busy:
            await asyncio.sleep(0.05)
        down[0] = monotonic()
        self.downs.append(down)
        await asyncio.to_thread(gateway.kill)
        gateway.start()
        await asyncio.to_thread(gateway.wait)
        down[1] = monotonic()
        self._no_kill_until = monotonic() + 4.0


async def _post(url: str, body: dict[str, object] | dict[str, str], key: str = "") -> Answer:
    address = Address(url)
    origin = Origin(asyncio.get_running_loop(), address)
    headers = [(b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    try:
        return await fetch(origin, "POST", address.base, headers=headers, body=json.dumps(body).encode(), timeout_s=30)
    finally:
        origin.close()
