"""Emptying replicas before they go: gateways are told through their administrators' ports to send them nothing new.

A supply's backends with the fewest requests go, and stay chosen until they are empty. A stopped backend is let in again
once gateways find it down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crosstie.wire.address import Address
from crosstie.wire.fetch import ask
from crosstie_gateway.scale.act import Moves, ScaleFailed
from crosstie_gateway.scaler.rules import Supply
from crosstie_gateway.scaler.scaler import Order


@dataclass(slots=True)
class SeenBackend:
    """As all gateways see it together."""

    pool: str
    up: bool
    draining: bool
    in_flight: int


@dataclass(slots=True)
class Drainer:
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
