"""Peers: gateways on other machines over the same backends, and their load and usage, by way of Redis.

For load and limits one worker speaks for its machine and puts what it hears on the board. What was learnt each process
tells and hears itself.
"""

import asyncio
from functools import partial
from math import isfinite
from os import urandom
from time import monotonic

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family
from crosstie.route.live import LivePool
from crosstie.route.spending import Spending
from crosstie.wire.variables import filled
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.share.board import Board, name_of
from crosstie_gateway.share.learnt import Learnt
from crosstie_gateway.share.peers import Peers, store_name
from crosstie_gateway.share.redis_share import LearntShare, RedisShare, connected
from crosstie_gateway.share.tally import BoardTally


class LearntSharing(Component):
    """What this process learns, told to all others, of this machine or another, and learnt from them."""

    async def start(self, process: GatewayProcess) -> None:
        self._gateway, state = process.gateway, process.fleet.state
        self._learnt = Learnt(urandom(8).hex(), _store_of(process))
        self._learnt.serve(self._gateway.live)
        self._share = LearntShare(connected(filled(state.redis or "")), self._learnt, self._gateway.now)
        self._share.start()

    def reloaded(self, fleet: Fleet) -> None:
        self._learnt.serve(self._gateway.live)

    async def stop(self) -> None:
        await self._share.stop()

    def families(self) -> list[Family]:
        meaning = "Observations of other gateways that were learnt from."
        return [("crosstie_share_learnt_total", "counter", meaning, [({}, float(self._learnt.heard))])]


def _store_of(process: GatewayProcess) -> str:
    place = process.fleet.state.store
    return store_name(filled(place) if place is not None else None)


class PeerSharing(Component):
    def __init__(self, board: Board):
        self._board = board

    async def start(self, process: GatewayProcess) -> None:
        self._gateway = process.gateway
        state = process.fleet.state
        self._peers = Peers(self._board, _store_of(process), self._gateway.now, monotonic)
        self._share = RedisShare(connected(filled(state.redis or "")), self._peers, self._on_share_change)
        self._peers.replicas(self._gateway.backends)
        self._share.start()

    def reloaded(self, fleet: Fleet) -> None:
        self._peers.replicas(self._gateway.backends)

    async def stop(self) -> None:
        await self._share.stop()

    def _on_share_change(self, why: str | None) -> None:
        if why is None:
            sentence = "Redis is back: load and limits are shared with other machines again"
            self._gateway.notify(Notice("share_back", "info", sentence))
        else:
            sentence = f"Redis is lost, load and limits are this machine's own until it is back: {why}"
            self._gateway.notify(Notice("share_lost", "error", sentence, why=why))

    def families(self) -> list[Family]:
        share = self._share
        up, others = "1 while load and limits are shared with other machines.", "Other machines that are heard of."
        return [
            ("crosstie_share_up", "gauge", up, [({}, float(share.up))]),
            ("crosstie_share_lost_total", "counter", "Times that Redis was lost.", [({}, float(share.lost))]),
            ("crosstie_share_machines", "gauge", others, [({}, float(len(self._peers)))]),
        ]


# What is spent is forgotten with time, which others are to hear of too.
_TELL_AGAIN_S = 10.0
# Beyond all keys and teams of a store, and small enough for what peers are told.
_FIRST_ID, _IDS = 2**51, 2**50


def account_of(pool: str, period: str) -> int:
    """Where a pool's spending stands in the tally: the same for all workers and peers."""
    return _FIRST_ID + name_of(f"spending {pool} {period}") % _IDS


class ProviderSpending(Component):
    """What is spent at providers who are paid by the token: on the metrics page, and one limit for all who share it."""

    async def start(self, process: GatewayProcess) -> None:
        self._gateway = process.gateway
        self._tally = BoardTally(process.board, process.row) if process.board is not None else None
        self._telling: asyncio.TimerHandle | None = None
        self.reloaded(process.fleet)

    def reloaded(self, fleet: Fleet) -> None:
        if self._tally is None:
            return
        for pool, spending in self._bought():
            for period in spending.periods:
                account = account_of(pool.name, period.name)
                period.tell = partial(self._tally.hold, account, more_usd=0.0)
                period.ask = partial(_of_others, self._tally, account)
        if self._telling is None:
            self._tell()

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def _tell(self) -> None:
        self._telling = self._gateway.loop.call_later(_TELL_AGAIN_S, self._tell)
        for _, spending in self._bought():
            spending.publish(self._gateway.now())

    def _bought(self) -> list[tuple[LivePool, Spending]]:
        return [(pool, pool.spending) for pool in self._gateway.live.pools if pool.spending is not None]

    def families(self) -> list[Family]:
        now, bought = self._gateway.now(), self._bought()
        if not bought:
            return []
        periods = [(pool.name, period) for pool, spending in bought for period in spending.periods]
        each = [({"pool": name, "in": period.name}, period) for name, period in periods]
        spent = [(at, period.spent_usd(now)) for at, period in each]
        most = [(at, period.most_usd) for at, period in each if isfinite(period.most_usd)]
        reserved = [({"pool": pool.name}, spending.reserved_usd) for pool, spending in bought]
        return [
            ("crosstie_provider_spent_usd", "gauge", "Spent at a provider within the last hour or day.", spent),
            ("crosstie_provider_reserved_usd", "gauge", "What requests at a provider may come to.", reserved),
            ("crosstie_provider_max_usd", "gauge", "What may be spent at a provider in an hour or a day.", most),
        ]


def _of_others(tally: BoardTally, account: int) -> float:
    return tally.held(account)[0]
