"""A day gone through beforehand: what the scaler would do and cost, beside the planned fleet and an autoscaler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from crosstie.core.progress import OnProgress, no_progress
from crosstie_gateway.scaler.fluid import Day, Traffic, fewest_gpus, fluid_day, replicas_for
from crosstie_gateway.scaler.platform import Controller
from crosstie_gateway.scaler.rivals import ByScaler, Fixed, Hpa
from crosstie_gateway.scaler.scaler import Scaler

PLANNED, SCALED, HPA = "as planned", "crosstie scale", "HPA, 70% busy"
_HPA_BUSY = 0.7
# Decisions of a rehearsal are no closer than this: it takes seconds, and starts take minutes.
_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Rehearsal:
    days: dict[str, Day]
    # GPUs: by windows of the day the fewest that carry the traffic; and those of the planned fleet.
    fewest: list[float]
    fixed_gpus: float

    @property
    def fewest_gpu_hours(self) -> float:
        return 24.0 * float(np.mean(self.fewest))

    def document(self) -> dict[str, Any]:
        rows = {
            name: {
                "within": day.share, "worst_hour": day.worst_hour[0], "worst_hour_within": day.worst_hour[1],
                "gpu_hours": day.gpu_hours, "usd": day.bill.usd, "moves": day.bill.moves, "flaps": day.bill.flaps,
            }
            for name, day in self.days.items()
        }  # fmt: skip
        course = [{"at_s": at, "asked": asked} for at, asked, _ in self.days[SCALED].course]
        return {"days": rows, "fewest_gpu_hours": self.fewest_gpu_hours, "course": course}


def rehearse(
    scaler: Scaler, rates: Mapping[str, float], planned: Mapping[str, int], on_progress: OnProgress = no_progress
) -> Rehearsal:
    """`rates`: requests/s of each class at its peak. What `scaler` has learnt is taken along, and it learns nothing."""
    known, days = scaler.known, scaler.days
    # From midnight on the day's own clock.
    rules = msgspec.structs.replace(
        scaler.rules, every_s=max(scaler.rules.every_s, _EVERY_S), utc_offset_hours=0.0
    )  # fmt: skip
    traffic: Traffic = {name: (rate, tuple(days.get(name, ()))) for name, rate in rates.items()}
    begin = replicas_for(rules, known, traffic, 0.0)
    state = msgspec.json.decode(msgspec.json.encode(scaler.state), type=type(scaler.state))
    controllers: dict[str, tuple[Controller, Mapping[str, int]]] = {
        PLANNED: (Fixed(planned), planned),
        HPA: (Hpa(rules, target=_HPA_BUSY), begin),
        SCALED: (ByScaler(Scaler(rules, known, days, state)), begin),
    }
    gone = {}
    for number, (name, (controller, start)) in enumerate(controllers.items()):
        on_progress(number, len(controllers), name)
        gone[name] = fluid_day(rules, known, controller, traffic, start)
    gpus = sum(known.gpus[supply.pool] * planned.get(supply.name, 0) for supply in rules.supplies)
    return Rehearsal(gone, fewest_gpus(rules, known, traffic), float(gpus))
