"""Recording inside vLLM and SGLang, by the doors that they have for it. Neither is imported here.

vLLM 0.32 (read and run, on the processor): a class whose methods every worker gets, called by `collective_rpc`. SGLang
v0.5.18 at 71de97b264b0 (read, not run): a factory of hooks that the server calls once its model is loaded.
Python hooks do not run where a captured graph is replayed, so both want eager mode.
"""

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from crosstie.core.errors import BadInput
from crosstie_port.divergence.recording import TensorRecorder


class RecordOutputs:
    """For vLLM's --worker-extension-cls: `crosstie_record` begins, `crosstie_record_end` writes the file."""

    def crosstie_record(self, path: str, seed: str = "0", calls: str = "1") -> str:
        model = self.get_model()  # type: ignore[attr-defined]
        rank, ranks = _rank()
        machine = {"engine": "vllm", "rank": str(rank), "ranks": str(ranks)}
        self._crosstie_recorder = TensorRecorder(model, seed=int(seed), calls=int(calls), machine=machine)
        self._crosstie_path = _of_rank(Path(path), rank)
        return str(self._crosstie_path)

    def crosstie_record_end(self) -> str:
        recorder = getattr(self, "_crosstie_recorder", None)
        if recorder is None:
            raise BadInput("crosstie_record was not called before")
        del self._crosstie_recorder
        recorder.detach()
        recorder.write(self._crosstie_path)
        return str(self._crosstie_path)


def sglang_hook(config: Mapping[str, Any]) -> Callable[..., None]:
    """For SGLang's --forward-hooks: {"path": ..., "seed": 0, "calls": 1}. It is called once, with the model in memory,
    and attaches hooks of its own, since those of SGLang's do not know the name of the module that they are on, nor what
    went into it. The file is written when a pass begins after the last that is recorded."""
    path = config.get("path")
    if not isinstance(path, str) or not path:
        raise BadInput('the config of crosstie\'s hook needs a path: {"config": {"path": "/tmp/a.npz"}}')
    rank, ranks = _rank()
    machine = {"engine": "sglang", "rank": str(rank), "ranks": str(ranks)}
    TensorRecorder(
        loaded_model(), seed=int(config.get("seed", 0)), calls=int(config.get("calls", 1)), machine=machine,
        target=_of_rank(Path(path), rank),
    )  # fmt: skip
    return lambda *_: None


def loaded_model() -> torch.nn.Module:
    """The module of this process that is in no other and has most inside."""
    # By type: `isinstance` asks objects for their class, and some warn when asked anything.
    modules = [get_object for get_object in gc.get_objects() if issubclass(type(get_object), torch.nn.Module)]
    inside = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inside]
    if not roots:
        raise BadInput("no PyTorch module is in memory")
    return max(roots, key=lambda root: sum(1 for _ in root.modules()))


def _rank() -> tuple[int, int]:
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if spread else (0, 1)


def _of_rank(path: Path, rank: int) -> Path:
    """Each rank writes a file of its own: a.npz, a.rank1.npz, ..."""
    made = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    return Path(os.path.abspath(made))
