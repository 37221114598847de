"""Signals to watch: what would change a decision, how it is looked at, and who says so, as rows of a file."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from crosstie.catalog.reading import read_records, sourced_file
from crosstie.core.errors import BadData

Kind = Literal["price", "release", "kernel", "by-hand"]
# What each kind cannot be looked at without.
_NEEDS: dict[str, tuple[str, ...]] = {
    "price": ("accelerators",), "release": ("engine",), "kernel": ("engine", "rule"), "by-hand": (),
}  # fmt: skip


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    kind: Kind
    what: str
    # What a plan would become, and how the signal is looked at.
    changes: str
    how: str
    source: str
    date: str
    # Plans that it concerns: those that weigh one of these, or have a pool under this engine; empty: every plan.
    accelerators: tuple[str, ...] = ()
    engine: str = ""
    # A row of preflight.
    rule: str = ""
    # By how much a price must have moved.
    share: Annotated[float, msgspec.Meta(ge=0.001, le=10)] = 0.1


def read_signals(file: Path) -> dict[str, Signal]:
    with sourced_file(file, ["signal"]) as (raw, sources):
        signals = read_records(file, "signal", raw.get("signal", []), Signal, sources)
    for index, signal in enumerate(signals):
        for key in _NEEDS[signal.kind]:
            if not getattr(signal, key):
                reason = f"missing: a signal of kind {signal.kind} is looked at by it"
                raise BadData(file, f"signal[{index}].{key}", reason)
    return {signal.id: signal for signal in signals}
