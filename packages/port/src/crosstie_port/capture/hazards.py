"""What keeps a function out of a graph: kinds of hazards, the reason of each with its rewrite, and the verdict. Their
words are rows of data/hazards.toml."""

from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.reading import read_record, read_toml
from crosstie_port.capture.sites import Site

_FILE = Path(__file__).parent / "data" / "hazards.toml"

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
_STALE = ("stale-host-value", "growing-allocation")


class CaptureHazard(msgspec.Struct, frozen=True, kw_only=True):
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


class CaptureResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `check` says of one callable. `notes`: what limits the answer, such as inputs that never vary."""

    verdict: Verdict
    hazards: tuple[CaptureHazard, ...] = ()
    notes: tuple[str, ...] = ()


def verdict_of(hazards: list[CaptureHazard]) -> Verdict:
    """A capture that fails is never replayed: errors outweigh staleness, and both outweigh what was not followed."""
    kinds = {hazard.kind for hazard in hazards}
    if kinds - {*_STALE, "not-followed"}:
        return "error"
    if kinds & set(_STALE):
        return "stale"
    return "unknown" if kinds else "ok"


class Reason(msgspec.Struct, frozen=True):
    kind: Kind
    # What the line does, without a subject.
    what: str
    remedy: str
    # Operations that are refused for it whatever their arguments.
    always: tuple[str, ...] = ()

    def at(self, site: Site, evidence: str, remedy: str = "") -> CaptureHazard:
        return CaptureHazard(
            kind=self.kind, what=self.what, file=site.file, line=site.line, function=site.function, evidence=evidence,
            remedy=remedy or self.remedy,
        )  # fmt: skip


REASONS = {name: read_record(_FILE, name, row, Reason) for name, row in read_toml(_FILE).items()}

# Values and sizes that the host has to know.
READ = REASONS["read"]
KERNEL_READ = REASONS["kernel_read"]
VALUE = REASONS["value"]
LINALG = REASONS["linalg"]
SOLVER = REASONS["solver"]
MASK = REASONS["mask"]
NONZERO = REASONS["nonzero"]
UNIQUE = REASONS["unique"]
COUNTS = REASONS["counts"]
REPEATS = REASONS["repeats"]
SPARSE = REASONS["sparse"]

# Copies between host and device.
TO_DEVICE = REASONS["to_device"]
SCALAR_TO_DEVICE = REASONS["scalar_to_device"]
FORMATS = REASONS["formats"]
TO_HOST = REASONS["to_host"]
BLOCKING = REASONS["blocking"]

# Waiting, streams and generators.
DEVICE_SYNC = REASONS["device_sync"]
STREAM_SYNC = REASONS["stream_sync"]
EVENT_QUERY = REASONS["event_query"]
NOT_CAPTURED = REASONS["not_captured"]
ISOLATION = REASONS["isolation"]
LEGACY = REASONS["legacy"]
UNJOINED = REASONS["unjoined"]
GENERATOR = REASONS["generator"]
SEEDING = REASONS["seeding"]
NO_ATTENTION = REASONS["no_attention"]
RAISES = REASONS["raises"]
NOT_FOLLOWED = REASONS["not_followed"]

# Replays that differ from calls.
CONSTANT = REASONS["constant"]
BRANCH = REASONS["branch"]
REBOUND = REASONS["rebound"]
GROWS = REASONS["grows"]
CACHED = REASONS["cached"]
PINNED = REASONS["pinned"]
OUTSIDE = REASONS["outside"]
UNTRACED = REASONS["untraced"]
