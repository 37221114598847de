"""Two pools of two vendors, as a scaler knows them."""

from typing import Any

import numpy as np

from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Capacities, ClassPart, FleetObservation, Scaler

# A replica of either takes two requests a second; the second costs twice as much, and starts in half the time.
KNOWN = Capacities(
    parts=[ClassPart("chat", 1.0)],
    rate={"cheap": np.array([2.0]), "dear": np.array([2.0])},
    gpus={"cheap": 1, "dear": 1},
    usd_per_gpu_hour={"cheap": 2.0, "dear": 4.0},
    start_s={"cheap": 400.0, "dear": 200.0},
)
CHEAP = Supply(name="cheap", pool="cheap", most=10)
DEAR = Supply(name="dear", pool="dear", most=20)


def rules(*supplies: Supply, **more: Any) -> ScaleRules:
    return ScaleRules(supplies=supplies or (CHEAP, DEAR), every_s=60.0, **more)


def seen(at_s: float, per_s: float, empty: dict[str, int] | None = None, **there: tuple[int, int]) -> FleetObservation:
    """`there`: by supply, replicas that serve and those that were asked for."""
    return FleetObservation(
        at_s=at_s, requests_per_s={"chat": per_s}, over_s=60.0, empty=empty or {},
        ready={name: ready for name, (ready, _) in there.items()},
        wanted={name: wanted for name, (_, wanted) in there.items()},
    )  # fmt: skip


def watched(scaler: Scaler, minutes: int, per_s: float, begin_s: float = 0.0, **there: tuple[int, int]) -> float:
    """The same for so many minutes; the moment after them."""
    for minute in range(minutes):
        scaler.decide(seen(begin_s + 60.0 * minute, per_s, None, **there))
    return begin_s + 60.0 * minutes
