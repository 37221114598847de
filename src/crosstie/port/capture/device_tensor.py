"""A tensor that says it lives on cuda:0 and keeps its numbers on the host, and what is known of each memory."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from crosstie.port.capture.sites import Site

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
# dlpack.h, kDLCUDA.
_DLPACK_CUDA = 2


class DeviceTensor(torch.Tensor):
    """`elem` is a plain host tensor with the same sizes and strides; views share its storage as views on a GPU do."""

    elem: torch.Tensor
    # The check whose tensor this is: threads of the user's code have no dispatch mode of ours.
    owner: Any

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor, owner: Any) -> "DeviceTensor":
        strides = (
            {"strides": elem.stride(), "storage_offset": elem.storage_offset()} if elem.layout is torch.strided else {}
        )
        # A view of a plain tensor is a plain tensor, in inference mode too; PyTorch's C++ relies on it.
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls, elem.size(), dtype=elem.dtype, layout=elem.layout, device=DEVICE, **strides
            )
        made.elem, made.owner = elem, owner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = next(leaf.owner for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        return owner.operation(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            if self.is_leaf:
                copied.requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]

    def __copy__(self) -> Any:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by way of the host."""
        return torch.Tensor.to, (self.to(HOST), DEVICE)

    def record_stream(self, stream: Any) -> None:
        """Memory is given back when nobody needs it any more."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Libraries that would use the address need a real device; others only ask whether there is one."""
        kind = self.elem.new_empty(0).numpy().dtype.str
        return {"typestr": kind, "shape": tuple(self.shape), "data": (self.elem.data_ptr(), False), "version": 2}

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.owner.cannot_follow("device memory given to another library (DLPack)")

    def follow_elem(self) -> None:
        """After an operation that may have changed the sizes of `elem` in place (t_, resize_, set_)."""
        if self.layout is not torch.strided or (self.shape == self.elem.shape and self.stride() == self.elem.stride()):
            return
        torch._C.TensorBase.data.__set__(self, DeviceTensor(self.elem, self.owner))


class Memory:
    """One storage, on the device or the host."""

    def __init__(self, serial: int, tensor: torch.Tensor, call: int, site: Site | None):
        self.serial = serial
        # Keeps the address from being given to another storage, not the storage itself.
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.call, self.site = call, site
        self.pinned = False
        # Whether its contents were computed from the inputs of the call.
        self.from_inputs = False


class Memories:
    """All storages met so far, by address."""

    def __init__(self) -> None:
        self._by_address: dict[int, Memory] = {}
        self.count = 0

    def of(self, tensor: torch.Tensor) -> Memory | None:
        return self._by_address.get(tensor.untyped_storage()._cdata)

    def note(self, tensor: torch.Tensor, call: int = 0, site: Site | None = None) -> Memory:
        address = tensor.untyped_storage()._cdata
        known = self._by_address.get(address)
        if known is None:
            known = self._by_address[address] = Memory(self.count, tensor, call, site)
            self.count += 1
        return known

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        known = self.of(tensor)
        return known is not None and known.pinned
