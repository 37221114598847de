"""Usage as it is kept: numbers by hour, key, model, class, pool and how requests ended. Days and months are in UTC."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

DAY_S = 86_400

# What usage may be listed by.
By = Literal["key", "team", "model", "pool", "class", "outcome", "code", "hour", "day", "month"]
BYS: tuple[By, ...] = get_args(By)


# What a number is counted under: the hour's beginning (seconds since the epoch), the key's id (0: none), model, class,
# pool, how it ended, and the error's code. A plain tuple, since one is made at every request.
Line = tuple[int, int, str, str, str, str, str]


@dataclass(slots=True)
class UsageCounts:
    """Added to at every request."""

    requests: int = 0
    # Those whose tokens were counted by the engine; the others' were estimated, or there were none.
    counted: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """What is written in one transaction. A store counts each (process, sequence) once; a process's sequence only
    grows."""

    process: str
    sequence: int
    lines: dict[Line, UsageCounts]

    @property
    def requests(self) -> int:
        return sum(counts.requests for counts in self.lines.values())

    def usd_by_key(self) -> dict[int, float]:
        usd: dict[int, float] = defaultdict(float)
        for (_, key_id, *_), counts in self.lines.items():
            usd[key_id] += counts.usd
        return usd


def day_name(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def month_name(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m")


def day_end(at: float) -> float:
    return (int(at // DAY_S) + 1) * float(DAY_S)


def month_end(at: float) -> float:
    first = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # Thirty-two days on is in the next month, whichever it is.
    return (first + timedelta(days=32)).replace(day=1).timestamp()
