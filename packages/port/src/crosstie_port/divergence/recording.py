"""A module's inputs and outputs, call by call, into a file: forward hooks on it and on everything in it."""

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crosstie.core.errors import BadInput
from crosstie_port.divergence.digest import MASK, TensorSummary, summarise
from crosstie_port.divergence.masks import as_blocked
from crosstie_port.divergence.records import RecordedTensor, Recording, write
from crosstie_port.divergence.routing import MARGIN, choice_of
from crosstie_port.divergence.weights import sampled

# Settings of a Hugging Face config that a cause may turn on.
_SETTINGS = (
    "attn_logit_softcapping", "final_logit_softcapping", "rope_scaling", "rope_parameters", "rope_theta", "model_type",
    "rms_norm_eps", "quantization_config", "sliding_window", "embedding_multiplier", "residual_multiplier",
    "attention_multiplier", "logits_scaling", "routed_scaling_factor", "query_pre_attn_scalar",
)  # fmt: skip
# Deeper than this, an argument is not looked into.
_DEEPEST = 4


@contextmanager
def record(
    model: torch.nn.Module, path: str | Path, *, seed: int = 0, modules: Sequence[str] = (), calls: int = 1,
    head: int | None = None, machine: Mapping[str, str] | None = None,
) -> Iterator["TensorRecorder"]:  # fmt: skip
    """What `model` computes in the block, written to `path` at its end; nothing is written where the block fails.

    `modules`: patterns of the names to record, such as "model.layers.0.*"; all where there is none. `calls`: how many
    calls of each module, from the first on. `head`: the width of an attention head, where the model's config has none.
    """
    recorder = TensorRecorder(model, seed=seed, modules=modules, calls=calls, head=head, machine=machine)
    try:
        yield recorder
    finally:
        recorder.detach()
    recorder.write(Path(path))


class TensorRecorder:
    """Hooks that stay until `detach`. With `target`, for an engine that says neither when a pass begins nor when it
    ends: the file is written as soon as a module that has been recorded often enough is called again."""

    def __init__(
        self, model: torch.nn.Module, *, seed: int = 0, modules: Sequence[str] = (), calls: int = 1,
        head: int | None = None, machine: Mapping[str, str] | None = None, target: Path | None = None,
    ):  # fmt: skip
        if calls < 1 or seed < 0:
            raise BadInput(f"calls {calls}, seed {seed}: at least one call, and a seed of 0 or more")
        named = [(name, module) for name, module in model.named_modules() if _asked(name, modules)]
        if not named:
            raise BadInput(f"no module is called {' or '.join(modules)}; such as {_some(model)}")
        config = getattr(model, "config", None)
        width = head_width(config) if head is None else head
        matrices = {name: one for name, one in model.named_parameters() if one.ndim > 1}
        self.recording = Recording(
            seed=seed, head=width, calls=calls, machine=dict(machine or {}) | here(model), settings=settings_of(config),
            weights={name: list(one.shape) for name, one in matrices.items()},
            narrow={name: str(one.dtype)[6:] for name, one in matrices.items() if one.element_size() < 2},
            sampled=sampled(model, seed),
        )  # fmt: skip
        self.target = target
        self._known: dict[tuple[str, tuple[int, ...]], int] = {}
        self._begun: Counter[str] = Counter()
        # What routers chose last: kept as sets, wherever they go.
        self._choices: list[torch.Tensor] = []
        self._handles = []
        for name, module in named:
            about = (name, type(module).__name__, not any(True for _ in module.children()))
            self._handles.append(module.register_forward_pre_hook(self._before(*about), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(*about)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def write(self, path: Path) -> None:
        if not self.recording.entries:
            raise BadInput(f"{path}: nothing was recorded: no module was called, or a graph was replayed in its place")
        write(self.recording, path)

    def _before(self, name: str, kind: str, leaf: bool) -> Any:
        def hook(_module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self._begun[name] += 1
            if self._begun[name] > self.recording.calls:
                self._over()
            else:
                # Before the module runs: some write into what they were given.
                self._keep(name, kind, leaf, "in", {**dict(enumerate(args)), **kwargs})

        return hook

    def _after(self, name: str, kind: str, leaf: bool) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if 1 <= self._begun[name] <= self.recording.calls:
                self._keep(name, kind, leaf, "out", output)

        return hook

    def _over(self) -> None:
        if self.target is not None:
            path, self.target = self.target, None
            self.detach()
            self.write(path)

    def _keep(self, name: str, kind: str, leaf: bool, side: str, values: Any) -> None:
        call = self._begun[name] - 1
        found = list(tensors(values))
        choice = choice_of(found) if side == "out" else None
        if choice is not None:
            called, indices, margins = choice
            self._choices = [*self._choices[-3:], indices]
            found.append((f"{called}{MARGIN}", margins))
        for place, (called, tensor) in enumerate(found):
            kept = self._index(self._summary(called, tensor))
            self.recording.entries.append(RecordedTensor(name, kind, leaf, call, side, place, kept, called))

    def _summary(self, called: str, tensor: torch.Tensor) -> TensorSummary:
        """Of a mask as what it blocks; of a router's choice as the set that it is, with the hash of its order too."""
        summary = summarise(tensor, self.recording.seed, self.recording.head)
        if any(tensor is chosen for chosen in self._choices):
            as_set = summarise(tensor.sort(-1).values, self.recording.seed, self.recording.head)
            return replace(as_set, hash=f"{as_set.hash} {summary.hash}")
        blocked = as_blocked(called, tensor)
        if blocked is None:
            return summary
        of_mask = summarise(blocked, self.recording.seed, self.recording.head)
        return replace(of_mask, dtype=MASK, hash=f"{MASK} {of_mask.hash}")

    def _index(self, summary: TensorSummary) -> int:
        """The same values are kept once: most inputs are an output of the module before."""
        key = summary.hash, summary.shape
        if key not in self._known:
            self._known[key] = len(self.recording.summaries)
            self.recording.summaries.append(summary)
        return self._known[key]


def tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Those with values and how to come to them, in lists and dictionaries too; other objects, such as a cache, are not
    looked into."""
    if isinstance(value, torch.Tensor):
        if value.numel() and not value.is_complex() and value.device.type != "meta":
            yield name or "0", value
    elif depth < _DEEPEST and isinstance(value, Mapping | list | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, one in parts:
            yield from tensors(one, f"{name}.{key}" if name else str(key), depth + 1)


def _asked(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(model: torch.nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:: max(len(names) // 3, 1)][:4]) or "nothing: it has no modules inside"


def head_width(config: Any) -> int:
    """Of a Hugging Face config, 0 where it does not say."""
    config = getattr(config, "text_config", config)
    width = getattr(config, "head_dim", None)
    if isinstance(width, int) and width > 0:
        return width
    hidden, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else 0


def settings_of(config: Any) -> dict[str, Any]:
    config = getattr(config, "text_config", config)
    found = {name: getattr(config, name, None) for name in _SETTINGS}
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)} | {
        name: {str(key): one for key, one in value.items() if isinstance(one, str | int | float | bool)}
        for name, value in found.items()
        if isinstance(value, Mapping)
    }


def here(model: torch.nn.Module) -> dict[str, str]:
    """What people would ask about the machine; without a date, so that the same run writes the same bytes."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else torch.device("cpu")
    found = {"torch": str(torch.__version__), "device": device.type, "model": type(model).__name__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["architecture"] = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
        found["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        if not torch.version.hip:
            found["architecture"] = f"sm_{properties.major}{properties.minor}"
    return found
