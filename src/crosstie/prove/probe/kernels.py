"""A plan of shapes in, a document of times out. Needs PyTorch and nothing else, so that it runs where only that is.

    PYTHONPATH=src python3 -m crosstie.prove.probe.kernels PLAN.json OUT.json

`crosstie probe --plan PLAN.json` writes the plan, on any machine; `crosstie probe --read OUT.json` shows the result.
"""

import gc
import json
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from crosstie.catalog.writing import json_rows, write_text
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.core.progress import OnProgress
from crosstie.prove.probe.decoder import Decoder, Small, scaled_product
from crosstie.prove.probe.device import REFUSALS, ProbedDevice, Timing, describe, first_line, open_device

FORMAT = 1
Case = dict[str, Any]
Row = dict[str, Any]
# What says of which shape a measurement is, by kind.
ATTENTION_FIELDS = ("sequences", "context", "heads", "kv_heads", "head_dim")
SHAPE_FIELDS: dict[str, tuple[str, ...]] = {
    "copy": ("bytes",),
    "kernel-in-graph": ("bytes",),
    "kernel-eager": ("bytes",),
    "host-launch": ("bytes",),
    "gemm": ("m", "n", "k"),
    "attention-prefill": ATTENTION_FIELDS,
    "attention-decode": ATTENTION_FIELDS,
    "decode-step": ("model", "batch", "context"),
    "prefill-step": ("model", "batch", "context"),
}
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
# What is read in turn before anything is read again: more than any cache holds.
COLD_BYTES = 512e6
MOST_GEMMS, MOST_ATTENTIONS = 64, 1024
KERNELS = 200
# Work before anything is timed, since an idle card runs at a fraction of its clock.
WARM_S = 1.0


class LoadedDevice:
    """A device and the one model that is on it."""

    def __init__(self, device: ProbedDevice, models: dict[str, dict[str, int]]):
        self.device, self.models = device, models
        self._small: Small | None = None
        self._loaded: tuple[str, str] | None = None
        self._decoder: Decoder | None = None

    def decoder(self, model: str, format: str) -> Decoder:
        if self._loaded != (model, format) or self._decoder is None:
            self._decoder = None
            self.device.settle()
            self._small = self._small or Small(self.device)
            self._loaded = (model, format)
            self._decoder = Decoder(self.device, self._small, self.models[model], format)
        return self._decoder

    def warm(self) -> None:
        x, start = self.device.normal(4096, 4096), time.perf_counter()
        while time.perf_counter() - start < WARM_S:
            self.device.timer.elapsed(lambda: x @ x)

    def unload(self) -> None:
        self._decoder = None
        self.device.settle()


Measured = tuple[Timing, str]


def copy(bench: LoadedDevice, case: Case) -> Measured:
    """A kernel's copy, not the copy engine's: that is what an operator reaches."""
    torch = bench.device.torch
    source = torch.rand(case["bytes"] // 4, device=bench.device.name)
    target = torch.empty_like(source)
    return bench.device.timer.time(lambda: torch.mul(source, 1.5, out=target), budget_s=0.2), "elementwise"


def launch(bench: LoadedDevice, case: Case) -> Measured:
    """Small kernels that wait for one another: back to back in a graph, from the host, and the host's part."""
    timer, x = bench.device.timer, bench.device.ones(case["bytes"] // 4)

    def run() -> None:
        for _ in range(KERNELS):
            x.add_(1.0)

    if case["kind"] == "host-launch":
        return timer.host(run, KERNELS), "eager"
    graph = case["kind"] == "kernel-in-graph"
    return timer.time(run, KERNELS, graph=graph), "graph" if graph else "eager"


def gemm(bench: LoadedDevice, case: Case) -> Measured:
    """Several weights in turn, so that the cache holds none of them."""
    device, m, n, k = bench.device, case["m"], case["n"], case["k"]
    eight = case["format"] == "fp8"
    if eight and device.fp8 is None:
        raise RuntimeError("PyTorch has no 8-bit type")
    copies = min(MOST_GEMMS, math.ceil(COLD_BYTES / (n * k * (1 if eight else 2))))
    device.need(2 * copies * n * k * (1.5 if eight else 1) + 2 * m * (n + k), "operands")
    x, weights = device.normal(m, k), [device.normal(n, k) for _ in range(copies)]
    rows, channels = device.ones(m, 1), device.ones(1, n)
    if eight:
        x, weights = x.to(device.fp8), [w.to(device.fp8) for w in weights]

    def run() -> None:
        for w in weights:
            scaled_product(device, x, w, rows, channels) if eight else x @ w.T

    return device.timer.time(run, copies), "scaled_mm" if eight else "matmul"


def attention(bench: LoadedDevice, case: Case) -> Measured:
    """Causal attention over a prompt, or of one query a sequence over its cache, which no copy of is in a cache."""
    device, context, dim = bench.device, case["context"], case["head_dim"]
    attend = device.functional.scaled_dot_product_attention
    keys = (case["sequences"], case["kv_heads"], context, dim)
    decode = case["kind"] == "attention-decode"
    read = 4 * math.prod(keys)
    device.need(max(COLD_BYTES, 3 * read), "operands")
    copies = min(MOST_ATTENTIONS, math.ceil(COLD_BYTES / read)) if decode else 1
    q = device.normal(case["sequences"], case["heads"], 1 if decode else context, dim)
    caches = [(device.normal(*keys), device.normal(*keys)) for _ in range(copies)]

    def run() -> None:
        for key, value in caches:
            attend(q, key, value, is_causal=not decode, enable_gqa=True)

    return fastest(device, run, copies)


def fastest(device: ProbedDevice, run: Callable[[], None], operations: int) -> Measured:
    """The best of the attention backends; a refusal of all of them is theirs to explain."""
    measurements: list[Measured] = []
    reasons: list[str] = []
    for backend in BACKENDS:
        try:
            with using(backend):
                measurements.append((device.timer.time(run, operations), backend))
        except RuntimeError as error:
            reasons.append(f"{backend}: {first_line(error)}")
    if not measurements:
        raise RuntimeError("; ".join(reasons))
    return min(measurements, key=lambda pair: pair[0].seconds)


def using(backend: str) -> Any:
    module = import_module("torch.nn.attention")
    return module.sdpa_kernel(getattr(module.SDPBackend, BACKENDS[backend]))


def whole_step(bench: LoadedDevice, case: Case) -> Measured:
    """All layers and the head, with the attention backend that is fastest at this shape."""
    decoder = bench.decoder(case["model"], case["format"])
    decode = case["kind"] == "decode-step"
    trial = {
        "kind": "attention-decode" if decode else "attention-prefill", "sequences": case["batch"],
        "context": case["context"], **{key: decoder.shape[key] for key in ("heads", "kv_heads", "head_dim")},
    }  # fmt: skip
    _, backend = attention(bench, trial)
    bench.device.settle()
    run = decoder.decode(case["batch"], case["context"]) if decode else decoder.prefill(case["context"])
    with using(backend):
        return bench.device.timer.time(run, budget_s=0.2), backend


KINDS: dict[str, Callable[[LoadedDevice, Case], Measured]] = {
    "copy": copy,
    "kernel-in-graph": launch,
    "kernel-eager": launch,
    "host-launch": launch,
    "gemm": gemm,
    "attention-prefill": attention,
    "attention-decode": attention,
    "decode-step": whole_step,
    "prefill-step": whole_step,
}


@dataclass
class ProbeRun:
    """What a run came to, whole or interrupted."""

    measurements: list[Row] = field(default_factory=list)
    failures: list[Row] = field(default_factory=list)
    # Why it is not all there, or None where it is.
    partial: str | None = None


def measure(device: ProbedDevice, plan: dict[str, Any], on_progress: OnProgress) -> ProbeRun:
    """Every case of the plan; what a kernel refuses is noted, and an interrupt ends it with what there is."""
    outcome, bench = ProbeRun(), LoadedDevice(device, plan["models"])
    cases: list[Case] = plan["cases"]
    # A capture may collect garbage first: it need not look at what was there before.
    gc.freeze()
    try:
        with warnings.catch_warnings(), device.torch.no_grad():
            # A backend that does not apply says why in warnings; the reason is kept where it matters.
            warnings.simplefilter("ignore")
            bench.warm()
            for done, case in enumerate(cases):
                on_progress(done, len(cases), case["part"])
                one(bench, case, outcome)
                device.settle()
            bench.unload()
    except KeyboardInterrupt:
        outcome.partial = "interrupted"
    except RuntimeError as error:
        # Refusals are noted case by case; past this one the device answers nothing.
        outcome.partial = f"the device failed ({first_line(error)})"
    finally:
        gc.unfreeze()
    outcome.failures += device.notes
    return outcome


def one(bench: LoadedDevice, case: Case, outcome: ProbeRun) -> None:
    what = {key: value for key, value in case.items() if key != "part"}
    try:
        measured, backend = KINDS[case["kind"]](bench, case)
    except REFUSALS as error:
        outcome.failures.append({**what, "reason": first_line(error)})
        return
    outcome.measurements.append({**what, "backend": backend, **measured._asdict()})


def run_plan(plan: dict[str, Any], on_progress: OnProgress) -> dict[str, Any]:
    """The document of one run on the GPU at hand."""
    try:
        device = open_device()
        start = time.perf_counter()
        facts = describe(device, plan["accelerators"])
    except KeyboardInterrupt:
        raise BadInput("interrupted before the first measurement; nothing was written") from None
    outcome = measure(device, plan, on_progress)
    if outcome.partial and not outcome.measurements:
        raise BadInput(f"{outcome.partial} before the first measurement; nothing was written")
    provenance = {
        **facts,
        "date": datetime.now(UTC).date().isoformat(),
        "crosstie": plan["crosstie"],
        "parts": plan["parts"],
        "quick": plan["quick"],
        "partial": outcome.partial,
        "wall_s": round(time.perf_counter() - start, 3),
        "skipped": {},
        "failures": outcome.failures,
    }
    return {"format": FORMAT, "provenance": provenance, "measurements": outcome.measurements}


def write_json(target: Path, document: dict[str, Any]) -> None:
    write_text(target, json_rows(document))


def check_target(target: Path) -> None:
    """Before minutes are spent on what could then not be written."""
    if target.is_dir():
        raise BadInput(f"{target}: is a folder, and the answer is a file")
    folder = target.absolute().parent
    if not folder.is_dir():
        raise BadInput(f"{target}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise BadInput(f"{target}: nothing may be written to {folder}")


def read_plan(file: Path) -> dict[str, Any]:
    try:
        plan = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read: {first_line(error)}") from None
    wanted = {"format", "crosstie", "parts", "quick", "accelerators", "models", "cases"}
    if not isinstance(plan, dict) or plan.keys() != wanted or plan["format"] != FORMAT:
        raise BadData(file, "", "is no plan of this version; `crosstie probe --plan FILE` writes one")
    return plan


def write_run(target: Path, document: dict[str, Any], plan: dict[str, Any]) -> None:
    """Raises once it is written where the run did not finish."""
    write_json(target, document)
    if why := document["provenance"]["partial"]:
        done = f"{len(document['measurements'])} of {len(plan['cases'])} measurements"
        raise BadInput(f"{why} after {done}; {target} has them, marked as partial")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    plan_file, target = Path(arguments[0]), Path(arguments[1])
    # A batch system that ends the run asks first: what is complete is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start, last = time.perf_counter(), ""

    def on_progress(done: int, total: int, part: str) -> None:
        nonlocal last
        if part != last:
            print(f"{time.perf_counter() - start:6.1f} s  {done:4} of {total}  {part}", file=sys.stderr, flush=True)
            last = part

    try:
        plan = read_plan(plan_file)
        check_target(target)
        document = run_plan(plan, on_progress)
        write_run(target, document, plan)
    except CrosstieError as error:
        print(f"crosstie: {error}", file=sys.stderr)
        return 2
    provenance = document["provenance"]
    print(
        f"{provenance['device']}: {len(document['measurements'])} measurements, {len(provenance['failures'])} refused, "
        f"in {provenance['wall_s']:.0f} s; written to {target}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
