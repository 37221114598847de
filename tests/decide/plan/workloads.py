"""Small workloads, quick to plan: a model or two, few accelerators, lengths that need no file."""

from typing import Any

from crosstie.catalog.lengths import cut, read_lengths
from crosstie.core.workload import Constraints, ModelChoice, Prices, RequestClass, Target, Workload

FEW = ("mi300x", "mi355x", "h200", "b200")
TWO = ("mi300x", "h200")


def one_class(
    name: str = "chat",
    rate: float = 20.0,
    inputs: Any = 1000,
    outputs: Any = 200,
    ttft: tuple[float, float] | None = (1.0, 0.9),
    tpot: tuple[float, float] | None = (0.05, 0.9),
    model: str = "llama-3.1-8b",
) -> RequestClass:
    """Targets are seconds and a percentile."""

    def target(asked: tuple[float, float] | None) -> Target | None:
        return Target(seconds=asked[0], percentile=asked[1]) if asked else None

    first = target(ttft)
    slices = cut(
        read_lengths(__file__, "input", inputs), read_lengths(__file__, "output", outputs),  # type: ignore[arg-type]
        paired=False, exempt=first.longest_exempt if first else 0.0, context=131_072,
    )  # fmt: skip
    return RequestClass(name=name, model=model, requests_per_s=rate, slices=slices, ttft=first, tpot=target(tpot))


CHAT = one_class("chat", 60.0, {"median": 500, "p95": 3000}, {"mean": 250, "p95": 700})
CODE = one_class("code", 40.0, 2500, 30, ttft=(0.4, 0.95), tpot=None)
BATCH = one_class("batch", 10.0, 3000, 400, ttft=None, tpot=None)


def workload(*classes: RequestClass, **changes: Any) -> Workload:
    """`changes`: of the workload, its constraints or its prices, by their names."""
    limits: dict[str, Any] = {"accelerators": FEW, "whole_nodes": False}
    limits |= {k: changes.pop(k) for k in list(changes) if k in Constraints.__struct_fields__}
    # An analyst's, of one source and for all of the few: what sellers ask moves with every update of the catalog.
    prices: dict[str, Any] = {"kinds": ("modelled-3-years",)}
    prices |= {k: changes.pop(k) for k in list(changes) if k in Prices.__struct_fields__}
    chosen = classes or (CHAT, CODE, BATCH)
    models = {one.model: ModelChoice(precisions=("fp8",)) for one in chosen}
    plain = {"name": "test", "mean_over_peak": 0.5, "sizing": "likely", "horizon_years": 1, "models": models}
    return Workload(
        classes=chosen, constraints=Constraints(**limits), prices=Prices(**prices), **{**plain, **changes}
    )  # fmt: skip
