"""The report of a loop on the screen, and as Markdown made of what the screen shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from crosstie.cli.show import console, heading, say, show_table, taken_down
from crosstie.core.figures import dollars, milliseconds, percent, significant
from crosstie.web.report import Heading, Line, ReportPart, Table

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "output_tokens_per_s": "tok/s"}
_TITLES = {"ttft_s": "TTFT, ms", "tpot_s": "TPOT, ms", "output_tokens_per_s": "tok/s"}


def show_loop(made: Mapping[str, Any]) -> None:
    out = console()
    say(out, made["title"])
    if made["emulated"]:
        say(out, "EMULATED: no GPU ran; how well the loop finds out what the emulator was told", "yellow")
    verdicts = made["doctor"].get("verdicts", {})
    for name, verdict in verdicts.items():
        say(out, f"doctor: {name}: {verdict}")
    for finding in made["doctor"].get("findings", ()):
        if finding["severity"] in ("error", "warning"):
            say(out, f"- {finding['severity']}: {finding['what']}", "yellow")
    for note in made["notes"]:
        say(out, f"- {note}", "yellow")
    starts = ", ".join(f"{one:.0f} s" for one in made["starts_s"])
    say(out, f"{made['spent_s'] / 60:.1f} minutes" + (f", the engine's start {starts}" if starts else ""))
    _show_points(made)
    _show_questions(made)
    _show_errors(made)
    _show_plan(made)


def _show_points(made: Mapping[str, Any]) -> None:
    """A table a metric: points are compared within one."""
    out = console()
    heading(out, "Predicted, then measured")
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
        show_table(out, columns, rows)
    say(out, f"{made['inside']} of {made['rows']} inside their 80% intervals; loads are tokens in/out x clients")
    failed = sum(point["failed"] for point in made["points"])
    if failed:
        say(out, f"{failed} requests failed", "red")
    for why, points in made["doubtful"].items():
        say(out, f"{why}: {', '.join(points)}", "yellow")
    if made["not_measured"]:
        say(out, f"not measured for want of time: {', '.join(made['not_measured'])}")


def _show_questions(made: Mapping[str, Any]) -> None:
    if not made["questions"]:
        return
    out = console()
    rows = [[one["short"], *map(_narrowed, one["widths"].values())] for one in made["questions"]]
    rows.append(["in the middle", *map(_narrowed, made["widths"].values())])
    columns = ["asked about", *(f">{_NAMES[name]}" for name in made["widths"])]
    show_table(out, columns, rows, "What became surer: intervals, high over low, before and now")


def _narrowed(widths: Sequence[float]) -> str:
    return f"{widths[0]:.2f}x to {widths[1]:.2f}x"


def _show_errors(made: Mapping[str, Any]) -> None:
    if made["errors"]:
        rows = [
            [title, *(percent(table[m]["median_ape"]) if m in table else "-" for m in ("ttft", "tpot", "throughput"))]
            for title, table in made["errors"].items()
        ]
        show_table(console(), ["median error", ">TTFT", ">TPOT", ">tok/s"], rows, "What was learnt")


def _show_plan(made: Mapping[str, Any]) -> None:
    out, plans = console(), made["plan"]
    if made["not_planned"]:
        say(out, f"not planned: {made['not_planned']}", "yellow")
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
    show_table(out, ["", ">an hour", ">80% interval", ">a million tokens", "~fleet"], rows,
               f"The plan of {plans['workload']}")  # fmt: skip
    less = plans["usd_per_month_less"]
    if less is not None:
        fleet = "another fleet" if plans["before"]["pools"] != plans["after"]["pools"] else "the same fleet"
        bill = (
            f"{dollars(abs(less))} a month {'less' if less > 0 else 'more'}" if abs(less) >= 0.01 else "the same bill"
        )
        say(out, f"with what was measured: {fleet}, {bill}")


def _value(name: str, value: float) -> str:
    return milliseconds(value) if name in ("ttft_s", "tpot_s") else significant(value)


def _between(name: str, one: Mapping[str, float]) -> str:
    return f"{_value(name, one['low'])} to {_value(name, one['high'])}"


def report_markdown(made: Mapping[str, Any]) -> str:
    with taken_down() as parts:
        show_loop(made)
    return markdown_of(parts)


def markdown_of(parts: Sequence[ReportPart]) -> str:
    """What was taken down of the screen; the first line is the title."""
    lines: list[str] = []
    for place, part in enumerate(parts):
        if isinstance(part, Heading):
            lines += ["", f"## {part.text}", ""]
        elif isinstance(part, Table):
            lines += ["", _cells([one.name for one in part.columns])]
            lines += [_cells(["---:" if one.right else "---" for one in part.columns]), *map(_cells, part.rows), ""]
        elif isinstance(part, Line):
            text = f"`{part.text}`" if part.verbatim else part.text
            lines += [f"# {text}", ""] if place == 0 else [f"- {text}"] if part.item else ["", text]
    return "\n".join(lines).replace("\n\n\n", "\n\n").strip() + "\n"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
