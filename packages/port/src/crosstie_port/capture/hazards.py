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

    def at(self, site: Site, evidence: str, remedy: str = "") -> CaptureHazard:
        return CaptureHazard(
            kind=self.kind, what=self.what, file=site.file, line=site.line, function=site.function, evidence=evidence,
            remedy=remedy or self.remedy,
        )  # fmt: skip


_REASONS = {name: read_record(_FILE, name, row, Reason) for name, row in read_toml(_FILE).items()}

# Values and sizes that the host has to know.
READ = _REASONS["read"]
KERNEL_READ = _REASONS["kernel_read"]
VALUE = _REASONS["value"]
LINALG = _REASONS["linalg"]
SOLVER = _REASONS["solver"]
MASK = _REASONS["mask"]
NONZERO = _REASONS["nonzero"]
UNIQUE = _REASONS["unique"]
COUNTS = _REASONS["counts"]
REPEATS = _REASONS["repeats"]
SPARSE = _REASONS["sparse"]

# Copies between host and device.
TO_DEVICE = _REASONS["to_device"]
SCALAR_TO_DEVICE = _REASONS["scalar_to_device"]
FORMATS = _REASONS["formats"]
TO_HOST = _REASONS["to_host"]
BLOCKING = _REASONS["blocking"]

# Waiting, streams and generators.
DEVICE_SYNC = _REASONS["device_sync"]
STREAM_SYNC = _REASONS["stream_sync"]
EVENT_QUERY = _REASONS["event_query"]
NOT_CAPTURED = _REASONS["not_captured"]
ISOLATION = _REASONS["isolation"]
LEGACY = _REASONS["legacy"]
UNJOINED = _REASONS["unjoined"]
GENERATOR = _REASONS["generator"]
SEEDING = _REASONS["seeding"]
NO_ATTENTION = _REASONS["no_attention"]
RAISES = _REASONS["raises"]
NOT_FOLLOWED = _REASONS["not_followed"]

# Replays that differ from calls.
CONSTANT = _REASONS["constant"]
BRANCH = _REASONS["branch"]
REBOUND = _REASONS["rebound"]
GROWS = _REASONS["grows"]
CACHED = _REASONS["cached"]
PINNED = _REASONS["pinned"]
OUTSIDE = _REASONS["outside"]
UNTRACED = _REASONS["untraced"]
