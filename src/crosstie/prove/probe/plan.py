"""What the probe measures: shapes of catalog models as plain data, which a machine without the catalog can run."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstie import __version__
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_toml
from crosstie.core.errors import BadInput
from crosstie.core.model import Model, Tensor
from crosstie.perf.work import work_of
from crosstie.prove.probe.kernels import FORMAT, Case

PARTS = {
    "copy": "memory bandwidth",
    "launch": "what starting a kernel costs",
    "gemm": "matrix products by shape and format",
    "attention": "prefill and decode attention",
    "dense": "whole steps of dense models",
    "moe": "whole steps of a mixture of experts",
}
_FILE = Path(__file__).parent / "data" / "shapes.toml"
LAUNCH_BYTES = 4096
MOST_CACHE_BYTES = 10e9
# What a part times: rows of shapes.toml.
Shapes = Mapping[str, Any]


def plan_of(catalog: Catalog, parts: Sequence[str] = (), quick: bool = False) -> dict[str, Any]:
    """The whole plan, or that of some parts."""
    for part in parts:
        if part not in PARTS:
            raise BadInput(f"unknown part '{part}'; known: {', '.join(PARTS)}")
    chosen = [part for part in PARTS if part in parts or not parts]
    shapes: Shapes = read_toml(_FILE)["quick" if quick else "full"]
    cases = [{"part": part, **case} for part in chosen for case in _CASES[part](catalog, shapes)]
    return {
        "format": FORMAT,
        "crosstie": __version__,
        "parts": chosen,
        "quick": quick,
        "accelerators": {a.id: a.memory_bytes for a in catalog.accelerators.values()},
        "models": {
            step["model"]: decoder_shape(catalog.model(step["model"]))
            for part in ("dense", "moe")
            for step in shapes[part]
            if part in chosen
        },
        "cases": cases,
    }


def _copies(_: Catalog, shapes: Shapes) -> Iterable[Case]:
    for size in shapes["copy_bytes"]:
        yield {"kind": "copy", "format": "fp32", "bytes": size}


def _launches(_: Catalog, shapes: Shapes) -> Iterable[Case]:
    for kind in ("kernel-in-graph", "kernel-eager", "host-launch"):
        yield {"kind": kind, "format": "fp32", "bytes": LAUNCH_BYTES}


def _gemms(catalog: Catalog, shapes: Shapes) -> Iterable[Case]:
    sizes = {size: None for model, tp in _split(catalog, shapes["gemm_models"]) for size in matrices(model, tp)}
    for (n, k), m, format in itertools.product(sizes, shapes["gemm_rows"], ("bf16", "fp8")):
        # Engines pad a single row for the 8-bit kernels, which take none.
        if m > 1 or format == "bf16":
            yield {"kind": "gemm", "format": format, "m": m, "n": n, "k": k}


def _attentions(catalog: Catalog, shapes: Shapes) -> Iterable[Case]:
    for model, tp in _split(catalog, shapes["attention_models"]):
        heads = head_shape(model, tp)
        for tokens in shapes["prompts"]:
            yield {"kind": "attention-prefill", "format": "bf16", "sequences": 1, "context": tokens, **heads}
        for batch, context in itertools.product(shapes["sequences"], shapes["contexts"]):
            if batch * context * heads["kv_heads"] * heads["head_dim"] * 4 <= MOST_CACHE_BYTES:
                yield {"kind": "attention-decode", "format": "bf16", "sequences": batch, "context": context, **heads}


def _steps(part: str, shapes: Shapes) -> Iterable[Case]:
    for step in shapes[part]:
        for format in step["formats"]:
            case = {"format": format, "model": step["model"]}
            for tokens in step["prompts"]:
                yield {"kind": "prefill-step", **case, "batch": 1, "context": tokens}
            for batch, context in step["batches"]:
                yield {"kind": "decode-step", **case, "batch": batch, "context": context}


_CASES: dict[str, Callable[[Catalog, Shapes], Iterable[Case]]] = {
    "copy": _copies,
    "launch": _launches,
    "gemm": _gemms,
    "attention": _attentions,
    "dense": lambda _, shapes: _steps("dense", shapes),
    "moe": lambda _, shapes: _steps("moe", shapes),
}


def _split(catalog: Catalog, names: Sequence[str]) -> Iterable[tuple[Model, int]]:
    """Models, each with the number of GPUs that share it."""
    for name, _, tp in (name.partition("/") for name in names):
        yield catalog.model(name), int(tp)


def matrices(model: Model, tp: int) -> Iterable[tuple[int, int]]:
    """Outputs and inputs of a rank's matrix products in a dense model; the head only where it is not split."""
    work = work_of(model)
    for operation in [*work.operations, *(work.head if tp == 1 else ())]:
        n = sum(
            tensor.rows // (min(tp, tensor.max_shards) if tensor.shard == "out" else 1) for tensor in operation.tensors
        )
        first = operation.tensors[0]
        yield n, first.cols // (tp if first.shard == "in" else 1)


def head_shape(model: Model, tp: int = 1) -> dict[str, int]:
    return {
        "heads": model.heads // tp,
        "kv_heads": max(1, model.kv_heads // tp),
        "head_dim": _tensor(model, "key").rows // model.kv_heads,
    }


def decoder_shape(model: Model) -> dict[str, int]:
    """What `Decoder` is built from; refuses a model that is not equal layers of full grouped attention."""
    layer = model.layers[0]
    full = [scan for scan in layer.scans if scan.window is None and scan.top_rows is None and scan.stride == 1]
    if len(model.layers) > 1 or len(full) != 1 or len(layer.scans) != 1 or layer.state is not None:
        raise BadInput(f"{model.id}: the probe times models of equal layers with full attention only")
    return {
        "layers": model.layer_count,
        "hidden": model.hidden,
        "inner": _tensor(model, "experts_down" if model.is_moe else "mlp_down").cols,
        **head_shape(model),
        "vocabulary": model.vocabulary,
        "experts": model.experts,
        "experts_per_token": model.experts_per_token,
    }


def _tensor(model: Model, role: str) -> Tensor:
    fitting = [tensor for tensor in model.layers[0].tensors if tensor.role == role]
    if len(fitting) != 1:
        raise BadInput(f"{model.id}: has {len(fitting)} tensors for {role}, and the probe needs one")
    return fitting[0]
