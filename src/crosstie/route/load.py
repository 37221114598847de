"""What others have on a replica: other gateways, who tell it exactly, and whoever else an engine reports."""

from math import exp
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from crosstie.route.live import Replica


# Over how long the rate of prompt tokens is taken.
RATE_S = 10.0

State = Literal["resident", "loading", "leaving", "asleep", "failed"]
_WORDS = {
    "resident": "it is loaded",
    "loading": "it is being loaded",
    "leaving": "it finishes its requests and makes room for another model",
    "asleep": "it is not loaded",
    "failed": "loading it failed",
}


class Cell(Protocol):
    """Where the gateways that share a replica write what they have there, and read what the others wrote."""

    def write(
        self, in_flight: int, waiting: int, waiting_tokens: float, held_tokens: float, decoding_tokens: float,
        prompt_rate: float, rate_at: float, ttft_urgency: float, tpot_urgency: float,
    ) -> None: ...  # fmt: skip

    def read(self) -> list[tuple[float, ...]]: ...

    def tell(self, **common: float) -> None: ...

    def in_flight_elsewhere(self) -> int: ...

    @property
    def busy_until(self) -> float: ...

    @property
    def changed(self) -> bool: ...


class Reported(NamedTuple):
    """What an engine says of itself."""

    running: float
    waiting: float
    kv_used_fraction: float | None
    at: float


class LoadElsewhere:
    """Sums over other workers and peers as they were last read; nothing where there are none."""

    __slots__ = (
        "busy_until", "cell", "decoding_tokens", "held_tokens", "in_flight", "prompt_rate", "rate_at",
        "strictest_tpot_s", "strictest_ttft_s", "waiting", "waiting_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        # Where all write and read; None: this gateway is alone.
        self.cell: Cell | None = None
        self.forget()

    def forget(self) -> None:
        self.in_flight = self.waiting = 0
        self.waiting_tokens = self.held_tokens = self.decoding_tokens = 0.0
        self.prompt_rate = self.rate_at = self.busy_until = 0.0
        self.strictest_ttft_s = self.strictest_tpot_s = float("inf")

    def publish(self, replica: "Replica") -> None:
        """What this gateway has there now."""
        cell = self.cell
        if cell is None:
            return
        ttft_s, tpot_s = replica.strictest()
        cell.write(
            replica.in_flight, replica.waiting, replica.waiting_tokens, replica.held_tokens, replica.decoding_tokens,
            replica.prompt_rate, replica.rate_at, 1.0 / max(ttft_s, 1e-9), 1.0 / max(tpot_s, 1e-9),
        )  # fmt: skip

    def publish_full(self, until: float) -> None:
        """The engine has refused a request because it has too many."""
        if self.cell is not None:
            self.cell.tell(busy_until=until)

    def read(self, now: float) -> None:
        """Reads what the others have told."""
        cell = self.cell
        if cell is None:
            return
        self.forget()
        self.rate_at = now
        self.busy_until = cell.busy_until
        ttft_urgency = tpot_urgency = 0.0
        for in_flight, waiting, queued, held, decoding, rate, rate_at, ttft, tpot in cell.read():
            self.in_flight += int(in_flight)
            self.waiting += int(waiting)
            self.waiting_tokens += queued
            self.held_tokens += held
            self.decoding_tokens += decoding
            self.prompt_rate += rate * exp(-max(now - rate_at, 0.0) / RATE_S)
            ttft_urgency, tpot_urgency = max(ttft_urgency, ttft), max(tpot_urgency, tpot)
        if ttft_urgency > 0.0:
            self.strictest_ttft_s = 1.0 / ttft_urgency
        if tpot_urgency > 0.0:
            self.strictest_tpot_s = 1.0 / tpot_urgency

    def prompt_rate_at(self, now: float) -> float:
        return self.prompt_rate * exp(-max(now - self.rate_at, 0.0) / RATE_S) if self.prompt_rate else 0.0

    def stricter(self, ttft_s: float, tpot_s: float) -> tuple[float, float]:
        """Of these targets and those of the others' requests."""
        return min(ttft_s, self.strictest_ttft_s), min(tpot_s, self.strictest_tpot_s)


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
            if one.in_flight or one.elsewhere.in_flight:
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
