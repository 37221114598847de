"""A plan as the fleet that the gateway serves."""

import math
from bisect import bisect_left
from collections.abc import Sequence

from crosstie.catalog.pools import UNLIMITED_CONTEXT
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.fleet import Fleet, HostedModel, Pool, PoolApart, PoolSide, Route, ServedClass
from crosstie.core.units import UNITS
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.plan.answer import PoolPlan, unused_name
from crosstie.decide.plan.candidates import longest_context
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.shared import SharedPoolPlan
from crosstie.perf.memory import sequences_that_fit
from crosstie.port.preflight.readiness import Readiness

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
        planned=plan.made,
        policy="cheapest-meeting-target",
        pools=(
            *(_pool(pool, plan.readiness[pool.name]) for pool in own),
            *([_shared(name, shared, plan.workload)] if shared else []),
        ),
        classes=tuple(
            _class(one, [Route(pool=name, share=1.0)] if one.model in shared_models else _routes(one, own))
            for one in plan.workload.classes
        ),
    )


def _shared(name: str, pool: SharedPoolPlan, workload: Workload) -> Pool:
    layout = pool.layout
    first = next(iter(layout.deployments.values()))
    assert workload.sharing is not None
    return Pool(
        name=name,
        model=first.model.id,
        accelerator=pool.accelerator,
        parallelism=layout.parallelism,
        precision=None,
        kv_format=first.kv_format,
        stack=first.stack.id,
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


def _pool(pool: PoolPlan, judged: Readiness) -> Pool:
    deployment, drafts = pool.deployment, pool.deployment.speculation
    return Pool(
        name=pool.name,
        model=deployment.model.id,
        accelerator=deployment.accelerator.id,
        parallelism=deployment.parallelism,
        precision=_precision(deployment),
        kv_format=deployment.kv_format,
        stack=deployment.stack.id,
        speculation=str(drafts) if drafts else None,
        text=drafts.text if drafts else "chat",
        acceptance=drafts.acceptance_length if drafts and drafts.source == "given" else None,
        release=judged.release or None,
        settings=judged.settings,
        replicas=pool.replicas,
        usd_per_gpu_hour=pool.usd_per_gpu_hour,
        # What the promise bears at its worst moment, not on average.
        max_in_flight=max(math.floor(pool.most_in_flight), 1),
        max_context=_longest(pool),
        apart=_apart(deployment) if isinstance(deployment, Disaggregated) else None,
    )


def _apart(service: Disaggregated) -> PoolApart:
    return PoolApart(
        prefill=PoolSide(replicas=service.prefill_replicas, parallelism=service.prefill.parallelism),
        decode=PoolSide(replicas=service.decode_replicas, parallelism=service.decode.parallelism),
        connector=service.connector.id,
    )


def _precision(deployment: Servable) -> str:
    """The model's own by that word: what it is made of may have no name, or one that also means something else."""
    own, stored = deployment.model.native, deployment.precision.by_role
    is_own = all({one.id for one in stored[role].formats} == set(shares) for role, shares in own.items())
    return "native" if is_own and deployment.precision.id not in ("bf16", "fp16") else deployment.precision.id


def _longest(pool: PoolPlan) -> int:
    """The longest single request whose cache a replica holds, as far as the model reaches."""
    one = pool.deployment
    most = one.model.max_context or 10**7
    sides = (one.prefill, one.decode) if isinstance(one, Disaggregated) else (one,)

    def too_long(tokens: int) -> bool:
        return not all(sequences_that_fit(side, tokens) for side in sides)

    # The first length that does not fit, less one.
    return bisect_left(range(most + 1), True, lo=2, key=too_long) - 1


def _routes(one: RequestClass, pools: Sequence[PoolPlan]) -> list[Route]:
    routes = []
    last = len(one.slices) - 1
    for index, piece in enumerate(one.slices):
        for pool in pools:
            for carried in pool.carried:
                if carried.part.request_class is one and carried.part.slice is piece:
                    # The longest slice takes whatever comes.
                    upto = None if index == last else piece.longest_input
                    routes.append(Route(pool=pool.name, share=carried.share, up_to_input=upto, why=carried.why))
    return routes


def _class(one: RequestClass, routes: Sequence[Route]) -> ServedClass:
    return ServedClass(
        name=one.name,
        model=one.model,
        requests_per_s=one.requests_per_s,
        input_tokens=one.input_tokens,
        output_tokens=one.output_tokens,
        ttft=one.ttft,
        tpot=one.tpot,
        routes=tuple(routes),
    )
