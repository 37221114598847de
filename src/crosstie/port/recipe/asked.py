"""A pool from what somebody asks for on a command line: the layout that fits where none is named."""

from bisect import bisect_left
from collections.abc import Sequence

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Adapter, Pool, PoolApart, PoolSide
from crosstie.core.model import Model
from crosstie.perf.fit import (
    DOES_NOT_FIT,
    Placement,
    candidate_layouts,
    longest_context,
    place_each,
    smallest_layout,
    surely_fits,
)
from crosstie.perf.service_layouts import parse_layout
from crosstie.port.preflight.engine import EngineRelease, engine_from, engines
from crosstie.port.recipe.published import PublishedLimits, public_recipe, published_limits

# Tokens of a request that the smallest layout must hold, as `fit` takes it.
_CONTEXT = 8192
# Requests in flight where nobody says: more than most loads have, so that the cache is the limit.
_IN_FLIGHT = 256


def asked_pool(
    catalog: Catalog, model: Model, accelerator: Accelerator, *, engine: str | None = None,
    layout: Parallelism | None = None, precision: str = "native", kv: str = "bf16", speculation: str | None = None,
    text: str = "chat", acceptance: float | None = None, apart: str | None = None, connector: str | None = None,
    context: int | None = None, in_flight: int | None = None, replicas: int = 1, adapters: Sequence[Adapter] = (),
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
        raise BadInput("--disaggregated has the layouts of both sides: leave --tp, --pp, --ep and --dp out")
    chosen = "as asked" if layout or sides else "the fewest GPUs that hold it"
    if sides:
        split = sides[1].parallelism
    elif layout is not None:
        split = layout
    else:
        at = context or min(_CONTEXT, model.max_context or _CONTEXT)
        placement = smallest_layout(
            catalog, model, accelerator, context=at, precision=precision, kv_format=kv, stack=stack, speculation=drafts
        )
        if placement is None:
            raise BadInput(
                f"{model.id} {DOES_NOT_FIT} on {accelerator.id} with {at:,} tokens; `crosstie fit` says where"
            )
        split, chosen = _with_room(catalog, placement, release)
    deployment = catalog.deployment(model, accelerator, split, precision, kv, stack, drafts)
    release = release or next((str(one.version) for one in installed if one.stack == deployment.stack.id), None)
    limits = limits_of(deployment, release)
    joined = None
    if sides:
        joined = PoolApart(
            prefill=PoolSide(replicas=sides[0].replicas, parallelism=sides[0].parallelism),
            decode=PoolSide(replicas=sides[1].replicas, parallelism=sides[1].parallelism),
            connector=catalog.connector(connector).id if connector
            else catalog.connector_for(deployment.stack, accelerator).id,
        )  # fmt: skip
    elif connector:
        raise BadInput("--connector is about --disaggregated, which is not given")
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
        max_in_flight=in_flight or min(_IN_FLIGHT, limits.sequences or _IN_FLIGHT),
        max_context=context or min(surely_longest(deployment), limits.context or model.max_context or 10**7),
        release=release,
        served_as=served_as or model.id,
        adapters=tuple(adapters),
        apart=joined,
    ), chosen


def limits_of(deployment: Deployment, release: str | None) -> PublishedLimits:
    """What the engine's own project lets a replica of it have."""
    model, engine = deployment.model, deployment.stack.id
    known = release or next((str(one.newest) for one in engines().values() if one.stack == engine), "0")
    recipe = public_recipe(engine, known, (model.id, *model.aliases))
    return published_limits(recipe, deployment.accelerator.chip.isa.value, deployment.precision)


def surely_longest(deployment: Deployment) -> int:
    """The longest request that fits even if the engine keeps twice the memory that it is assumed to; engines refuse to
    start where one does not. Where none does, the longest by the assumption."""
    most = deployment.model.max_context or 10**7
    first_too_long = bisect_left(range(most + 1), True, lo=2, key=lambda tokens: not surely_fits(deployment, tokens))
    return first_too_long - 1 if first_too_long > _CONTEXT else longest_context(deployment)


def _with_room(catalog: Catalog, found: Placement, release: str | None) -> tuple[Parallelism, str]:
    """The fewest GPUs that hold it, and where its own recipe asks for more memory than they have, the fewest that have
    it; with the reason."""
    first, accelerator = found.deployment, found.deployment.accelerator
    limits = limits_of(first, release)
    if limits.has_room(first.parallelism, accelerator):
        return first.parallelism, "the fewest GPUs that hold it"
    splits = [
        split
        for split in candidate_layouts(first.model, accelerator)
        if split.ep == split.dp == 1 and limits.has_room(split, accelerator)
    ]
    fitting = [placement for placement in place_each(catalog, first, splits, found.context) if placement.fits]
    if not fitting:
        return first.parallelism, "the fewest GPUs that hold it"
    roomy = min(fitting, key=lambda placement: placement.preference).deployment.parallelism
    return roomy, f"the fewest GPUs with {limits.memory_gb} GB, {limits.why}"
