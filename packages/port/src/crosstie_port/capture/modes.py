"""How PyTorch's calls reach the stand-in device: all of Python's, and below autograd all operations.

Without a CUDA device PyTorch refuses to index a tensor that says "cuda": c10 keeps one device guard per type in an
exported array. A CPU build leaves CUDA's place empty, a CUDA build has a guard there that calls the driver. While a
function is checked, the CPU's guard, which does nothing, stands there.
"""

import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
import torch._dynamo  # PyTorch imports it at the first dispatch under a mode, and reads torch.cuda then
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from crosstie.core.errors import BadInput
from crosstie_port.capture.device import Device
from crosstie_port.capture.device_tensor import DEVICE, DeviceTensor, storage_of
from crosstie_port.capture.hazards import FORMATS, NO_ATTENTION
from crosstie_port.capture.stand_in import LEGACY, add_hook, standing_in

_ARRAY = "_ZN3c104impl26device_guard_impl_registryE"
# c10/core/DeviceType.h: these two numbers are part of every serialised tensor and do not change.
_CPU, _CUDA = 0, 1

_T = torch.Tensor


@contextmanager
def cuda_guard_does_nothing() -> Iterator[None]:
    guards = _guards()
    before = guards[_CUDA]
    guards[_CUDA] = guards[_CPU]
    try:
        yield
    finally:
        guards[_CUDA] = before


def _guards() -> "ctypes.Array[ctypes.c_void_p]":
    library = Path(torch.__file__).parent / "lib" / ("libc10.dylib" if sys.platform == "darwin" else "libc10.so")
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(library)), _ARRAY)
    except (OSError, ValueError) as error:
        raise BadInput(f"preflight capture runs with PyTorch on Linux or macOS; not with {library}: {error}") from None


@contextmanager
def stand_in_device(device: Device) -> Iterator[None]:
    """While this lasts, "cuda" is `device`, in this thread and those it starts."""
    plain_run = threading.Thread.run

    @contextmanager
    def modes() -> Iterator[None]:
        with _Operations(device), _Calls(device):
            yield

    def run(thread: threading.Thread) -> None:
        with modes():
            plain_run(thread)

    device.modes = modes
    from_data = _from_data_everywhere(device)

    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    # A module that moves to the device takes new parameters; a host tensor cannot become a device tensor in place.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # TorchScript would compile kernels for the device that it believes to be there.
    fuses = torch._C._jit_texpr_fuser_enabled()
    torch._C._jit_set_texpr_fuser_enabled(False)
    try:
        with (
            cuda_guard_does_nothing(),
            patch.object(threading.Thread, "run", run),
            standing_in(device),
            patch.multiple(torch, **from_data),
            torch.backends.cudnn.flags(enabled=False),
            modes(),
        ):
            yield
    finally:
        for made in from_data.values():
            torch.jit._builtins._get_builtin_table().pop(id(made), None)
        torch._C._jit_set_texpr_fuser_enabled(fuses)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.operation(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Calls that do their work in C++ before any operation is dispatched, or that refuse subclasses of Tensor."""

    def __init__(self, device: Device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        default = torch.utils._device.CURRENT_DEVICE
        if default is not None and kwargs.get("device") is None and func in torch.utils._device._device_constructors():
            # torch.set_default_device and torch.device(...) as a context stand below this mode.
            kwargs = {**kwargs, "device": default}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": with_index(kwargs["device"])}
        on_device = bool(args) and isinstance(args[0], DeviceTensor)
        handler = _HANDLERS.get(func) or (_DEVICE_HANDLERS.get(func) if on_device else None)
        return handler(self._device, func, args, kwargs) if handler else func(*args, **kwargs)


def with_index(device: Any) -> Any:
    """cuda:0 for "cuda": the host's guard, asked which device is current, would answer with the host."""
    named = isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
    return DEVICE if named or isinstance(device, int) else device


def _cuda(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return args[0].to(DEVICE, non_blocking=non_blocking)


def _from_data(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """torch.tensor and its kin: made on the host and copied over, as PyTorch does."""
    data = args[0] if args else kwargs["data"]
    where = kwargs.get("device")
    if kwargs.get("pin_memory"):
        unpinned = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        return _pin_memory(device, func, (_from_data(device, func, args, unpinned),), {})
    if isinstance(data, torch.Tensor):
        where = data.device if where is None else where
        made = data.to(where, kwargs.get("dtype"), copy=func.__name__ == "tensor")
        return made.detach().requires_grad_(bool(kwargs.get("requires_grad")))
    if isinstance(data, (list, tuple)):
        args = (_numbers(data), *args[1:])
        kwargs = {name: value for name, value in kwargs.items() if name != "data"}
    if where != DEVICE:
        return func(*args, **kwargs)
    wanted = {name: value for name, value in kwargs.items() if name not in ("device", "requires_grad")}
    return func(*args, **wanted).to(DEVICE).requires_grad_(bool(kwargs.get("requires_grad")))


def _numbers(data: Any) -> Any:
    """PyTorch reads device tensors in a list one by one."""
    if isinstance(data, (list, tuple)) or (isinstance(data, DeviceTensor) and data.dim()):
        return [_numbers(part) for part in data]
    return data.item() if isinstance(data, DeviceTensor) else data


def _from_data_everywhere(device: Device) -> dict[str, Any]:
    """PyTorch's own Python functions call these too, where no mode sees it."""
    # PyTorch's list of what torch.device(...) as a context changes, made before these are replaced.
    torch.utils._device._device_constructors()

    def wrapped(func: Any) -> Any:
        @functools.wraps(func)
        def made(*args: Any, **kwargs: Any) -> Any:
            if torch._C._len_torch_function_stack():
                return func(*args, **kwargs)
            return _from_data(device, func, args, {**kwargs, "device": with_index(kwargs.get("device"))})

        # TorchScript knows functions by identity.
        scripted = torch.jit._builtins._find_builtin(func)
        if scripted is not None:
            torch.jit._builtins._register_builtin(made, scripted)
        return made

    return {func.__name__: wrapped(func) for func in (torch.tensor, torch.as_tensor, torch.asarray)}


def _new_tensor(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    like, data, *rest = args
    options = {"dtype": like.dtype, "device": like.device, **kwargs}
    return _from_data(device, torch.tensor, (data, *rest), options)


def _new(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The old constructor: of sizes, or of data."""
    like, *given = args
    if given and not isinstance(given[0], (int, torch.Size)):
        return _from_data(device, torch.tensor, (given[0],), {"dtype": like.dtype, "device": like.device, **kwargs})
    return torch.empty(*given, dtype=like.dtype, device=like.device) if given else like.new_empty(0)


def _type(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """x.type("torch.cuda.HalfTensor"): the name has the device in it, and a name without one the host."""
    name = args[1] if len(args) > 1 else kwargs.get("dtype")
    if isinstance(name, type):
        name = f"{name.__module__}.{name.__name__}"
    kind = str(name).removeprefix("torch.").removeprefix("cuda.").removesuffix("Tensor")
    if not isinstance(name, str) or kind not in LEGACY:
        return func(*args, **kwargs)
    where = DEVICE if name.startswith("torch.cuda.") else torch.device("cpu")
    return args[0].to(where, LEGACY[kind], non_blocking=bool(kwargs.get("non_blocking")))


def _pin_memory(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(args[0], DeviceTensor):
        raise device.as_on_gpu(RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"))
    return args[0] if device.memories.is_pinned(args[0]) else torch.ops.aten._pin_memory(args[0])


def _as_text(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device.met(FORMATS, "repr or format of a device tensor")
    return func(args[0].elem, *args[1:], **kwargs)


def _no_array(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("force"):
        return args[0].detach().cpu().numpy()
    said = "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first."
    raise device.as_on_gpu(TypeError(said))


def _set_data(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    func(*args, **kwargs)
    if isinstance(args[1], DeviceTensor):
        args[0].elem = args[1].elem


def _by_index(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """x[...] and x[...] = y: a list among the indices becomes a tensor on the host and is copied over."""
    target, index, *value = args
    index = tuple(map(_index_tensor, index)) if isinstance(index, tuple) else _index_tensor(index)
    return func(target, index, *value)


def _index_tensor(index: Any) -> Any:
    is_sequence = isinstance(index, (list, tuple, range, numpy.ndarray))
    return torch.tensor(index).to(DEVICE) if is_sequence and len(index) else index


def _attention(device: Device, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Which kernel a GPU would choose depends on its properties; none of them synchronises, but there may be none."""
    given = inspect.signature(_attention_arguments).bind(*args, **kwargs).arguments
    if not isinstance(given["query"], DeviceTensor):
        return func(*args, **kwargs)
    mask = given.get("attn_mask")
    _has_kernel(device, given["query"].shape[-1], mask is not None)
    if mask is not None and mask.dtype is torch.bool:
        given["attn_mask"] = torch.zeros_like(mask, dtype=given["query"].dtype).masked_fill_(~mask, float("-inf"))
    return torch.ops.aten._scaled_dot_product_attention_math(**given)[0]


def _has_kernel(device: Device, head_size: int, masked: bool) -> None:
    allowed = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
    }
    lacks = {row.backend for row in device.part.attention if head_size > row.max_head_size}
    # The kernels of flash attention take no mask on any part.
    lacks |= {"flash"} if masked else set()
    asked = [name for name, may in allowed.items() if may]
    if set(asked) <= lacks:
        device.met(NO_ATTENTION, f"{', '.join(asked)} for heads of {head_size}{' with a mask' if masked else ''}")


def _attention_arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """The names and order of scaled_dot_product_attention's, which has no signature to ask."""


_Handler = Callable[[Device, Any, Any, dict[str, Any]], Any]
_HANDLERS: dict[Any, _Handler] = {
    _T.to: lambda device, func, args, kwargs: func(
        *(with_index(arg) if isinstance(arg, (str, torch.device)) else arg for arg in args), **kwargs
    ),
    _T.cuda: _cuda,
    _T.type: _type,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    _T.new_tensor: _new_tensor,
    _T.pin_memory: _pin_memory,
    _T.is_pinned: lambda device, func, args, kwargs: (
        not isinstance(args[0], DeviceTensor) and device.memories.is_pinned(args[0])
    ),
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
# Where the first argument is a device tensor; others go to PyTorch.
_DEVICE_HANDLERS: dict[Any, _Handler] = {
    _T.__getitem__: _by_index,
    _T.__setitem__: _by_index,
    # What asks for an address gets the one of the host's memory: the same for the same memory.
    _T.data_ptr: lambda device, func, args, kwargs: func(args[0].elem),
    _T.untyped_storage: lambda device, func, args, kwargs: storage_of(args[0]),
    _T.storage: lambda device, func, args, kwargs: torch.TypedStorage(
        wrap_storage=storage_of(args[0]), dtype=args[0].dtype, _internal=True
    ),
    _T.tolist: lambda device, func, args, kwargs: func(args[0].cpu()),
    _T.__repr__: _as_text,
    _T.__format__: _as_text,
    _T.new: _new,
    _T.numpy: _no_array,
    _T.__array__: _no_array,
    _T.register_hook: lambda device, func, args, kwargs: add_hook(*args),
    _T.data.__set__: _set_data,
}
