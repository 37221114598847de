"""Where responses live: an engine that keeps one can go on from it (`previous_response_id`), and no other can."""

from collections.abc import Callable

from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.fields import decode_answer, readable
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

PATH = "/v1/responses"
# Of all keys; the oldest are forgotten first.
_MOST = 100_000
_LONGEST_ID = 256


class KeptResponses:
    """By key, so that nobody goes on from another's."""

    # Whether this gateway keeps them itself, so that any engine can go on from one.
    is_stored = False

    def __init__(self) -> None:
        self._homes: dict[tuple[int, str], str] = {}
        # Called with what other workers are to know.
        self.on_kept: Callable[[int, str, str], None] = lambda key_id, response, home: None

    def prepare(
        self, request: Request, reply: Reply, key_id: int, go_on: Callable[[RequestRejected | None], None]
    ) -> None:
        """Calls `go_on` once, when a request is as its engine is to get it."""
        raise NotImplementedError

    def handle(self, request: Request, reply: Reply) -> None:
        """A request about one that is kept."""
        raise NotImplementedError

    def keep(self, request: Request, key_id: int, relay: StreamRelay | WholeRelay | None, home: str) -> None:
        """A response has been served by a backend."""
        response = _id_of(relay)
        if response and len(response) <= _LONGEST_ID:
            self.learn(key_id, response, home)
            self.on_kept(key_id, response, home)

    def learn(self, key_id: int, response: str, home: str) -> None:
        self._homes.pop((key_id, response), None)
        self._homes[key_id, response] = home
        if len(self._homes) > _MOST:
            del self._homes[next(iter(self._homes))]

    def home(self, key_id: int, response: str) -> str | None:
        return self._homes.get((key_id, response))


def _id_of(relay: StreamRelay | WholeRelay | None) -> str:
    if isinstance(relay, WholeRelay):
        return _named(relay.content)
    # The last event has the whole response.
    ids = [_named(payload) for payload in payloads(relay.latest)] if relay is not None else []
    return next(filter(None, ids), "")


def _named(said: bytes) -> str:
    answer = readable(decode_answer, said)
    name = "" if answer is None else answer.id if answer.response is None else answer.response.id
    return name if isinstance(name, str) else ""
