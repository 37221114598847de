"""Port, from Python: what breaks when a model moves from CUDA to ROCm, and an FP8 checkpoint in the other dialect.

Nothing runs on an accelerator. `crosstie.port.capture` and `crosstie.port.split` need PyTorch and are imported by
their own names.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from crosstie.catalog.library import Catalog
from crosstie.catalog.named import AcceleratorNames, named_accelerators
from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.checkpoint import convert as converting
from crosstie.port.checkpoint.conversion import plan_conversion
from crosstie.port.checkpoint.convert import Converted, default_jobs
from crosstie.port.checkpoint.fp8 import Dialect
from crosstie.port.checkpoint.index import open_checkpoint
from crosstie.port.preflight import model as checking
from crosstie.port.preflight.engine import engine_from
from crosstie.port.preflight.model import Question, Report
from crosstie.port.preflight.support import FEATURES
from crosstie.port.preflight.weights import read_stored


def preflight(
    model: str | Path, on: AcceleratorNames, *, engine: str = "vllm", tp: int | None = None, ep: bool = False,
    kv_format: str | None = None, context: int | None = None, features: Sequence[str] = (),
    environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None, scan: str = "sample",
    catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> Report:  # fmt: skip
    """What breaks when a checkpoint moves to these accelerators: findings with evidence and remedy, a verdict for each.

    `model` is a folder, a GGUF file, a config.json or a catalog name; `engine` is vllm, sglang or llama.cpp, with a
    release (`vllm==0.28.0`) or without. `features` must work; `environment` and `flags` are how the engine is started.
    `scan` says how much of FP8 weights is read: none, sample or all.
    """
    for name in features:
        if name not in FEATURES:
            raise BadInput(f"feature {name}: not one of {', '.join(FEATURES)}")
    catalog = catalog or Catalog()
    question = Question(
        engine=engine_from(engine), tp=tp, ep=ep, kv=kv_format, context=context, features=tuple(features),
        environment=dict(environment or {}), flags=dict(flags or {}), scan=scan,
    )  # fmt: skip
    accelerators = named_accelerators(catalog, on)
    return checking.preflight(catalog, read_stored(catalog, str(model)), accelerators, question, on_progress)


def convert(
    folder: str | Path, out: str | Path, *, to: Dialect, jobs: int | None = None, even_if_normalised: bool = False,
    keep_kv_scales: bool = False, sync: bool = False, on_progress: OnProgress = no_progress,
) -> Converted:  # fmt: skip
    """An FP8 checkpoint in the other dialect, exactly, in a new folder; interrupted, the same call goes on.

    `to` is e4m3fnuz (MI300X, MI325X) or e4m3fn (everything else). `even_if_normalised`: also a format that vLLM and
    SGLang convert themselves while loading it. `sync` flushes each shard to the disk before it counts.
    """
    planned = plan_conversion(
        open_checkpoint(Path(folder)), to, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales
    )
    return converting.convert(planned, Path(out), jobs=jobs or default_jobs(), sync=sync, on_progress=on_progress)
