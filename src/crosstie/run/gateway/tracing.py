"""Who follows requests through their attempts; see `telemetry` for the one that exports spans."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosstie.run.gateway.ended import Ended


class Trace:
    """One request, as it goes on. Its end is told to the gateway's listeners, with `Ended.trace`."""

    # Of the trace: 32 digits.
    id = ""

    def attempt(self, pool: str, backend: str) -> bytes:
        """It is sent to a backend: the header lines that tell the backend so."""
        raise NotImplementedError

    def first_token(self) -> None:
        """The answer has begun, in its present attempt."""
        raise NotImplementedError

    def failed(self, why: str, status: int) -> None:
        """Its present attempt has come to nothing."""
        raise NotImplementedError


class Tracing:
    def begin(self, ended: "Ended", given: bytes) -> Trace:
        """A request has come; `given` are its own valid lines of trace context, if it has any."""
        raise NotImplementedError
