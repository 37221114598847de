"""Claims about software: computed where bits or measured rows decide, else from public sources with their date."""

import numpy as np
from numpy.typing import NDArray

from crosstie.prove.claims.evidence import Evidence, output_rates, per_gpu_rates
from crosstie.prove.claims.reading import PublishedClaim, spans_of
from crosstie.prove.claims.rests import Rest, fact_rest, fact_rests, rows_rest, source_rests
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, UNCHECKABLE, WRONG, Judgement, check, verdict_of

DIALECTS = ("mi300x chip.fp8_dialect", "h100-sxm chip.fp8_dialect")


def decode_e4m3(codes: NDArray[np.uint8], bias: int, fnuz: bool) -> NDArray[np.float64]:
    """Values of FP8 codes with four bits of exponent and three of fraction, NaN where a dialect has none."""
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = ((codes >> 3) & 0x0F).astype(np.int64)
    fraction = (codes & 0x07).astype(np.float64) / 8.0
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1.0 + fraction) * 2.0 ** (exponent - bias))
    missing = codes == 0x80 if fnuz else (codes & 0x7F) == 0x7F
    return np.where(missing, np.nan, sign * value)


@check("c69")
def dialects(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    codes = np.arange(256, dtype=np.uint8)
    bias = round(evidence.number("fnuz_bias"))
    ocp, fnuz = decode_e4m3(codes, bias - 1, fnuz=False), decode_e4m3(codes, bias, fnuz=True)
    both = np.isfinite(ocp) & np.isfinite(fnuz)
    nonzero = both & (fnuz != 0.0)
    ratios = np.unique(ocp[nonzero] / fnuz[nonzero])
    own, other = (evidence.label(name, "chip.fp8_dialect") for name in ("mi300x", "h100-sxm"))
    exact = len(ratios) == 1 and claim.only.holds(float(ratios[0]), 0.0)
    verdict = WRONG if not exact or own == other else HOLDS
    reason = (
        f"decoded in both dialects, all {int(both.sum())} codes that are finite in both are {float(ratios[0]):g}x "
        f"in OCP what they are in fnuz, exactly; of the other {256 - int(both.sum())}, 0x80 is minus zero in one and "
        "NaN in the other, 0x7F and 0xFF are NaN in OCP and 240 in size in fnuz"
    )
    rests = [Rest("arithmetic", "256 codes decoded with biases 7 and 8"), *source_rests(evidence, "fnuz_bias")]
    rests += fact_rests(evidence, *DIALECTS)
    return Judgement(verdict, f"{float(ratios[0]):g} x", reason, rests)


@check("c57")
def gfx_override(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    isa = evidence.label("rx-7900-xtx", "chip.isa")
    digits = isa.removeprefix("gfx")
    own = f"{int(digits[:-2])}.{int(digits[-2], 16)}.{int(digits[-1], 16)}"
    needed = claim.value != own
    reason = f"the card is {isa}, which the variable writes as {own}: to set it to {claim.value} "
    reason += (
        "overrides a different target" if needed else "changes nothing. AMD and vLLM list the card by its own target"
    )
    rests = fact_rests(evidence, "rx-7900-xtx chip.isa")
    rests += source_rests(evidence, "radeon_supported", "radeon_in_vllm")
    return Judgement(CONDITIONAL if needed else WRONG, f"not needed; it is {own} by itself", reason, rests)


@check("c56")
def hipify(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    reason = "AMD's documentation gives no share, and 'simple' has no definition that could be counted"
    return Judgement(UNCHECKABLE, "no share published", reason, source_rests(evidence, "hipify_limits"))


@check("c68")
def one_variable(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    own, other = (evidence.label(name, "chip.fp8_dialect") for name in ("mi300x", "h100-sxm"))
    reason = (
        "the engine comes from another image or wheel and needs another driver, as AMD's own page says; a variable "
        "such as VLLM_ROCM_USE_AITER=1 is a matter of speed on top"
    )
    if own != other:
        reason += f". On MI300X FP8 checkpoints are read in another dialect ({own} instead of {other}) besides"
    rests = source_rests(evidence, "vllm_on_rocm") + fact_rests(evidence, *DIALECTS)
    return Judgement(WRONG if claim.says_yes else HOLDS, "no: driver and image or wheel", reason, rests)


@check("c70")
def v4_kernels(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    ported_to, isa = evidence.fact("v4_kernels_gfx950").value, evidence.label("mi300x", "chip.isa")
    lacking = evidence.fact("v4_kernels_missing").value == "yes" and ported_to != isa
    reason = (
        "it holds for AITER's own kernels: AMD's inventory of May 2026 lacks them, and the one proposed in September "
        "is for gfx950. It does not hold as a bar to serving: others have served the model on MI300X with other "
        "kernels, so what is lacking is speed"
    )
    names = ("v4_kernels_missing", "v4_kernels_gfx950", "v4_on_mi300x", "v4_flash_on_mi300x")
    rests = source_rests(evidence, *names) + fact_rests(evidence, "mi300x chip.isa")
    return Judgement(CONDITIONAL if lacking == claim.says_yes else WRONG, "yes, as of September 2026", reason, rests)


@check("c71")
def graph_capture(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    breaks = evidence.fact("hip_copies").value == "not allowed"
    reason = (
        "by the documentation it holds for a scalar copied from ordinary host memory: such a copy waits, and capture "
        "refuses what waits, on CUDA as on HIP since 7.0. It does not hold for a fill or for a copy from pinned memory "
        "on CUDA, where we saw both captured; on HIP we ran nothing"
    )
    rests = source_rests(evidence, "hip_copies", "cuda_copies", "hip_matches_cuda", "captured_copies")
    return Judgement(CONDITIONAL if breaks == claim.says_yes else WRONG, "yes, for copies that wait", reason, rests)


@check("c39")
def aiter_attention(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    (said,) = spans_of(str(evidence.fact("aiter_attention").value))
    agrees = said == claim.only
    reason = (
        f"the engine's authors and AMD report {said}x: it holds for models with ordinary attention heads against the "
        "legacy backend, and not for MLA models against Triton, where they report 1.2 to 1.5x. The measurements are "
        "theirs"
    )
    return Judgement(CONDITIONAL if agrees else WRONG, f"{said} x", reason, source_rests(evidence, "aiter_attention"))


@check("c28")
def flash_attention(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    fractions = {name: evidence.catalog.efficiency(evidence.part(name)).attention for name in ("mi300x", "h100-sxm")}
    rate = {name: fact.value * evidence.field(name, "dense.bf16").si for name, fact in fractions.items()}
    gap = 100.0 * (1.0 - rate["mi300x"] / rate["h100-sxm"])
    reason = (
        f"by the catalog's constants an MI300X is {gap:.0f}% behind an H100 in attention, but its own constant is "
        "assumed and confirms nothing; AMD's launch figures put it 10 to 20% ahead in FlashAttention-2. No measurement "
        "of both with one kernel was found"
    )
    known = all(fact.basis in ("measured", "derived") for fact in fractions.values())
    verdict = verdict_of([claim.only.holds(gap, 0.2)]) if known else UNCHECKABLE
    rests = [fact_rest(name, "efficiency attention", fact) for name, fact in fractions.items()]
    rests += source_rests(evidence, "flash_attention_at_launch")
    return Judgement(verdict, f"{gap:.0f}% by assumed constants", reason, rests)


@check("c38")
def deficit_of_2024(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Inference results of 2024 on both, at the same conditions; the article's source is about training."""
    dstack = [p for p in evidence.measured(source_id="dstack_h100_mi300x") if p["num_accelerators"] == "8"]
    at_once = [p for p in dstack if p["concurrency"] == "rate 1000 req/s"]
    h100, mi300x = (
        [row.value for row in output_rates(p for p in at_once if p["accelerator"] == name)]
        for name in ("H100", "MI300X")
    )
    deficits = [max(h100) / value for value in mi300x]
    rows = {name: evidence.offline(name, "mlperf_v4.1") for name in ("h100-sxm", "mi300x")}
    tuned = max(per_gpu_rates(rows["h100-sxm"])) / max(per_gpu_rates(rows["mi300x"]))
    span = claim.only
    worst = max(*deficits, tuned)
    verdict = CONDITIONAL if span.holds(worst, 0.1) else WRONG
    reason = (
        "for inference the published results of 2024 show less. H100 over MI300X on eight GPUs, Llama 3.1 405B FP8, "
        f"vLLM 0.6.3, all requests at once: {' and '.join(f'{d:.2f}x' for d in deficits)} in two settings of the "
        f"MI300X (below 1 it is ahead); MLPerf v4.1, tuned: {tuned:.2f}x (compared within 10%). SemiAnalysis's study "
        "of that month is about training, which is not checked here"
    )
    rests = [rows_rest(at_once, "Llama 3.1 405B FP8, 8 GPUs, ShareGPT")]
    rests.append(rows_rest([*rows["h100-sxm"], *rows["mi300x"]], "Llama-2-70B Offline"))
    rests += source_rests(evidence, "training_2024")
    return Judgement(verdict, f"{min(*deficits, tuned):.2f} to {worst:.2f} x", reason, rests)
