"""Peers: gateways on other machines over the same backends, and their load and usage, by way of Redis.

For load and limits one worker speaks for its machine and puts what it hears on the board. What was learnt each process
tells and hears itself.
"""

from os import urandom
from time import monotonic

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family
from crosstie.wire.variables import filled
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.learnt import Learnt
from crosstie_gateway.share.peers import Peers, store_name
from crosstie_gateway.share.redis_share import LearntShare, RedisShare, connected


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
