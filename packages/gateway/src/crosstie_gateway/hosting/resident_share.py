"""Carries over Redis what gateways say of shared replicas, and keeps the leader's lease (`residents`)."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from crosstie_gateway.hosting.residents import HOLD_S, HostReport, Lease, Residents
from crosstie_gateway.share.redis_share import RedisTalk

# What Redis may take to answer somebody who is about to load.
_PATIENCE_S = 1.0
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HostReport).decode


class ResidentShare(RedisTalk):
    """`report`: what to tell now; `on_asked`: requests by model at other gateways; `on_news`: the leader's state has
    changed."""

    every_s = 0.05

    def __init__(
        self, client: Any, fleet: str, machine: str, clock: Callable[[], float], report: Callable[[], HostReport],
        on_asked: Callable[[str, int], None], on_news: Callable[[], None], hold_s: float = HOLD_S,
    ):  # fmt: skip
        super().__init__(client, lambda why: None)
        self.channel = f"crosstie:host:{fleet}"
        self.residents, self.lease = Residents(machine, clock), Lease(fleet, machine, clock, hold_s)
        self._report, self._on_asked, self._on_news = report, on_asked, on_news
        self._said: tuple[object, ...] = ()

    async def begin(self) -> None:
        self.lease.lost_sight()

    async def tell(self, whole: bool) -> None:
        if whole:
            self.residents.forget_silent()
            await self.lease.keep(self._client, self.residents.number, self.residents.claims)
        report = self._report()
        said = (
            report.leads, report.number, report.revision, report.waiting, report.in_flight, report.states,
            set(report.claims),
        )  # fmt: skip
        if whole or said != self._said:
            await self._client.publish(self.channel, _encode(report))
            self._said = said

    def hear(self, data: bytes) -> None:
        report = _decode(data)
        for model, times in self.residents.hear(report).items():
            self._on_asked(model, times)
        if report.leads or report.waiting:
            self._on_news()

    def silence(self) -> None:
        self.residents.forget_silent()
        self.lease.lost_sight()

    async def leave(self) -> None:
        await self.lease.give_up(self._client)
        bye = HostReport(self.residents.machine, False, 0, 0, {}, [], {}, leaving=True)
        await self._client.publish(self.channel, _encode(bye))

    async def claim(self, slots: Collection[str], for_s: float) -> bool:
        """Whether this gateway may change these for so long; False where nobody can say."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.lease.claim(self._client, slots, for_s, self.residents.claims)
        except Exception:  # noqa: BLE001 (whatever it was: without a word of Redis' nothing is touched)
            return False

    async def release(self, slots: Collection[str]) -> None:
        # What cannot be said is over when its time is.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.lease.release(self._client, slots), _PATIENCE_S)
