"""From passes to a verdict: gauges with intervals, each held against a limit and against what A differs from itself by.

Intervals are bootstrap intervals over prompts, not positions: places of one text are not independent. A gauge says
`same` if its whole interval is within what is allowed, `differs` if none of it is, and `unsure` between. Gauges of
answers (tool calls, JSON, loops, garbage) speak only where B is worse than A for sure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np

from crosstie.core.errors import BadInput
from crosstie.core.figures import plural
from crosstie.prove.parity.endpoint import Passes, Way
from crosstie.prove.parity.groups import Group, Groups, by_position, by_prompt, first_divergence, length_of
from crosstie.prove.parity.power import SIZES, Power, Rows, power
from crosstie.prove.parity.samples import (
    ComparedToken,
    Pair,
    Sample,
    calls_a_tool_rightly,
    is_garbage,
    is_wanted_json,
    loops,
    paired,
)

Says = Literal["same", "unsure", "differs"]
_RESAMPLES = 2000
_SEED = 20260801
# B may be so many times as far from A as A is from itself, where that is more than the limit.
_TIMES_FLOOR = 2.0
# An A that is so many times the limit away from itself is no measure of anything.
_MOST_FLOOR = 5.0
# Answers that part within so many tokens, and at no near tie, part early.
EARLY = 8
# Nats between the likeliest token and the least listed one below which a model prefers none: trained ones have more.
_FLAT = 0.05
DISAGREEMENT, FORCED = "forced disagreement", "forced KL"
# Late places must be so many times as far apart as early ones before positions are blamed.
_TIMES_WORSE = 4.0
_LEAST_PLACES = 4


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Nats a token, and fractions. docs/parity.md has where they come from."""

    kl: float = 0.02
    disagreement: float = 0.05
    early: float = 0.25
    worse: float = 0.05


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """`floor`: the same of A against itself. `low` to `high`: 95% of resamples of the prompts."""

    name: str
    floor: float
    value: float
    low: float
    high: float
    allowed: float
    says: Says
    prompts: int
    # Of gauges of answers: how many of A's and of B's are bad; `value` is what B has more.
    a_rate: float | None = None
    b_rate: float | None = None


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    a: str
    b: str
    a_model: str
    b_model: str
    verdict: Says
    way: Way | None
    top: int
    prompts: int
    positions: int
    # Prompts that A did not answer, which are left out, and that B alone did not, each with its first reason.
    left_out: tuple[str, ...]
    unanswered: tuple[str, ...]
    gauges: tuple[Gauge, ...]
    first_divergence: Groups
    by_position: tuple[Group, ...]
    by_length: tuple[Group, ...]
    by_language: tuple[Group, ...]
    # Which fault so many prompts see; None where texts were not forced.
    power: Power | None
    causes: tuple[str, ...]
    notes: tuple[str, ...]
    # Whether A or B has no model behind it: then it says nothing of any GPU.
    emulated: bool = False


def judged(a: str, b: str, passes: Passes, limits: Limits | None = None, faults: tuple[float, ...] = SIZES) -> Parity:
    """Raises BadInput where A or B answered nothing. `faults`: sizes of which to say how many prompts they need."""
    limits = limits or Limits()
    asked = list(zip(passes.first, passes.again, passes.other, strict=True))
    heard = [trio for trio in asked if not (trio[0].error or trio[1].error)]
    if not heard:
        raise BadInput(f"{a}: answered no prompt: {asked[0][0].error or asked[0][1].error}")
    whole = [trio for trio in heard if not trio[2].error]
    if not whole:
        raise BadInput(f"{b}: answered no prompt: {heard[0][2].error}")
    noise = [paired(first, again) for first, again, _ in whole]
    pairs = [paired(first, other) for first, _, other in whole]
    gauges = _gauges(noise, pairs, limits)
    unanswered = tuple(f"{three.prompt.id}: {three.error}" for _, _, three in heard if three.error)
    positions = by_position(noise, pairs)
    sees = _sees(noise, pairs, gauges, faults)
    return Parity(
        a=a, b=b, a_model=passes.a_model, b_model=passes.b_model,
        verdict="differs" if unanswered else _together(gauges, passes.first),
        way=passes.way, top=passes.top, prompts=len(whole),
        positions=sum(len(pair.forced) for pair in pairs),
        left_out=tuple(f"{own.prompt.id}: {own.error or two.error}" for own, two, _ in asked if own.error or two.error),
        unanswered=unanswered, gauges=gauges, first_divergence=first_divergence(noise, pairs),
        by_position=positions, by_length=by_prompt(noise, pairs, length_of),
        by_language=by_prompt(noise, pairs, lambda pair: pair.a.prompt.language),
        causes=causes_of(pairs, {gauge.name: gauge.says for gauge in gauges}, positions, limits.kl),
        power=sees, notes=_notes(passes, gauges, limits, sees), emulated=passes.emulated,
    )  # fmt: skip


def _together(gauges: Sequence[Gauge], first: Sequence[Sample]) -> Says:
    said = {gauge.says for gauge in gauges}
    return "differs" if "differs" in said else "unsure" if "unsure" in said or _is_flat(first) else "same"


def _is_flat(samples: Sequence[Sample]) -> bool:
    """Whether A finds all tokens about equally likely, as weights do that were never loaded: then nothing that is wrong
    with B would show."""
    tops = [place.top.values() for sample in samples for place in (*sample.forced, *sample.steps) if len(place.top) > 1]
    return bool(tops) and float(np.median([max(top) - min(top) for top in tops])) < _FLAT


def _sees(noise: list[Pair], pairs: list[Pair], gauges: Sequence[Gauge], faults: tuple[float, ...]) -> Power | None:
    floor, seen = (_sums((pair.forced for pair in own), lambda place: place.kl) for own in (noise, pairs))
    return power(floor, seen, next((gauge.allowed for gauge in gauges if gauge.name == FORCED), 0.0), faults)


def _gauges(noise: list[Pair], pairs: list[Pair], limits: Limits) -> tuple[Gauge, ...]:
    measures: list[tuple[str, Callable[[list[Pair]], Rows], float]] = [
        (FORCED, lambda own: _sums((pair.forced for pair in own), lambda place: place.kl), limits.kl),
        ("chat KL", lambda own: _sums((pair.greedy for pair in own), lambda place: place.kl), limits.kl),
        (
            DISAGREEMENT,
            lambda own: _sums((pair.forced for pair in own), lambda place: not place.agrees),
            limits.disagreement,
        ),
        ("early divergence", _early, limits.early),
    ]
    gauges = [_held(name, rows(noise), rows(pairs), limit) for name, rows, limit in measures]
    for name, kind, is_bad in _DETECTORS:
        floor, asked = ([pair for pair in own if kind in ("", pair.a.prompt.kind)] for own in (noise, pairs))
        gauges.append(_worse(name, floor, asked, is_bad, limits.worse))
    return tuple(gauge for gauge in gauges if gauge is not None)


def _sums(prompts: Iterable[Sequence[ComparedToken]], of: Callable[[ComparedToken], float]) -> Rows:
    """Of each prompt: a sum over its places, and how many they are."""
    return [(float(sum(map(of, places))), float(len(places))) for places in prompts if places]


def _early(pairs: list[Pair]) -> Rows:
    """Near ties fall either way in the same model: they count only where nobody can tell that they were such."""

    def parts(pair: Pair) -> bool:
        clear = pair.is_clear or not (pair.a.steps and pair.b.steps)
        return pair.parts_at is not None and pair.parts_at < EARLY and clear

    return [(float(parts(pair)), 1.0) for pair in pairs]


# What makes an answer bad, and the kind of prompts that it is looked for in; "": in all.
_DETECTORS: tuple[tuple[str, str, Callable[[Sample], bool]], ...] = (
    ("invalid tool calls", "tool", lambda sample: not calls_a_tool_rightly(sample)),
    ("invalid JSON", "json", lambda sample: not is_wanted_json(sample)),
    ("repetition", "", lambda sample: loops(sample.answer)),
    ("garbage", "", lambda sample: is_garbage(sample.answer, sample.prompt.text)),
    ("empty answers", "", lambda sample: not (sample.answer.strip() or sample.calls)),
)


def _worse(
    name: str, noise: list[Pair], pairs: list[Pair], is_bad: Callable[[Sample], bool], limit: float
) -> Gauge | None:
    """By how many of the prompts B is worse than A."""

    def rows(pairs: list[Pair]) -> Rows:
        return [(float(is_bad(pair.b)) - float(is_bad(pair.a)), 1.0) for pair in pairs]

    gauge = _held(name, rows(noise), rows(pairs), limit)
    if gauge is None:
        return None
    return msgspec.structs.replace(
        gauge, says="differs" if gauge.low > gauge.allowed else "same",
        a_rate=sum(is_bad(pair.a) for pair in pairs) / len(pairs),
        b_rate=sum(is_bad(pair.b) for pair in pairs) / len(pairs),
    )  # fmt: skip


def _held(name: str, noise: Rows, rows: Rows, limit: float) -> Gauge | None:
    if not rows:
        return None
    value, low, high = interval(rows)
    floor = interval(noise)[0] if noise else 0.0
    allowed = max(limit, _TIMES_FLOOR * floor)
    says: Says = "same" if high <= allowed else "differs" if low > allowed else "unsure"
    if floor > _MOST_FLOOR * limit:
        says = "unsure"
    return Gauge(name=name, floor=floor, value=value, low=low, high=high, allowed=allowed, says=says, prompts=len(rows))


def interval(rows: Rows) -> tuple[float, float, float]:
    """A ratio of sums over prompts, and where 95% of its resamples lie."""
    sums, counts = np.array(rows, dtype=float).T
    picked = np.random.default_rng(_SEED).integers(0, len(rows), size=(_RESAMPLES, len(rows)))
    drawn = sums[picked].sum(axis=1) / counts[picked].sum(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(sums.sum() / counts.sum()), float(low), float(high)


def _notes(passes: Passes, gauges: Sequence[Gauge], limits: Limits, sees: Power | None) -> tuple[str, ...]:
    notes = ["A or B is emulated: there is no model behind it"] if passes.emulated else []
    kl = next((gauge for gauge in gauges if gauge.name == FORCED), None)
    if sees is not None and sees.is_beyond_noise and kl is not None and kl.says == "same":
        notes.append(
            f"B is further from A than A from itself, by {sees.beyond_noise:.2g} nats: within what is allowed, and no "
            "noise. Other kernels or formats do that, and so does a small fault: `crosstie diff` tells them apart"
        )
    if _is_flat(passes.first):
        notes.append(
            "A finds all tokens about equally likely: dummy or random weights? Nothing that is wrong with B would show"
        )
    if passes.way is None:
        notes.append("not teacher-forced: the two have no way in common; chats alone were compared")
    if not any(sample.steps for sample in passes.first) or not any(sample.steps for sample in passes.other):
        notes.append("no log-probabilities of chats: answers were compared word by word, which says much less")
    noisy = [gauge.name for gauge in gauges if gauge.name in ("forced KL", "chat KL") and gauge.floor > limits.kl]
    if noisy:
        notes.append(f"A is above the limit against itself ({', '.join(noisy)}): B is held against twice that")
    hopeless = [gauge.name for gauge in gauges if gauge.name.startswith("invalid") and gauge.a_rate == 1.0]
    if hopeless:
        notes.append(f"all of A's are {' and '.join(hopeless)}: B cannot be worse at that")
    return tuple(notes)


def document(parities: Sequence[Parity], scores: Sequence[Any] = ()) -> dict[str, Any]:
    """For `--json`; what is not a number is null."""
    whole = {"comparisons": parities, "lm_eval": scores}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(whole))
    return plain


def causes_of(
    pairs: Sequence[Pair], says: Mapping[str, str], by_position: Sequence[Group], limit_kl: float
) -> tuple[str, ...]:
    """What such a difference comes from: guesses by the traces that causes leave, each with what it rests on."""
    if "differs" not in says.values():
        return ()
    causes = []
    more = [
        both.b.prompt_tokens - both.a.prompt_tokens for both in pairs if both.a.prompt_tokens and both.b.prompt_tokens
    ]
    lengths = _other_lengths(pairs)
    if lengths:
        causes.append(f"the tokenizer: {plural(lengths, 'text')} cut into other tokens")
    elif more and sum(map(bool, more)) > len(more) / 2:
        causes.append(
            f"the chat template: B counts {median(more):+g} tokens for the same messages, and as many for the same text"
        )
    if says.get("forced KL") == "same" and says.get("chat KL") == "differs":
        causes.append("the chat template or a system prompt: plain texts are alike, and chats are not")
    told = [group for group in by_position if group.places >= _LEAST_PLACES]
    if says.get("forced KL") != "differs" or lengths:
        return tuple(causes)
    if len(told) > 1 and told[-1].kl > _TIMES_WORSE * max(told[0].kl, limit_kl / _TIMES_WORSE):
        causes.append(
            f"positions: KL is {told[0].kl:.2g} at tokens {told[0].name} and {told[-1].kl:.2g} at {told[-1].name}; "
            "look at RoPE scaling, a sliding window, the KV cache and its scales"
        )
    else:
        causes.append(
            "the weights: texts differ from their first tokens on; look at scales, the FP8 dialect (a factor of two), "
            "a quantised layout, RoPE's base and scaling; `crosstie diff` finds the module"
        )
    return tuple(causes)


def _other_lengths(pairs: Sequence[Pair]) -> int:
    """Texts that the two do not cut alike: before the same place they count other tokens."""
    count = 0
    for pair in pairs:
        a = {step.at: step.position for step in pair.a.forced}
        b = {step.at: step.position for step in pair.b.forced}
        count += any(a[at] != b[at] for at in a.keys() & b.keys())
    return count
