"""Tells engines which session a request is of, so that they keep its cache, and when none of its turns is waited for.

SGLang started with --enable-session-radix-cache evicts what no session refers to first: requests name theirs by
`session_id`, until `/close_session` (sgl-project/sglang@cce0a1244b5a, 23 August 2026: entrypoints/openai/protocol.py,
docs/advanced_features/session_radix_cache.mdx). Not compiled, since it waits for sockets.
"""

import contextlib
import os

from crosstie.route.live import Flight
from crosstie.route.load import ReplicaLoad
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.wire.tasks import Tasks

_PATIENCE_S = 5.0


class SessionKeeper:
    """`backends`: by the replica's key."""

    def __init__(self, backends: dict[str, Backend]):
        self._backends = backends
        # Other workers have sessions of the same numbers.
        self._run = os.urandom(6).hex()
        self._closing = Tasks()

    def member(self, flight: Flight) -> bytes:
        """What a request says of its session; nothing where it is not likely to come back."""
        session = flight.session
        number = flight.replica.pool.sessions.keep(session, flight.ask.pause_s) if session is not None else 0
        return b'"session_id":"%b"' % self._name(number).encode() if number else b""

    def let_go(self, replica: ReplicaLoad, number: int) -> None:
        backend = self._backends.get(replica.key)
        if backend is not None and backend.replica.up:
            self._closing.spawn(self._close(backend, self._name(number)))

    def close(self) -> None:
        for task in self._closing:
            task.cancel()

    def _name(self, number: int) -> str:
        return f"{self._run}-{number}"

    async def _close(self, backend: Backend, name: str) -> None:
        # An engine that cannot be asked is about to lose its cache, or evicts what it keeps in vain after all else.
        with contextlib.suppress(OSError, TimeoutError):
            await backend.ask("POST", f"{backend.root.decode()}/close_session", _PATIENCE_S, {"session_id": name})
