"""What capture refuses of one operation on the device, read from PyTorch's CUDA kernels and checked on an H200.

Most operations are free of hazards, and need no row. A rule is for an operation that copies between host and device,
reads a device value on the host inside its kernel, or sizes its output by the data. Operations that PyTorch composes of
others (.item(), one_hot, allclose, arange of a tensor) need none either: their parts come by here one by one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from crosstie.port.capture.device_tensor import DeviceTensor, Memories
from crosstie.port.capture.hazards import (
    BLOCKING,
    COUNTS,
    GENERATOR,
    KERNEL_READ,
    LINALG,
    MASK,
    NONZERO,
    READ,
    REPEATS,
    SCALAR_TO_DEVICE,
    SOLVER,
    SPARSE,
    TO_DEVICE,
    TO_HOST,
    UNIQUE,
    VALUE,
    Reason,
)

_ALWAYS: dict[str, Reason] = {
    "aten::_local_scalar_dense": READ,
    "aten::item": READ,
    "aten::nonzero": NONZERO,
    "aten::masked_select": NONZERO,
    "aten::_unique": UNIQUE,
    "aten::_unique2": UNIQUE,
    "aten::unique_dim": UNIQUE,
    "aten::unique_consecutive": UNIQUE,
    "aten::unique_dim_consecutive": UNIQUE,
    "aten::bincount": COUNTS,
    "aten::_linalg_check_errors": LINALG,
    "aten::_linalg_eigh": LINALG,
    "aten::_linalg_svd": LINALG,
    "aten::linalg_eig": SOLVER,
    "aten::_linalg_eigvals": SOLVER,
    "aten::linalg_eigvals": SOLVER,
    "aten::linalg_lstsq": SOLVER,
    "aten::_ctc_loss": KERNEL_READ,
    "aten::allclose": READ,
    "aten::linalg_pinv": LINALG,
    "aten::linalg_matrix_exp": SOLVER,
    "aten::linalg_ldl_factor_ex": SOLVER,
    "aten::cholesky": LINALG,
    "aten::cholesky_inverse": LINALG,
    "aten::_to_sparse": SPARSE,
    "aten::_to_sparse_csr": SPARSE,
    "aten::_to_sparse_csc": SPARSE,
    "aten::_to_sparse_bsr": SPARSE,
    "aten::_to_sparse_bsc": SPARSE,
    "aten::_coalesce": SPARSE,
    "aten::_nested_tensor_from_tensor_list": TO_DEVICE,
    "aten::_nested_tensor_from_mask": TO_HOST,
    "aten::_nested_tensor_from_mask_left_aligned": READ,
    "aten::quantize_per_tensor_dynamic": READ,
}
# Host tensors of any size may stand beside device tensors in these.
_MIXING = {
    "aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::set_", "aten::_pack_padded_sequence", "aten::_ctc_loss",
    "aten::_use_cudnn_ctc_loss", "aten::_use_miopen_ctc_loss", "aten::_copy_from", "aten::_copy_from_and_resize",
}  # fmt: skip


def hazards_of(func: Any, args: Any, kwargs: dict[str, Any], memories: Memories) -> Iterator[tuple[Reason, str]]:
    """What capture refuses of this operation, with evidence. `args` hold the device's and the host's tensors."""
    name = str(func._schema.name)
    shown = f"{name}({', '.join(_show(value) for value in [*args, *kwargs.values()])})"
    reason = _ALWAYS.get(name)
    if reason is not None:
        yield reason, shown
    judge = _JUDGES.get(name)
    if judge is not None:
        given = _by_name(func, args, kwargs)
        for found in judge(given, memories):
            yield found, shown
    # Not torch.Generator, which is replaced while a function is checked.
    if isinstance(kwargs.get("generator"), torch._C.Generator):
        yield GENERATOR, shown


def may_mix(func: Any) -> bool:
    return str(func._schema.name) in _MIXING


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update(zip((argument.name for argument in arguments), args, strict=False))
    given.update(kwargs)
    return given


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


def _to_copy(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    source, device = given["self"], given.get("device")
    if device is None or not source.numel():
        return
    if isinstance(source, DeviceTensor) and device.type == "cpu":
        # Without blocking PyTorch copies into pinned memory of its own.
        if not given["non_blocking"]:
            yield TO_HOST
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
    direct = same_layout and _dense(host) and not converted
    by_device = host.is_contiguous() and (from_device or same_shape) and (non_blocking or not converted)
    if not memories.is_pinned(host) or not (direct or by_device):
        number = source.dim() == 0 and target is not None
        yield TO_HOST if from_device else SCALAR_TO_DEVICE if number else TO_DEVICE
    elif not non_blocking:
        yield BLOCKING


def _dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _index(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    indices = [index for index in given["indices"] if index is not None]
    if not isinstance(given["self"], DeviceTensor):
        return
    if any(_is_mask(index) and isinstance(index, DeviceTensor) for index in indices):
        yield MASK
    if _uploads_index(indices):
        yield TO_DEVICE


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
        yield MASK
    elif not isinstance(values, DeviceTensor) and not masks:
        yield SCALAR_TO_DEVICE if values.dim() == 0 else TO_DEVICE
    if _uploads_index(indices):
        yield TO_DEVICE


def _where(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # A number beside it is made on the device; a tensor of the host is copied over.
    if any(not isinstance(given[side], DeviceTensor) for side in ("self", "other")):
        yield TO_DEVICE


def _equal(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    left, right = given["self"], given["other"]
    if left.shape != right.shape:
        return
    one = left.elem.data_ptr() == right.elem.data_ptr() and left.stride() == right.stride()
    if not one:
        yield READ


def _repeat_interleave(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if given.get("output_size") is None:
        yield REPEATS


def _value_on_device(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if isinstance(given["value"], DeviceTensor):
        yield VALUE


def _bounds_on_device(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if any(isinstance(given.get(bound), DeviceTensor) for bound in ("start", "end", "high")):
        yield READ


def _histc(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if given["min"] == given["max"]:
        yield KERNEL_READ


def _normal(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if isinstance(given.get("std"), DeviceTensor):
        yield KERNEL_READ


def _segment_reduce(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if not given["unsafe"]:
        yield KERNEL_READ


def _searchsorted(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # The bounds of a sorter are checked on the host.
    if given.get("sorter") is not None:
        yield KERNEL_READ


def _mode(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # Longer rows than one block can sort go through thrust, which waits.
    if given["self"].dim() and given["self"].shape[given["dim"]] > 2048:
        yield KERNEL_READ


def _scale_on_device(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    if isinstance(given["scale"], DeviceTensor):
        yield READ


def _zero_point(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # Whole zero points are checked against the range on the host.
    if not given["zero_point"].is_floating_point():
        yield KERNEL_READ


def _grouped_mm(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # The grouped kernel is for bfloat16; other types take a loop over groups, whose offsets go to the host.
    if isinstance(given.get("offs"), DeviceTensor) and given["self"].dtype is not torch.bfloat16:
        yield TO_HOST


def _isin(given: dict[str, Any], memories: Memories) -> Iterator[Reason]:
    # Few test elements are compared one by one; many are sorted and made unique first.
    elements, tests = given.get("elements"), given.get("test_elements")
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor):
        return
    if tests.numel() >= 10.0 * elements.numel() ** 0.145 and not given["assume_unique"]:
        yield UNIQUE


_JUDGES: dict[str, Callable[[dict[str, Any], Memories], Iterator[Reason]]] = {
    "aten::copy_": _copy,
    "aten::_to_copy": _to_copy,
    "aten::index": _index,
    "aten::_unsafe_index": _index,
    "aten::index_put": _index_put,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::where": _where,
    "aten::equal": _equal,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::masked_fill": _value_on_device,
    "aten::masked_fill_": _value_on_device,
    "aten::index_fill": _value_on_device,
    "aten::index_fill_": _value_on_device,
    "aten::linspace": _bounds_on_device,
    "aten::logspace": _bounds_on_device,
    "aten::randint_like": _bounds_on_device,
    "aten::histc": _histc,
    "aten::normal": _normal,
    "aten::isin": _isin,
    "aten::segment_reduce": _segment_reduce,
    "aten::searchsorted": _searchsorted,
    "aten::mode": _mode,
    "aten::quantize_per_tensor": _scale_on_device,
    "aten::fake_quantize_per_channel_affine_cachemask": _zero_point,
    "aten::_grouped_mm": _grouped_mm,
}
