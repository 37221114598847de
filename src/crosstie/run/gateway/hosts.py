"""What a gateway asks of whoever loads and puts away the models of shared pools."""

from crosstie.route.ask import Ask
from crosstie.route.live import Replica


class Hosts:
    def asked(self, ask: Ask) -> tuple[str, float] | None:
        """A request is about to be decided on: why, where its model cannot be there in time, and when to ask again."""
        raise NotImplementedError

    def absent(self, model: str) -> tuple[str, float] | None:
        """Why a hosted model is loaded nowhere, and after how many seconds to ask again; None where it is loaded."""
        raise NotImplementedError

    def doubted(self, replica: Replica, *, surely: bool = False) -> None:
        """Something went wrong on it, so that it may have lost its model; `surely`: its engine has said so."""
        raise NotImplementedError
