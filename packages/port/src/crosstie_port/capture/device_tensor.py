"""A tensor that says it is on cuda:0 and keeps its numbers on the host, its storage, and what is known of memory."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from crosstie_port.capture.sites import Site

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


class MemoryRecord:
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
        self._by_address: dict[int, MemoryRecord] = {}
        # Bytes of the host that are pinned: memory is, whatever tensor or array looks at it.
        self._pinned: list[tuple[StorageWeakRef, range]] = []
        self.count = 0

    def of(self, tensor: torch.Tensor) -> MemoryRecord | None:
        return self._by_address.get(tensor.untyped_storage()._cdata)

    def note(self, tensor: torch.Tensor, call: int = 0, site: Site | None = None) -> MemoryRecord:
        address = tensor.untyped_storage()._cdata
        known = self._by_address.get(address)
        if known is None:
            known = self._by_address[address] = MemoryRecord(self.count, tensor, call, site)
            self.count += 1
        return known

    def pin(self, tensor: torch.Tensor) -> None:
        record, storage = self.note(tensor), tensor.untyped_storage()
        record.pinned = True
        self._pinned.append((record.storage, range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())))

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        known = self.of(tensor)
        if known is not None and known.pinned:
            # share_memory_ has moved it.
            return not tensor.is_shared()
        # Not torch.Tensor's: under a mode that asks the device.
        at = torch._C.TensorBase.data_ptr(tensor)
        return any(at in where and not storage.expired() for storage, where in self._pinned)


class DeviceStorage(torch.UntypedStorage):
    """The host's storage behind a device tensor; what PyTorch does to bytes goes by the device, as an operation."""

    owner: Any

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    def _bytes(self) -> DeviceTensor:
        return DeviceTensor(plain_bytes(self), self.owner)

    def cpu(self) -> Any:
        return self._bytes().cpu().untyped_storage()

    def to(self, *, device: Any = DEVICE, **_: Any) -> Any:
        return self if torch.device(device).type == "cuda" else self.cpu()

    def cuda(self, *_: Any, **__: Any) -> Any:
        return self

    def clone(self) -> Any:
        return storage_of(self._bytes().clone())

    def copy_(self, source: Any, non_blocking: Any = None) -> Any:
        given = source._bytes() if isinstance(source, DeviceStorage) else plain_bytes(source)
        self._bytes().copy_(given, bool(non_blocking))
        return self

    def fill_(self, value: Any) -> Any:
        self._bytes().fill_(value)
        return self

    def __getitem__(self, index: Any) -> Any:
        return self._bytes()[index].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self._bytes()[index].fill_(value)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(self.nbytes()))


def storage_of(tensor: Any) -> DeviceStorage:
    """PyTorch keeps one Python object for each storage: from now on it is of this class."""
    storage: Any = tensor.elem.untyped_storage()
    storage.__class__ = DeviceStorage
    storage.owner = tensor.owner
    return storage


def plain_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The same memory as a tensor of the host."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)
