"""The numbers in what a function gives and in what it keeps, by name, and where two sets of them differ."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from crosstie.port.capture.device_tensor import DeviceTensor

Numbers = dict[str, Any]
_DEPTH = 6
# Enough for another order of summation, far below what a stale value changes.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def numbers(value: Any, name: str = "output") -> Numbers:
    """Copies of all tensors, and all plain values."""
    return {at: _copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for at, leaf in _leaves(value, name)}


def copies(memory: dict[str, torch.Tensor]) -> Numbers:
    return {at: _copy(tensor) for at, tensor in memory.items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    return plain.clone() if plain.layout is torch.strided else plain.to_dense()


def device_memory(value: Any, name: str) -> dict[str, torch.Tensor]:
    """The memory of all device tensors in it, not copied."""
    return dict(_leaves(value, name, only_device=True))


def _leaves(value: Any, name: str, only_device: bool = False, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DeviceTensor):
        yield name, value.elem
    elif isinstance(value, (torch.Tensor, bool, int, float, complex, str)):
        if not only_device:
            yield name, value
    elif depth < _DEPTH:
        for key, part in _parts(value):
            yield from _leaves(part, f"{name}{key}", only_device, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f".{key}", tensor
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        if isinstance(value, type) or (callable(value) and not isinstance(value, torch.nn.Module)):
            return
        for key, part in vars(value).items():
            if not key.startswith("_"):
                yield f".{key}", part


def differences(replayed: Numbers, called: Numbers, exact: bool = False) -> list[str]:
    """One sentence for each name whose numbers are not the same, within rounding unless `exact`."""
    if "replay" in replayed:
        return [replayed["replay"]]
    found = [f"{name} is not in both" for name in sorted(replayed.keys() ^ called.keys())]
    for name in sorted(replayed.keys() & called.keys()):
        said = _difference(replayed[name], called[name], exact)
        if said:
            found.append(f"{name}: {said}")
    return found


def _difference(replayed: Any, called: Any, exact: bool) -> str | None:
    if not isinstance(replayed, torch.Tensor) or not isinstance(called, torch.Tensor):
        return None if replayed == called or replayed != replayed else f"{replayed!r} at replay, {called!r} in a call"
    if replayed.shape != called.shape or replayed.dtype != called.dtype:
        return f"{_kind(replayed)} at replay, {_kind(called)} in a call"
    wide = torch.complex128 if called.is_complex() else torch.float64
    left, right = replayed.to(wide), called.to(wide)
    tolerance = 0.0 if exact else _TOLERANCE.get(called.dtype, 0.0)
    unlike = ~torch.isclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not unlike.any():
        return None
    at = int(unlike.flatten().nonzero()[0])
    one, other = left.flatten()[at].item(), right.flatten()[at].item()
    return f"{int(unlike.sum())} of {unlike.numel()} values, such as {one:.8g} at replay and {other:.8g} in a call"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
