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


# What a worker tells others of a replica, in this order. An urgency is one over the tightest target there, 0 without.
LOAD_FIELDS: Final = (
    "in_flight", "waiting", "waiting_tokens", "held_tokens", "decoding_tokens", "prompt_rate", "rate_at",
    "ttft_urgency", "tpot_urgency", "head_at", "head_tokens", "first_at",
)  # fmt: skip
SharedLoad = tuple[float, ...]


def combined(loads: list[SharedLoad], now: float) -> SharedLoad:
    """What several have on a replica together, its rate as of now."""
    in_flight = waiting = waiting_tokens = held = decoding = rate = ttft_urgency = tpot_urgency = head_tokens = 0.0
    head_at, first_at = inf, -inf
    for load in loads:
        in_flight += load[0]
        waiting += load[1]
        waiting_tokens += load[2]
        held += load[3]
        decoding += load[4]
        rate += load[5] * exp(-max(now - load[6], 0.0) / RATE_S)
        ttft_urgency, tpot_urgency = max(ttft_urgency, load[7]), max(tpot_urgency, load[8])
        if load[1] and load[9] < head_at:
            head_at, head_tokens = load[9], load[10]
        first_at = max(first_at, load[11])
    counts = (in_flight, waiting, waiting_tokens, held, decoding, rate, now)
    return (*counts, ttft_urgency, tpot_urgency, head_at, head_tokens, first_at)


class Cell(Protocol):
    """Where the workers and peers that share a replica write what they have there, and read what the others wrote."""

    def write(self, load: SharedLoad) -> None: ...

    def read(self) -> list[SharedLoad]: ...

    def tell(self, **common: float) -> None: ...

    def in_flight_elsewhere(self) -> int: ...

    @property
    def busy_until(self) -> float: ...

    @property
    def changed(self) -> bool: ...


class EngineLoad(NamedTuple):
    """What an engine says of itself."""

    running: float
    waiting: float
    # None where the engine does not say.
    kv_used_fraction: float | None


class LoadElsewhere:
    """Sums over other workers and peers as they were last read; nothing where there are none."""

    def __init__(self) -> None:
        # Where all write and read; None: this worker is alone.
        self.cell: Cell | None = None
        # How often that is looked at, and when it is due again.
        self.every_s = 0.0
        self._due = -inf
        self.in_flight = self.waiting = 0
        self.waiting_tokens = self.held_tokens = self.decoding_tokens = 0.0
        self.prompt_rate = self.rate_at = self.busy_until = 0.0
        self.strictest_ttft_s = self.strictest_tpot_s = inf
        # As of the replica's own, below: the first that waits of all, and when any last got its first token.
        self.head_started, self.head_tokens, self.last_first_at = inf, 0.0, -inf

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
        load = combined(cell.read(), now)
        self.busy_until = cell.busy_until
        self.in_flight, self.waiting, self.waiting_tokens = int(load[0]), int(load[1]), load[2]
        self.held_tokens, self.decoding_tokens, self.prompt_rate, self.rate_at = load[3], load[4], load[5], now
        self.strictest_ttft_s = 1.0 / load[7] if load[7] > 0.0 else inf
        self.strictest_tpot_s = 1.0 / load[8] if load[8] > 0.0 else inf
        self.head_started, self.head_tokens, self.last_first_at = load[9], load[10], load[11]
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

    def total(self, now: float, typical_input: float) -> tuple[float, float, float, float, float]:
        """Own, elsewhere and external: requests in flight, those that decode, and tokens held, decoding and waiting.
        `typical_input`: prompt tokens of an external request."""
        in_flight, decoding = float(self.in_flight), float(self.in_flight - self.waiting)
        held, cached, queued = self.held_tokens, self.decoding_tokens, self.waiting_tokens
        elsewhere = self.elsewhere
        if elsewhere.in_flight:
            in_flight += elsewhere.in_flight
            decoding += elsewhere.in_flight - elsewhere.waiting
            held += elsewhere.held_tokens
            cached += elsewhere.decoding_tokens
            queued += elsewhere.waiting_tokens
        if now < self.external_until:
            in_flight += self.external_running + self.external_waiting
            decoding += self.external_running
            held += self.external_held + self.external_waiting * typical_input
            cached += self.external_held
            queued += self.external_waiting * typical_input
        return in_flight, decoding, held, cached, queued

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
            (
                float(self.in_flight), float(self.waiting), self.waiting_tokens, self.held_tokens,
                self.decoding_tokens, self.prompt_rate, self.rate_at, 1.0 / max(ttft_s, 1e-9),
                1.0 / max(tpot_s, 1e-9), self.head_started, self.head_tokens, self.last_first_at,
            )
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


class AdapterSlots:
    """Places for LoRA adapters on one replica: what is loaded there as far as is known, and how many use each."""

    def __init__(self, most: int):
        self.most = most
        # Those that are loaded, the least recently used first.
        self._loaded: dict[str, None] = {}
        # Requests on the replica by the adapter that they need; some may be loaded only now.
        self._in_use: dict[str, int] = {}
        # Those that could not be loaded, and until when that is believed.
        self._failed: dict[str, float] = {}

    @property
    def loaded(self) -> list[str]:
        return list(self._loaded)

    def has(self, adapter: str) -> bool:
        return adapter in self._loaded

    def ready(self, adapter: str) -> bool:
        """Whether it is there, and stays: one that nobody uses makes room where every place is wanted by others."""
        return adapter in self._loaded and self._has_place(adapter)

    def _has_place(self, adapter: str) -> bool:
        """Each adapter that requests are on the replica for needs a place, loaded or coming; the others can go."""
        return adapter in self._in_use or len(self._in_use) < self.most

    def begin(self, adapter: str) -> None:
        self._in_use[adapter] = self._in_use.get(adapter, 0) + 1
        if adapter in self._loaded:
            del self._loaded[adapter]
            self._loaded[adapter] = None

    def end(self, adapter: str) -> None:
        left = self._in_use[adapter] - 1
        if left:
            self._in_use[adapter] = left
        else:
            del self._in_use[adapter]

    def refuses(self, adapter: str, now: float) -> bool:
        """Whether it could not be loaded a moment ago."""
        return self._failed.get(adapter, float("-inf")) > now

    def may_take(self, adapter: str, now: float) -> bool:
        """Whether it is there, or could be loaded: there is a place, or one that nobody uses."""
        known = adapter in self._loaded or adapter in self._in_use
        return self._has_place(adapter) and (known or not self.refuses(adapter, now))

    @property
    def full(self) -> bool:
        return len(self._loaded) >= self.most

    def idle(self) -> str | None:
        """The least recently used that nobody uses."""
        return next((one for one in self._loaded if one not in self._in_use), None)

    def came(self, adapter: str) -> None:
        self._loaded[adapter] = None
        self._failed.pop(adapter, None)

    def went(self, adapter: str) -> None:
        self._loaded.pop(adapter, None)

    def failed(self, adapter: str, until: float) -> None:
        self._loaded.pop(adapter, None)
        self._failed[adapter] = until

    def found(self, adapters: list[str]) -> None:
        """What the engine says that it has: what it has no more is forgotten, and what others have loaded there was
        used by nobody here."""
        new = [adapter for adapter in adapters if adapter not in self._loaded]
        known = [one for one in self._loaded if one in adapters]
        first, last = [one for one in new if one not in self._in_use], [one for one in new if one in self._in_use]
        self._loaded = dict.fromkeys([*first, *known, *last])

    def clear(self) -> None:
        """Its engine may be another one."""
        self._loaded.clear()
        self._failed.clear()
