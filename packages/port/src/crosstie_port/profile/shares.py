"""Where a step's time goes: each moment belongs to one class of kernels, or to a gap.

Streams overlap. A moment in which several classes run is the first's in the order of `CLASSES`: a collective that is
hidden behind a matrix product costs nothing. A gap before a kernel is the host's as far as the call that launched it
came back only after the GPU had run dry; the rest is the GPU's own time between kernels.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.figures import plural
from crosstie_port.profile.roofline import StepRoofline
from crosstie_port.profile.sorting import (
    ATTENTION,
    BOOKKEEPING,
    CLASSES,
    COLLECTIVES,
    ELEMENTWISE,
    HOST,
    PRODUCTS,
    UNKNOWN,
    KernelKind,
    cures,
    sorted_by_name,
)  # fmt: skip
from crosstie_port.profile.trace import GpuEvent, ProfilerTrace, StepMark

BETWEEN, GAPS = "gaps: between kernels", "gaps"
# Of what is bookkeeping, the part by which sparse attention chooses what to read.
_CHOOSING = ("sorting", "gathers")


class KernelShare(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sort: str
    what: str
    calls: float
    # Of all its calls in a step, whether or not something else ran meanwhile.
    seconds: float


class Share(msgspec.Struct, frozen=True, kw_only=True):
    sort: str
    seconds: float
    fraction: float
    # What the performance model expects of such a step, and the least that the hardware allows; None where neither is.
    predicted_s: float | None = None
    roofline_s: float | None = None
    # What would be saved if it took as long as predicted; without a prediction, all of bookkeeping, gaps and exposed
    # collectives, and None of the rest.
    recoverable_s: float | None = None


class StepKind(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one kind, where an engine's marks say what a step carries."""

    # "decode", or "with prompts".
    name: str
    steps: int
    # Means of a step.
    sequences: float
    prompt_tokens: float
    step_s: float
    busy_s: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    made_by: str
    device: str
    # Other GPUs of the trace, which are not in these figures.
    others: int
    steps: int
    # Seconds of a step from its first kernel to the next one's; without a timeline, the sum of its kernels.
    step_s: float
    busy_s: float
    launches: float
    timeline: bool
    shares: list[Share]
    # Of bookkeeping, by what it does.
    bookkeeping: dict[str, float]
    # Collectives that ran while something else did.
    hidden_collectives_s: float
    kernels: list[KernelShare]
    unknown: list[KernelShare]
    roofline: StepRoofline | None
    verdict: list[str]
    phases: list[StepKind] = []


def profile(
    trace: ProfilerTrace, *, steps: int | None = None, device: str | None = None, roofline: StepRoofline | None = None
) -> Profile:
    """`steps`: how many there are, where the trace does not mark them."""
    if steps is not None and steps < 1:
        raise BadInput(f"--steps {steps}: at least 1")
    if not trace.events:
        return _of_totals(trace, steps or 1, roofline)
    busy: dict[str, float] = defaultdict(float)
    for event in trace.events:
        busy[event.device] += event.end_s - event.start_s
    chosen = device if device is not None else max(busy, key=busy.__getitem__)
    events = [event for event in trace.events if event.device == chosen]
    if not events:
        raise BadInput(f"{trace.file}: nothing ran on device {device}; there are {', '.join(sorted(busy))}")
    seen = _whole(events) if steps else _within_marks(events, trace.marks, chosen)
    number = steps or seen.steps
    spent, hidden = _swept(seen)
    return _told(
        trace, number, _kernels(seen.events, number), {name: value / number for name, value in spent.items()}, roofline,
        device=chosen, others=len(busy) - 1, step_s=(seen.end_s - seen.start_s) / number, hidden=hidden / number,
        launches=len(seen.events) / number, timeline=True, phases=_phases(events, trace.marks, chosen),
    )  # fmt: skip


class _Window(msgspec.Struct, frozen=True):
    """What is looked at of a timeline: the events of so many steps, and the one after them, which ends the last gap."""

    events: list[GpuEvent]
    start_s: float
    end_s: float
    steps: int
    after: GpuEvent | None = None


def _whole(events: list[GpuEvent]) -> _Window:
    return _Window(events, events[0].start_s, max(event.end_s for event in events), 1)


def _within_marks(events: list[GpuEvent], marks: Sequence[StepMark], device: str) -> _Window:
    """From the first mark to the last one's beginning, so that every step has the gap behind it. What the GPU still had
    to do when the first marked step was launched is not counted: a GPU that runs behind its host has plenty of it."""
    mine = [mark for mark in marks if mark.device in (device, None)]
    if not mine:
        return _whole(events)
    steps = max(len(mine) - 1, 1)
    begin, end = mine[0].start_s, mine[-1].start_s if len(mine) > 1 else mine[-1].end_s
    if mine[0].device is None:
        # Marked on the host: a step's kernels are those that it launched, whenever they ran.
        inside = [event for event in events if event.launched_s is not None and begin <= event.launched_s < end]
        if not inside:
            return msgspec.structs.replace(_whole(events), steps=len(mine))
        begin, later = inside[0].start_s, [event for event in events if (event.launched_s or 0.0) >= end]
        ended = max(event.end_s for event in inside)
        return _Window(
            inside, begin, later[0].start_s if later and len(mine) > 1 else ended, steps, later[0] if later else None
        )
    inside = [event for event in events if begin <= event.start_s < end]
    later = [event for event in events if event.start_s >= end]
    return _Window(inside, begin, end, steps, later[0] if later and len(mine) > 1 else None)


def _phases(events: Sequence[GpuEvent], marks: Sequence[StepMark], device: str) -> list[StepKind]:
    """Of an engine that says what its steps carry: steps that only decode, and those with prompts."""
    mine = [one for one in marks if one.device == device and one.sequences is not None]
    found: dict[str, list[tuple[StepMark, float, float]]] = {}
    starts = [event.start_s for event in events]
    for step_mark, after in pairwise(mine):
        inside = list(events[bisect_left(starts, step_mark.start_s) : bisect_left(starts, after.start_s)])
        busy = _busy(inside)
        name = "with prompts" if step_mark.prompt_tokens else "decode"
        found.setdefault(name, []).append((step_mark, after.start_s - step_mark.start_s, busy))
    return [
        StepKind(
            name=name, steps=len(these), sequences=fmean(mark.sequences or 0 for mark, _, _ in these),
            prompt_tokens=fmean(mark.prompt_tokens or 0 for mark, _, _ in these),
            step_s=fmean(step for _, step, _ in these), busy_s=fmean(busy for _, _, busy in these),
        )
        for name, these in sorted(found.items())
    ]  # fmt: skip


def _busy(events: Sequence[GpuEvent]) -> float:
    spent, end = 0.0, -inf
    for event in events:
        spent += max(event.end_s - max(event.start_s, end), 0.0)
        end = max(end, event.end_s)
    return spent


def _of_totals(trace: ProfilerTrace, steps: int, roofline: StepRoofline | None) -> Profile:
    """A summary has no times of single kernels: sums, and no gaps."""
    kernels = [
        KernelShare(name=name, sort=place.sort, what=place.what, calls=calls / steps, seconds=seconds / steps)
        for name, calls, seconds in trace.totals
        for place in (sorted_by_name(name),)
    ]
    spent: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        spent[kernel.sort] += kernel.seconds
    return _told(
        trace, steps, sorted(kernels, key=lambda share: -share.seconds), spent, roofline, device="all", others=0,
        step_s=sum(spent.values()), hidden=0.0, launches=sum(share.calls for share in kernels), timeline=False,
    )  # fmt: skip


def place_of(event: GpuEvent) -> KernelKind:
    return KernelKind(BOOKKEEPING, "copies") if event.kind == "copy" else sorted_by_name(event.name)


def _kernels(events: Sequence[GpuEvent], steps: int) -> list[KernelShare]:
    calls, seconds = Counter[tuple[str, KernelKind]](), defaultdict[tuple[str, KernelKind], float](float)
    for event in events:
        key = event.name, place_of(event)
        calls[key] += 1
        seconds[key] += event.end_s - event.start_s
    return [
        KernelShare(
            name=name, sort=place.sort, what=place.what, calls=calls[name, place] / steps, seconds=spent / steps
        )
        for (name, place), spent in sorted(seconds.items(), key=lambda pair: -pair[1])
    ]


def _swept(seen: _Window) -> tuple[dict[str, float], float]:
    """Seconds by class and gap, and those of collectives that something else hides."""
    edges: list[tuple[float, int, str]] = []
    for event in seen.events:
        sort = place_of(event).sort
        edges += [(event.start_s, 1, sort), (min(event.end_s, seen.end_s), -1, sort)]
    edges.sort(key=lambda edge: edge[0])
    order = {name: i for i, name in enumerate((*CLASSES[:4], UNKNOWN, COLLECTIVES))}
    running, spent, hidden, at = Counter[str](), defaultdict[str, float](float), 0.0, edges[0][0]
    for when, change, sort in edges:
        active = [name for name, count in running.items() if count > 0]
        if active:
            spent[min(active, key=order.__getitem__)] += when - at
            if COLLECTIVES in active and len(active) > 1:
                hidden += when - at
        running[sort] += change
        at = when
    for name, seconds in _gaps(seen).items():
        spent[name] += seconds
    return spent, hidden


def _gaps(seen: _Window) -> dict[str, float]:
    known = any(event.launched_s is not None for event in seen.events)
    found: dict[str, float] = defaultdict(float)
    end = seen.start_s
    for event in [*seen.events, *([seen.after] if seen.after else [])]:
        gap = min(event.start_s, seen.end_s) - end
        if gap > 0.0:
            late = 0.0 if event.launched_s is None else min(max(event.launched_s - end, 0.0), gap)
            found[HOST if known else GAPS] += late if known else gap
            if known:
                found[BETWEEN] += gap - late
        end = max(end, event.end_s)
    return found


def _told(
    trace: ProfilerTrace, steps: int, kernels: list[KernelShare], spent: dict[str, float],
    roofline: StepRoofline | None, *, device: str, others: int, step_s: float, hidden: float, launches: float,
    timeline: bool, phases: Sequence[StepKind] = (),
) -> Profile:  # fmt: skip
    if roofline is not None:
        roofline = _shared_out(roofline, spent)
    order = (*CLASSES, HOST, BETWEEN, GAPS)
    names = [name for name in order if spent.get(name, 0.0) > 0.0]
    if roofline is not None:
        names += [name for name in order if name not in names and roofline.predicted_s.get(name, 0.0) > 0.0]
    shares = [_share(name, spent.get(name, 0.0), step_s, roofline) for name in names]
    what: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.sort == BOOKKEEPING:
            what[kernel.what] += kernel.seconds
    made = Profile(
        file=trace.file, made_by=trace.made_by, device=device, others=others, steps=steps, step_s=step_s,
        busy_s=sum(spent.get(name, 0.0) for name in CLASSES), launches=launches, timeline=timeline, shares=shares,
        bookkeeping=dict(sorted(what.items(), key=lambda pair: -pair[1])), hidden_collectives_s=hidden, kernels=kernels,
        unknown=[one for one in kernels if one.sort == UNKNOWN], roofline=roofline, verdict=[], phases=list(phases),
    )  # fmt: skip
    return msgspec.structs.replace(made, verdict=_verdict(made, trace.has_stacks))


def _shared_out(beside: StepRoofline, spent: Mapping[str, float]) -> StepRoofline:
    """The model has one sum for norms, activations and bookkeeping: what norms and activations do not take of it is
    there for bookkeeping. Attention that no kernel is named after is written as products, and expected among them."""
    predicted, ideal = dict(beside.predicted_s), dict(beside.ideal_s)
    whole = predicted[ELEMENTWISE] + predicted[BOOKKEEPING]
    predicted[ELEMENTWISE] = min(whole, spent.get(ELEMENTWISE, 0.0))
    predicted[BOOKKEEPING] = whole - predicted[ELEMENTWISE]
    if not spent.get(ATTENTION):
        for one in (predicted, ideal):
            one[PRODUCTS] += one.pop(ATTENTION)
    return msgspec.structs.replace(beside, predicted_s=predicted, ideal_s=ideal)


def _share(name: str, seconds: float, step_s: float, roofline: StepRoofline | None) -> Share:
    predicted = roofline.predicted_s.get(name) if roofline else None
    recoverable: float | None = None
    if predicted is not None:
        recoverable = max(seconds - predicted, 0.0)
    elif name in (BOOKKEEPING, COLLECTIVES, HOST, BETWEEN, GAPS):
        recoverable = seconds
    return Share(
        sort=name, seconds=seconds, fraction=seconds / step_s if step_s else 0.0, predicted_s=predicted,
        roofline_s=roofline.ideal_s.get(name) if roofline else None, recoverable_s=recoverable,
    )  # fmt: skip


def _verdict(found: Profile, has_stacks: bool) -> list[str]:
    """The largest recoverable share first; then what else must be said."""
    said = []
    if has_stacks:
        said.append(
            "the profiler recorded Python's calls (with_stack), which slows the host several times: its gaps are the "
            "profiler's. Take the trace again without (of vLLM: torch_profiler_with_stack false in --profiler-config)."
        )
    saved = [one for one in found.shares if one.recoverable_s]
    if saved:
        most = max(saved, key=lambda one: one.recoverable_s or 0.0)
        share = (most.recoverable_s or 0.0) / found.step_s
        than = " more than predicted" if most.predicted_s else ""
        said.append(
            f"largest recoverable share: {most.sort}, {share:.0%} of the step{than}. Look at {cures()[most.sort]}."
        )
    choosing = sum(found.bookkeeping.get(name, 0.0) for name in _CHOOSING)
    sums = {one.sort: one.seconds for one in found.shares}
    other = max(sums.get(ATTENTION, 0.0), sums.get(PRODUCTS, 0.0))
    if choosing > 0.25 * found.busy_s and sums.get(BOOKKEEPING, 0.0) > other:
        said.append(
            f"this step spends its time in bookkeeping: {sums[BOOKKEEPING] / found.busy_s:.0%} of the GPU's busy time, "
            f"of which {choosing / sums[BOOKKEEPING]:.0%} is sorting and gathering. Sparse attention looks so when it "
            "chooses what to read by general kernels: it chooses for longer than it attends."
        )
    if found.unknown:
        known = sum(kernel_share.seconds for kernel_share in found.unknown)
        names = [kernel_share.name[:60] for kernel_share in found.unknown[:3]] + ["..."] * (len(found.unknown) > 3)
        said.append(
            f"{plural(len(found.unknown), 'kernel')} not known by name, {known / max(found.busy_s, 1e-12):.0%} of the "
            f"busy time: {', '.join(names)}"
        )
    if ATTENTION not in sums:
        said.append("no kernel is attention by its name: written as products and a softmax, it stands under those.")
    if not found.timeline:
        said.append("this file has sums and no times: gaps and overlaps are not known.")
    return said
