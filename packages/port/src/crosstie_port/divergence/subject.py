"""A Hugging Face directory, run once on a prompt and recorded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, no_progress
from crosstie_port.divergence.digest import draws

TYPES = ("auto", "float32", "bfloat16", "float16")


def record_directory(
    folder: Path, out: Path, *, prompt: str | None = None, tokens: int = 32, seed: int = 0, dtype: str = "auto",
    device: str | None = None, modules: Sequence[str] = (), on_progress: OnProgress = no_progress,
) -> dict[str, int]:  # fmt: skip
    """One pass over `prompt`, or over so many tokens drawn from the seed; how many modules and tensors were kept."""
    # Before a model is loaded for minutes.
    if not out.parent.is_dir():
        raise BadInput(f"{out}: there is no folder {out.parent}")
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: no config.json there; --model is a Hugging Face model directory")
    torch, transformers = _libraries()
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_progress(0, 0, f"loading {folder.name}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        model = model.to(where).eval()
        ids = _ids(torch, transformers, model, folder, prompt, tokens, seed)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise BadInput(f"{folder}: {_first_line(error)}") from None
    from crosstie_port.divergence.recording import record

    on_progress(0, 0, f"one pass on {where}")
    try:
        with torch.inference_mode(), record(model, out, seed=seed, modules=modules) as recorder:
            model(ids.to(where), use_cache=False)
    except RuntimeError as error:
        raise BadInput(f"{folder}: the pass on {where} failed: {_first_line(error)}") from None
    kept = recorder.recording
    return {
        "modules": len({entry.module for entry in kept.entries}),
        "tensors": len(kept.summaries),
        "tokens": int(ids.shape[1]),
    }


def _ids(torch: Any, transformers: Any, model: Any, folder: Path, prompt: str | None, tokens: int, seed: int) -> Any:
    if prompt is not None:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)(
            prompt, return_tensors="pt"
        ).input_ids
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.from_numpy(draws(seed, 1, tokens, vocabulary))[None]


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as missing:
        raise BadInput(f"diff --record needs {missing.name}: pip install torch transformers") from None
    return torch, transformers


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
