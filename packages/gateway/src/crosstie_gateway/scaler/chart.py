"""A scaled day as a picture: GPUs of each supply over the hours, the fewest that would do, and a fixed fleet."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from crosstie.web.chart import colours, new_figure, save
from crosstie_gateway.scaler.fluid import Day


def draw_day(day: Day, gpus: Mapping[str, int], fewest: Sequence[float], fixed: float, title: str, file: Path) -> None:
    """`gpus`: of a replica, by supply; `fewest`: over the day, in windows of equal length; `fixed`: GPUs that stay."""
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    hours = [at / 3600.0 for at, _, _ in day.course]
    layers = [[asked[name] * each for _, asked, _ in day.course] for name, each in gpus.items()]
    axes.stackplot(hours, layers, labels=list(gpus), colors=colours(), step="post", alpha=0.75, linewidth=0)
    needed = [*fewest, fewest[-1]]
    axes.step(
        [24.0 * at / len(fewest) for at in range(len(needed))], needed, where="post", color="0.1", linewidth=1.4,
        label="the fewest that carry the traffic",
    )  # fmt: skip
    axes.axhline(fixed, color="0.3", linewidth=1.4, linestyle="--", label="a fleet for the peak")
    axes.set_xlim(hours[0] // 1, hours[-1])
    axes.set_ylim(0, 1.25 * max(fixed, *needed, *map(sum, zip(*layers, strict=True))))
    axes.set_xticks(range(0, 25, 3), [f"{hour % 24:02d}:00" for hour in range(0, 25, 3)])
    axes.set_ylabel("GPUs asked for")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    save(figure, file, "a day in virtual time, with predicted capacities; no GPU ran", axis="y")
