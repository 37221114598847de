"""What was used, as it is listed by key, day or pool: the row that the gateway's store answers with."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Used:
    """A row of an account: the values it is grouped by, and its sums."""

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
    sums = {field.name: sum(getattr(row, field.name) for row in rows) for field in fields(Used) if field.name != "of"}
    return Used(of=(), **sums)


def hour_of(at: float) -> int:
    """The beginning of its hour, in seconds since the epoch."""
    return int(at // HOUR_S) * HOUR_S
