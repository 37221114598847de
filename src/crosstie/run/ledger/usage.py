"""Usage as it is kept: numbers by hour, key, model, class, pool and how requests ended."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

# What usage may be listed by.
By = Literal["key", "model", "pool", "class", "outcome", "code", "hour", "day", "month"]
BYS: tuple[By, ...] = get_args(By)


# What a number is counted under: the beginning of its hour (seconds since the epoch), the key's id (0: none), model,
# class, pool, how it ended, and the error's code. A plain tuple, since one is made at every request.
Line = tuple[int, int, str, str, str, str, str]


class Counts:
    """Plain and mutable: added to at every request."""

    __slots__ = ("counted", "input_tokens", "output_tokens", "requests", "usd")

    def __init__(self, requests: int = 0, counted: int = 0, input_tokens: int = 0, output_tokens: int = 0,
                 usd: float = 0.0):  # fmt: skip
        # `counted`: those whose tokens were counted by the engine; the others' were estimated, or there were none.
        self.requests, self.counted = requests, counted
        self.input_tokens, self.output_tokens, self.usd = input_tokens, output_tokens, usd


class Batch(NamedTuple):
    """What is written in one transaction. A store counts a (process, sequence) once, however often it is tried; the
    sequence of a process only grows."""

    process: str
    sequence: int
    lines: dict[Line, Counts]

    @property
    def requests(self) -> int:
        return sum(counts.requests for counts in self.lines.values())

    def usd_by_key(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for (_, key_id, *_), counts in self.lines.items():
            found[key_id] = found.get(key_id, 0.0) + counts.usd
        return found


class Used(NamedTuple):
    """A row of an account: the values of what it is listed by, and its sums."""

    of: tuple[str, ...]
    # Those that were let in, those that were refused (by limits, targets, keys), and those let in that failed.
    requests: int
    refused: int
    failed: int
    input_tokens: int
    output_tokens: int
    usd: float


def total(rows: Iterable[Used]) -> Used:
    rows = list(rows)
    return Used(
        of=(),
        requests=sum(row.requests for row in rows),
        refused=sum(row.refused for row in rows),
        failed=sum(row.failed for row in rows),
        input_tokens=sum(row.input_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
        usd=sum(row.usd for row in rows),
    )
