"""Claims about speed, against estimates with their 80% intervals, microbenchmarks and measured rows."""

from collections.abc import Iterable
from statistics import median

from crosstie.prove.calibration.results import OperatingPoint
from crosstie.prove.claims.evidence import LLAMA, EstimatedRun, Evidence, called, per_gpu_rates, ratio_of
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest, between, fact_rests, rows_rest, run_rest, source_rests
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, WRONG, Judgement, check, verdict_of

# "4K context" taken as 4,096 tokens in all: three quarters prompt, three quarters answer, or nearly all answer.
SHAPES = ((3072, 1024), (1024, 3072), (128, 3968))
CASES = tuple((shape, precision, gpus) for shape in SHAPES for precision in ("fp8", "bf16") for gpus in (1, 2))


@check("c05")
def sustained_fp8(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    span, peak = claim.only, evidence.field("mi300x", "dense.fp8")
    reached, by_amd = evidence.field("mi300x", "measured.matmul_fp8"), evidence.number("mi300x_fp8_by_amd")
    best = max(reached.si / 1e12, by_amd)
    verdict = verdict_of([span.holds(best, 0.1)])
    reason = (
        f"the most that we found published for FP8 matrix products on it, by AMD or others, is {best:,.0f} TFLOP/s, "
        f"{best * 1e12 / peak.si:.0%} of peak; {span} would be {span.low * 1e12 / peak.si:.0%} (compared within 10%)"
    )
    rests = source_rests(evidence, "mi300x_fp8_by_amd")
    rests += fact_rests(evidence, "mi300x measured.matmul_fp8", "mi300x dense.fp8")
    return Judgement(verdict, f"{best:,.0f} TFLOP/s", reason, rests)


@check("c07")
def compute_gap(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    paths = ("dense.fp8", "measured.matmul_fp8")
    peak, reached = (evidence.field("h100-sxm", path).si / evidence.field("mi300x", path).si for path in paths)
    sparse = evidence.field("h100-sxm", "sparse.fp8")
    span = claim.only
    agrees = [span.holds(peak, 0.1), span.holds(reached, 0.1)]
    reason = (
        f"dense peaks give {peak:.2f}x, the best matrix products published {reached:.2f}x (compared within 10%); "
        f"{span}x is near H100's rate with sparsity ({sparse.value:,.0f}) over the {evidence.claimed('c05')} of c05, "
        "one a peak and one not"
    )
    rests = fact_rests(evidence, *(f"{name} {path}" for path in paths for name in ("h100-sxm", "mi300x")))
    return Judgement(verdict_of(agrees), f"{peak:.2f}x at peak, {reached:.2f}x measured", reason, rests)


@check("c24", "c25")
def batch_64(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    on, span = "mi300x" if claim.id == "c24" else "h200", claim.only
    runs = [run for case in CASES if (run := _at_batch_64(evidence, on, case)) is not None]
    agreeing = [run for run in runs if span.meets(*run.interval)]
    nearest, farthest = (pick(runs, key=lambda run: abs(run.per_gpu - span.middle)) for pick in (min, max))
    low, high = min(r.interval[0] for r in runs), max(r.interval[1] for r in runs)
    reason = (
        "the claim names neither precision nor how 4,096 tokens divide into prompt and answer. Of "
        f"{len(runs)} ways (FP8 and BF16, one and two GPUs, from mostly prompt to nearly all answer) it holds in "
        f"{len(agreeing)}, nearest {_said(nearest)}, and not in {len(runs) - len(agreeing)}, farthest {_said(farthest)}"
        f"; 80% intervals from {low:,.0f} to {high:,.0f} per GPU"
    )
    if claim.id == "c25":
        reason += f". Ways in which c24 and c25 both hold: {', '.join(_both(evidence)) or 'none'}"
    rests = [run_rest(nearest), run_rest(farthest)]
    near = evidence.measured(accelerator=called(on), model="Llama-3.1-70B", precision="fp8")
    if rates := per_gpu_rates(near):
        spread = between(min(rates), max(rates))
        rests.append(rows_rest(near, f"{len(rates)} results of Llama 3.1 70B FP8, any load: {spread} tok/s per GPU"))
    shown = f"{nearest.per_gpu:,.0f} tok/s ({between(*nearest.interval)})"
    return Judgement(verdict_of(run in agreeing for run in runs), shown, reason, rests)


def _at_batch_64(evidence: Evidence, on: str, case: tuple[tuple[int, int], str, int]) -> EstimatedRun | None:
    shape, precision, gpus = case
    return evidence.run(LLAMA, on, (64, *shape), precision, gpus=gpus, stack="vllm")


def _said(run: EstimatedRun) -> str:
    return f"{run.per_gpu:,.0f} for {run.deployment.label} with {run.load[1]:,} in and {run.load[2]:,} out"


def _both(evidence: Evidence) -> list[str]:
    """Where the figures of c24 and c25 lie in the intervals of the same number of GPUs at the same load."""
    figures = (("mi300x", evidence.claimed("c24")), ("h200", evidence.claimed("c25")))
    found = []
    for case in CASES:
        runs = [(_at_batch_64(evidence, on, case), span) for on, span in figures]
        if all(run and span.meets(*run.interval) for run, span in runs):
            shape, precision, gpus = case
            found.append(f"{precision} on {gpus}, {shape[0]:,} in")
    return found


@check("c46", "c47")
def batch_of_unstated_size(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """No batch and no lengths are given: which of a range of loads, if any, would give the figure?"""
    # What does not fit one H100 is taken as meant for the pair.
    (on, gpus), span = ("mi300x", 1) if claim.id == "c46" else ("h100-sxm", 2), claim.only
    loads = [(n, *shape) for n in (16, 64, 256) for shape in ((128, 128), (1024, 512))]
    runs = [run for load in loads if (run := evidence.run(LLAMA, on, load, "fp16", gpus=gpus))]
    agreeing = [run for run in runs if span.meets(gpus * run.interval[0], gpus * run.interval[1])]
    low, high = (pick(runs, key=lambda run: run.per_gpu) for pick in (min, max))
    where = f"one {called(on)}" if gpus == 1 else f"the two {called(on)} that hold it together"
    reason = (
        f"neither batch nor lengths are stated: over {len(runs)} loads of 16 to 256 requests the estimates for "
        f"{where} run from {gpus * low.per_gpu:,.0f} to {gpus * high.per_gpu:,.0f} tok/s. The figure lies in "
        f"{len(agreeing)} of the intervals{_example(agreeing)}, and not in the others"
        f"{_example([run for run in runs if run not in agreeing])}"
    )
    reason += f"; one {called(on)}'s half is {high.per_gpu:,.0f} at most" if gpus > 1 else ""
    shown = f"{between(gpus * low.per_gpu, gpus * high.per_gpu)} tok/s{' for two' if gpus > 1 else ''}"
    return Judgement(verdict_of(run in agreeing for run in runs), shown, reason, (run_rest(low), run_rest(high)))


def _example(runs: list[EstimatedRun]) -> str:
    return f", as with {runs[0].load[0]} requests of {runs[0].load[1]:,} in and {runs[0].load[2]:,} out" if runs else ""


@check("c45")
def ceilings(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    shown, agrees, alone, rests = [], [], [], list[Rest]()
    for span, on in zip(claim.spans, ("mi300x", "h100-sxm"), strict=True):
        one = evidence.run(LLAMA, on, (1, 512, 128), "fp16", gpus=1)
        any_number = one or evidence.needed(LLAMA, on, (1, 512, 128), "fp16")
        per_card = any_number.estimate.single_stream_ceiling_tokens_per_s / any_number.deployment.parallelism.gpus
        shown.append(f"{per_card:.1f}")
        agrees.append(span.holds(per_card, 0.02))
        alone.append(one is not None)
        rests += fact_rests(evidence, f"{on} memory.bandwidth")
    verdict = WRONG if not all(agrees) else HOLDS if all(alone) else CONDITIONAL
    reason = "it holds as arithmetic, bandwidth over the bytes of weights that a token reads (within 2%)"
    if not all(agrees):
        reason = "bandwidth over the bytes of weights that a token reads gives other figures (compared within 2%)"
    if not all(alone):
        reason += ". It does not hold for one H100, which cannot hold the model: its figure is half of what two have"
    rests.append(Rest("arithmetic", "memory bandwidth / bytes of the weights multiplied by"))
    return Judgement(verdict, f"{' and '.join(shown)} tok/s", reason, rests)


@check("c48", "c49")
def llama_cpp(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    model, on = ("llama-3.1-70b", "mi300x") if claim.id == "c48" else ("llama-3.1-8b", "rx-7900-xtx")
    run = evidence.needed(model, on, (1, 512, 128), "q4_k_m", gpus=1, stack="llama.cpp")
    low, high = run.interval
    span, rests = claim.only, [run_rest(run)]
    agrees = span.meets(low, high)
    most = run.estimate.single_stream_ceiling_tokens_per_s
    reason = (
        f"one request, 512 in and 128 out: estimate {run.per_gpu:.0f} tok/s, 80% {between(low, high)}, at most "
        f"{most:.0f} by bandwidth"
    )
    if claim.id == "c49":
        seen = evidence.number("radeon_8b")
        agrees = agrees or span.holds(seen, 0.05)
        reason += f"; a llama.cpp developer's published run gave {seen:.0f}"
        rests += source_rests(evidence, "radeon_8b")
    else:
        reason += (
            ". Nobody's run of llama.cpp on this part is in the catalog: the estimate is extrapolated from other "
            f"engines, and its interval begins at {low / span.high:.1f}x the most that is claimed"
        )
    return Judgement(verdict_of([agrees]), f"{run.per_gpu:.0f} tok/s ({between(low, high)})", reason, rests)


@check("c72")
def v4_flash(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    span, said = claim.only, evidence.number("v4_flash_on_mi300x")
    loads = [(n, 512, 512) for n in (256, 512, 1024)]
    runs = [evidence.needed("deepseek-v4-flash", "mi300x", load, "native", gpus=2) for load in loads]
    inside = [run for run in runs if span.meets(*run.interval)]
    reported = span.holds(said, 0.02)
    verdict = CONDITIONAL if reported and inside else WRONG
    reason = (
        f"those who ported the model report {said:,.0f} for 512 in and 512 out on two GPUs (within 2%). Our estimates "
        f"for that shape are {', '.join(f'{run.per_gpu:,.0f} at {run.load[0]:,}' for run in runs)} in flight; the "
        f"claim lies in the intervals of {_loads(inside)}, and not in those of "
        f"{_loads(run for run in runs if run not in inside)}. Other lengths give other figures"
    )
    rests = [*source_rests(evidence, "v4_flash_on_mi300x"), *map(run_rest, runs)]
    shown = f"{said:,.0f} tok/s reported, {runs[1].per_gpu:,.0f} estimated at 512 in flight"
    return Judgement(verdict, shown, reason, rests)


def _loads(runs: Iterable[EstimatedRun]) -> str:
    return " and ".join(f"{run.load[0]:,}" for run in runs) or "none"


@check("c13")
def vllm_gap(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """By how many percent the MI300X is behind; below zero it is ahead."""
    wanted = claim.only.middle
    gaps, rests = {}, list[Rest]()
    for precision in ("bf16", "fp8"):
        amd, nvidia = (
            evidence.needed(LLAMA, on, (64, *SHAPES[0]), precision, stack="vllm") for on in ("mi300x", "h100-sxm")
        )
        ratio = ratio_of(amd, nvidia)
        gaps[precision] = [100.0 * (1.0 - value) for value in (ratio.value, ratio.high, ratio.low)]
        rests += [run_rest(amd), run_rest(nvidia)]
    agrees = {name: low <= wanted <= high for name, (_, low, high) in gaps.items()}
    listed = "; ".join(
        f"{name} {_behind(value)} (80%: {_behind(low)} to {_behind(high)})" for name, (value, low, high) in gaps.items()
    )
    holding = " and ".join(name for name, yes in agrees.items() if yes) or "neither"
    reason = (
        "MI300X against H100 per GPU, vLLM on both, 64 in flight, 3,072 in and 1,024 out, the fewest GPUs of each that "
        f"hold it: {listed}. The claim names no precision; {wanted:.0f}% lies in the interval of {holding}"
    )
    if holding == "bf16":
        reason += ", which is wide, and not in that of fp8, where one MI300X does what takes four H100"
    shown = "; ".join(f"{_behind(value)} in {name}" for name, (value, _, _) in gaps.items())
    return Judgement(verdict_of(agrees.values()), shown, reason, rests)


def _behind(points: float) -> str:
    return f"{abs(points):.0f}% {'behind' if points >= 0 else 'ahead'}"


@check("c11")
def fp4_against_h100(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    peak = evidence.field("b200", "dense.fp4").si / evidence.field("h100-sxm", "dense.fp8").si
    b200, h100 = (evidence.offline(name, "mlperf_v5.1") for name in ("b200", "h100-sxm"))
    measured = max(per_gpu_rates(b200)) / max(per_gpu_rates(h100))
    span = claim.only
    verdict = verdict_of([span.holds(peak, 0.05), span.holds(measured, 0.1)])
    reason = (
        f"it {'holds' if span.holds(peak, 0.05) else 'does not hold'} for peaks: B200's FP4 over H100's FP8, as H100 "
        f"has no FP4, is {peak:.2f}x (within 5%). It {'holds' if span.holds(measured, 0.1) else 'does not hold'} for "
        f"results: the best Llama-2-70B Offline ones of MLPerf v5.1 are {measured:.1f}x apart per GPU (within 10%)"
    )
    rests = fact_rests(evidence, "b200 dense.fp4", "h100-sxm dense.fp8")
    rests.append(rows_rest([*b200, *h100], f"best of {len(b200)} B200 and {len(h100)} H100 submissions"))
    return Judgement(verdict, f"{peak:.2f}x at peak, {measured:.2f}x measured", reason, rests)


@check("c21", "c63")
def mi350x_against(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """At equal precision the peaks bound what arithmetic gives, bandwidth what decoding gives."""
    older, span = "mi325x" if claim.id == "c21" else "mi300x", claim.only
    paths = ("memory.bandwidth", "dense.bf16", "dense.fp8")
    bandwidth, bf16, fp8 = (evidence.field("mi350x", path).si / evidence.field(older, path).si for path in paths)
    new, old = (evidence.needed(LLAMA, on, (64, *SHAPES[0]), "fp8", gpus=1) for on in ("mi350x", older))
    predicted = ratio_of(new, old)
    at = {"bandwidth": bandwidth, "arithmetic in BF16": bf16, "arithmetic in FP8": fp8}
    bound = [name for name, value in at.items() if span.holds(value, 0.05)]
    free = [name for name in at if name not in bound]
    where = (
        f"holds where {' or '.join(bound)} binds, not where {' or '.join(free)} does" if bound else "is none of these"
    )
    reason = (
        f"peaks are {fp8:.2f}x in FP8 and {bf16:.2f}x in BF16, bandwidth is {bandwidth:.2f}x; "
        f"{span}x {where} (within 5%). The estimate for 70B FP8, 64 in flight, 3,072 in and 1,024 out, is {predicted}, "
        "wide because few results of the MI350X are published"
    )
    fields = (f"{name} {path}" for path in ("dense.fp8", "memory.bandwidth") for name in ("mi350x", older))
    rests = [*fact_rests(evidence, *fields), run_rest(new), run_rest(old)]
    shown = f"{between(min(at.values()), max(at.values()))} x, estimate {predicted.value:.2f} x"
    return Judgement(CONDITIONAL if bound else WRONG, shown, reason, rests)


@check("c40")
def mlperf_total(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    span, said = claim.only, evidence.number("mlperf_5_mi300x")
    rows = evidence.offline("mi300x")
    rates = per_gpu_rates(rows)
    verdict = verdict_of([span.holds(said, 0.001)])
    reason = (
        f"reported so, at second hand; that is {said / 32:,.0f} per GPU, beside {between(min(rates), max(rates))} in "
        f"the {len(rates)} MI300X results of v4.1, v5.1 and v6.0. The results of v5.0 itself are not shipped here"
    )
    what = f"Llama-2-70B Offline on MI300X, median {median(rates):,.0f} tok/s per GPU"
    rests = [*source_rests(evidence, "mlperf_5_mi300x"), rows_rest(rows, what)]
    return Judgement(verdict, f"{said:,.0f} tok/s", reason, rests)


@check("c41")
def mlperf_advantage(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    said, span = evidence.number("mlperf_5_mi300x"), claim.only
    gaps, rows = {}, list[OperatingPoint]()
    for round_ in ("mlperf_v4.1", "mlperf_v5.1"):
        points = [p for p in evidence.offline("h100-sxm", round_) if p["num_accelerators"] == "32"]
        gaps[round_] = 100.0 * (said / (32.0 * max(per_gpu_rates(points))) - 1.0)
        rows += points
    verdict = verdict_of([span.holds(gap, 0.05) for gap in gaps.values()])
    listed = " and ".join(f"{gap:+.0f}% against {name.removeprefix('mlperf_')}" for name, gap in gaps.items())
    reason = (
        f"{said:,.0f} tok/s beside the best 32 H100 of the rounds that are shipped here: {listed} (compared within "
        "5%). It holds against the H100 result of the year before, and not against the round after, whose H100 "
        "software was faster"
    )
    rests = [*source_rests(evidence, "mlperf_5_mi300x")]
    rests.append(rows_rest(rows, "Llama-2-70B Offline on 32 H100, TensorRT-LLM"))
    return Judgement(verdict, listed, reason, rests)
