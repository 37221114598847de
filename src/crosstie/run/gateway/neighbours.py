"""What a gateway tells the other workers of its machine, and asks of them; see `service.neighbourhood`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crosstie.run.gateway.backend import Backend
    from crosstie.run.gateway.scrape import EngineLoad


class Neighbours:
    def changed(self, backend: "Backend") -> None:
        """This worker has found a backend up or down."""
        raise NotImplementedError

    def probed(self, backend: "Backend", fault: str | None, *, refused: bool) -> None:
        """It has asked after a backend's health; None: it is well."""
        raise NotImplementedError

    def knows_health(self, backend: "Backend") -> bool:
        """Whether someone has asked the backend lately."""
        raise NotImplementedError

    def reported(self, backend: "Backend", load: "EngineLoad") -> None:
        """It has read a backend's metrics."""
        raise NotImplementedError

    def knows_load(self, backend: "Backend") -> bool:
        """Whether someone has read its metrics lately; then they are this worker's as well."""
        raise NotImplementedError

    def metrics_to(self, send: Callable[[str], None]) -> None:
        """Sends the page of all workers, once they have told theirs."""
        raise NotImplementedError
