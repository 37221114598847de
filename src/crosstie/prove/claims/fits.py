"""Claims about memory: weights, caches and the fewest GPUs, through the same `fit` that users run."""

import math

from crosstie.core.deployment import KV_FORMATS
from crosstie.perf.fit import Placement, fit, place, smallest_layout
from crosstie.perf.memory import weight_bytes
from crosstie.prove.claims.evidence import LLAMA, Evidence
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest, fact_rests, model_rest
from crosstie.prove.claims.verdicts import Judgement, check, verdict_of

LARGE, MIXTRAL = "llama-3.1-405b", "mixtral-8x7b"
SIZE_TOLERANCE = 0.02


def weights_gb(evidence: Evidence, model: str, precision: str) -> float:
    found = evidence.catalog.model(model)
    return weight_bytes(found, evidence.catalog.precision(found, precision)) / 1e9


def fewest(evidence: Evidence, model: str, on: str, precision: str, context: int, barely: bool = False) -> int | None:
    """GPUs of the smallest layout that vLLM serves one sequence of the context on; `barely`: also where it does so only
    if the engine itself keeps little memory, as `fit` says of a layout that is asked for."""
    found = evidence.catalog.model(model)
    if barely:
        placed = fit(evidence.catalog, found, [evidence.part(on)], context=context, precisions=[precision]).placements
        return min((one.deployment.parallelism.gpus for one in placed if one.fits), default=None)
    placement = smallest_layout(evidence.catalog, found, evidence.part(on), context=context, precision=precision)
    return placement.deployment.parallelism.gpus if placement else None


@check("c35", "c51")
def size_of_weights(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    model = MIXTRAL if claim.id == "c51" else LLAMA
    size = weights_gb(evidence, model, "fp16")
    verdict = verdict_of([claim.only.holds(size, SIZE_TOLERANCE)])
    name = evidence.catalog.model(model).name
    reason = f"the weights of {name} in 16 bits take {size:.1f} GB; compared within {SIZE_TOLERANCE:.0%}"
    return Judgement(verdict, f"{size:.1f} GB", reason, [model_rest(evidence, model, "weights in 16 bits")])


@check("c50")
def size_of_cache(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    model, context = evidence.catalog.model(LLAMA), 32_768
    size = model.cache_bytes(context, KV_FORMATS["fp16"]) / 1e9
    span = claim.only
    verdict = verdict_of([span.holds(size, 0.1)])
    reason = (
        f"8 KV heads of 128 over 80 layers in 16 bits take {size / context * 1e6:.1f} KB a token, {size:.1f} GB at "
        f"{context:,} tokens of one request of {model.name}; {span} GB are {span.low / size:.1f} such requests "
        "(compared within 10%)"
    )
    return Judgement(verdict, f"{size:.1f} GB", reason, [model_rest(evidence, LLAMA, "its KV cache")])


@check("c36")
def one_or_two(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    wanted = [span.low for span in claim.spans]
    contexts = (4_096, 32_768)
    found = {c: [fewest(evidence, LLAMA, on, "fp16", c) for on in ("mi300x", "h100-sxm")] for c in contexts}
    barely = {
        c: [fewest(evidence, LLAMA, on, "fp16", c, barely=True) for on in ("mi300x", "h100-sxm")] for c in contexts
    }
    verdict = verdict_of([readings[c] == wanted for readings in (found, barely) for c in contexts])
    cases = "; ".join(f"at {c:,} tokens {found[c][0]} MI300X and {found[c][1]} H100" for c in contexts)
    plan = Rest("model", "vLLM's memory plan: 90% of memory, 3.2 GB kept (assumed), TP of 1, 2, 4, 8")
    holding = [f"{c:,}" for c in contexts if found[c] == wanted]
    reason = (
        f"fewest GPUs on which vLLM serves one request: {cases}. So it holds at {' and '.join(holding) or 'neither'}"
    )
    reason += " tokens, not at the other length" if len(holding) == 1 else ""
    close = [f"at {c:,} tokens {barely[c][0]} and {barely[c][1]}" for c in contexts if barely[c] != found[c]]
    if close:
        reason += f". If the engine does not keep twice the 3.2 GB, {' and '.join(close)} do, as `fit` says"
    return Judgement(verdict, f"{found[4096][0]} and {found[4096][1]} GPUs", reason, [*_memory(evidence), plan])


@check("c37", "c52")
def how_many_for_405b(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """c37 counts GPUs that engines use, c52 gives a lower bound, which bytes alone decide."""
    wanted = claim.spans
    agrees, cases, shown = {}, {}, []
    for precision in ("bf16", "fp8", "int4"):
        amd = fewest(evidence, LARGE, "mi300x", precision, 4_096)
        nvidia = fewest(evidence, LARGE, "h100-sxm", precision, 4_096)
        if claim.id == "c52":
            nvidia = math.ceil(weights_gb(evidence, LARGE, precision) * 1e9 / evidence.part("h100-sxm").memory_bytes)
        agrees[precision] = all(
            count is not None and span.holds(count, 0.0) for count, span in zip((amd, nvidia), wanted, strict=True)
        )
        shown.append(f"{amd} and {nvidia} GPUs in {precision}")
        size = weights_gb(evidence, LARGE, precision)
        cases[precision] = f"{precision} ({size:.0f} GB) {amd} MI300X and {nvidia} H100"
    verdict = verdict_of(agrees.values())
    holding = [name for name, yes in agrees.items() if yes]
    how = "MI300X as vLLM splits it, H100 by bytes alone" if claim.id == "c52" else "As vLLM splits it"
    reason = (
        f"the claim leaves out the format: it holds in {' and '.join(holding) or 'none'}, and not in "
        f"{' and '.join(name for name in agrees if name not in holding) or 'any other'}. {how}, one request of 4,096 "
        f"tokens: {', '.join(cases.values())}"
    )
    rests = [*_memory(evidence), model_rest(evidence, LARGE, "weights by format")]
    return Judgement(verdict, "; ".join(reversed(shown)), reason, rests)


@check("c61")
def left_for_cache(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    weights = weights_gb(evidence, LLAMA, "bf16")
    capacity = evidence.field("mi350x", "memory.capacity")
    plain = capacity.value - weights
    left = _placed(evidence, "mi350x", "bf16").plan.cache_bytes / 1e9
    span = claim.only
    agrees = [span.holds(plain, SIZE_TOLERANCE), span.holds(left, SIZE_TOLERANCE)]
    reason = (
        f"it holds as a subtraction of printed figures, {capacity.value:.0f} less {weights:.1f} are {plain:.0f} "
        f"(within {SIZE_TOLERANCE:.0%}). It does not hold in an engine: the {capacity.value:.0f} are GiB "
        f"({capacity.si / 1e9:.0f} GB), and vLLM, which leaves a tenth of memory alone and keeps 3.2 GB, has "
        f"{left:.0f} GB"
    )
    rests = [*_memory(evidence, "mi350x"), model_rest(evidence, LLAMA, "weights in BF16")]
    rests.append(Rest("arithmetic", "capacity less weights"))
    return Judgement(verdict_of(agrees), f"{plain:.0f} GB plain, {left:.0f} GB for vLLM", reason, rests)


@check("c26")
def room_for_requests(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Requests of 4,096 tokens whose cache one GPU holds: where memory ends, queues begin."""
    ratios = {}
    for precision in ("int4", "fp8"):
        mi300x, h200 = (_placed(evidence, on, precision).cache_tokens for on in ("mi300x", "h200"))
        ratios[precision] = mi300x / h200
    span = claim.only
    low, high = min(ratios.values()), max(ratios.values())
    agrees = {name: span.holds(value, 0.05) for name, value in ratios.items()}
    holding = " and ".join(name for name, yes in agrees.items() if yes) or "neither"
    reason = (
        "taken as how many requests of 4,096 tokens of a 70B model one GPU holds before they queue: "
        f"{', '.join(f'{value:.2f}x in {name}' for name, value in ratios.items())}. It holds in {holding} alone "
        "(within 5%). Whether latency degrades before that is another question, which the claim leaves open"
    )
    rests = _memory(evidence, "mi300x", "h200")
    return Judgement(verdict_of(agrees.values()), f"{low:.2f} to {high:.2f} x", reason, rests)


def _placed(evidence: Evidence, on: str, precision: str) -> Placement:
    """The 70B model on one GPU, with requests of 4,096 tokens."""
    model = evidence.catalog.model(LLAMA)
    return place(evidence.catalog.deployment(model, evidence.part(on), precision=precision), 4_096)


def _memory(evidence: Evidence, *names: str) -> list[Rest]:
    return fact_rests(evidence, *(f"{name} memory.capacity" for name in names or ("mi300x", "h100-sxm")))
