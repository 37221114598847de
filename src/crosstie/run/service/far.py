"""Other machines' gateways over the same backends: their load and what keys used there, by way of Redis.

One process of a machine speaks and listens for all of them, and puts what it hears on their board.
"""

from time import monotonic
from typing import TYPE_CHECKING

from crosstie.core.fleet import Fleet
from crosstie.run.gateway.metrics import Family
from crosstie.run.gateway.notices import Notice
from crosstie.run.ledger.places import filled
from crosstie.run.share.board import Board
from crosstie.run.share.machines import Machines, store_name
from crosstie.run.share.redis_share import RedisShare, connected

if TYPE_CHECKING:
    from crosstie.run.service.process import Serve


class OtherMachines:
    def __init__(self, board: Board):
        self._board = board

    async def start(self, serve: "Serve") -> None:
        self._gateway = serve.gateway
        state = serve.fleet.state
        store = store_name(filled(state.store) if state.store is not None else None)
        self._machines = Machines(self._board, store, self._gateway.now, monotonic)
        self._share = RedisShare(connected(filled(state.redis or "")), self._machines, self._tell)
        self._machines.replicas(self._gateway.backends)
        self._gateway.metrics.sources.append(self._figures)
        self._share.start()

    def reloaded(self, fleet: Fleet) -> None:
        self._machines.replicas(self._gateway.backends)

    async def stop(self) -> None:
        await self._share.stop()

    def _tell(self, why: str | None) -> None:
        if why is None:
            sentence = "Redis is back: load and limits are shared with other machines again"
            self._gateway.notify(Notice("share_back", "info", sentence))
        else:
            sentence = f"Redis is lost, load and limits are this machine's own until it is back: {why}"
            self._gateway.notify(Notice("share_lost", "error", sentence, why=why))

    def _figures(self) -> list[Family]:
        share = self._share
        up, others = "1 while load and limits are shared with other machines.", "Other machines that are heard of."
        return [
            ("crosstie_share_up", "gauge", up, [({}, float(share.up))]),
            ("crosstie_share_lost_total", "counter", "Times that Redis was lost.", [({}, float(share.lost))]),
            ("crosstie_share_machines", "gauge", others, [({}, float(len(self._machines)))]),
        ]
