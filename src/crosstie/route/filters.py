"""Which pools and replicas may take a request at all; in words, which may not and why.

What a pool is (its model, context, modalities) does not change while a request waits: such misses are refused. What a
replica does (down, draining, busy, full) may change.
"""

from collections.abc import Collection
from typing import Final

from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import LiveFleet, LivePool, Replica

# Prompts are counted by their bytes before they are sent, and may be this much shorter than that.
_SURELY: Final = 0.75


def _surely(ask: Ask) -> float:
    """Tokens that it comes to at the least."""
    guessed = 0.0 if ask.counted else (1.0 - _SURELY) * ask.input_tokens / ask.prompts
    return longest(ask) - guessed


def longest(ask: Ask) -> float:
    """Tokens that the request may come to; of several prompts, each."""
    return ask.input_tokens / ask.prompts + (ask.output_tokens if ask.most_output is None else float(ask.most_output))


def fitting(pools: list[LivePool], ask: Ask) -> list[LivePool]:
    """Pools of the model that could serve it if they had room."""
    needs, pin, modalities = longest(ask), ask.pin, ask.modalities
    return [pool for pool in pools if needs <= pool.max_context and _may(pool, pin, modalities)] or _barely(pools, ask)


def _may(pool: LivePool, pin: str | None, modalities: frozenset[str]) -> bool:
    if pool.draining or (pin is not None and pool.name != pin):
        return False
    return pool.modalities is None or modalities <= pool.modalities


def _barely(pools: list[LivePool], ask: Ask) -> list[LivePool]:
    """If none is long enough by the estimate: the longest, unless the request is surely too long even for that.

    An engine that refuses it says so itself; a request that would have fitted must not be refused for a guess.
    """
    needs = _surely(ask)
    able = [pool for pool in pools if _may(pool, ask.pin, ask.modalities) and needs <= pool.max_context]
    most = max((pool.max_context for pool in able), default=0)
    return [pool for pool in able if pool.max_context == most]


def refused(fleet: LiveFleet, ask: Ask) -> Decision:
    """Why no pool fits."""
    pools = fleet.by_model.get(ask.model)
    if not pools:
        known = ", ".join(sorted(fleet.by_model))
        return Decision("refuse", f"no pool serves {ask.model}; there are {known}", refusal="unknown-model")
    if ask.pin is not None:
        pools = [pool for pool in pools if pool.name == ask.pin]
        if not pools:
            return Decision("refuse", f"no pool {ask.pin} serves {ask.model}", refusal="pin")
    able = [pool for pool in pools if pool.modalities is None or ask.modalities <= pool.modalities]
    if not able:
        asked = " and ".join(sorted(ask.modalities))
        return Decision("refuse", f"no pool of {ask.model} takes {asked}", refusal="modality")
    most = max(pool.max_context for pool in able)
    if _surely(ask) > most:
        said = f"{longest(ask):.0f} tokens exceed the {most} of the longest context"
        return Decision("refuse", said, refusal="context")
    return Decision("refuse", f"every pool of {ask.model} is draining", refusal="unavailable")


def pool_dropped(pool: LivePool, ask: Ask, fits: bool) -> str | None:
    """The first filter that drops a pool, in words; None: none does. `fits`: what `fitting` said of it."""
    if pool.pool.model != ask.model:
        return f"model: serves {pool.pool.model}"
    if ask.pin is not None and pool.name != ask.pin:
        return f"pin: the request asks for {ask.pin}"
    if pool.modalities is not None and not ask.modalities <= pool.modalities:
        missing = ", ".join(sorted(ask.modalities - pool.modalities))
        return f"modality: takes no {missing}"
    if not fits and longest(ask) > pool.max_context:
        return f"context: {longest(ask):.0f} tokens exceed {pool.max_context}"
    if pool.draining:
        return "draining: the pool is being emptied"
    if not pool.replicas:
        return "up: the pool has no backends"
    return None


def replica_dropped(replica: Replica, now: float, exclude: Collection[str]) -> str | None:
    """The first filter that drops a replica, in words; None: none does."""
    if replica.key in exclude:
        return "tried: it has failed this request already"
    if not replica.up:
        return f"up: {replica.why_down or 'down'}"
    if replica.draining:
        return "draining: it is being emptied"
    if replica.presence is not None and not replica.presence.there:
        return replica.presence.words
    if replica.busy_until > now:
        return f"busy: its engine is full, asked again in {replica.busy_until - now:.1f} s"
    limit = replica.view.limit
    if replica.in_flight >= limit:
        slow = f", {replica.share_at(now):.0%} of its full share" if replica.share_at(now) < 1.0 else ""
        elsewhere = replica.elsewhere.in_flight
        return f"room: {replica.in_flight + elsewhere} in flight of {limit + elsewhere}{slow}"
    return None


def may_take(replica: Replica, now: float, exclude: Collection[str], panic: bool) -> bool:
    """Whether it may be sent a request now; one of a large pool is brought up to this moment."""
    if not replica.up and not (panic and replica.suspected):
        return False
    if replica.draining or replica.busy_until > now or (exclude and replica.key in exclude):
        return False
    if replica.pool.holders is not None:
        if replica.elsewhere.is_news(now):
            replica.read_elsewhere(now)
        if now >= replica.fresh_until:
            replica.advance(now)
    return replica.in_flight < replica.view.limit and replica.busy_until <= now


def available(pool: LivePool, now: float, exclude: Collection[str], panic: bool) -> list[Replica]:
    """Replicas that may be sent a request now; `panic`: those that are only suspected as well."""
    return [replica for replica in pool.replicas if may_take(replica, now, exclude, panic)]


def without_room(pools: list[LivePool], now: float, exclude: Collection[str]) -> Decision:
    """No replica may be sent it now: wait if one of them is merely full, or its model to be loaded there; refuse if
    none is up."""
    for pool in pools:
        for one in pool.replicas:
            if one.up and not one.draining and one.key not in exclude and (one.presence is None or one.presence.there):
                return Decision("wait", lambda: _full(pools, now, exclude))
    everybody = [replica for pool in pools for replica in pool.replicas]
    up = [one for one in everybody if one.up and not one.draining]
    absent = [one for one in up if one.presence is not None and not one.presence.there]
    if absent:
        states = [one.presence.state for one in absent if one.presence is not None]
        said = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
        return Decision("wait", f"{pools[0].pool.model} has to be loaded first: {said}", refusal="cold")
    tried = sum(one.key in exclude for one in everybody)
    down = len(everybody) - tried
    sides = "".join(f"; {pool.name}: {pool.why_out()}" for pool in pools if pool.prefill is not None and down)
    said = f"no replica is up: {down} down or draining, {tried} tried{sides}"
    return Decision("refuse", said, refusal="unavailable")


def _full(pools: list[LivePool], now: float, exclude: Collection[str]) -> str:
    up = [one for pool in pools for one in pool.replicas if one.up and not one.draining and one.key not in exclude]
    full = [replica for replica in up if replica.presence is None or replica.presence.there]
    busy = sum([replica.busy_until > now for replica in full])
    said = f", {busy} of them by their engine's word" if busy else ""
    return f"all {len(full)} replicas that are up are full{said}"
