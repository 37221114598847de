"""What a plan or a simulation assumes, and what each of its pools gives and costs, as every other answer tells it."""

import math
from collections.abc import Sequence

from crosstie.catalog.traces import Trace
from crosstie.core.figures import seconds
from crosstie.core.fleet import Fleet
from crosstie.core.question import BuyersQuestion, Reckoning, reckoning
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.cost.energy import mean_share
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.run_result import Run

_RANKS = ("tp", "pp", "ep", "dp")


def plan_question(plan: Plan) -> BuyersQuestion:
    work = plan.workload
    by = "simulation" if plan.confirmed else "closed forms"
    sure = 0.5 if plan.too_dear else work.sureness
    sold, pools = mean_share(work), plan.fleet.pools if plan.fleet else []
    drafts = dict.fromkeys(str(pool.deployment.speculation) for pool in pools if pool.deployment.speculation)
    price = plan.market.kinds[0]
    return _asked(work, price=price, sure=sure, utilisation=sold, by=by, drafts=" or ".join(drafts))


def simulation_question(workload: Workload | None, trace: Trace | None, run: Run) -> BuyersQuestion:
    """Of the traffic that was sent: all of it is sold, and none of the hours in which less comes."""
    if trace is not None or workload is None:
        lengths = (trace.input_tokens.mean(), trace.output_tokens.mean()) if trace is not None else (1.0, 1.0)
        return BuyersQuestion(
            input_tokens=round(lengths[0]), output_tokens=round(lengths[1]), requests_per_s=run.requests_per_s,
            in_flight=None, price="the fleet's", precision="the fleet's", sure=0.5, per="tokens in and out",
            by="simulation",
        )  # fmt: skip
    price, rate = "the fleet's", run.requests_per_s
    return _asked(workload, price=price, sure=0.5, utilisation=1.0, by="simulation", requests_per_s=rate)


def _asked(work: Workload, **others: object) -> BuyersQuestion:
    rate = math.fsum(request_class.requests_per_s for request_class in work.classes)
    named = dict.fromkeys(word for one in work.classes for word in work.choice(one.model).precisions)
    return BuyersQuestion(
        models=tuple(dict.fromkeys(request_class.model for request_class in work.classes)),
        input_tokens=round(math.fsum(one.requests_per_s * one.input_tokens for one in work.classes) / rate),
        output_tokens=round(math.fsum(one.requests_per_s * one.output_tokens for one in work.classes) / rate),
        in_flight=None,
        targets=tuple(dict.fromkeys(word for request_class in work.classes for word in _targets(request_class))),
        precision=" or ".join(named),
        evidence=work.constraints.evidence,
        horizon_years=float(work.horizon_years),
        per="tokens in and out",
        **{"requests_per_s": rate, **others},  # type: ignore[arg-type]
    )


def _targets(request_class: RequestClass) -> list[str]:
    both = (("TTFT", request_class.ttft), ("TPOT", request_class.tpot))
    return [f"{name} p{target.percentile * 100:g} {seconds(target.seconds)}" for name, target in both if target]


def plan_reckoned(plan: Plan) -> list[Reckoning]:
    """A pool each, the dearest first. What a GPU gives is what it is sent at the peak, and sold is the mean of that."""
    kinds = {item.id: f"{item.quote.kind}, {item.quote.origin}" for item in plan.market.items}
    sold = mean_share(plan.workload)
    return [
        _pool(pool, kinds[pool.deployment.accelerator.id], sold) for pool in (plan.fleet.pools if plan.fleet else ())
    ]


def _pool(pool: PoolPlan, price: str, sold: float) -> Reckoning:
    estimate = pool.estimate
    sent = math.fsum(one.requests_per_s * one.part.slice.output_tokens for one in pool.carried) / pool.gpus
    ends = estimate.interval.per_gpu(pool.deployment.gpus) if estimate.interval else None
    scale = sent / estimate.output_tokens_per_s_per_gpu
    main = max(pool.carried, key=lambda one: (not one.part.slice.exempt, one.load)).part.slice if pool.carried else None
    lengths = (main.input_tokens, main.output_tokens) if main else (1, 1)
    return reckoning(
        pool.deployment, *lengths, in_flight=estimate.concurrency, output_tokens_per_s_per_gpu=sent or None,
        filled=scale or 1.0,
        tokens_80=(ends[0] * scale, ends[1] * scale) if ends and sent else None,
        usd_per_gpu_hour=pool.usd_per_gpu_hour, price=price, utilisation=sold,
    )  # fmt: skip


def run_reckoned(fleet: Fleet, run: Run, classes: Sequence[RequestClass]) -> list[Reckoning]:
    """A pool each: what its GPUs gave of the traffic that was sent."""
    lengths = {one.name: (one.input_tokens, one.output_tokens) for one in classes}
    found = []
    for pool, seen in zip(fleet.pools, run.pools, strict=True):
        sent = {name: count / max(run.requests, 1) * run.requests_per_s for name, count in seen.requests.items()}
        if pool.accelerator is None or not sent or not set(sent) <= set(lengths):
            continue
        main = max(sent, key=lambda name: sent[name])
        gpus = pool.replica_gpus * pool.replicas
        found.append(
            Reckoning(
                model=pool.model,
                accelerator=pool.accelerator,
                gpus=pool.replica_gpus,
                layout=str(pool.parallelism),
                parallelism=None if pool.apart else {name: getattr(pool.parallelism, name) for name in _RANKS},
                precision=pool.precision or "native",
                kv_format=pool.kv_format,
                stack=pool.stack or "",
                drafts=pool.speculation or "",
                input_tokens=round(lengths[main][0]),
                output_tokens=round(lengths[main][1]),
                in_flight=seen.mean_in_flight / max(seen.replicas, 1),
                output_tokens_per_s_per_gpu=math.fsum(rate * lengths[name][1] for name, rate in sent.items()) / gpus,
                usd_per_gpu_hour=seen.usd_per_hour / gpus,
                price="the fleet's",
            )
        )
    return found
