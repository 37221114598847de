"""The storage of a device tensor: bytes that only operations of the device may touch."""

from collections.abc import Iterator
from typing import Any

import torch

from crosstie.port.capture.device_tensor import DEVICE, DeviceTensor


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
