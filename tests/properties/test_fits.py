"""`fit`, `compare`, `preflight` and `plan` say the same of memory: over models, accelerators, precisions and layouts."""

from collections import Counter
from typing import cast

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.model import Model
from crosstie.core.workload import ModelChoice
from crosstie.decide.compare.scorecard import Entry, Load, compare
from crosstie.decide.plan.candidates import candidates
from crosstie.decide.plan.gate import Gate
from crosstie.perf.fit import BARELY, DOES_NOT_FIT, FITS, Placement, allowed, fit, place, surely_fits
from crosstie.perf.memory import MemoryPlan, memory_plan
from crosstie.port.preflight.memory import memory_finding, placement_on

CATALOG = Catalog([])
MODELS, ACCELERATORS = list(CATALOG.models.values()), list(CATALOG.accelerators.values())
# Every model meets some accelerators, and every accelerator some models.
SOME = 2
CONTEXT = 8192
STACK = "vllm"
SAID = {"note": FITS, "unknown": BARELY, "error": DOES_NOT_FIT}


class Open:
    """What runs is not asked here."""

    def passes(self, deployment: object) -> bool:
        return True


def said(
    model: Model, accelerator: Accelerator, precision: str, placed: Placement, context: int
) -> dict[str, tuple[str, MemoryPlan | None]]:
    """What three of the four say of a layout, and the bytes that they count."""
    split = placed.deployment.parallelism
    entry = compared(model, accelerator, precision, split, context)
    checked = placement_on(
        CATALOG, model, accelerator, context=context, precision=precision, kv="bf16", stack=STACK, tp=split.tp
    )
    assert checked
    return {
        "fit": (placed.verdict, placed.plan),
        "compare": (entry.memory, memory_plan(entry.deployment) if entry.deployment else None),
        "preflight": (SAID[memory_finding(checked, model, accelerator, context).severity], checked.plan),
    }


def compared(model: Model, accelerator: Accelerator, precision: str, split: Parallelism, context: int) -> Entry:
    load = Load(1, context - 1, 1)
    card = compare(CATALOG, model, [accelerator], load, parallelism=split, precision=precision, stack=STACK)
    return card.entries[0]


def offered(model: Model, accelerator: Accelerator, precision: str, context: int) -> list[Deployment]:
    """Layouts that a plan tries."""
    choice = ModelChoice(precisions=(precision,), stacks=(STACK,), speculation=("none",))
    return candidates(CATALOG, model, [accelerator], choice, context, context, cast(Gate, Open()), "any")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_the_four_agree_on_what_fits_and_on_its_bytes(precision: str) -> None:
    met = Counter[str]()
    for index, model in enumerate(MODELS):
        context = min(CONTEXT, model.max_context or CONTEXT)
        for step in range(SOME):
            accelerator = ACCELERATORS[(index * SOME + step) % len(ACCELERATORS)]
            splits = list(allowed([Parallelism(tp=n) for n in (1, 2, 4, 8)], model, accelerator))
            try:
                shown = fit(
                    CATALOG, model, [accelerator], context=context, precisions=[precision], stack=STACK, layouts=splits
                )
            except BadInput:
                # A format or a vendor that the stack does not serve: all four refuse that before they count.
                continue
            planned = {
                str(one.parallelism): memory_plan(one) for one in offered(model, accelerator, precision, context)
            }
            for placed in shown.placements:
                layout = str(placed.deployment.parallelism)
                found = said(model, accelerator, precision, placed, context)
                where = (model.id, accelerator.id, layout, found)
                assert {verdict for verdict, _ in found.values()} == {placed.verdict}, where
                assert {plan for _, plan in found.values() if plan} == {placed.plan}, where
                # A plan offers what surely fits, and nothing else.
                assert planned.get(layout) == (placed.plan if placed.verdict == FITS else None), where
                met[placed.verdict] += 1
    # All three cases came up.
    assert min(met[FITS], met[DOES_NOT_FIT]) > 20
    assert met[BARELY] > 0


def test_what_fits_barely_is_said_and_never_planned(crosstie: Command) -> None:
    """Prompts are made longer until the engine's own share of memory decides."""
    model, mi300x = CATALOG.model("llama-3.1-70b"), CATALOG.accelerator("mi300x")
    one = CATALOG.deployment(model, mi300x, stack=STACK)
    context = next(n for n in range(65_536, 131_072, 1024) if not surely_fits(one, n))
    assert place(one, context).verdict == BARELY
    assert place(one, context).fits
    assert compared(model, mi300x, "native", Parallelism(), context).memory == BARELY
    assert "TP1" not in {str(other.parallelism) for other in offered(model, mi300x, "native", context)}
    assert place(one, 131_072).verdict == DOES_NOT_FIT
    asked = ("llama-3.1-70b", "--on", "mi300x", "--tp", "1", "--stack", STACK)
    alone = ("--input", str(context - 1), "--output", "1", "--concurrency", "1")
    for told in (crosstie("fit", *asked, "--context", str(context)), crosstie("compare", *asked, *alone)):
        assert BARELY in " ".join(told.out.split())
