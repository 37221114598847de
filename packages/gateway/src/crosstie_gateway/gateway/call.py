"""A request on its way to one backend: over a connection that was kept, or one that is made for it."""

import asyncio
from typing import Final

from crosstie.wire.client import Connection
from crosstie.wire.files import is_exhausted
from crosstie.wire.way import TlsRefused
from crosstie_gateway.gateway.backend import FULL_S, Backend
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.errors import AttemptFailure, without_address

# A kept connection that was closed while it lay idle shows it this soon; later, somebody was at work on the request.
_STALE_S: Final = 0.1


class BackendCall:
    def __init__(self, context: Context, backend: Backend):
        self.context, self.backend = context, backend
        self.connection: Connection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.asked_at = 0.0

    @property
    def who(self) -> str:
        """The backend, in words."""
        raise NotImplementedError

    def go(self, connection: Connection) -> None:
        """Sends what is asked on it."""
        raise NotImplementedError

    def failed(self, failure: AttemptFailure) -> None:
        """No connection could be made, or it was lost."""
        raise NotImplementedError

    def dispatch(self) -> None:
        connection = self.backend.origin.take()
        if connection is not None:
            self.go(connection)
        else:
            self.connect()

    def connect(self) -> None:
        self.connecting = self.backend.origin.connect(self.context.serving.connect_timeout_s, self.connected)

    def connected(self, result: Connection | Exception) -> None:
        self.connecting = None
        if isinstance(result, Connection):
            self.go(result)
        elif isinstance(result, OSError) and is_exhausted(result):
            # Nobody's fault but the gateway's own; another backend may have a connection to spare.
            self.context.on_exhausted()
            why = "the gateway has no file left to open for a connection to a backend; try again later"
            self.failed(AttemptFailure(why, 503, fault=False, code="gateway_exhausted", retry_after_s=FULL_S))
        else:
            did = "is not to be trusted" if isinstance(result, TlsRefused) else "refused the connection"
            self.failed(AttemptFailure(f"{self.who} {did}: {without_address(result)}", 502, refused=True))

    def on_lost(self, error: Exception | None) -> None:
        """A kept connection that its server has closed while idle is replaced by another."""
        lost, self.connection = self.connection, None
        just_asked = self.context.now() - self.asked_at < _STALE_S * self.context.speed
        stale = lost is not None and lost.uses > 1 and not lost.answered and just_asked
        if stale:
            self.connect()
            return
        said = f": {without_address(error)}" if error else ""
        self.failed(AttemptFailure(f"{self.who} cut the connection{said}", 502, refused=isinstance(error, TlsRefused)))

    def hang_up(self) -> None:
        """The engine sees its client go, and stops."""
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            self.connection.abort()
            self.connection = None
