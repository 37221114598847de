"""Which replicas of a pool a decision looks at: all of a small one; of a large one a few, so that a decision costs the
same however large it is.

Equal replicas under much the same load differ little, and the best of sixteen is nearly the best of all. Whoever
differs is looked at in any case: where the conversation was before, and those who hold most of the prompt. The others
begin at another place in each decision, so that gateways which know each other's load some milliseconds late do not
all take the same one.
"""

from collections.abc import Collection
from typing import Final

from crosstie.route.ask import Ask
from crosstie.route.filters import may_take
from crosstie.route.live import LivePool, Replica

# Of a larger pool, those that may be sent to and are looked at, and those that are because of what they hold.
LOOKED_AT: Final = 16
HOLDERS: Final = 8


def looked_at(pool: LivePool, ask: Ask, now: float, exclude: Collection[str], panic: bool, turn: int) -> list[Replica]:
    """Those of a small pool as they are; of a large one those that may be sent a request, brought up to this moment."""
    replicas = pool.replicas
    if pool.holders is None:
        return replicas
    found = [one for one in _favoured(pool, ask) if may_take(one, now, exclude, panic)]
    count, left = len(replicas), LOOKED_AT
    at = _scattered(turn, count)
    for _ in range(count):
        replica = replicas[at]
        if may_take(replica, now, exclude, panic):
            found.append(replica)
            left -= 1
            if not left:
                break
        at += 1
        if at == count:
            at = 0
    return found


def most_held(pool: LivePool, ask: Ask, block_tokens: float) -> float:
    """Tokens of the prompt that one of its replicas may hold, at the most."""
    most = ask.input_tokens - 1.0
    holders = pool.holders
    if holders is not None and ask.tokens is None:
        most = min(most, holders.depth(ask.prefix) * block_tokens)
    return max(most, 0.0)


def _favoured(pool: LivePool, ask: Ask) -> list[Replica]:
    """Where the conversation was before, and those that hold most of the prompt."""
    holders = pool.holders
    # Of what a quarter of them hold, some are among the others who are looked at.
    common = max(len(pool.replicas) // 4, HOLDERS)
    numbers = holders.most(ask.prefix, HOLDERS, common) if holders is not None and ask.prefix else []
    replicas = [pool.replicas[number] for number in numbers]
    home = ask.under_way.home if ask.under_way is not None else None
    if isinstance(home, Replica) and home.pool is pool and not home.draining and home not in replicas:
        replicas.append(home)
    return replicas


def _scattered(turn: int, count: int) -> int:
    """One of so many places, which has nothing to do with those of turns before: whoever has every second turn comes
    to all of them as well."""
    mixed = turn & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    mixed = ((mixed ^ (mixed >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 15)) % count
