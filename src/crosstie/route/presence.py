"""Whether a model that shares its replica's machine with others is loaded there, and who works beside it."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from crosstie.route.live import Replica

State = Literal["resident", "loading", "leaving", "asleep", "failed"]
_WORDS = {
    "resident": "it is loaded",
    "loading": "it is being loaded",
    "leaving": "it finishes its requests and makes room for another model",
    "asleep": "it is not loaded",
    "failed": "loading it failed",
}


class Presence:
    """Of one model on one replica. What is not resident is sent nothing, as though its engine had no room."""

    __slots__ = ("beside", "state", "why")

    def __init__(self) -> None:
        # Nobody has asked the engine yet.
        self.state: State = "asleep"
        self.why = ""
        # The other models of the same machine.
        self.beside: list[Replica] = []

    @property
    def there(self) -> bool:
        return self.state == "resident"

    @property
    def words(self) -> str:
        return f"{self.state}: {_WORDS[self.state]}{f' ({self.why})' if self.why else ''}"

    def crowd(self) -> float:
        """How many models share the machine's time just now, with one more request of this one."""
        busy = 1.0
        for one in self.beside:
            if one.in_flight or one.neighbours.in_flight:
                busy += 1.0
        return busy


def become(replica: "Replica", state: State, why: str = "") -> None:
    presence = replica.presence
    if presence is None:
        raise ValueError(f"{replica.key} is no replica of a pool that hosts several models")
    was, presence.state, presence.why = presence.there, state, why
    if presence.there and not was:
        replica.busy_until = float("-inf")
    elif not presence.there:
        # Until it is loaded; whoever chooses passes it by like one that is full, and those who wait for it wait on.
        replica.busy_until = float("inf")
