"""Emulated engines that share a machine: its memory, its time, and how each is loaded and put away. Each is a server
that sleeps and wakes as vLLM does, or all are behind one router as in llama.cpp."""

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from crosstie.host.hosted import Hosted
from crosstie_gateway.emulate.answers import failure
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.replica import EmulatedReplica, Sequence
from crosstie_gateway.emulate.requests import EngineError
from crosstie_gateway.emulate.server import EmulatedServer, Handler
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

# How often a server that is to sleep looks whether its requests have ended.
_POLL_S = 0.005


class EmulatedMachine:
    """Memory that loaded models take, and time that those with requests share equally."""

    def __init__(self, capacity_bytes: float):
        self.capacity_bytes = capacity_bytes
        self.engines: list[HostedEngine] = []
        self._crowd = 1

    def fits(self, engine: "HostedEngine") -> bool:
        others = [other for other in self.engines if other.state != "unloaded" and other is not engine]
        used = sum(other.takes.taken_bytes for other in others)
        return used + engine.takes.taken_bytes <= self.capacity_bytes

    def share_time(self) -> None:
        """Slows replicas by the number that compute at once."""
        crowd = max(sum(engine.replica.busy for engine in self.engines), 1)
        if crowd != self._crowd:
            self._crowd = crowd
            for engine in self.engines:
                engine.replica.pace(crowd=float(crowd))


class SharedReplica(EmulatedReplica):
    """Tells its machine when it begins to compute, and when it has nothing more to do."""

    machine: EmulatedMachine | None = None

    def submit(self, sequence: Sequence, *, handed_over: bool = False) -> None:
        super().submit(sequence, handed_over=handed_over)
        self._tell_machine()

    def _forget(self, sequence: Sequence) -> None:
        super()._forget(sequence)
        self._tell_machine()

    def _tell_machine(self) -> None:
        if self.machine is not None:
            # Later: it may be in the middle of its steps.
            self.loop.call_soon(self.machine.share_time)


class HostedEngine(EmulatedServer):
    """One model of a machine. Loading takes its time, and fails where memory does not suffice."""

    def __init__(self, replica: SharedReplica, index: int, machine: EmulatedMachine, takes: Hosted, *, seed: int = 0):
        super().__init__(replica, index, seed=seed)
        self.machine, self.takes = machine, takes
        self.hosted: str | None = takes.model
        self.name = f"{self.name}/{takes.model}"
        self.state = "unloaded"
        self.failed = False
        self._loads = 0
        replica.machine = machine
        machine.engines.append(self)

    def load(self, then: Callable[[bool], None]) -> None:
        """`then` is told whether it is loaded."""
        self.failed = not self.machine.fits(self)
        if self.failed:
            then(False)
            return
        self.state = "loading"
        self._loads += 1
        self.loop.call_later(self.takes.load_s / self.replica.speed, self._loaded, self._loads, then)

    def _loaded(self, number: int, then: Callable[[bool], None]) -> None:
        if self.state == "loading" and number == self._loads:
            self.state = "loaded"
            then(True)

    def unload(self) -> None:
        """Cuts off what it was answering."""
        self.replica.drop()
        self.state = "unloaded"
        self.machine.share_time()

    def inject(self, fault: Fault) -> None:
        super().inject(fault)
        if fault.kind == "crash":
            self.unload()


class SleepingServer(HostedEngine):
    """vLLM with sleep mode (0.32): /sleep, /wake_up, /is_sleeping. Requests to a sleeping server wait. After a crash it
    sleeps; a real one comes back awake, or not at all without the memory."""

    def __init__(self, *given: Any, **named: Any):
        super().__init__(*given, **named)
        # Requests that came while it slept.
        self._waiting: list[tuple[Request, Reply]] = []

    def _answer(self, path: str, request: Request, reply: Reply, generates: Handler | None) -> None:
        if path == "/is_sleeping" and request.method == "GET":
            reply.send(200, json.dumps({"is_sleeping": self.state != "loaded"}).encode(), self.headers)
        elif path == "/sleep" and request.method == "POST":
            self._sleep(request, reply)
        elif path == "/wake_up" and request.method == "POST":
            self._wake(reply)
        elif generates is not None and self.state != "loaded":
            self._waiting.append((request, reply))
        else:
            super()._answer(path, request, reply, generates)

    def _sleep(self, request: Request, reply: Reply) -> None:
        asked = parse_qs(request.query)
        level, mode = asked.get("level", ["1"])[0], asked.get("mode", ["abort"])[0]
        if level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            raise EngineError(400, "BadRequestError", f"level {level}, mode {mode}: not known")
        if mode == "wait" and self.replica.busy:
            self.loop.call_later(_POLL_S, self._sleep, request, reply)
            return
        self.unload()
        if not reply.gone:
            reply.send(200, json.dumps({"status": "sleeping", "level": int(level)}).encode(), self.headers)

    def _wake(self, reply: Reply) -> None:
        def woken(done: bool) -> None:
            if done:
                waiting, self._waiting = self._waiting, []
                self._handle_again(waiting)
            if reply.gone:
                return
            if done:
                reply.send(200, json.dumps({"status": "awake", "tags": None}).encode(), self.headers)
            else:
                body = failure(500, "InternalServerError", "CUDA Error: out of memory (emulated)")
                reply.send(500, body, self.headers)

        if self.state == "loaded":
            woken(True)
        else:
            self.load(woken)

    def _drop(self) -> None:
        super()._drop()
        self._waiting.clear()


class EmulatedRouter(EmulatedServer):
    """llama.cpp's server without a model (b21e4de, --no-models-autoload): /models, /models/load, /models/unload, and
    requests by the name of their model."""

    def __init__(self, engines: list[HostedEngine], index: int):
        super().__init__(engines[0].replica, index)
        self.engines = {engine.model: engine for engine in engines}
        self.model = ", ".join(self.engines)
        for engine in engines:
            engine.faults = self.faults
        self._generating = {path: self._passing(path) for path in self._generating}
        self._telling |= {"/models": self._list, "/v1/models": self._list, "/metrics": self._no_model}

    def _answer(self, path: str, request: Request, reply: Reply, generates: Handler | None) -> None:
        if path in ("/models/load", "/models/unload") and request.method == "POST":
            _, engine = self._named(request)
            if engine is None:
                raise EngineError(404 if path == "/models/load" else 400, "not_found_error", "model is not found")
            loads, running = path == "/models/load", engine.state != "unloaded"
            if loads == running:
                fault = "model is already running" if running else "model is not running"
                raise EngineError(400, "invalid_request_error", fault)
            engine.load(lambda done: None) if loads else engine.unload()
            reply.send(200, b'{"success":true}', self.headers)
            return
        super()._answer(path, request, reply, generates)

    def _named(self, request: Request) -> tuple[object, HostedEngine | None]:
        """The model that a request names, and its engine if there is one."""
        try:
            body = msgspec.json.decode(request.body)
        except msgspec.DecodeError:
            body = None
        if not isinstance(body, dict):
            raise EngineError(400, "BadRequestError", "the body is no JSON object")
        name = body.get("model")
        return name, self.engines.get(name) if isinstance(name, str) else None

    def _passing(self, path: str) -> Handler:
        def passed(request: Request, reply: Reply) -> None:
            name, engine = self._named(request)
            if engine is None:
                raise EngineError(400, "invalid_request_error", f"model '{name}' not found")
            if engine.state != "loaded":
                raise EngineError(400, "invalid_request_error", "model is not loaded")
            engine._generating[path](request, reply)

        return passed

    def _list(self, reply: Reply) -> None:
        data = []
        for name, engine in self.engines.items():
            status: dict[str, object] = {"value": engine.state}
            if engine.failed:
                status |= {"failed": True, "exit_code": 1}
            data.append({"id": name, "aliases": [], "object": "model", "owned_by": "llamacpp", "status": status})
        reply.send(200, json.dumps({"data": data, "object": "list"}).encode(), self.headers)

    def _no_model(self, reply: Reply) -> None:
        raise EngineError(400, "invalid_request_error", "model name is missing from the request")

    def inject(self, fault: Fault) -> None:
        super().inject(fault)
        for engine in self.engines.values():
            if fault.kind == "crash":
                engine.unload()
            elif fault.kind == "slow":
                engine.replica.pace(slower=fault.factor or 1.0)

    def close(self) -> None:
        super().close()
        for engine in self.engines.values():
            engine.replica.close()
