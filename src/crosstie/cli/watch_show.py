"""How saved plans look beside what would be planned today."""

from typing import Any

from rich.text import Text

from crosstie.core.document import picked, plain
from crosstie.core.figures import dollars, plural
from crosstie.decide.plan.watch import PriceMove, Watched
from crosstie.web.parts import Parts, note


def watched_parts(plans: list[Watched]) -> Parts:
    for old in plans:
        word = f"FLIPPED by {old.because}" if old.flipped else "holds"
        yield Text.assemble((old.then.workload.name, "bold"), f"  {old.file}, made {old.then.made}: ", (word, "bold"))
        now = old.now.usd_per_hour if old.now.answered else None
        yield f"  then {_fleet(old.then.gpus, old.then.usd_per_hour)}; now {_fleet(old.now.gpus, now)}"
        yield from (f"  {_move(move, newer=move in old.newer_prices)}" for move in old.moves)
        if old.recalibrated:
            yield "  the calibration is another than it was"
        for names, what in ((old.appeared, "priced now and not then"), (old.gone, "priced then and not now")):
            if names:
                yield f"  {what}: {', '.join(names)}"
        for sign in old.signs:
            # Prices that moved stand above.
            if sign.state == "changed" and sign.signal.kind != "price":
                yield f"  signal {sign.signal.id}: {sign.now}; it changes {sign.signal.changes}"
        quiet, by_hand = (sum(sign.state == state for sign in old.signs) for state in ("quiet", "by hand"))
        if quiet or by_hand:
            yield note(f"  watched and unchanged: {plural(quiet, 'signal')}; by hand: {by_hand} (--json has them)")


def _fleet(gpus: dict[str, int], usd_per_hour: float | None) -> str:
    if usd_per_hour is None:
        return "no fleet"
    return f"{', '.join(f'{n} {name}' for name, n in gpus.items())}, {dollars(usd_per_hour)} an hour"


def _move(move: PriceMove, newer: bool) -> str:
    age = f", of {move.dated}: the plan is older than this price" if newer else ""
    return f"{move.accelerator}: {dollars(move.then)} then, {dollars(move.now)} now ({move.change:+.0%}){age}"


def watched_json(plan: Watched) -> dict[str, Any]:
    return {
        **picked(plan, "file name=then.workload.name made=then.made flipped because"),
        "then": picked(plan.then, "gpus usd_per_hour"),
        "now": {"gpus": plan.now.gpus, "usd_per_hour": plan.now.usd_per_hour if plan.now.answered else None},
        "prices": [{**plain(move), "newer_than_plan": move in plan.newer_prices} for move in plan.moves],
        **picked(plan, "appeared gone recalibrated"),
        "signals": [{**plain(sign.signal), **picked(sign, "state now")} for sign in plan.signs],
    }
