"""What keeps a function out of a graph: kinds of hazards, the reason of each with its rewrite, and the verdict."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from crosstie_port.capture.sites import Site

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


@dataclass(frozen=True, slots=True)
class Reason:
    kind: Kind
    # What the line does, without a subject.
    what: str
    remedy: str

    def at(self, site: Site, evidence: str, remedy: str = "") -> CaptureHazard:
        return CaptureHazard(
            kind=self.kind, what=self.what, file=site.file, line=site.line, function=site.function, evidence=evidence,
            remedy=remedy or self.remedy,
        )  # fmt: skip


_host_sync = partial(Reason, "host-sync")
_shape = partial(Reason, "data-dependent-shape")
_pageable = partial(Reason, "pageable-copy")
_refused = partial(Reason, "refused-call")
_stale = partial(Reason, "stale-host-value")

# Values and sizes that the host has to know.

READ = _host_sync(
    "reads a device value on the host",
    "keep the value on the device: torch.where, a mask, or an index tensor in place of the Python value; "
    "or compute it before the capture and pass it in a buffer",
)
KERNEL_READ = _host_sync(
    "has a kernel that reads device values on the host",
    "an operation of fixed size in its place, or run it between two graphs",
)
VALUE = _host_sync(
    "reads a fill value from the device", "torch.where(mask, value, x), which takes the value on the device"
)
LINALG = _host_sync(
    "reads the solver's status on the host",
    "the variant that does not check (torch.linalg.inv_ex, cholesky_ex, solve_ex), or run it between two graphs",
)
SOLVER = _host_sync("runs a solver that waits for the device", "run it between two graphs, or compute it once")
MASK = _shape(
    "indexes with a boolean mask, so the shape depends on the data",
    "torch.where(mask, a, b) or masked_fill on the whole tensor; or torch.nonzero_static(mask, size=N) as the index",
)
NONZERO = _shape(
    "makes an output whose size depends on the data",
    "torch.nonzero_static(mask, size=N, fill_value=0), or keep the mask and use torch.where",
)
UNIQUE = _shape(
    "makes an output whose size depends on the data",
    "sort, compare neighbours and keep a mask of fixed size; or run it between two graphs",
)
COUNTS = _shape(
    "reads the largest value on the host to size its output",
    "torch.zeros(n, device=...).scatter_add_(0, index, ones) with a fixed n",
)
REPEATS = _shape("sums the repeats on the host to size its output", "pass output_size=N, with N the same in every call")
SPARSE = _shape(
    "builds a sparse layout, whose size depends on the data",
    "a dense tensor with a mask, or build the sparse tensor before the capture",
)

# Copies between host and device.

TO_DEVICE = _pageable(
    "copies pageable host memory to the device",
    "make the tensor once before the capture (register_buffer), or on the device with torch.full, arange or zeros; "
    "or copy from a pinned buffer with non_blocking=True",
)
SCALAR_TO_DEVICE = _pageable(
    "copies a number from the host into one element",
    "x[i].fill_(value), or x[i:i + 1] = value: both put the number into the kernel's arguments",
)
FORMATS = _host_sync("formats the values of a device tensor", "print shapes and types, or print after the replay")
TO_HOST = _pageable(
    "copies device memory to pageable host memory",
    "leave the result on the device and copy it after the replay, or copy into a pinned buffer with non_blocking=True",
)
BLOCKING = Reason(
    "blocking-pinned-copy", "copies pinned memory and waits for the copy", "pass non_blocking=True to the copy"
)

# Waiting, streams and generators.

DEVICE_SYNC = _host_sync("waits for the whole device", "leave it out: a graph keeps its order; wait after the replay")
STREAM_SYNC = _host_sync(
    "waits for a stream or event on the host",
    "event.wait() or stream.wait_stream(), which order the work on the device; wait on the host after the replay",
)
EVENT_QUERY = _host_sync("asks whether device work is done", "ask after the replay")
NOT_CAPTURED = _refused(
    "allocates memory on a stream that is not part of the capture",
    "side.wait_stream(torch.cuda.current_stream()) before it, and the other way round after it",
)
ISOLATION = _refused(
    "makes the captured stream wait for work that is not captured",
    "fork first: side.wait_stream(torch.cuda.current_stream()) before the work on the side stream",
)
LEGACY = _refused(
    "makes the default stream wait for the captured one",
    "a stream of its own (torch.cuda.Stream()) in place of the default stream",
)
UNJOINED = _refused(
    "leaves work on a side stream that the capture never joins",
    "torch.cuda.current_stream().wait_stream(side) before the function returns",
)
GENERATOR = _refused(
    "draws from a generator that the graph does not know",
    "the default generator (generator=None), or CUDAGraph.register_generator_state(generator) before the capture; "
    "releases after PyTorch 2.11 register it by themselves",
)
SEEDING = _refused("makes or seeds a device generator during capture", "do so before the capture")
NO_ATTENTION = _refused(
    "asks for kernels of attention of which this part has none",
    "allow another backend as well, or none in particular: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])",
)
RAISES = _refused(
    "raises under capture and not in a plain call",
    "the branch that runs while torch.cuda.is_current_stream_capturing() must not raise",
)
NOT_FOLLOWED = Reason(
    "not-followed",
    "runs something that the stand-in device cannot follow",
    "capture it on a GPU, or check the function without it",
)

# Replays that differ from calls.

CONSTANT = _stale(
    "bakes a host value into the graph that is another in the next call",
    "keep the value in a device tensor and update it there in place (self.step.add_(1)), or copy it into a static "
    "buffer before each replay",
)
BRANCH = _stale(
    "launches other operations in the next call than in the captured one",
    "choose with torch.where on the device, or capture one graph per branch and choose before the replay",
)
REBOUND = _stale(
    "reads state that each call puts into a new tensor; the graph keeps reading the old one",
    "write the state in place: self.state.copy_(new), not self.state = new",
)
GROWS = Reason(
    "growing-allocation",
    "works on a tensor that has another size in each call; the graph keeps the captured size",
    "allocate the largest size once and write into it at an index that is a device tensor (index_copy_)",
)
CACHED = _stale(
    "keeps a value that an earlier call computed from its inputs; the graph never computes it again",
    "compute it inside the captured call",
)
PINNED = _stale(
    "copies a pinned buffer that only the host's code fills; a replay does not run that code",
    "fill the pinned buffer before each replay",
)
OUTSIDE = _stale(
    "needs work of a stream or thread that is not part of the capture, so a replay does not run it",
    "side.wait_stream(torch.cuda.current_stream()) before it, and the other way round after it",
)
UNTRACED = _stale("gives other numbers at replay than in a call", "look for state that only Python updates")
