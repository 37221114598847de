"""`crosstie schedule`: a purchase schedule, quarter by quarter."""

from pathlib import Path
from typing import Any

import click
import msgspec

from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.options import FILE, flag_option, on_option, text_option, whole_option
from crosstie.cli.progress import progress
from crosstie.core.document import picked
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, share, significant
from crosstie.core.schedule import ScheduleRequest
from crosstie.decide.schedule.schedule import PurchaseSchedule, QuarterPlan, purchase_schedule
from crosstie.web.parts import Heading, Parts, Table, note
from crosstie.web.schedule_chart import schedule_picture

_KINDS = {"owned": "owned", "contract": "under contract", "rented": "rented", "there": "on hand"}


@click.command("schedule")
@click.argument("workload", type=FILE)
@on_option("Only these accelerators, announced ones among them.")
@whole_option("--quarters", 2, 20, "How many. [default: the file's, or 12]")
@text_option("--growth", "SHARE,...", "By quarter, such as 10%,10%,5%; the last goes on.")
@flag_option("--sold-only", "Without parts that were only announced.")
@plot_option("Draw it")
@answer_options()
def command(
    workload: Path, accelerators: str | None, quarters: int | None, growth: str | None, sold_only: bool,
    plot: Drawing, wanted: Wanted,
) -> int:  # fmt: skip
    """What to order now, what to rent until it comes, which option to keep, and what each quarter costs.

    \b
    crosstie schedule workload.toml
    crosstie schedule workload.toml --growth 15%,15%,5% --plot schedule.svg
    crosstie schedule workload.toml --on mi355x,b200,mi455x

    WORKLOAD is a file of `plan`; its [schedule] has growth by quarter, lead times, deliveries and contracts
    (docs/schedule.md). The orders have the least expected cost over worlds that differ in traffic growth, in what a
    GPU carries and in the delays of announced parts. Announced parts rest on their vendors' figures and on assumed
    prices: nobody has measured them. Exit status 1 when nothing is to be ordered or rented.
    """
    catalog = Catalog()
    asked = read_workload(catalog, find_workload(workload))
    asked = msgspec.structs.replace(asked, schedule=_changed(asked.schedule, quarters, growth))
    with progress("schedule") as on_progress:
        schedule = purchase_schedule(
            catalog, asked, names_in(accelerators), announced=not sold_only, on_progress=on_progress
        )
    plot.draw(lambda: schedule_picture(schedule))
    wanted.give(lambda: to_json(schedule), lambda _: parts(schedule))
    return 0 if any(quarter.gpus for quarter in schedule.quarters) else 1


def _changed(asked: ScheduleRequest, quarters: int | None, growth: str | None) -> ScheduleRequest:
    if quarters is not None:
        asked = msgspec.structs.replace(asked, quarters=quarters)
    if growth is not None:
        asked = msgspec.structs.replace(asked, growth=tuple(_step(word) for word in names_in(growth)))
    return asked


def _step(word: str) -> float:
    try:
        growth = 1.0 + float(word.removesuffix("%")) / (100.0 if word.endswith("%") else 1.0)
    except ValueError:
        raise BadInput(f"--growth {word}: write shares, such as 10%,10%,5%") from None
    if not 0.1 <= growth <= 10.0:
        raise BadInput(f"--growth {word}: must be from -90% to 900% a quarter")
    return growth


def parts(plan: PurchaseSchedule) -> Parts:
    first, last = plan.quarters[0].name, plan.quarters[-1].name
    yield (
        f"Schedule of {plan.workload.name}, {first} to {last}: {dollars(plan.usd)} expected, "
        f"80% of worlds {dollars(plan.usd_80[0])} to {dollars(plan.usd_80[1])}"
    )
    if plan.standing_usd:
        yield f"besides {dollars(plan.standing_usd)} for what is there: contracts to their ends, and running it"
    yield Heading("Now")
    for order in plan.orders:
        what = "order" if order.how == "buy" else f"sign {order.how}"
        yield f"- {what} {order.gpus:,} x {order.accelerator}, {dollars(order.usd)}, serving from {order.serves_from}"
    if not plan.orders:
        yield "- order nothing"
    for name, kinds in plan.quarters[0].gpus.items():
        if kinds.get("rented", 0.0) >= 0.5:
            yield f"- rent {kinds['rented']:,.0f} x {name} by the hour"
    yield Heading("Then, in the mean of all worlds")
    columns = ["quarter", ">peak", ">cost", ">80% of worlds", "~in use"]
    yield Table(columns, [_row(quarter) for quarter in plan.quarters])
    yield note("peak over today's, with 80% of worlds; GPUs in the mean of worlds, so that few is some or none")
    yield Heading("What it is worth")
    for name, more in plan.beside.items():
        word = f"{dollars(abs(more))} {'more' if more > 0 else 'less'}" if abs(more) > 0.005 * plan.usd else "the same"
        yield f"- {name}: {word}"
    yield from _announced(plan)


def _announced(schedule: PurchaseSchedule) -> Parts:
    for part in schedule.parts:
        told = part.accelerator.announced
        if told is None:
            continue
        rated = f"{part.likely_gpus:.3g} carry today's peak by its vendor's figures"
        price = f"{dollars(told.usd_low.value)} to {dollars(told.usd_high.value)} assumed"
        when = f"said for {told.expected.value}, {part.slip_months:.0f} months later in the mean"
        yield f"- {part.id}: in {share(schedule.announced[part.id])} of worlds; {rated}; {price}; {when}"
    for name, filled in schedule.only_rented.items():
        yield f"- {name} is only rented: sold by the rack, of which this fills {share(filled)}"
    if schedule.waiting_saves > 0.005 * schedule.usd:
        yield f"- announced parts save {dollars(schedule.waiting_saves)} of it; --sold-only plans without them"


def _row(plan: QuarterPlan) -> list[str]:
    used = [f"{significant(gpus)} {name} {_KINDS[kind]}" for name, kinds in plan.gpus.items()
            for kind, gpus in kinds.items() if gpus >= 0.5]  # fmt: skip
    middle, low, high = plan.demand
    peak = f"{middle:.2f}" if high - low < 0.005 else f"{middle:.2f} ({low:.2f}-{high:.2f})"
    ends = f"{dollars(plan.usd_80[0])} to {dollars(plan.usd_80[1])}"
    return [plan.name, peak, dollars(plan.usd), ends, "; ".join(used) or "-"]


def to_json(schedule: PurchaseSchedule) -> dict[str, Any]:
    return {
        **picked(schedule, "workload=workload.name schedule=asked usd usd_80 standing_usd now=orders quarters"),
        "others_usd_more": schedule.beside,
        "announced": [
            {
                "accelerator": part.id,
                "in_share_of_worlds": schedule.announced[part.id],
                **picked(part, "expected=accelerator.announced.expected.value slip_months"),
                **picked(part, "gpus_for_todays_peak=likely_gpus usd_assumed=accelerator.announced.usd.value"),
            }
            for part in schedule.parts
            if part.accelerator.announced
        ],
        **picked(schedule, "announced_parts_save_usd=waiting_saves only_rented"),
    }
