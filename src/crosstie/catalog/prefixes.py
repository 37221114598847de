"""The `prefix` of a class: what of its prompts is in a cache when they come, given or measured on its trace."""

from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.lengths import Lengths
from crosstie.catalog.reading import read_record, table
from crosstie.catalog.reuse import Reuse, reuse
from crosstie.catalog.traces import BLOCKS, Ints, Trace
from crosstie.core.errors import BadData
from crosstie.core.workload import TIERS, HitCurve, PrefixReuse, Slice

# Replicas over which requests are spread when the curve is measured; between them logarithms are interpolated.
_SPREAD = (1, 4, 16, 64)
# Sizes of caches between which curves are taken as straight.
_SIZES = 40
_OF_MEASURED = ("routing", *TIERS, *TIERS.values())


def read_prefix(file: Path, where: str, raw: object, trace: Trace | None) -> PrefixReuse:
    entry = table(file, where, raw)
    prefix_reuse = read_record(file, where, entry, PrefixReuse)
    if prefix_reuse.measured:
        _check_measurable(file, where, entry, trace)
    else:
        for key in _OF_MEASURED:
            if key in entry:
                raise BadData(file, f"{where}.{key}", "needs measured = true: where hits are is known of a trace alone")
        if prefix_reuse.hit_rate is None and not prefix_reuse.shared_tokens:
            raise BadData(file, where, "give hit_rate, shared_tokens, or measured = true with a trace of hash_ids")
    return prefix_reuse


def _check_measurable(file: Path, where: str, entry: dict[str, object], trace: Trace | None) -> None:
    for key in ("hit_rate", "shared_tokens", "idle_s"):
        if key in entry:
            raise BadData(file, f"{where}.{key}", "is what measured = true finds out: leave one of them out")
    if trace is None:
        raise BadData(file, f"{where}.measured", "the class has no trace to measure it on")
    if trace.blocks is None:
        raise BadData(file, f"{where}.measured", f"the trace has no {BLOCKS}, which tell what prompts have in common")
    if not trace.requests_per_s:
        raise BadData(file, f"{where}.measured", "the trace has no times, so nothing tells how soon prompts come again")


def with_prefixes(
    file: Path,
    where: str,
    prefix: PrefixReuse,
    slices: tuple[Slice, ...],
    inputs: Lengths,
    requests_per_s: float,
    trace: Trace | None,
) -> tuple[Slice, ...]:
    """The slices with what is cached of their prompts; `inputs` are those that they were cut from."""
    if prefix.measured:
        assert trace is not None
        return _measured(prefix, slices, inputs, requests_per_s, trace)
    shared, rate = float(prefix.shared_tokens), prefix.hit_rate
    mean = sum(band.share * band.input_tokens for band in slices)
    if rate is not None and shared > rate * mean:
        raise BadData(
            file, f"{where}.shared_tokens", f"{shared:,.0f} are more than hit_rate, {rate:g} of {mean:,.0f} tokens"
        )
    return tuple(
        _given(prefix, band, inputs[group]) for band, group in zip(slices, _groups(slices, inputs), strict=True)
    )


def _groups(slices: tuple[Slice, ...], inputs: Lengths) -> list[Ints]:
    """Which of the requests each slice is made of."""
    ends = np.rint(np.cumsum([band.share for band in slices]) * len(inputs)).astype(np.int64)
    return np.split(np.argsort(inputs, kind="stable"), ends[:-1])


def _given(prefix: PrefixReuse, band: Slice, inputs: Lengths) -> Slice:
    """A bare rate says nothing of who hits: every prompt is taken to have that share of it in the cache."""

    def cached(lengths: Lengths) -> Lengths:
        if prefix.hit_rate is None:
            return np.minimum(float(prefix.shared_tokens), lengths - 1.0)
        return prefix.hit_rate * lengths

    mean = float(cached(inputs).mean())
    return msgspec.structs.replace(
        band,
        cached_tokens=mean,
        shared_tokens=min(float(prefix.shared_tokens), mean),
        cached_sample=tuple(map(float, cached(np.array([float(tokens) for tokens, _ in band.sample])))),
        prefix=prefix,
    )


def _measured(
    prefix: PrefixReuse, slices: tuple[Slice, ...], inputs: Lengths, requests_per_s: float, trace: Trace
) -> tuple[Slice, ...]:
    # Attention replicas of one engine are spread over as well, so that all rows are needed however requests are routed.
    reuses = [reuse(trace, count) for count in _SPREAD]
    sizes = _sizes(reuses)
    spared = np.bincount(reuses[0].request, reuses[0].tokens, len(trace))
    assert trace.requests_per_s
    tokens = float((trace.input_tokens + trace.output_tokens).mean())
    made = []
    for band, group in zip(slices, _groups(slices, inputs), strict=True):
        mine = np.zeros(len(trace), np.bool_)
        mine[group] = True
        rows = [each.curve(sizes, mine) for each in reuses]
        hits = HitCurve(
            tokens_per_s=trace.requests_per_s * tokens,
            class_tokens_per_s=requests_per_s * tokens,
            cache_tokens=tuple(map(float, sizes)),
            replicas=_SPREAD,
            cached_tokens=tuple(tuple(map(float, row)) for row in rows),
        )
        # The sample is of the trace's own requests.
        known = {(round(float(inputs[row])), int(trace.output_tokens[row])): float(spared[row]) for row in group}
        sample = tuple(known.get(pair, 0.0) for pair in band.sample)
        cached = float(rows[0][-1])
        made.append(msgspec.structs.replace(band, cached_tokens=cached, cached_sample=sample, prefix=prefix, hits=hits))
    return tuple(made)


def _sizes(reuses: list[Reuse]) -> Lengths:
    needs = np.concatenate([trace_reuse.needs for trace_reuse in reuses])
    if not len(needs):
        return np.array([1.0])
    return np.unique(np.quantile(needs, np.linspace(0.0, 1.0, _SIZES)))
