"""A pool from what somebody asks for on a command line: the layout that fits where none is named."""

from collections.abc import Sequence

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Adapter, Pool, PoolApart, PoolSide
from crosstie.core.model import Model
from crosstie.perf.estimate_apart import parse_layout
from crosstie.perf.fit import DOES_NOT_FIT, longest_context, smallest_layout
from crosstie.port.preflight.engine import EngineRelease, engine_from

# Tokens of a request that the smallest layout must hold, as `fit` takes it.
_CONTEXT = 8192


def asked_pool(
    catalog: Catalog, model: Model, accelerator: Accelerator, *, engine: str | None = None,
    layout: Parallelism | None = None, precision: str = "native", kv: str = "bf16", speculation: str | None = None,
    text: str = "chat", acceptance: float | None = None, apart: str | None = None, connector: str | None = None,
    context: int | None = None, in_flight: int = 256, replicas: int = 1, adapters: Sequence[Adapter] = (),
    served_as: str | None = None, installed: Sequence[EngineRelease] = (),
) -> tuple[Pool, str]:  # fmt: skip
    """The pool, and where its layout comes from. `installed`: releases that are there, for an engine that is named
    without one. Raises BadInput where nothing fits."""
    release = None
    stack = None
    if engine is not None:
        named = engine_from(engine)
        stack, release = named.stack, str(named.version) if named.named else None
    if context is not None:
        model.check_context(context, f"--context {context}")
    drafts = catalog.speculation(model, speculation, text=text, length=acceptance) if speculation else None
    sides = parse_layout(apart) if apart else None
    if sides and layout:
        raise BadInput("--apart has the layouts of both sides: leave --tp, --pp, --ep and --dp out")
    chosen = "as asked" if layout or sides else "the fewest GPUs that hold it"
    if sides:
        split = sides[1].parallelism
    elif layout is not None:
        split = layout
    else:
        at = context or min(_CONTEXT, model.max_context or _CONTEXT)
        found = smallest_layout(
            catalog, model, accelerator, context=at, precision=precision, kv_format=kv, stack=stack, speculation=drafts
        )
        if found is None:
            raise BadInput(
                f"{model.id} {DOES_NOT_FIT} on {accelerator.id} with {at:,} tokens; `crosstie fit` says where"
            )
        split = found.deployment.parallelism
    deployment = catalog.deployment(model, accelerator, split, precision, kv, stack, drafts)
    release = release or next((str(one.version) for one in installed if one.stack == deployment.stack.id), None)
    joined = None
    if sides:
        joined = PoolApart(
            prefill=PoolSide(replicas=sides[0].replicas, parallelism=sides[0].parallelism),
            decode=PoolSide(replicas=sides[1].replicas, parallelism=sides[1].parallelism),
            connector=catalog.connector(connector).id if connector
            else catalog.connector_for(deployment.stack, accelerator).id,
        )  # fmt: skip
    elif connector:
        raise BadInput("--connector is about --apart, which is not given")
    return Pool(
        name=f"{model.id}-{accelerator.id}",
        model=model.file if model.file and not model.file.endswith(".toml") else model.id,
        accelerator=accelerator.id,
        parallelism=split,
        precision=precision,
        kv_format=kv,
        stack=deployment.stack.id,
        speculation=speculation,
        text=text,
        acceptance=acceptance,
        replicas=replicas,
        usd_per_gpu_hour=0.0,
        max_in_flight=in_flight,
        max_context=context or longest_context(deployment),
        release=release,
        served_as=served_as or model.id,
        adapters=tuple(adapters),
        apart=joined,
    ), chosen
