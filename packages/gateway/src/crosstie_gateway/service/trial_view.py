"""What a pool on trial has shown, and whether it is ready for its model's traffic."""

from statistics import median

import msgspec

from crosstie.prove.parity.verdict import Says

# Below so many compared answers nobody can say.
LEAST_COMPARED = 20
# Fewer failures are an accident.
LEAST_FAILED = 3


class TrialGauge(msgspec.Struct, frozen=True, kw_only=True):
    """One of parity's; `floor`: of the pool in service against itself."""

    name: str
    says: Says
    value: float
    floor: float
    allowed: float


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    model: str
    class_name: str | None
    shadow: float
    canary: float | None
    # Copies by what came of them, and how many of them were compared.
    copies: dict[str, int]
    compared: int
    verdict: Says | None
    gauges: tuple[TrialGauge, ...]
    # Of copies: seconds that it took for an answer, over those of the pool in service; None: not known.
    slower: float | None
    # Clients' requests that the canary has served, and the faults of its backends since it began.
    served: int
    faults: int
    # The median of its first tokens and of its seconds a token, over those of other pools; None: too few to say.
    ttft_ratio: float | None
    token_ratio: float | None
    # Why its canary has ended; empty: it has not.
    stopped: str
    # Whether one of the two has no model behind it: then it says nothing of any GPU.
    emulated: bool
    ready: str
    why: tuple[str, ...]


def readiness(view: TrialView, max_slower: float, max_failed: float) -> TrialView:
    """`ready`: yes, no, or not yet."""
    failed = view.copies.get("failed", 0)
    against = [f"its canary has ended: {view.stopped}"] if view.stopped else []
    if failed >= LEAST_FAILED and failed > max_failed * (view.compared + failed):
        against.append(f"{failed} of {view.compared + failed} copies failed there, and {max_failed:.1%} may")
    if view.verdict == "differs":
        against.append(
            f"its answers differ: {', '.join(gauge.name for gauge in view.gauges if gauge.says == 'differs')}"
        )
    if view.slower is not None and view.slower > max_slower and view.compared >= LEAST_COMPARED:
        against.append(f"answers to copies take {view.slower:.2f} times as long, and may {max_slower:g} times")
    open_yet = ["one of the two is emulated: there is no model behind it"] if view.emulated else []
    if view.compared < LEAST_COMPARED:
        open_yet.append(f"{view.compared} answers were compared, and {LEAST_COMPARED} are needed")
    elif view.verdict == "unsure":
        unsure = [gauge.name for gauge in view.gauges if gauge.says == "unsure"]
        open_yet.append(f"it takes more answers to be sure of {', '.join(unsure) or 'a model without preferences'}")
    ready = "no" if against else "not yet" if open_yet else "yes"
    said = f"{view.compared} answers compared, {failed} failed there alone"
    return msgspec.structs.replace(view, ready=ready, why=tuple(against + open_yet) or (said,))


def together(views: list[TrialView], max_slower: float, max_failed: float) -> TrialView:
    """Of one pool, as each process has it: one of them compares, all of them send."""
    best = max(views, key=lambda view: view.compared)
    stopped = next((view.stopped for view in views if view.stopped), "")
    ratios = {
        name: [ratio for view in views if (ratio := getattr(view, name)) is not None]
        for name in ("ttft_ratio", "token_ratio")
    }
    whole = msgspec.structs.replace(
        best, served=sum(view.served for view in views), faults=sum(view.faults for view in views), stopped=stopped,
        **{name: median(each) if each else None for name, each in ratios.items()},
    )  # fmt: skip
    return readiness(whole, max_slower, max_failed)
