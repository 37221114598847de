"""What a replica has to do: this worker's own requests, those of other workers and peers, who tell them exactly, and
external traffic, of which only the engine knows. Of a model that shares its machine, also whether it is loaded."""

from math import exp, inf
from typing import Final, Literal, NamedTuple, Protocol

# Over how long the rate of prompt tokens is taken.
RATE_S: Final = 10.0

State = Literal["resident", "loading", "leaving", "asleep", "failed"]
_WORDS: Final = {
    "resident": "it is loaded",
    "loading": "it is being loaded",
    "leaving": "it finishes its requests and makes room for another model",
    "asleep": "it is not loaded",
    "failed": "loading it failed",
}


class Cell(Protocol):
    """Where the workers and peers that share a replica write what they have there, and read what the others wrote."""

    def write(
        self, in_flight: int, waiting: int, waiting_tokens: float, held_tokens: float, decoding_tokens: float,
        prompt_rate: float, rate_at: float, ttft_urgency: float, tpot_urgency: float, head_at: float = inf,
        head_tokens: float = 0.0, first_at: float = -inf,
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

    def __init__(self) -> None:
        # Where all write and read; None: this worker is alone.
        self.cell: Cell | None = None
        # How often that is looked at, and when it is due again.
        self.every_s = 0.0
        self._due = -inf
        self._clear()

    def _clear(self) -> None:
        self.in_flight = self.waiting = 0
        self.waiting_tokens = self.held_tokens = self.decoding_tokens = 0.0
        self.prompt_rate = self.rate_at = self.busy_until = 0.0
        self.strictest_ttft_s = self.strictest_tpot_s = inf
        # As of the replica's own, below: the first that waits of all, and when any last got its first token.
        self.head_started, self.head_tokens, self.last_first_at = inf, 0.0, -inf

    def publish_full(self, until: float) -> None:
        """The engine has refused a request because it has too many."""
        if self.cell is not None:
            self.cell.tell(busy_until=until)

    def is_news(self, now: float) -> bool:
        """Whether others have written since it was last read, as far as it is time to look."""
        cell = self.cell
        if cell is None or now < self._due:
            return False
        self._due = now + self.every_s
        return cell.changed

    def read(self, now: float) -> bool:
        """Reads what the others have written; whether their counts have changed."""
        cell = self.cell
        if cell is None:
            return False
        before = (self.in_flight, self.waiting, self.held_tokens)
        self._clear()
        self.rate_at = now
        self.busy_until = cell.busy_until
        ttft_urgency = tpot_urgency = 0.0
        for (
            in_flight,
            waiting,
            queued,
            held,
            decoding,
            rate,
            rate_at,
            ttft,
            tpot,
            head_at,
            tokens,
            first_at,
        ) in cell.read():
            self.in_flight += int(in_flight)
            self.waiting += int(waiting)
            self.waiting_tokens += queued
            self.held_tokens += held
            self.decoding_tokens += decoding
            self.prompt_rate += rate * exp(-max(now - rate_at, 0.0) / RATE_S)
            ttft_urgency, tpot_urgency = max(ttft_urgency, ttft), max(tpot_urgency, tpot)
            if waiting and head_at < self.head_started:
                self.head_started, self.head_tokens = head_at, tokens
            self.last_first_at = max(self.last_first_at, first_at)
        if ttft_urgency > 0.0:
            self.strictest_ttft_s = 1.0 / ttft_urgency
        if tpot_urgency > 0.0:
            self.strictest_tpot_s = 1.0 / tpot_urgency
        return before != (self.in_flight, self.waiting, self.held_tokens)

    def prompt_rate_at(self, now: float) -> float:
        return self.prompt_rate * exp(-max(now - self.rate_at, 0.0) / RATE_S) if self.prompt_rate else 0.0


class ReplicaLoad:
    """Counts of one replica; `live.Replica` moves them."""

    def __init__(self, key: str, since: float):
        self.key = key
        self.in_flight = 0
        # Sent, and no first token yet.
        self.waiting = 0
        self.waiting_tokens = 0.0
        # Contexts at the middle of their answers: of all in flight, and of those that decode.
        self.held_tokens = 0.0
        self.decoding_tokens = 0.0
        self.prompt_rate = 0.0
        self.rate_at = since
        # The first that waits: since when (infinity: nobody waits), and its new prompt tokens.
        self.head_started = inf
        self.head_tokens = 0.0
        self.last_first_at = -inf
        # TTFT and TPOT targets of those in flight, and how many have each.
        self.targets: dict[tuple[float, ...], int] = {}
        # Sessions that left their cache here and are likely to come back, and what they have of it: expected values.
        self.warm_sessions = self.warm_tokens = 0.0
        self.elsewhere = LoadElsewhere()
        self.external_running = self.external_waiting = self.external_held = 0.0
        self.external_until = -inf
        # The engine has said that it is full.
        self.busy_until = -inf
        # Of one of several models on the same machine; None: its model has the machine to itself.
        self.presence: Presence | None = None

    def prompt_rate_at(self, now: float) -> float:
        """Prompt tokens a second, decayed."""
        return self.prompt_rate * exp(-max(now - self.rate_at, 0.0) / RATE_S)

    def strictest(self) -> tuple[float, float]:
        if len(self.targets) < 2:
            for targets in self.targets:
                return targets[0], targets[1]
            return inf, inf
        return min([targets[0] for targets in self.targets]), min([targets[1] for targets in self.targets])

    def publish(self) -> None:
        """Tells other workers and peers what this one has there now."""
        cell = self.elsewhere.cell
        if cell is None:
            return
        ttft_s, tpot_s = self.strictest()
        cell.write(
            self.in_flight, self.waiting, self.waiting_tokens, self.held_tokens, self.decoding_tokens,
            self.prompt_rate, self.rate_at, 1.0 / max(ttft_s, 1e-9), 1.0 / max(tpot_s, 1e-9),
            self.head_started, self.head_tokens, self.last_first_at,
        )  # fmt: skip


class Presence:
    """Of one model on one replica. What is not resident is sent nothing, as though its engine had no room."""

    def __init__(self) -> None:
        # Nobody has asked the engine yet.
        self.state: State = "asleep"
        self.why = ""
        # The other models of the same machine.
        self.beside: list[ReplicaLoad] = []

    @property
    def there(self) -> bool:
        return self.state == "resident"

    @property
    def words(self) -> str:
        return f"{self.state}: {_WORDS[self.state]}{f' ({self.why})' if self.why else ''}"

    def crowd(self) -> float:
        """How many models share the machine's time just now, with one more request of this one."""
        return 1.0 + sum(1.0 for load in self.beside if load.in_flight or load.elsewhere.in_flight)


def become(load: ReplicaLoad, state: State, why: str = "") -> None:
    """A model has come to another state on a replica that it shares."""
    presence = load.presence
    if presence is None:
        raise ValueError(f"{load.key} is no replica of a pool that hosts several models")
    was, presence.state, presence.why = presence.there, state, why
    if presence.there and not was:
        load.busy_until = -inf
    elif not presence.there:
        # Until it is loaded; whoever chooses passes it by like one that is full, and those who wait for it wait on.
        load.busy_until = inf
