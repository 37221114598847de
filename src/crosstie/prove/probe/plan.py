"""What the probe measures: shapes of catalog models as plain data, which a machine without the catalog can run."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from crosstie import __version__
from crosstie.catalog.library import Catalog
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
    "collectives": "all-reduce between the GPUs of this machine",
}
MIB = 1 << 20
COPY_BYTES, QUICK_COPY_BYTES = (256 * MIB, 1024 * MIB, 4096 * MIB), (1024 * MIB,)
LAUNCH_BYTES = 4096
# Models and tensor-parallel splits that lend their shapes.
GEMM_MODELS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 1), ("llama-3.1-70b", 2), ("llama-3.1-70b", 8))
QUICK_GEMM_MODELS = (("llama-3.1-70b", 2),)
GEMM_ROWS, QUICK_GEMM_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 64, 1024, 4096)
ATTENTION_MODELS = (("llama-3.1-8b", 1), ("llama-3.1-70b", 1), ("llama-3.1-70b", 8), ("gpt-oss-120b", 1))
QUICK_ATTENTION_MODELS = (("llama-3.1-70b", 1),)
PROMPTS, QUICK_PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768), (2048, 16384)
SEQUENCES, CONTEXTS = (1, 8, 32, 128), (512, 2048, 8192, 32768)
QUICK_SEQUENCES, QUICK_CONTEXTS = (1, 128), (4096,)
MOST_CACHE_BYTES = 10e9
# Whole steps: model, format, batches with their contexts, prompts.
POINTS = ((1, 512), (1, 4096), (8, 4096), (16, 1024), (32, 4096), (64, 2048), (128, 1024), (128, 4096), (256, 512))
FEWER_POINTS = ((1, 4096), (8, 4096), (32, 4096), (64, 2048), (128, 1024))
QUICK_POINTS = ((1, 4096), (64, 2048))
STEPS: dict[str, tuple[tuple[str, str, tuple[tuple[int, int], ...], tuple[int, ...]], ...]] = {
    "dense": (
        ("llama-3.1-8b", "bf16", POINTS, (128, 512, 2048, 8192, 16384)),
        ("llama-3.1-8b", "fp8", POINTS, (128, 512, 2048, 8192, 16384)),
        ("qwen3-8b", "bf16", FEWER_POINTS, (512, 2048, 8192)),
        ("qwen3-32b", "bf16", FEWER_POINTS, (512, 2048, 8192)),
        ("qwen3-32b", "fp8", FEWER_POINTS, (512, 2048, 8192)),
    ),
    "moe": (("qwen3-30b-a3b", "bf16", POINTS, (128, 512, 2048, 8192, 16384)),),
}
QUICK_STEPS = {
    "dense": (("llama-3.1-8b", "bf16", QUICK_POINTS, (2048,)),),
    "moe": (("qwen3-30b-a3b", "bf16", QUICK_POINTS, (2048,)),),
}
ALL_REDUCE_BYTES = (8 << 10, 64 << 10, 512 << 10, 4 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
QUICK_ALL_REDUCE_BYTES = (8 << 10, 4 * MIB, 256 * MIB)


def plan_of(catalog: Catalog, parts: Sequence[str] = (), quick: bool = False) -> dict[str, Any]:
    """The whole plan, or that of some parts."""
    for part in parts:
        if part not in PARTS:
            raise BadInput(f"unknown part '{part}'; known: {', '.join(PARTS)}")
    chosen = [part for part in PARTS if part in parts or not parts]
    steps = [step for part in ("dense", "moe") if part in chosen for step in (QUICK_STEPS if quick else STEPS)[part]]
    makers = {"copy": _copies, "launch": _launches, "gemm": _gemms, "attention": _attentions}
    cases = [
        {"part": part, **case}
        for part in chosen
        for case in (makers[part](catalog, quick) if part in makers else _steps(part, quick))
    ]
    reduced = QUICK_ALL_REDUCE_BYTES if quick else ALL_REDUCE_BYTES
    return {
        "format": FORMAT,
        "crosstie": __version__,
        "parts": chosen,
        "quick": quick,
        "accelerators": {a.id: a.memory_bytes for a in catalog.accelerators.values()},
        "models": {name: decoder_shape(catalog.model(name)) for name, *_ in steps},
        "cases": cases,
        "all_reduce_bytes": list(reduced) if "collectives" in chosen else [],
    }


def _copies(_: Catalog, quick: bool) -> Iterable[Case]:
    for size in QUICK_COPY_BYTES if quick else COPY_BYTES:
        yield {"kind": "copy", "format": "fp32", "bytes": size}


def _launches(_: Catalog, quick: bool) -> Iterable[Case]:
    for kind in ("kernel-in-graph", "kernel-eager", "host-launch"):
        yield {"kind": kind, "format": "fp32", "bytes": LAUNCH_BYTES}


def _gemms(catalog: Catalog, quick: bool) -> Iterable[Case]:
    shapes: dict[tuple[int, int], None] = {}
    for name, tp in QUICK_GEMM_MODELS if quick else GEMM_MODELS:
        shapes.update(dict.fromkeys(matrices(catalog.model(name), tp)))
    for (n, k), m, format in itertools.product(shapes, QUICK_GEMM_ROWS if quick else GEMM_ROWS, ("bf16", "fp8")):
        # Engines pad a single row for the 8-bit kernels, which take none.
        if m > 1 or format == "bf16":
            yield {"kind": "gemm", "format": format, "m": m, "n": n, "k": k}


def _attentions(catalog: Catalog, quick: bool) -> Iterable[Case]:
    sequences, contexts = (QUICK_SEQUENCES, QUICK_CONTEXTS) if quick else (SEQUENCES, CONTEXTS)
    for name, tp in QUICK_ATTENTION_MODELS if quick else ATTENTION_MODELS:
        heads = head_shape(catalog.model(name), tp)
        for tokens in QUICK_PROMPTS if quick else PROMPTS:
            yield {"kind": "attention-prefill", "format": "bf16", "sequences": 1, "context": tokens, **heads}
        for batch, context in itertools.product(sequences, contexts):
            if batch * context * heads["kv_heads"] * heads["head_dim"] * 4 <= MOST_CACHE_BYTES:
                yield {"kind": "attention-decode", "format": "bf16", "sequences": batch, "context": context, **heads}


def _steps(part: str, quick: bool) -> Iterable[Case]:
    for model, format, points, prompts in (QUICK_STEPS if quick else STEPS).get(part, ()):
        for tokens in prompts:
            yield {"kind": "prefill-step", "format": format, "model": model, "batch": 1, "context": tokens}
        for batch, context in points:
            yield {"kind": "decode-step", "format": format, "model": model, "batch": batch, "context": context}


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
