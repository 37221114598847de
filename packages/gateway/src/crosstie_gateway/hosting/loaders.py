"""How a replica is told to load a model and to put it away: vLLM's sleep, llama.cpp's router, or a command.

vLLM's pages are of its development mode (0.32: VLLM_SERVER_DEV_MODE=1, --enable-sleep-mode), llama.cpp's of a server
without a model (b21e4de, August 2026: --models-dir or --models-preset).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from crosstie.core.fleet import HostedModel, Pool
from crosstie.wire.fetch import Answer
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.wire.hook import HookFailed, run_hook

# How often an engine is asked whether it has finished what was asked of it.
_ASK_S = 0.1
# Of what an engine says against a load, as much as a line of a log bears.
_MOST_SAID = 300


class LoadFailed(Exception):
    """In one line, for people."""


class Loader:
    """Of one shared pool; replicas are counted from 0. Times are of the clock."""

    # Whether a load that was given up can be put away at once; if not, memory is taken until it has ended.
    gives_up = True

    def __init__(self, gateway: Gateway, pool: Pool):
        self.gateway, self.pool = gateway, pool
        self.entries: dict[str, HostedModel] = {host.model: host for host in pool.hosts}
        self._keys = {part.model: part.backends for part in pool.by_model()}
        # Held on to, because what a reload takes out of the file has still to be put away.
        self._backends = {key: gateway.backends[key] for keys in self._keys.values() for key in keys}

    async def load(self, index: int, model: str, patience_s: float) -> None:
        """Returns when it can be served there. Raises LoadFailed."""
        raise NotImplementedError

    async def unload(self, index: int, model: str, patience_s: float) -> None:
        """Returns when its memory is free. Raises LoadFailed."""
        raise NotImplementedError

    async def resident(self, index: int) -> dict[str, bool | None]:
        """Whether each model can be served by that replica; None: it does not say."""
        models = list(self.entries)
        states = await asyncio.gather(*(self._is_loaded(index, model) for model in models))
        return dict(zip(models, states, strict=True))

    async def _is_loaded(self, index: int, model: str) -> bool | None:
        raise NotImplementedError

    def backend(self, index: int, model: str) -> Backend:
        return self._backends[self._keys[model][index]]

    async def _ask(
        self, backend: Backend, method: str, path: str, patience_s: float | None = None, body: object = None
    ) -> Answer:
        """`path` below the server's root. Raises OSError."""
        if patience_s is None:
            patience_s = max(self.gateway.serving.health_every_s, self.gateway.serving.connect_timeout_s)
        return await backend.ask(method, path, patience_s, body)

    async def _do(
        self, backend: Backend, path: str, patience_s: float, body: object = None, unless: bytes | None = None
    ) -> None:
        """Raises LoadFailed where it is not done; `unless`: where the engine says this, there was nothing to do."""
        try:
            answer = await self._ask(backend, "POST", f"{backend.origin.address.root}{path}", patience_s, body)
        except OSError as error:
            raise LoadFailed(f"{path} of {backend.origin.address.url}: {error}") from None
        if answer.status != 200 and (unless is None or unless not in answer.body):
            raise LoadFailed(_refused(answer, path.partition("?")[0]))

    async def _until(self, true: Callable[[], Awaitable[bool | None]], patience_s: float, failure: str) -> None:
        """Asks until `true` gives True. Raises LoadFailed, also after `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while not await true():
                    await asyncio.sleep(_ASK_S)
        except TimeoutError:
            raise LoadFailed(f"{failure} within {patience_s:g} s") from None


def _refused(answer: Answer, path: str) -> str:
    said = answer.words(_MOST_SAID)
    return f"{path} answered {answer.status}: {said}" if said else f"{path} answered {answer.status}"


class VllmSleep(Loader):
    """Each model is a server of its own on the replica's GPUs; a sleeping one keeps its weights in the host's memory.

    Level 1, since after level 2 weights must be loaded anew; `mode=wait` finishes requests, another client's too.
    """

    # A waking server goes on waking, and calls itself asleep meanwhile.
    gives_up = False

    async def load(self, index: int, model: str, patience_s: float) -> None:
        if await self._sleeps_after("/wake_up", self.backend(index, model), patience_s):
            raise LoadFailed("/wake_up was answered, and it still sleeps")

    async def unload(self, index: int, model: str, patience_s: float) -> None:
        if not await self._sleeps_after("/sleep?level=1&mode=wait", self.backend(index, model), patience_s):
            raise LoadFailed("/sleep was answered, and it does not sleep")

    async def _sleeps_after(self, path: str, backend: Backend, patience_s: float) -> bool:
        await self._do(backend, path, patience_s)
        try:
            sleeps = await self._sleeping(backend, patience_s)
        except OSError as error:
            raise LoadFailed(f"/is_sleeping: {error}") from None
        if sleeps is None:
            raise LoadFailed("/is_sleeping does not say whether it sleeps")
        return sleeps

    async def _sleeping(self, backend: Backend, patience_s: float | None) -> bool | None:
        answer = await self._ask(backend, "GET", f"{backend.origin.address.root}/is_sleeping", patience_s)
        if answer.status in (404, 405):
            raise LoadFailed(
                f"{backend.origin.address.url} has no /is_sleeping: start vLLM with VLLM_SERVER_DEV_MODE=1 and "
                "--enable-sleep-mode"
            )
        sleeps = _object(answer).get("is_sleeping")
        return sleeps if isinstance(sleeps, bool) else None

    async def _is_loaded(self, index: int, model: str) -> bool | None:
        try:
            sleeps = await self._sleeping(self.backend(index, model), None)
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        return None if sleeps is None else not sleeps


class LlamaRouter(Loader):
    """One address for all models: the router starts a process for each that is loaded."""

    async def load(self, index: int, model: str, patience_s: float) -> None:
        backend, name = self.backend(index, model), self._name(model)
        # It may have begun already: then it is waited for all the same.
        await self._do(backend, "/models/load", patience_s, {"model": name}, unless=b"already running")

        async def loaded() -> bool:
            status = (await self._statuses(backend)).get(name, {})
            if status.get("failed"):
                raise LoadFailed(f"its process ended with status {status.get('exit_code')}")
            return status.get("value") == "loaded"

        try:
            await self._until(loaded, patience_s, "it was not loaded")
        except LoadFailed:
            # What is half loaded holds memory: a router kills such a process.
            with contextlib.suppress(LoadFailed):
                await self._do(backend, "/models/unload", patience_s, {"model": name})
            raise

    async def unload(self, index: int, model: str, patience_s: float) -> None:
        backend, name = self.backend(index, model), self._name(model)
        await self._do(backend, "/models/unload", patience_s, {"model": name}, unless=b"not running")

        async def gone() -> bool:
            return (await self._statuses(backend)).get(name, {}).get("value") == "unloaded"

        await self._until(gone, patience_s, "it was not unloaded")

    async def resident(self, index: int) -> dict[str, bool | None]:
        backend = self.backend(index, next(iter(self.entries)))
        try:
            statuses = await self._statuses(backend)
        except LoadFailed:
            return dict.fromkeys(self.entries)
        # One that the router itself has put to sleep wakes with its next request.
        return {
            model: statuses.get(self._name(model), {}).get("value") in ("loaded", "sleeping") for model in self.entries
        }

    async def _statuses(self, backend: Backend) -> dict[str, dict[str, Any]]:
        """Statuses by name and alias; a server without a router has its one model loaded."""
        try:
            answer = await self._ask(backend, "GET", f"{backend.origin.address.root}/models")
        except OSError as error:
            raise LoadFailed(f"/models: {error}") from None
        if answer.status != 200:
            raise LoadFailed(_refused(answer, "/models"))
        states: dict[str, dict[str, Any]] = {}
        for listed in _listed(answer):
            status = listed.get("status", {"value": "loaded"})
            for name in (listed.get("id"), *(listed.get("aliases") or ())):
                states[str(name)] = status if isinstance(status, dict) else {}
        return states

    def _name(self, model: str) -> str:
        return self.entries[model].served_as or model


class HookLoader(Loader):
    """A command of the user's. Whether it has worked is asked of the server, by its list of models."""

    async def load(self, index: int, model: str, patience_s: float) -> None:
        await self._run("load", index, model, patience_s)
        failure = "the command was done, and the server did not list the model"
        await self._until(lambda: self._is_loaded(index, model), patience_s, failure)

    async def unload(self, index: int, model: str, patience_s: float) -> None:
        await self._run("unload", index, model, patience_s)

    async def _run(self, action: str, index: int, model: str, patience_s: float) -> None:
        backend = self.backend(index, model)
        given = {
            "ACTION": action,
            "MODEL": backend.model,
            "POOL": self.pool.name,
            "BACKEND": backend.origin.address.url.partition("#")[0],
            "REPLICA": str(index),
        }
        where = f"pool {self.pool.name}: {action} {model} on replica {index}"
        # To the log and nowhere else: a command may say anything.
        try:
            await run_hook(
                self.pool.load_hook or "", given, patience_s, lambda said: self.gateway.notify(f"{where}: {said}")
            )
        except HookFailed as error:
            raise LoadFailed(str(error)) from None

    async def _is_loaded(self, index: int, model: str) -> bool | None:
        backend = self.backend(index, model)
        try:
            answer = await self._ask(backend, "GET", f"{backend.base.decode()}/models")
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        if answer.status != 200:
            return False if answer.status == 503 else None
        return any(listed.get("id") == backend.model for listed in _listed(answer))


def _object(answer: Answer) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _listed(answer: Answer) -> list[dict[str, Any]]:
    data = _object(answer).get("data")
    return [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def loader_of(gateway: Gateway, pool: Pool) -> Loader:
    kinds = {"vllm-sleep": VllmSleep, "llamacpp-router": LlamaRouter, "hook": HookLoader}
    return kinds[pool.loading or "hook"](gateway, pool)
