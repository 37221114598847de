"""What is done with a decision: scale subresources patched, a command run, the gateway told what to empty.

An `Actor` says what replicas were asked for, if it knows, and carries out orders. A failure is reported, changes
nothing, and is tried again with the next decision.
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from crosstie.core.errors import BadInput
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import Answer, ask
from crosstie.wire.way import Way
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Order
from crosstie_gateway.wire.hook import HookFailed, run_hook

# Where a pod finds the API server's certificate, its own token and its namespace.
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_GROUPS = {
    "deployments": "/apis/apps/v1",
    "statefulsets": "/apis/apps/v1",
    "replicasets": "/apis/apps/v1",
    "leaderworkersets": "/apis/leaderworkerset.x-k8s.io/v1",
}
_HOOK_S = 600.0
# Of the pods of a ReplicaSet those with the lowest cost go first.
_COST = "controller.kubernetes.io/pod-deletion-cost"


class ScaleFailed(Exception):
    """An order was not brought about; the reason in words."""


@dataclass(frozen=True, slots=True)
class Moves:
    """A supply's addresses: to be stopped now, being emptied, and free for new replicas."""

    stop: tuple[str, ...] = ()
    emptying: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


class Actor(Protocol):
    async def there(self, supply: Supply) -> int | None:
        """Replicas that were asked for; None: it does not know."""

    async def hosts(self, supply: Supply) -> set[str] | None:
        """Addresses of its replicas' hosts; None: it does not know."""

    async def obey(self, supply: Supply, order: Order, before: int, moves: Moves | None) -> None:
        """`moves`: which ones, where gateways are told what to empty."""


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Scale subresources of an API server, with the rights `get` and `patch`; to empty pods, also `list` and `patch` on
    pods."""

    url: str
    namespace: str
    token: str = ""
    # A file: the authorities that its certificate is held to, in place of the system's.
    ca: str | None = None

    @classmethod
    def in_pod(cls) -> "Kubernetes":
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token, namespace = (_POD / "token").read_text().strip(), (_POD / "namespace").read_text().strip()
        except OSError:
            token = namespace = ""
        if not host or not token:
            raise BadInput("--patch: this is no pod with a service account; name the API server: --patch URL")
        return cls(f"https://{host}:{port}", namespace, token, str(_POD / "ca.crt"))

    def path(self, supply: Supply) -> str:
        kind, slash, name = (supply.target or f"deployments/{supply.name}").partition("/")
        if not slash or not name or kind not in _GROUPS:
            raise BadInput(
                f"supply {supply.name}: target '{supply.target}' is not one of {', '.join(_GROUPS)}, then /NAME"
            )
        return f"{_GROUPS[kind]}/namespaces/{self.namespace}/{kind}/{name}/scale"

    async def _ask(self, supply: Supply, path: str, method: str = "GET", body: object = None) -> dict[str, Any]:
        at = Address(self.url)
        way = Way(ssl.create_default_context(cafile=self.ca)) if at.secure else None
        origin = Origin(asyncio.get_running_loop(), at, way)
        try:
            answer = await ask(
                origin, method, at.root + path, key=self.token, body=body, kind=b"application/merge-patch+json",
                timeout_s=10.0,
            )  # fmt: skip
        except OSError as error:
            raise ScaleFailed(f"{self.url}: {error}") from None
        finally:
            origin.close()
        resource = path.partition("/namespaces/")[2]
        if answer.status == 404:
            raise ScaleFailed(
                f"supply {supply.name}: the API server has no {resource}; apply its manifest, or name what is scaled "
                "as its `target`"
            )
        if answer.status == 403:
            verb = "patch" if method == "PATCH" else "get"
            raise ScaleFailed(
                f"supply {supply.name}: 403: {_message(answer)}; docs/scaling.md has the Role to {verb} {resource}"
            )
        if answer.status not in (200, 201):
            raise ScaleFailed(f"supply {supply.name}: the API server answers {answer.status}: {_message(answer)}")
        if not isinstance(said := answer.said, dict):
            raise ScaleFailed(f"supply {supply.name}: the API server's answer is no object")
        return said

    async def there(self, supply: Supply) -> int | None:
        """Replicas that were asked for; the subresource does not know which serve."""
        return int((await self._ask(supply, self.path(supply))).get("spec", {}).get("replicas", 0))

    async def _pods(self, supply: Supply) -> list[dict[str, Any]]:
        selector = (await self._ask(supply, self.path(supply))).get("status", {}).get("selector", "")
        listed = await self._ask(supply, f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={quote(selector)}")
        return [pod for pod in listed.get("items", []) if pod.get("status", {}).get("podIP")]

    async def hosts(self, supply: Supply) -> set[str] | None:
        return {pod["status"]["podIP"] for pod in await self._pods(supply)}

    async def obey(self, supply: Supply, order: Order, before: int, moves: Moves | None) -> None:
        if moves is not None:
            await self._mark(supply, {Address(at).dials for at in (*moves.stop, *moves.emptying)})
        if order.replicas != before:
            await self._ask(supply, self.path(supply), "PATCH", {"spec": {"replicas": order.replicas}})

    async def _mark(self, supply: Supply, leaving: Iterable[str]) -> None:
        """Marks pods being emptied as the cheapest to delete."""
        for pod in await self._pods(supply):
            cost = "-100" if pod["status"]["podIP"] in leaving else "0"
            if (pod["metadata"].get("annotations") or {}).get(_COST, "0") != cost:
                path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}"
                await self._ask(supply, path, "PATCH", {"metadata": {"annotations": {_COST: cost}}})


def _message(answer: Answer) -> str:
    said = answer.said
    return str((said.get("message") if isinstance(said, dict) else "") or "no reason given")[:200]


@dataclass(frozen=True, slots=True)
class ScaleHook:
    """A command of the user's, for SkyPilot or a script: told in its environment what to have."""

    command: str
    say: Callable[[str], object]

    async def there(self, supply: Supply) -> int | None:
        return None

    async def hosts(self, supply: Supply) -> set[str] | None:
        return None

    async def obey(self, supply: Supply, order: Order, before: int, moves: Moves | None) -> None:
        if order.replicas == before:
            return
        given = {
            "SUPPLY": supply.name, "POOL": supply.pool, "KIND": supply.kind, "REPLICAS": str(order.replicas),
            "BEFORE": str(before), "DRAINING": str(order.draining), "WHY": order.why,
            "STOP": " ".join(moves.stop if moves else ()), "START": " ".join(moves.start if moves else ()),
        }  # fmt: skip
        try:
            await run_hook(self.command, given, _HOOK_S, lambda said: self.say(f"hook: {said}"))
        except HookFailed as error:
            raise ScaleFailed(f"supply {supply.name}: {error}") from None


def actors(rules: ScaleRules, kubernetes: Kubernetes | None, hook: ScaleHook | None) -> list[Actor]:
    """The actors that were asked for. Raises BadInput for targets that cannot be patched."""
    for supply in rules.supplies if kubernetes else ():
        kubernetes.path(supply)  # type: ignore[union-attr]
    return [actor for actor in (kubernetes, hook) if actor is not None]


# Emptying replicas before they go


@dataclass(slots=True)
class SeenBackend:
    """As all gateways see it together."""

    pool: str
    up: bool
    draining: bool
    in_flight: int


@dataclass(slots=True)
class Drainer:
    """Empties replicas before they go: gateways are told, through their administrators' ports, to send them nothing
    new. A supply's backends with the fewest requests go, and stay chosen until they are empty. A stopped backend is let
    in again once gateways find it down."""

    urls: Sequence[str]
    key: str
    backends: dict[str, SeenBackend] = field(default_factory=dict)
    # Stopped, and not seen down yet.
    stopped: set[str] = field(default_factory=set)

    async def refresh(self) -> None:
        """Raises OSError where a gateway does not answer, and Failed where it does not let us in."""
        seen: dict[str, SeenBackend] = {}
        for url in self.urls:
            for pool in (await self._ask(url, "GET", "pools"))["pools"]:
                for backend in pool["backends"]:
                    mine = seen.setdefault(backend["backend"], SeenBackend(pool["pool"], True, False, 0))
                    mine.up = mine.up and backend["up"]
                    mine.draining = mine.draining or backend["draining"] or pool["draining"]
                    mine.in_flight += backend["in_flight"]
        self.backends = seen
        for address in [address for address in self.stopped if address not in seen or not seen[address].up]:
            self.stopped.discard(address)
            if address in seen and seen[address].draining:
                await self._tell("undrain", address)

    def empty(self, supplies: Sequence[Supply], hosts: Mapping[str, set[str]]) -> dict[str, int]:
        """How many of those being emptied are empty, by supply."""
        return {
            supply.name: sum(not self.backends[at].in_flight for at in self._leaving(supply, hosts.get(supply.name)))
            for supply in supplies
        }

    async def obey(self, supply: Supply, order: Order, before: int, hosts: set[str] | None = None) -> Moves:
        """`hosts`: of its pods, where the platform knows them."""
        leaving = self._leaving(supply, hosts)
        stop = leaving[: max(before - order.replicas, 0)]
        self.stopped.update(stop)
        stays = leaving[len(stop) :]
        for address in stays[order.draining :]:
            await self._tell("undrain", address)
        serving = [at for at in self._of(supply, hosts) if self.backends[at].up and not self.backends[at].draining]
        # The last of its addresses first where they are equally busy: hooks start the first ones first.
        serving.sort(key=lambda at: (self.backends[at].in_flight, -self._place(supply, at)))
        more = serving[: max(order.draining - len(stays), 0)]
        for address in more:
            await self._tell("drain", address)
        down = [at for at in self._of(supply, hosts) if not self.backends[at].up and at not in self.stopped]
        emptying = (*stays[: order.draining], *more)
        return Moves(tuple(stop), emptying, tuple(down[: max(order.replicas - before, 0)]))

    def _of(self, supply: Supply, hosts: set[str] | None) -> list[str]:
        """A supply's addresses: its own, its pods', or all of its pool."""
        if supply.backends:
            return [address for address in supply.backends if address in self.backends]
        mine = [address for address, seen in self.backends.items() if seen.pool == supply.pool]
        return mine if hosts is None else [address for address in mine if Address(address).dials in hosts]

    def _leaving(self, supply: Supply, hosts: set[str] | None) -> list[str]:
        """Those being emptied: empty ones first."""
        mine = [at for at in self._of(supply, hosts) if self.backends[at].draining and self.backends[at].up]
        return sorted((at for at in mine if at not in self.stopped), key=lambda at: self.backends[at].in_flight)

    def _place(self, supply: Supply, address: str) -> int:
        return (supply.backends or list(self.backends)).index(address)

    async def _tell(self, action: str, address: str) -> None:
        for url in self.urls:
            await self._ask(url, "POST", action, {"backend": address})
        self.backends[address].draining = action == "drain"

    async def _ask(self, url: str, method: str, name: str, body: object = None) -> dict[str, Any]:
        at = Address(url)
        answer = await ask(at, method, f"{at.base}/admin/v1/{name}", key=self.key, body=body, timeout_s=30.0)
        said = answer.said
        if answer.status != 200 or not isinstance(said, dict):
            error = said.get("error") if isinstance(said, dict) else None
            why = error.get("message") if isinstance(error, dict) else "is it a gateway's --admin-port?"
            raise ScaleFailed(f"{url}: {name} is answered {answer.status}: {why}")
        return said
