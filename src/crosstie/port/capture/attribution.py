"""Which lines make a replay stale: the tape of the captured call beside the tape of the next one."""

from collections.abc import Iterator
from typing import Any

from crosstie.port.capture.device import Device
from crosstie.port.capture.hazards import Hazard
from crosstie.port.capture.reasons import BRANCH, CACHED, CONSTANT, GROWS, OUTSIDE, PINNED, REBOUND, UNTRACED, Rule
from crosstie.port.capture.sites import Site
from crosstie.port.capture.tape import Entry, address

Found = tuple[Rule, str, Site]


def stale_hazards(
    device: Device, captured: list[Entry], following: list[Entry], evidence: str, at: Site
) -> list[Hazard]:
    """At least one. `evidence`: the numbers that differ; `at`: the function, where no line can be named."""
    found = list(between(captured, following))
    if not found:
        found = [*_from_earlier_calls(device, captured), *_from_pinned(device, captured)]
    found = found or [(OUTSIDE, "not on the captured stream", site) for site in device.outside]
    found = found or [(UNTRACED, "no single line was found", at)]
    made: dict[tuple[Any, ...], Hazard] = {}
    for rule, seen, site in found:
        hazard = Hazard(kind=rule.kind, what=rule.what, file=site.file, line=site.line, function=site.function,
                        evidence=f"{seen}; {evidence}", remedy=rule.remedy)  # fmt: skip
        made.setdefault((rule, site), hazard)
    return list(made.values())


def between(captured: list[Entry], following: list[Entry]) -> Iterator[Found]:
    made_before: set[int] = set()
    made_after: set[int] = set()
    for before, after in zip(captured, following, strict=False):
        if before.func is not after.func or len(before.tensors) != len(after.tensors):
            yield BRANCH, f"{before.name} in the captured call, {after.name} in the next", before.site
            return
        if [t.shape for t in before.tensors] != [t.shape for t in after.tensors]:
            sizes = [
                (list(b.shape), list(a.shape))
                for b, a in zip(before.tensors, after.tensors, strict=True)
                if a.shape != b.shape
            ]
            yield GROWS, f"{before.name} on {sizes[0][0]}, then on {sizes[0][1]}", before.site
            return
        if list(map(repr, before.constants)) != list(map(repr, after.constants)):
            pairs = [(b, a) for b, a in zip(before.constants, after.constants, strict=False) if repr(b) != repr(a)]
            if pairs:
                yield CONSTANT, f"{before.name} with {pairs[0][0]!r}, then with {pairs[0][1]!r}", before.site
        for old, new in zip(before.tensors, after.tensors, strict=True):
            outer = address(old) not in made_before and address(new) not in made_after
            if outer and address(old) != address(new):
                yield REBOUND, f"{before.name} reads other memory in the next call", before.site
        made_before |= {address(out) for out in before.outs}
        made_after |= {address(out) for out in after.outs}
    if len(captured) != len(following):
        rest = (captured if len(captured) > len(following) else following)[min(len(captured), len(following))]
        yield BRANCH, f"{len(captured)} operations in the captured call, {len(following)} in the next", rest.site


def _from_earlier_calls(device: Device, captured: list[Entry]) -> Iterator[Found]:
    made: set[int] = set()
    for entry in captured:
        for tensor in entry.tensors:
            memory = device.memories.of(tensor)
            if address(tensor) not in made and memory and memory.from_inputs and memory.call and memory.site:
                yield CACHED, f"made in call {memory.call}, read by {entry.name} at {entry.site}", memory.site
        made |= {address(out) for out in entry.outs}


def _from_pinned(device: Device, captured: list[Entry]) -> Iterator[Found]:
    for entry in captured:
        if any(device.memories.is_pinned(tensor) for tensor in entry.tensors):
            yield PINNED, f"{entry.name} from pinned memory", entry.site
