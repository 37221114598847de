"""The report of a loop."""

from collections.abc import Mapping, Sequence
from typing import Any

from crosstie.core.figures import dollars, milliseconds, percent, significant
from crosstie.web.parts import Heading, Line, Parts, Table, caution

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "output_tokens_per_s": "tok/s"}
_TITLES = {"ttft_s": "TTFT, ms", "tpot_s": "TPOT, ms", "output_tokens_per_s": "tok/s"}


def loop_parts(made: Mapping[str, Any]) -> Parts:
    yield made["title"]
    if made["emulated"]:
        yield caution("EMULATED: no GPU ran; how well the loop finds out what the emulator was told")
    verdicts = made["doctor"].get("verdicts", {})
    yield from (f"doctor: {name}: {verdict}" for name, verdict in verdicts.items())
    for finding in made["doctor"].get("findings", ()):
        if finding["severity"] in ("error", "warning"):
            yield caution(f"- {finding['severity']}: {finding['what']}")
    yield from (caution(f"- {note}") for note in made["notes"])
    starts = ", ".join(f"{one:.0f} s" for one in made["starts_s"])
    yield f"{made['spent_s'] / 60:.1f} minutes" + (f", the engine's start {starts}" if starts else "")
    yield from _points(made)
    yield from _questions(made)
    yield from _errors(made)
    yield from _plan(made)


def _points(made: Mapping[str, Any]) -> Parts:
    """A table a metric: points are compared within one."""
    yield Heading("Predicted, then measured")
    for name, title in _TITLES.items():
        rows = [
            [point["short"], _value(name, row["predicted"]["value"]), _between(name, row["predicted"]),
             _value(name, row["measured"]), f"{row['error']:+.0%}", "yes" if row["inside"] else "NO",
             _value(name, row["predicted_after"]["value"]) if row["predicted_after"] else "-"]
            for point in made["points"]
            for row in [point["metrics"].get(name)]
            if row
        ]  # fmt: skip
        columns = [title, ">predicted", ">80% interval", ">measured", ">error", "inside", ">predicted now"]
        yield Table(columns, rows)
    yield f"{made['inside']} of {made['rows']} inside their 80% intervals; loads are tokens in/out x clients"
    failed = sum(point["failed"] for point in made["points"])
    if failed:
        yield Line(f"{failed} requests failed", "red")
    yield from (caution(f"{why}: {', '.join(points)}") for why, points in made["doubtful"].items())
    if made["not_measured"]:
        yield f"not measured for want of time: {', '.join(made['not_measured'])}"


def _questions(made: Mapping[str, Any]) -> Parts:
    if not made["questions"]:
        return
    rows = [[one["short"], *map(_narrowed, one["widths"].values())] for one in made["questions"]]
    rows.append(["in the middle", *map(_narrowed, made["widths"].values())])
    columns = ["asked about", *(f">{_NAMES[name]}" for name in made["widths"])]
    yield Table(columns, rows, "What became surer: intervals, high over low, before and now")


def _narrowed(widths: Sequence[float]) -> str:
    return f"{widths[0]:.2f}x to {widths[1]:.2f}x"


def _errors(made: Mapping[str, Any]) -> Parts:
    if made["errors"]:
        rows = [
            [title, *(percent(table[m]["median_ape"]) if m in table else "-" for m in ("ttft", "tpot", "throughput"))]
            for title, table in made["errors"].items()
        ]
        yield Table(["median error", ">TTFT", ">TPOT", ">tok/s"], rows, "What was learnt")


def _plan(made: Mapping[str, Any]) -> Parts:
    plans = made["plan"]
    if made["not_planned"]:
        yield caution(f"not planned: {made['not_planned']}")
    if plans is None:
        return
    rows = []
    for when, title in (("before", "before"), ("after", "now")):
        one = plans[when]
        ends = one["interval_usd_per_hour"]
        rows.append([
            title, dollars(one["usd_per_hour"]) if one["answered"] else "no fleet",
            f"{dollars(ends[0])} to {dollars(ends[1])}" if ends else "-",
            dollars(one["usd_per_million"]) if one["usd_per_million"] is not None else "-",
            "; ".join(one["pools"].values()) or "-",
        ])  # fmt: skip
    columns = ["", ">an hour", ">80% interval", ">a million tokens", "~fleet"]
    yield Table(columns, rows, f"The plan of {plans['workload']}")
    less = plans["usd_per_month_less"]
    if less is not None:
        fleet = "another fleet" if plans["before"]["pools"] != plans["after"]["pools"] else "the same fleet"
        bill = (
            f"{dollars(abs(less))} a month {'less' if less > 0 else 'more'}" if abs(less) >= 0.01 else "the same bill"
        )
        yield f"with what was measured: {fleet}, {bill}"


def _value(name: str, value: float) -> str:
    return milliseconds(value) if name in ("ttft_s", "tpot_s") else significant(value)


def _between(name: str, one: Mapping[str, float]) -> str:
    return f"{_value(name, one['low'])} to {_value(name, one['high'])}"
