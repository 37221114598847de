"""Recommendations: who wins in the situation named, by estimates, measured rows and prices of each kind."""

from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.prove.claims.evidence import LLAMA, EstimatedRun, Evidence, called, per_gpu_rates, ratio_of
from crosstie.prove.claims.fits import weights_gb
from crosstie.prove.claims.rates import SHAPES
from crosstie.prove.claims.reading import PublishedClaim
from crosstie.prove.claims.rests import Rest, fact_rests, quote_rest, rows_rest, run_rest
from crosstie.prove.claims.verdicts import CONDITIONAL, HOLDS, UNCHECKABLE, WRONG, Judgement, check, verdict_of

# What the articles weigh against one another.
FIELD = ("mi300x", "mi325x", "mi350x", "h100-sxm", "h200", "b200")


def _cost(run: EstimatedRun, usd: float, kind: str) -> float:
    """USD for each token/s that is bought, or for a million tokens that are rented."""
    return usd / run.per_gpu if kind == "purchase" else usd / 3600.0 / run.per_gpu * 1e6


def chosen(evidence: Evidence, claim: PublishedClaim) -> str:
    return evidence.part(claim.value.removeprefix("wait for ").casefold()).id


@check("c29")
def long_context(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """70B in FP8 with prompts of 32K on eight GPUs: by each kind of price, who gives a token or its rate for least."""
    name = chosen(evidence, claim)
    runs = {on: evidence.best_of_node(LLAMA, on, (64, 32_000, 500), "fp8") for on in FIELD}
    firsts, said, rests = {}, [], [run_rest(run) for run in runs.values()]
    for kind in ("purchase", "modelled-3-years", "on-demand", "own-neocloud"):
        quotes = {on: quote for on in FIELD if (quote := evidence.price(on, kind))}
        costs = {on: _cost(runs[on], quote.usd, kind) for on, quote in quotes.items()}
        ranked = sorted(costs, key=lambda on: costs[on])
        firsts[kind] = ranked[0]
        beside = name if ranked[0] != name and name in costs else ranked[1]
        unit = "USD for a token/s" if kind == "purchase" else "USD a million tokens"
        said.append(
            f"{kind}: {called(ranked[0])} {costs[ranked[0]]:,.3g} {unit}, {called(beside)} {costs[beside]:,.3g}"
        )
        rests += [quote_rest(quotes[on]) for on in (ranked[0], beside)]
    verdict = verdict_of([first == name for first in firsts.values()])
    holding = [kind for kind, first in firsts.items() if first == name]
    far = [called(on) for on, run in runs.items() if "extrapolated" in run.estimate.basis]
    reason = (
        f"it holds by {' and '.join(holding) or 'no kind of price'}, each kind for itself. 70B FP8, 32,000 in and 500 "
        f"out, 64 in flight on eight GPUs, cheapest by {'; '.join(said)}. Tokens/s of {', '.join(far)} are extrapolated"
    )
    if evidence.price(name, "purchase") is None and evidence.own_price(name):
        own = evidence.claimed("c14").middle
        reason += (
            f"; the only purchase price of an {called(name)} is the article's own, "
            f"{_cost(runs[name], own, 'purchase'):,.3g} USD for a token/s"
        )
    return Judgement(verdict, "; ".join(f"{kind}: {called(on)}" for kind, on in firsts.items()), reason, rests)


@check("c30")
def top_throughput(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    name = chosen(evidence, claim)
    rows = {on: points for on in evidence.catalog.accelerators if (points := evidence.offline(on))}
    best = {on: max(per_gpu_rates(points)) for on, points in rows.items()}
    discussed = {on: best[on] for on in FIELD if on in best}
    first, overall = max(discussed, key=lambda on: discussed[on]), max(best, key=lambda on: best[on])
    verdict = verdict_of([first == name, overall == name])
    reason = (
        "by the best Llama-2-70B Offline result of MLPerf v4.1 to v6.0 per GPU, formats and rounds as submitted, it "
        f"{'holds' if first == name else 'does not hold'} among the parts that the articles discuss, where "
        f"{called(first)} is first ({discussed[first]:,.0f} tok/s), and "
        f"{'holds' if overall == name else 'does not hold'} among all, where {called(overall)} is "
        f"({best[overall]:,.0f})"
    )
    listed = ", ".join(f"{on} {rate:,.0f}" for on, rate in sorted(discussed.items(), key=lambda item: -item[1]))
    rest = rows_rest([p for points in rows.values() for p in points], f"tok/s per GPU: {listed}")
    return Judgement(verdict, f"{called(first)}; of all {called(overall)}", reason, [rest])


@check("c31")
def wait_or_fp4(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    name = chosen(evidence, claim)
    having = [on for on in FIELD if evidence.label(on, "chip.fp4_dialect") != "none"]
    rows = evidence.measured(accelerator=called(name))
    verdict = WRONG if name not in having else CONDITIONAL if rows or len(having) > 1 else HOLDS
    reason = f"of the parts discussed {' and '.join(map(called, having))} have FP4"
    if name in having and len(having) > 1:
        reason += ": it holds where the part is to be AMD's, and not as the only choice"
    if rows:
        reason += f". There is nothing left to wait for: its first results here are of {min(p['date'] for p in rows)}"
    rests = fact_rests(evidence, *(f"{on} chip.fp4_dialect" for on in having))
    rests += [rows_rest(rows, f"{len(rows)} published operating points of the {called(name)}")] if rows else []
    return Judgement(verdict, f"FP4: {', '.join(map(called, having))}", reason, rests)


@check("c65")
def sustained_batch(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Who gives most tokens/s per GPU at batch 64, and whether the intervals can tell."""
    name, rival = chosen(evidence, claim), "b200"
    rests, ratios = list[Rest](), {}
    for precision in ("bf16", "fp8"):
        ours, theirs = (evidence.needed(LLAMA, on, (64, *SHAPES[0]), precision) for on in (name, rival))
        ratios[precision] = ratio_of(ours, theirs)
        rests += [run_rest(ours), run_rest(theirs)]
    decided = [ratio.value > 1.0 for ratio in ratios.values() if not ratio.low <= 1.0 <= ratio.high]
    rows = {on: evidence.offline(on) for on in (name, rival)}
    best = {on: max(per_gpu_rates(points)) for on, points in rows.items()}
    shown = " and ".join(f"{called(on)} {rate:,.0f}" for on, rate in best.items())
    rests.append(rows_rest([p for points in rows.values() for p in points], f"best Offline result: {shown}"))
    verdict = verdict_of(decided) if decided else UNCHECKABLE
    reason = (
        f"{called(name)} over {called(rival)} per GPU, 64 in flight, 3,072 in and 1,024 out: "
        f"{', '.join(f'{precision} {ratio}' for precision, ratio in ratios.items())}"
        f"{'' if decided else '; the intervals do not part them'}. The best published Llama-2-70B Offline results, "
        f"in FP4, are {shown} tok/s"
    )
    quotes = [evidence.price(on, "purchase") for on in (name, rival)]
    if quotes[0] and quotes[1]:
        rests += [quote_rest(quote) for quote in quotes if quote]
        worth = quotes[1].usd / quotes[0].usd
        per_usd = ", ".join(f"{precision} {ratio.value * worth:.1f}x" for precision, ratio in ratios.items())
        reason += (
            f". Per USD of purchase ({quotes[0].usd:,.0f} and {quotes[1].usd:,.0f}, third parties' estimates) it would "
            f"be ahead: {per_usd}"
            if worth * min(r.value for r in ratios.values()) > 1.0
            else ""
        )
    computed = ", ".join(f"{ratio.value:.2f}x in {precision}" for precision, ratio in ratios.items())
    return Judgement(verdict, f"{'' if decided else 'undecided: '}{computed}", reason, rests)


@check("c66")
def low_latency(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Time between tokens of one request: an 8B model on one GPU, a 70B model over eight."""
    name, limit_s = chosen(evidence, claim), 5e-3
    wins, said, shown, rests = [], [], [], list[Rest]()
    for model, gpus in (("llama-3.1-8b", 1), (LLAMA, 8)):
        every = {on: evidence.run(model, on, (1, 1024, 256), "fp8", gpus=gpus) for on in FIELD}
        runs = {on: run for on, run in every.items() if run}
        seconds = {on: run.estimate.tpot_s for on, run in runs.items()}
        first = min(seconds, key=lambda on: seconds[on])
        quick = [on for on in seconds if seconds[on] < limit_s]
        wins.append((first == name, name in quick))
        shown.append(f"{called(first)} {seconds[first] * 1e3:.1f} ms for {model}")
        said.append(
            f"{shown[-1]} on {gpus} GPU{'s' * (gpus > 1)}, where {len(quick)} of {len(runs)} parts stay below "
            f"{limit_s * 1e3:.0f} ms"
        )
        rests += [run_rest(runs[on]) for on in dict.fromkeys((first, name))]
    verdict = HOLDS if all(all(case) for case in wins) else CONDITIONAL if any(won for won, _ in wins) else WRONG
    reason = f"least time between tokens of one request, FP8, vLLM, 1,024 in and 256 out: {'; '.join(said)}"
    if verdict == CONDITIONAL:
        reason += (
            ". The claim names no model: below 5 ms holds for the small one, where others do it too, not the large"
        )
    return Judgement(verdict, "; ".join(shown), reason, rests)


@check("c67")
def many_models(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    name, size = chosen(evidence, claim), weights_gb(evidence, LLAMA, "fp8")
    held = {on: 8 * int(evidence.part(on).memory_bytes / 1e9 // size) for on in FIELD}
    spread = {on: int(8 * evidence.part(on).memory_bytes / 1e9 // size) for on in FIELD}
    agrees = [counts[name] == max(counts.values()) for counts in (held, spread)]
    every = {on: part.memory_bytes for on, part in evidence.catalog.accelerators.items()}
    equal = sorted(on for on, size_ in every.items() if size_ >= 0.95 * every[name] and on != name)
    # The third reading, time to switch, is not modelled.
    verdict = verdict_of([*agrees, False])
    listed, shared = (
        ", ".join(f"{called(on)} {count}" for on, count in sorted(counts.items(), key=lambda item: -item[1]))
        for counts in (held, spread)
    )
    reason = (
        f"copies of a 70B model in FP8 ({size:.0f} GB) that eight GPUs keep loaded, bare weights, among the parts "
        f"discussed: each copy on one GPU {listed}; each spread over all eight, as if their bytes were one memory, "
        f"{shared}. It is not the only choice, as {', '.join(map(called, equal)) or 'none'} have as much; nor is it "
        "known to hold by time to switch, which is not modelled"
    )
    rests = fact_rests(evidence, f"{name} memory.capacity", "b200 memory.capacity")
    return Judgement(verdict, f"{called(name)} {held[name]}, B200 {held['b200']} copies", reason, rests)


@check("c42")
def large_models_only(evidence: Evidence, claim: PublishedClaim) -> Judgement:
    """Tokens/s per GPU and per USD of MI300X over H100, for the models named and for four others."""
    named, others = ("llama-3.1-405b", "deepseek-v3"), (LLAMA, "llama-3.1-8b", "mixtral-8x22b", "qwen3-235b-a22b")
    quotes = [quote for on in ("mi300x", "h100-sxm") if (quote := evidence.price(on, "modelled-3-years"))]
    if len(quotes) < 2:
        raise BadInput("the catalog lacks a three-year rent of one of them")
    cheaper = quotes[1].usd / quotes[0].usd
    speed, rests = {}, [quote_rest(quote) for quote in quotes]
    for model in (*named, *others):
        amd, nvidia = (_widest(evidence, model, on) for on in ("mi300x", "h100-sxm"))
        speed[model] = amd.per_gpu / nvidia.per_gpu
        rests += [run_rest(amd), run_rest(nvidia)] if model in named else []
    # Five percent is less than such estimates can tell apart.
    faster = {model for model, ratio in speed.items() if ratio > 1.05}
    per_usd = {model for model, ratio in speed.items() if ratio * cheaper > 1.05}
    most = len(others) / 2
    parts = [set(named) <= faster & per_usd, len(faster & set(others)) < most, len(per_usd & set(others)) < most]
    verdict = verdict_of(parts)
    listed = ", ".join(f"{model} {ratio:.2f}x" for model, ratio in speed.items())
    reason = (
        f"estimates of MI300X over H100 per GPU, FP8, 128 in flight on eight GPUs, 1,024 in and 1,024 out, with the "
        f"software measured last: {listed}; per USD of a three-year rent {cheaper:.2f} times that. For speed it "
        f"{'holds' if all(parts[:2]) else 'does not hold'}: ahead by more than 5% on "
        f"{', '.join(sorted(faster)) or 'none'}. For cost it {'holds' if parts[2] else 'does not'}: cheaper a token on "
        f"{len(per_usd)} of {len(speed)}. DeepSeek-V3 needs 16 H100, hence part of its gap"
    )
    yes = ["yes" if holds else "no" for holds in (all(parts[:2]), parts[2])]
    counts = f"faster on {len(faster)}, cheaper a token on {len(per_usd)} of {len(speed)} models"
    return Judgement(verdict, f"{yes[0]} for speed, {yes[1]} for cost: {counts}", reason, rests)


def _widest(evidence: Evidence, model: str, on: str) -> EstimatedRun:
    """The best split of eight GPUs; more of them where eight do not hold the model."""
    load, precision = (128, 1024, 1024), "native" if model.startswith("deepseek") else "fp8"
    try:
        return evidence.best_of_node(model, on, load, precision)
    except DoesNotFit:
        return evidence.needed(model, on, load, precision)
