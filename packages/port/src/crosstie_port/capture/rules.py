"""What capture refuses of one operation on any device, read from PyTorch's CUDA kernels and checked on an H200.

Most operations are free of hazards, and need no row. A rule is for an operation that copies between host and device,
reads a device value on the host inside its kernel, or sizes its output by the data. Operations that PyTorch composes of
others (.item(), one_hot, allclose, arange of a tensor) need none either: their parts come by here one by one. What
differs from part to part (grouped and scaled products) is data, in `parts`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from crosstie_port.capture import hazards
from crosstie_port.capture.device_tensor import DeviceTensor, Memories
from crosstie_port.capture.hazards import Reason
from crosstie_port.capture.parts import Rule
from crosstie_port.capture.tape import arguments_of

_ALWAYS = {name: reason for reason in hazards.REASONS.values() for name in reason.always}
# Host tensors of any size may stand beside device tensors in these.
_MIXING = {
    "aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::set_", "aten::_pack_padded_sequence", "aten::_ctc_loss",
    "aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss", "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::_foreach_copy_", "aten::_foreach_copy",
}  # fmt: skip


def hazards_of(
    func: Any, args: Any, kwargs: dict[str, Any], memories: Memories, own: list[Rule]
) -> Iterator[tuple[Reason, str]]:
    """What capture refuses of this operation, with evidence. `args` hold the device's and the host's tensors.

    `own`: the rules of the part that the device stands for.
    """
    shown = f"{func._schema.name}({', '.join(_show(value) for value in [*args, *kwargs.values()])})"
    name = str(func._schema.name).removeprefix("aten::")
    if name in _ALWAYS:
        yield _ALWAYS[name], shown
    judge, when = _JUDGES.get(name), _WHEN.get(name)
    if judge or when or own:
        given = {argument.name: value for argument, value in arguments_of(func, args, kwargs)}
        yield from ((reason, shown) for reason in (judge(given, memories) if judge else ()))
        if when and when[1](given):
            yield when[0], shown
        yield from ((rule.reason, shown) for rule in own if rule.holds(given))
    # Not torch.Generator, which is replaced while a function is checked.
    if isinstance(kwargs.get("generator"), torch._C.Generator):
        yield hazards.GENERATOR, shown


def may_mix(func: Any) -> bool:
    return str(func._schema.name) in _MIXING


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        where = "device" if isinstance(value, DeviceTensor) else "host"
        return f"{where} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(item) for item in value[:4])}{', ...' if len(value) > 4 else ''}]"
    return repr(value)


def _copy(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    target, source = given["self"], given["src"]
    if not source.numel():
        return
    yield from _between(source, target, target.dtype != source.dtype, bool(given["non_blocking"]), memories)


def _foreach_copy(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    """Between devices it is one copy after another."""
    for target, source in zip(given["self"], given["src"], strict=True):
        yield from _copy({**given, "self": target, "src": source}, memories)


def _to_copy(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    source, device = given["self"], given.get("device")
    if device is None or not source.numel():
        return
    if isinstance(source, DeviceTensor) and device.type == "cpu":
        # Without blocking PyTorch copies into pinned memory of its own.
        if not given["non_blocking"]:
            yield hazards.TO_HOST
    elif not isinstance(source, DeviceTensor) and device.type == "cuda":
        converted = given.get("dtype") not in (None, source.dtype)
        yield from _between(source, None, converted, bool(given["non_blocking"]), memories)


def _between(
    source: torch.Tensor, target: torch.Tensor | None, converted: bool, non_blocking: bool, memories: Memories
) -> Iterator[Reason]:  # fmt: skip
    """A copy between host and device; `target` None is memory made for it, laid out like the source."""
    from_device, to_device = isinstance(source, DeviceTensor), target is None or isinstance(target, DeviceTensor)
    if from_device == to_device:
        return
    host = target if target is not None and from_device else source
    # One copy of the bytes as they are, or through a temporary: that is device memory where the host's side is
    # contiguous and whole, and pageable memory elsewhere, or where the copy waits and converts.
    same_shape = target is None or target.shape == source.shape
    same_layout = target is None or (same_shape and target.stride() == source.stride())
    direct = same_layout and bool(torch.ops.aten.is_non_overlapping_and_dense(host)) and not converted
    by_device = host.is_contiguous() and (from_device or same_shape) and (non_blocking or not converted)
    if not memories.is_pinned(host) or not (direct or by_device):
        number = source.dim() == 0 and target is not None
        yield hazards.TO_HOST if from_device else hazards.SCALAR_TO_DEVICE if number else hazards.TO_DEVICE
    elif not non_blocking:
        yield hazards.BLOCKING


def _index(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    indices = [index for index in given["indices"] if index is not None]
    if not isinstance(given["self"], DeviceTensor):
        return
    if any(_is_mask(index) and isinstance(index, DeviceTensor) for index in indices):
        yield hazards.MASK
    if _uploads_index(indices):
        yield hazards.TO_DEVICE


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _uploads_index(indices: list[torch.Tensor]) -> bool:
    """A mask on the host is searched there, and what is found goes over through pinned memory."""
    return any(not isinstance(index, DeviceTensor) and not _is_mask(index) for index in indices)


def _index_put(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    indices, values = [index for index in given["indices"] if index is not None], given["values"]
    if not isinstance(given["self"], DeviceTensor):
        return
    masks = [index for index in indices if _is_mask(index) and isinstance(index, DeviceTensor)]
    # One mask and one value from the host become masked_fill.
    filled = len(indices) == len(masks) == 1 and values.numel() == 1 and not given["accumulate"]
    if masks and not (filled and not isinstance(values, DeviceTensor)):
        yield hazards.MASK
    elif not isinstance(values, DeviceTensor) and not masks:
        yield hazards.SCALAR_TO_DEVICE if values.dim() == 0 else hazards.TO_DEVICE
    if _uploads_index(indices):
        yield hazards.TO_DEVICE


def _on_device(*names: str) -> Callable[[dict[str, Any]], bool]:
    """Whether one of these arguments is a device tensor."""
    return lambda given: any(isinstance(given.get(name), DeviceTensor) for name in names)


def _is_other_memory(given: dict[str, Any]) -> bool:
    left, right = given["self"], given["other"]
    if left.shape != right.shape:
        return False
    return left.elem.data_ptr() != right.elem.data_ptr() or left.stride() != right.stride()


def _sorts_tests(given: dict[str, Any]) -> bool:
    """Few test elements are compared one by one; many are sorted and made unique first."""
    elements, tests = given.get("elements"), given.get("test_elements")
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor):
        return False
    return tests.numel() >= 10.0 * elements.numel() ** 0.145 and not given["assume_unique"]


# Operations with one hazard that depends on their arguments.
_WHEN: dict[str, tuple[Reason, Callable[[dict[str, Any]], bool]]] = {
    # A number beside it is made on the device; a tensor of the host is copied over.
    "where": (hazards.TO_DEVICE, lambda given: not (_on_device("self")(given) and _on_device("other")(given))),
    "equal": (hazards.READ, _is_other_memory),
    "repeat_interleave": (hazards.REPEATS, lambda given: given.get("output_size") is None),
    **dict.fromkeys(("masked_fill", "masked_fill_", "index_fill", "index_fill_"), (hazards.VALUE, _on_device("value"))),
    **dict.fromkeys(("linspace", "logspace", "randint_like"), (hazards.READ, _on_device("start", "end", "high"))),
    "histc": (hazards.KERNEL_READ, lambda given: bool(given["min"] == given["max"])),
    "normal": (hazards.KERNEL_READ, _on_device("std")),
    "isin": (hazards.UNIQUE, _sorts_tests),
    "segment_reduce": (hazards.KERNEL_READ, lambda given: not given["unsafe"]),
    **dict.fromkeys(
        ("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_solve_ex", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"),
        (hazards.LINALG, lambda given: bool(given["check_errors"])),
    ),
    # The bounds of a sorter are checked on the host.
    "searchsorted": (hazards.KERNEL_READ, lambda given: given.get("sorter") is not None),
    # Longer rows than one block can sort go through thrust, which waits.
    "mode": (
        hazards.KERNEL_READ,
        lambda given: bool(given["self"].dim() and given["self"].shape[given["dim"]] > 2048),
    ),
    "quantize_per_tensor": (hazards.READ, _on_device("scale")),
    # Whole zero points are checked against the range on the host.
    "fake_quantize_per_channel_affine_cachemask": (
        hazards.KERNEL_READ,
        lambda given: not given["zero_point"].is_floating_point(),
    ),
}
_JUDGES: dict[str, Callable[[dict[str, Any], Memories], Iterator[Reason]]] = {
    "copy_": _copy,
    "_foreach_copy_": _foreach_copy,
    "_to_copy": _to_copy,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _index_put),
}
