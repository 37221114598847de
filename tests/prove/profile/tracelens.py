"""AMD-AGI/TraceLens' traces of MI210, MI300X, MI350X, H100 and B200 beside TraceLens' own figures (tracelens.csv).

    python -m tests.prove.profile.tracelens CHECKOUT            every trace that the checkout has, beside its figures
    python -m tests.prove.profile.tracelens CHECKOUT --reduce   writes data/tracelens/ anew

MIT licence (data/tracelens/LICENSE). Reduced: what ran on a GPU, the calls that launched it and the marks of steps, as
the profiler wrote them; arguments that nothing here reads are left out, and of rocprofv3's file all but the first kernels.
"""

import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from crosstie_port.profile.shares import Profile, profile
from crosstie_port.profile.trace import read_trace

HERE = Path(__file__).parent
REDUCED = HERE / "data" / "tracelens"
_KERNELS = 500
_READ = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation", "gpu_user_annotation"}


class Reference(msgspec.Struct, frozen=True):
    """`total_ms` and `busy_ms` are TraceLens' (gpu_timeline.csv beside the trace) over `steps` steps; empty where it has
    none. `reduced` is the file under data/tracelens/."""

    trace: str
    device: str
    steps: int
    total_ms: float | None
    busy_ms: float | None
    reduced: str


def references() -> list[Reference]:
    with (HERE / "tracelens.csv").open() as opened:
        rows = [{name: value or None for name, value in row.items()} for row in csv.DictReader(opened)]
    return [msgspec.convert({**row, "reduced": row["reduced"] or ""}, Reference, strict=False) for row in rows]


def reduced_chrome(document: dict[str, Any]) -> dict[str, Any]:
    events = [one for one in document["traceEvents"] if one.get("ph") == "X" and one.get("cat") in _READ]
    on_gpu = {"kernel", "gpu_memcpy", "gpu_memset"}
    launched = {one.get("args", {}).get("correlation") for one in events if one["cat"] in on_gpu}
    kept = [
        {key: one[key] for key in ("ph", "cat", "name", "pid", "ts", "dur")}
        | {"args": {key: one["args"][key] for key in ("device", "correlation") if key in one.get("args", {})}}
        for one in events
        if one["cat"] != "cuda_runtime" or one.get("args", {}).get("correlation") in launched
    ]  # fmt: skip
    return {"traceEvents": kept}


def reduced_rocprofv3(document: dict[str, Any]) -> dict[str, Any]:
    run = document["rocprofiler-sdk-tool"][0]
    dispatched = sorted(run["buffer_records"]["kernel_dispatch"], key=lambda one: one["start_timestamp"])[:_KERNELS]
    named = {one["dispatch_info"]["kernel_id"] for one in dispatched}
    symbols = [one for one in run["kernel_symbols"] if one["kernel_id"] in named]
    return {
        "rocprofiler-sdk-tool": [
            {"kernel_symbols": symbols, "buffer_records": {"kernel_dispatch": dispatched, "hip_api": [], "memory_copy": []}}
        ]
    }  # fmt: skip


def reduce(checkout: Path, reference: Reference) -> None:
    document = json.loads(gzip.decompress((checkout / reference.trace).read_bytes()))
    made = reduced_rocprofv3(document) if "rocprofiler-sdk-tool" in document else reduced_chrome(document)
    (REDUCED / reference.reduced).write_bytes(
        gzip.compress(json.dumps(made, separators=(",", ":")).encode(), 9, mtime=0)
    )


def ratios(found: Profile, reference: Reference) -> dict[str, float]:
    """Our step and busy time over TraceLens', where it has them."""
    pairs = {"step": (found.step_s, reference.total_ms), "busy": (found.busy_s, reference.busy_ms)}
    return {name: ours * 1e3 * reference.steps / theirs for name, (ours, theirs) in pairs.items() if theirs}


def main(checkout: Path, *, again: bool) -> None:
    for reference in references():
        if not (checkout / reference.trace).exists():
            print(f"{reference.trace}: not in this checkout")
            continue
        found = profile(read_trace(checkout / reference.trace))
        unknown = sum(one.seconds for one in found.unknown) / found.busy_s
        beside = ", ".join(f"{name} {ratio:.3f} of TraceLens'" for name, ratio in ratios(found, reference).items())
        beside = beside or "no figure beside it"
        print(
            f"{reference.trace}: {found.step_s * 1e3:.2f} ms a step, {beside}, {unknown:.1%} of busy not known by name"
        )
        if again and reference.reduced:
            reduce(checkout, reference)


if __name__ == "__main__":
    main(Path(sys.argv[1]), again="--reduce" in sys.argv)
