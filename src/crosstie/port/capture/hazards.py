"""What keeps a function out of a graph: kinds of hazards, and the verdict over all that one call met."""

from typing import Literal, get_args

import msgspec

# "ok": capture succeeds and replays are true; "error": capture fails; "stale": capture succeeds and a replay gives
# other numbers than a call would; "unknown": something ran that the stand-in device cannot follow.
Verdict = Literal["ok", "error", "stale", "unknown"]

Kind = Literal[
    "host-sync",
    "pageable-copy",
    "blocking-pinned-copy",
    "data-dependent-shape",
    "stale-host-value",
    "growing-allocation",
    "refused-call",
    "not-followed",
]
KINDS: tuple[str, ...] = get_args(Kind)
_STALE = ("stale-host-value", "growing-allocation")


class Hazard(msgspec.Struct, frozen=True, kw_only=True):
    """One thing at one line of the user's code."""

    kind: Kind
    # What the line does, as a sentence without a subject: "reads a device value on the host (aten::item)".
    what: str
    file: str
    line: int | None
    function: str
    # What was seen: the operation and its arguments, or the numbers that differ.
    evidence: str
    # The rewrite that can be captured.
    remedy: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` says of one callable. `notes`: what limits the answer, such as inputs that never vary."""

    verdict: Verdict
    hazards: tuple[Hazard, ...] = ()
    notes: tuple[str, ...] = ()


def verdict_of(hazards: list[Hazard]) -> Verdict:
    """A capture that fails is never replayed: errors outweigh staleness, and both outweigh what was not followed."""
    kinds = {hazard.kind for hazard in hazards}
    if kinds - {*_STALE, "not-followed"}:
        return "error"
    if kinds & set(_STALE):
        return "stale"
    return "unknown" if kinds else "ok"
