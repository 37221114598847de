"""A plan as the fleet that the gateway serves."""

from crosstie.catalog.pools import UNLIMITED_CONTEXT
from crosstie.core.fleet import Fleet, HostedModel, Pool, Route
from crosstie.core.units import UNITS
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import unused_name
from crosstie.decide.plan.candidates import longest_context
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.pools import class_of, pool_of, routes_of
from crosstie.decide.plan.shared import SharedPoolPlan
from crosstie.port.preflight.engine import engines

# Stands for the command that loads and unloads, until somebody writes it: docs/hosting.md.
_HOOK = "./load-model"


def fleet_of(plan: Plan) -> Fleet:
    if not plan.answered:
        raise ValueError("a plan without a fleet has none to write")
    own = plan.fleet.pools if plan.fleet else []
    shared = plan.shared.answer if plan.shared else None
    name = unused_name(f"shared-{shared.accelerator}", {pool.name for pool in own}) if shared else ""
    shared_models = plan.workload.sharing.models if plan.workload.sharing else ()
    return Fleet(
        name=plan.workload.name,
        folders=plan.workload.folders,
        planned=plan.made,
        policy="cheapest-meeting-target",
        pools=(
            *(pool_of(pool, plan.readiness[pool.name]) for pool in own),
            *([_shared(name, shared, plan.workload)] if shared else []),
        ),
        classes=tuple(
            class_of(one, [Route(pool=name, share=1.0)] if one.model in shared_models else routes_of(one, own))
            for one in plan.workload.classes
        ),
    )


def _shared(name: str, pool: SharedPoolPlan, workload: Workload) -> Pool:
    layout = pool.layout
    first = next(iter(layout.deployments.values()))
    assert workload.sharing is not None
    newest = next((str(engine.version) for engine in engines().values() if engine.stack == first.stack.id), None)
    return Pool(
        name=name,
        model=first.model.id,
        accelerator=pool.accelerator,
        parallelism=layout.parallelism,
        precision=None,
        kv_format=first.kv_format,
        stack=first.stack.id,
        release=workload.choice(first.model.id).releases.get(first.stack.id, newest),
        replicas=pool.replicas,
        usd_per_gpu_hour=pool.usd_per_hour / pool.gpus,
        # Of each model: what its least cache is for.
        max_in_flight=workload.sharing.sequences,
        max_context=UNLIMITED_CONTEXT,
        hosts=tuple(
            HostedModel(
                model=one.model,
                precision=layout.deployments[one.model].precision.id,
                memory_gib=one.taken_bytes / UNITS["GiB"].si,
                load_s=one.load_s,
                max_context=longest_context(workload, one.model),
                pinned=one.pinned,
            )
            for one in layout.hosted
        ),
        # Only level-1 sleep keeps weights in the host's memory; whatever else loads models is the user's to say.
        loading="vllm-sleep" if workload.sharing.load_from == "host" else "hook",
        load_hook=None if workload.sharing.load_from == "host" else _HOOK,
        host_memory_gib=layout.room_bytes / UNITS["GiB"].si,
    )
