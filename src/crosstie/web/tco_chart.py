"""The tornado as a picture: what each input, alone at its ends, makes of the answer. Needs the `plot` extra."""

from typing import Any

from crosstie.decide.cost.assessment import Assessment, describe, ends_of, saving
from crosstie.web.chart import Picture, colours, frame, in_percent, new_figure

_NOTE = "blue: the input at its low end, orange: at its high end; predicted, not measured"


def tornado(assessed: Assessment) -> Picture | None:
    """The widest bar on top; from the input's low end to its high end, around the likely answer. None where every input
    is exact."""
    moves = "; ".join(f"{describe(bar)}: {ends_of(bar)}" for bar in assessed.tornado[:3])
    made = Picture(lambda: _tornado(assessed), _NOTE, f"what moves the answer most: {moves}", {"axis": "x"})
    return made if assessed.tornado else None


def _tornado(assessed: Assessment) -> Any:
    bars = list(reversed(assessed.tornado))
    figure = new_figure(9, 1.6 + 0.38 * len(bars))
    axes = figure.subplots()
    low_colour, high_colour = colours()[1], colours()[0]
    is_saving = len(assessed.ranking) > 1
    middle = _likely(assessed)
    for at, bar in enumerate(bars):
        for end, colour in ((bar.outcome_at_low, low_colour), (bar.outcome_at_high, high_colour)):
            axes.barh(at, end - middle, left=middle, color=colour, height=0.45)
        # Over its bar: beside it words would leave a phone no room for bars.
        axes.text(0.0, at + 0.25, f" {describe(bar)}: {ends_of(bar)}", fontsize=8, va="bottom", in_layout=False,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(bars) - 0.1)
    axes.axvline(middle, color="0.2", linewidth=0.8)
    of, unit = assessed.ranking[0], "USD per million output tokens"
    if is_saving:
        first, second = assessed.ranking[:2]
        in_percent(axes.xaxis)
        of, unit = f"{first} against {second}", f"saving of {first} against {second} per output token"
        unit += f"; below 0 {second} is cheaper"
    frame(axes, f"{of}: one input at a time, the others likely", x=unit)
    return figure


def _likely(assessed: Assessment) -> float:
    costs = [assessed.usd_per_mtok[name] for name in assessed.ranking[:2]]
    return costs[0] if len(costs) == 1 else saving(*costs)
