"""A purchase schedule as a picture: what carries the peak quarter by quarter, and how the peak may grow."""

from typing import Any

from crosstie.decide.schedule.schedule import PurchaseSchedule
from crosstie.web.chart import Picture, colours, frame, new_figure

_HATCHES = {"there": "..", "owned": "", "contract": "//", "rented": "xx"}
_WORDS = {"there": "on hand", "owned": "owned", "contract": "under contract", "rented": "rented"}


def schedule_picture(schedule: PurchaseSchedule) -> Picture:
    coming = any(part.accelerator.announced for part in schedule.parts)
    note = "predicted, means over worlds" + ("; announced parts by their vendors' figures" if coming else "")
    title = f"{schedule.workload.name}: what carries the traffic, by quarter"
    return Picture(lambda: _drawn(schedule, title), note, title, {"axis": "y"})


def _drawn(schedule: PurchaseSchedule, title: str) -> Any:
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    quarters = schedule.quarters
    places = list(range(len(quarters)))
    names = [part.id for part in schedule.parts if any(part.id in quarter.carried for quarter in quarters)]
    below = [0.0] * len(quarters)
    for name, colour in zip(names, colours() * 3, strict=False):
        for kind, hatch in _HATCHES.items():
            height = [quarter.carried.get(name, {}).get(kind, 0.0) for quarter in quarters]
            if max(height) < 1e-3:
                continue
            axes.bar(
                places, height, bottom=below, color=colour, alpha=0.8, hatch=hatch, edgecolor="white", linewidth=0,
                label=f"{name}, {_WORDS[kind]}",
            )  # fmt: skip
            below = [a + b for a, b in zip(below, height, strict=True)]
    middle, low, high = (list(ends) for ends in zip(*(quarter.demand for quarter in quarters), strict=True))
    axes.plot(places, middle, color="0.1", linewidth=1.6, label="peak over today's")
    axes.fill_between(places, low, high, color="0.1", alpha=0.12, linewidth=0, label="80% of worlds")
    axes.set_xticks(places, [quarter.name for quarter in quarters], rotation=45, ha="right")
    frame(axes, title, y="share of today's peak", legend="upper left", ncols=2)
    return figure
