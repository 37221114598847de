"""A decision on the screen: what comes, what is provided for, what to have of each supply, and why."""

from rich.console import Console

from crosstie.cli.show import say, show_table
from crosstie.core.figures import dollars, number
from crosstie_gateway.scaler.scaler import FleetObservation, ScaleDecision, Scaler, clock


def show_decision(out: Console, label: str, scaler: Scaler, seen: FleetObservation, decision: ScaleDecision) -> None:
    say(out, f"{label} at {clock(decision.at_s, scaler.rules)}: what would be done; nothing was")
    show_table(
        out,
        ("class", "requests/s now", "at most", "until", "margin", "provided for"),
        [
            (
                name, number(need.now), number(need.peak), clock(need.until_s, scaler.rules),
                f"{need.margin - 1.0:.0%}", number(need.provided),
            )
            for name, need in decision.needs.items()
        ],
    )  # fmt: skip
    state = scaler.state.supplies
    show_table(
        out,
        ("supply", "price", "$/h each", "starts in", "serving", "to have", "of them to empty"),
        [
            (
                supply.name, supply.kind, dollars(scaler.known.usd_per_hour(supply)),
                f"{state[supply.name].start.likely_s / 60:.0f} min", str(seen.ready.get(supply.name, 0)),
                str(decision.orders[supply.name].replicas), str(decision.orders[supply.name].draining),
            )
            for supply in scaler.rules.supplies
        ],
    )  # fmt: skip
    for supply in scaler.rules.supplies:
        say(out, f"- {supply.name}: {decision.orders[supply.name].why}")
    say(out, f"Together {dollars(decision.usd_per_hour)} an hour")
    if decision.short:
        say(out, f"Short: {decision.short}")
    learnt = [f"{name} {reach.factor:.2f}" for name, reach in scaler.state.reach.items() if reach.factor != 1.0]
    if learnt:
        say(out, f"Learnt: replicas take so many times what the plan says: {', '.join(learnt)}")
