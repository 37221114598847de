"""What the performance model says of the step that was traced: by class, as predicted and at the hardware's peaks."""

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Hardware
from crosstie.perf.step import shape, step
from crosstie_port.profile.sorting import ATTENTION, BOOKKEEPING, COLLECTIVES, ELEMENTWISE, HOST, PRODUCTS


class StepRoofline(msgspec.Struct, frozen=True, kw_only=True):
    deployment: str
    batch: int
    context: int
    prefill: int
    # Seconds of the step by class of `sorting`. Norms, activations and bookkeeping are one sum in the model, which
    # stands under the first until a trace says how it is shared out.
    predicted_s: dict[str, float]
    # At the peak rates of arithmetic and memory.
    ideal_s: dict[str, float]
    step_s: float
    ideal_step_s: float


def roofline(deployment: Deployment, *, batch: int, context: int, prefill: int = 0) -> StepRoofline:
    """A step that decodes `batch` sequences with `context` tokens each, and reads `prefill` tokens of a prompt."""
    if batch < 0 or context < 0 or prefill < 0 or batch + prefill < 1:
        raise BadInput("--batch, --context and --prefill are 0 or more, and there must be a sequence or a prompt")
    deployment.model.check_context(context + max(prefill, 1), f"--context {context}")
    cost = step(Hardware([deployment]), shape(float(batch), float(context), float(prefill)))

    def one(array: object) -> float:
        return float(array[0, 0])  # type: ignore[index]

    parts = {name: one(value) for name, value in cost.parts_s.items()}
    ideal = {name: one(value) for name, value in cost.ideal_parts_s.items()}
    return StepRoofline(
        deployment=deployment.label, batch=batch, context=context, prefill=prefill,
        predicted_s={
            PRODUCTS: parts.get("products", 0.0), ATTENTION: parts.get("attention", 0.0),
            ELEMENTWISE: parts.get("bookkeeping", 0.0), BOOKKEEPING: 0.0, COLLECTIVES: one(cost.interconnect_s),
            HOST: one(cost.total_s - cost.gpu_s),
        },
        ideal_s={PRODUCTS: ideal.get("products", 0.0), ATTENTION: ideal.get("attention", 0.0)},
        step_s=one(cost.total_s), ideal_step_s=one(cost.ideal_s),
    )  # fmt: skip


def deployment_of(
    catalog: Catalog, model: str, accelerator: str, *, tp: int, precision: str, kv: str, stack: str | None
) -> Deployment:
    accelerators = catalog.accelerators_named(accelerator, stack)
    if len(accelerators) != 1:
        raise BadInput(f"--on {accelerator}: a trace is of one accelerator")
    return catalog.deployment(catalog.model(model), accelerators[0], Parallelism(tp=tp), precision, kv, stack)
