"""Which models are resident on each replica of a pool that hosts several, by memory and demand.

No clock and no input or output: whoever serves says what was asked, does the moves that come back, and says how they
went. Four rules keep replicas from swapping models instead of serving them:

    residence   what was loaded stays for a while: some seconds, and some times its load while it is asked for
    margin      a newcomer that is worth less than those it would evict waits for its patience to end
    turns       then it gets the replica where that costs least, whatever it is worth; of those whose patience has
                ended, who came first goes first. Those in its way take no new requests and leave when they are idle
    one load    at a time on each replica

So nobody starves, and no model leaves a replica more often than once in the least residence.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from crosstie.core.errors import BadInput
from crosstie.host.hosted import Hosted, ModelCounts, Move, ResidencySettings, Slot, Wait, WaitingModel

# Requests in flight of a model on a replica: busy(slot key, model).
Busy = Callable[[str, str], int]

# A copy beside another is worth this share of the model's whole worth: losing it makes nobody wait, only queues longer.
_COPY_WORTH = 0.25
_GIB = 1024.0**3
# When nothing tells when to ask again: requests end at any moment.
_SOON_S = 0.25
# A model that is asked for no more is forgotten after this many times its expected wait, and some seconds.
_FORGET_WAITS = 2.0
_FORGET_S = 5.0


@dataclass(frozen=True, slots=True)
class _Spot:
    """A replica where a model could go: whom to evict, what that is worth, and from when on it is allowed."""

    slot: Slot
    evict: tuple[str, ...]
    loss: float
    free_from: float
    idle: bool
    left_bytes: float


class Residency:
    def __init__(
        self, hosted: Sequence[Hosted], slots: Sequence[Slot], now: float, settings: ResidencySettings | None = None
    ) -> None:
        self._settings = settings or ResidencySettings()
        self.hosted = {one.model: one for one in hosted}
        self.slots = list(slots)
        if len(self.hosted) < len(hosted):
            raise BadInput("a model is hosted twice in one pool")
        if not hosted or not slots:
            raise BadInput("a shared pool needs models and replicas")
        # Where each pinned model stays.
        self._home = self._homes()
        self._worth = self._settings.worth(hosted, self._settings.demand_memory_s, now)
        self._waiting: dict[str, WaitingModel] = {}
        self._failures = dict.fromkeys(self.hosted, 0)
        # From when on each may be tried again, and why not before.
        self._not_before = dict.fromkeys(self.hosted, -math.inf)
        self._why_not_yet = dict.fromkeys(self.hosted, "")
        self.counts = {model: ModelCounts() for model in self.hosted}

    def _homes(self) -> dict[str, Slot]:
        """The largest pinned models first, each where most is left; refuses what could never be served."""
        left = {slot.key: slot.capacity_bytes for slot in self.slots}
        if len(left) < len(self.slots):
            raise BadInput("two replicas of a shared pool have the same key")
        home: dict[str, Slot] = {}
        for one in sorted(self.hosted.values(), key=lambda one: (not one.pinned, -one.taken_bytes)):
            where = max(self.slots, key=lambda slot: left[slot.key])
            if one.taken_bytes > left[where.key]:
                beside = " beside the pinned ones" if home else ""
                raise BadInput(
                    f"{one.model} takes {one.taken_bytes / _GIB:.1f} GiB; no replica of the pool has more than "
                    f"{max(left[where.key], 0.0) / _GIB:.1f} GiB for it{beside}"
                )
            if one.pinned:
                left[where.key] -= one.taken_bytes
                home[one.model] = where
        return home

    def asked(self, model: str, now: float) -> None:
        """A request came for the model."""
        self._worth.asked(model, now)
        counts = self.counts[model]
        counts.asked += 1
        # Written out: this is on the way of every request.
        for slot in self.slots:
            if slot.serves(model):
                return
        counts.cold_waits += 1

    def resident(self, model: str) -> list[Slot]:
        """Where it can be served now."""
        return [slot for slot in self.slots if slot.serves(model)]

    def why_waiting(self, model: str) -> Wait:
        """After `wanted` gave no move: why, and when to ask again."""
        waiting = self._waiting.get(model)
        return waiting.wait if waiting else Wait(f"{model} waits for nothing", _SOON_S)

    def wanted(self, model: str, now: float, busy: Busy) -> Move | None:
        """The move that makes room for a model that is nowhere resident; None while it must wait (`why_waiting`)."""
        one = self.hosted[model]
        self._forget_the_gone(now)
        if self.resident(model):
            self.forget(model)
            return None
        waiting = self._waiting.setdefault(model, WaitingModel(now, now))
        waiting.asked_at, waiting.is_awaited = now, True
        for slot in self.slots:
            if slot.loading == model:
                left = slot.loading_since + one.load_s - now
                return self._must_wait(waiting, f"{model} is being loaded on {slot.key}", max(left, _SOON_S))
        if now < self._not_before[model]:
            return self._must_wait(waiting, self._why_not_yet[model], self._not_before[model] - now)
        spot = self._best(one, now, busy)
        if spot is None:
            return self._must_wait(waiting, "every replica is loading, promised to another model or away", _SOON_S)
        if not spot.evict:
            return Move(spot.slot, one, (), "fits in free memory")
        return self._turn(one, spot, waiting, now)

    def _turn(self, one: Hosted, spot: _Spot, waiting: WaitingModel, now: float) -> Move | None:
        """Whether the newcomer may evict by now; if so, it goes or claims the replica."""
        patient_until = waiting.since + self._settings.waits_s(one)
        worthy = self._worth.deserves(one.model, spot.loss, self._settings.margin, now)
        deserved = worthy and spot.free_from <= now
        if not deserved and now < patient_until:
            names = ", ".join(spot.evict)
            return self._must_wait(waiting, f"{names} would have to go, and may stay for now", patient_until - now)
        if spot.slot.claimed_by is None and self._is_before(one.model, waiting, now):
            return self._must_wait(waiting, "others have waited longer", _SOON_S)
        spot.slot.claimed_by = one.model
        if now < spot.free_from:
            return self._must_wait(waiting, f"what was just loaded on {spot.slot.key} may stay", spot.free_from - now)
        spot.slot.leaving = frozenset(spot.evict)
        if not spot.idle:
            return self._must_wait(
                waiting, f"{', '.join(spot.evict)} on {spot.slot.key} finish their requests", _SOON_S
            )
        why = "worth more than what it evicts" if deserved else "its turn after waiting"
        return Move(spot.slot, one, spot.evict, why)

    def _is_before(self, model: str, waiting: WaitingModel, now: float) -> bool:
        """Whether another whose patience has ended came before this one, and has no replica promised to it."""
        promised = {slot.claimed_by for slot in self.slots}
        return any(
            other.since < waiting.since
            and other.is_awaited
            and name != model
            and name not in promised
            and now >= max(other.since + self._settings.waits_s(self.hosted[name]), self._not_before[name])
            and all(slot.loading != name for slot in self.slots)
            for name, other in self._waiting.items()
        )

    def ahead(self, now: float, busy: Busy) -> Move | None:
        """A load that nobody waits for: a pinned model that is away; another copy of one that has too much to do;
        a model that was asked for, into memory that nobody uses."""
        self._forget_the_gone(now)
        for model, slot in self._home.items():
            if model not in slot.resident and self._may_load(model, now):
                spot = self._spot(slot, self.hosted[model], now, busy)
                if spot is not None and spot.idle and spot.free_from <= now:
                    return Move(slot, self.hosted[model], spot.evict, "pinned")
        move = self._another_copy(now, busy)
        if move is not None:
            return move
        if any(waiting.is_awaited for waiting in self._waiting.values()):
            # Whoever waits needs the link.
            return None
        absent = [m for m in self.hosted if not self.resident(m) and self._may_load(m, now)]
        for model in sorted(absent, key=lambda m: -self._worth.per_byte(m, now)):
            if self.counts[model].asked:
                spot = self._best(self.hosted[model], now, busy)
                if spot is not None and not spot.evict:
                    return Move(spot.slot, self.hosted[model], (), "ahead of demand, into free memory")
        return None

    def _another_copy(self, now: float, busy: Busy) -> Move | None:
        crowded: list[tuple[float, str]] = []
        for model in self.hosted:
            on = self.resident(model)
            if on and self._may_load(model, now):
                each = sum(busy(slot.key, model) for slot in on) / len(on)
                if each >= self._settings.copy_at_in_flight:
                    crowded.append((each, model))
        for each, model in sorted(crowded, reverse=True):
            spot = self._best(self.hosted[model], now, busy)
            if spot is None or not spot.idle or spot.free_from > now:
                continue
            # Of a copy only a part of the model's worth is gained, so the margin is the larger.
            if not spot.evict or self._worth.deserves(model, spot.loss, self._settings.margin / _COPY_WORTH, now):
                return Move(spot.slot, self.hosted[model], spot.evict, f"{each:.0f} in flight on each copy")
        return None

    def _may_load(self, model: str, now: float) -> bool:
        return now >= self._not_before[model] and all(slot.loading != model for slot in self.slots)

    def _best(self, one: Hosted, now: float, busy: Busy) -> _Spot | None:
        """Free memory, the tightest that holds it; else the replica that was claimed; else where it costs least."""
        home = self._home.get(one.model)
        slots = [home] if home is not None and home.usable else self.slots
        claimed: _Spot | None = None
        best: _Spot | None = None
        for slot in slots:
            if one.model in slot.resident or slot.claimed_by not in (None, one.model):
                continue
            spot = self._spot(slot, one, now, busy)
            if spot is None:
                if slot.claimed_by == one.model:
                    self._released(slot)
                continue
            if slot.claimed_by == one.model:
                claimed = spot
            if best is None or self._order(spot, one, now) < self._order(best, one, now):
                best = spot
        # Whoever leaves for it must not have left for nothing.
        return claimed if claimed is not None and best is not None and best.evict else best

    def _spot(self, slot: Slot, one: Hosted, now: float, busy: Busy) -> _Spot | None:
        if not slot.usable or slot.loading is not None or one.model in slot.unable:
            return None
        if one.taken_bytes > slot.capacity_bytes:
            return None
        short = one.taken_bytes - (slot.capacity_bytes - slot.used_bytes(self.hosted))
        if short <= 0:
            return _Spot(slot, (), 0.0, now, True, -short)
        candidates = [m for m in slot.resident if self._home.get(m) is not slot]
        if slot.claimed_by == one.model and slot.leaving:
            chosen = self._enough(slot, [m for m in candidates if m in slot.leaving], short, now)
            if chosen:
                return self._evicting(slot, chosen, now, busy)
        stayed = [m for m in candidates if now >= self._free_from(slot, m)]
        idle = [m for m in stayed if not busy(slot.key, m)]
        sets = {self._enough(slot, among, short, now) for among in (idle, stayed, candidates)}
        spots = [self._evicting(slot, chosen, now, busy) for chosen in sorted(sets) if chosen]
        return min(spots, key=lambda spot: self._order(spot, one, now), default=None)

    def _order(self, spot: _Spot, one: Hosted, now: float) -> tuple[float, float, float]:
        """At the least cost; the soonest; little memory left over."""
        wait_s = max(spot.free_from - now, 0.0)
        return self._cost(spot, one, wait_s, now), wait_s, spot.left_bytes

    def _cost(self, spot: _Spot, one: Hosted, wait_s: float, now: float) -> float:
        """Until the busy ones have finished the newcomer waits longer than for its load, so they count for more.
        Whoever still has residence costs the newcomer the rest of it, which is better waited for than a hot model
        is lost."""
        loss = spot.loss if spot.idle else spot.loss * (1.0 + self._settings.drain_s / max(one.load_s, 0.01))
        return loss + self._worth.lost(one.model, now) * wait_s / max(one.load_s, 0.01)

    def _enough(self, slot: Slot, candidates: Iterable[str], short: float, now: float) -> tuple[str, ...]:
        """The least worth by byte until there is room, less those that are not needed then; () if none will do."""
        chosen: list[str] = []
        freed = 0.0
        for model in sorted(candidates, key=lambda m: (self._copy_share(slot, m) * self._worth.per_byte(m, now), m)):
            if freed >= short:
                break
            chosen.append(model)
            freed += self.hosted[model].taken_bytes
        if freed < short:
            return ()
        for model in sorted(chosen, key=lambda m: -self._loss(slot, m, now)):
            if freed - self.hosted[model].taken_bytes >= short:
                chosen.remove(model)
                freed -= self.hosted[model].taken_bytes
        return tuple(chosen)

    def _evicting(self, slot: Slot, chosen: tuple[str, ...], now: float, busy: Busy) -> _Spot:
        return _Spot(
            slot,
            chosen,
            self._worth.combined([self._loss(slot, model, now) for model in chosen]),
            max(self._free_from(slot, model) for model in chosen),
            all(not busy(slot.key, model) for model in chosen),
            0.0,
        )

    def _free_from(self, slot: Slot, model: str) -> float:
        """When its residence ends: sooner if it has been quiet for as long as its load takes."""
        one, since = self.hosted[model], slot.resident[model]
        quiet_from = self._worth.asked_at[model] + one.load_s
        return max(since + self._settings.min_residence_s, min(since + self._settings.residence_s(one), quiet_from))

    def _loss(self, slot: Slot, model: str, now: float) -> float:
        return self._copy_share(slot, model) * self._worth.lost(model, now)

    def _copy_share(self, slot: Slot, model: str) -> float:
        return _COPY_WORTH if any(other is not slot and other.serves(model) for other in self.slots) else 1.0

    def began(self, move: Move, now: float) -> None:
        """The move is being made: whom it evicts is gone from here on, and its memory is taken."""
        slot = move.slot
        if slot.loading is not None:
            raise ValueError(f"{slot.key} is loading {slot.loading} already")
        for model in move.evict:
            del slot.resident[model]
            self._worth.evicted(model)
            self.counts[model].evictions += 1
        slot.loading, slot.loading_since = move.load.model, now
        self._released(slot)
        self._unclaim(move.load.model)

    def loaded(self, move: Move, now: float) -> None:
        slot, model = move.slot, move.load.model
        slot.loading = None
        slot.resident[model] = now
        self._failures[model] = 0
        counts = self.counts[model]
        counts.loads += 1
        counts.load_s.add(now - slot.loading_since)
        self.forget(model)

    def failed(self, move: Move, now: float) -> None:
        """The model is not there, and is tried again after a while that doubles with each failure."""
        model = move.load.model
        self._failures[model] += 1
        self.counts[model].failed += 1
        # 2 ** 30 is beyond any backoff, and a float.
        pause = self._settings.backoff_s * 2.0 ** min(self._failures[model] - 1, 30)
        self._again_after(
            move, min(pause, self._settings.most_backoff_s), f"loading {model} failed; it is tried again", now
        )

    def put_off(self, move: Move, why: str, now: float) -> None:
        """It was not tried, or not to its end: nothing is known against the model or the replica."""
        self._again_after(move, self._settings.backoff_s, why, now)

    def _again_after(self, move: Move, pause_s: float, why: str, now: float) -> None:
        model = move.load.model
        if move.slot.loading == model:
            move.slot.loading = None
        self._not_before[model], self._why_not_yet[model] = now + pause_s, why
        waiting = self._waiting.get(model)
        if waiting:
            self._must_wait(waiting, why, pause_s)

    def retry(self, model: str) -> None:
        """A load that failed may be tried at once: on another replica, where nothing speaks against it."""
        self._not_before[model] = -math.inf

    def observed(self, key: str, models: Iterable[str], now: float) -> None:
        """What a replica says it has: after a start, or when it came back. Models of no concern here are ignored."""
        slot = next(slot for slot in self.slots if slot.key == key)
        slot.resident = {m: slot.resident.get(m, now) for m in models if m in self.hosted and m != slot.loading}
        self._released(slot)

    def only(self, waited_for: Collection[str]) -> None:
        """Models that somebody waits for at present. The others keep their place for those who come again, and hold
        up nobody."""
        for model, waiting in self._waiting.items():
            waiting.is_awaited = model in waited_for
            if not waiting.is_awaited:
                self._unclaim(model)

    def forget(self, model: str) -> None:
        """Nobody waits for the model any more."""
        self._waiting.pop(model, None)
        self._unclaim(model)

    def _unclaim(self, model: str) -> None:
        for slot in self.slots:
            if slot.claimed_by == model:
                self._released(slot)

    def _released(self, slot: Slot) -> None:
        slot.claimed_by, slot.leaving = None, frozenset()

    def _forget_the_gone(self, now: float) -> None:
        gone = [
            model
            for model, waiting in self._waiting.items()
            if now > waiting.asked_at + _FORGET_WAITS * waiting.wait.retry_s + _FORGET_S
        ]
        for model in gone:
            self.forget(model)

    def _must_wait(self, waiting: WaitingModel, why: str, retry_s: float) -> Move | None:
        """No move, and the reason is kept for whoever asks."""
        waiting.wait = Wait(why, max(retry_s, 0.01))
        return None
