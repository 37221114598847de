"""How saved plans look beside what would be planned today."""

from typing import Any

from rich.text import Text

from crosstie.core.document import picked, plain
from crosstie.core.figures import dollars, plural
from crosstie.decide.plan.watch import PriceMove, Watched
from crosstie.web.parts import Parts, note


def watched_parts(found: list[Watched]) -> Parts:
    for one in found:
        word = f"FLIPPED by {one.because}" if one.flipped else "holds"
        yield Text.assemble((one.then.workload.name, "bold"), f"  {one.file}, made {one.then.made}: ", (word, "bold"))
        now = one.now.usd_per_hour if one.now.answered else None
        yield f"  then {_fleet(one.then.gpus, one.then.usd_per_hour)}; now {_fleet(one.now.gpus, now)}"
        yield from (f"  {_move(move, newer=move in one.newer_prices)}" for move in one.moves)
        if one.recalibrated:
            yield "  the calibration is another than it was"
        for names, what in ((one.appeared, "priced now and not then"), (one.gone, "priced then and not now")):
            if names:
                yield f"  {what}: {', '.join(names)}"
        for sign in one.signs:
            # Prices that moved stand above.
            if sign.state == "changed" and sign.signal.kind != "price":
                yield f"  signal {sign.signal.id}: {sign.now}; it changes {sign.signal.changes}"
        quiet, by_hand = (sum(sign.state == state for sign in one.signs) for state in ("quiet", "by hand"))
        if quiet or by_hand:
            yield note(f"  watched and unchanged: {plural(quiet, 'signal')}; by hand: {by_hand} (--json has them)")


def _fleet(gpus: dict[str, int], usd_per_hour: float | None) -> str:
    if usd_per_hour is None:
        return "no fleet"
    return f"{', '.join(f'{n} {name}' for name, n in gpus.items())}, {dollars(usd_per_hour)} an hour"


def _move(move: PriceMove, newer: bool) -> str:
    age = f", of {move.dated}: the plan is older than this price" if newer else ""
    return f"{move.accelerator}: {dollars(move.then)} then, {dollars(move.now)} now ({move.change:+.0%}){age}"


def watched_json(one: Watched) -> dict[str, Any]:
    return {
        **picked(one, "file name=then.workload.name made=then.made flipped because"),
        "then": picked(one.then, "gpus usd_per_hour"),
        "now": {"gpus": one.now.gpus, "usd_per_hour": one.now.usd_per_hour if one.now.answered else None},
        "prices": [{**plain(move), "newer_than_plan": move in one.newer_prices} for move in one.moves],
        **picked(one, "appeared gone recalibrated"),
        "signals": [{**plain(sign.signal), **picked(sign, "state now")} for sign in one.signs],
    }
