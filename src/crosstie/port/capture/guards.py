"""A device guard for CUDA where no CUDA device is: without one, PyTorch refuses to index a tensor that says "cuda".

c10 keeps one guard per device type in an exported array. A CPU build leaves CUDA's place empty, a CUDA build has a
guard there that calls the driver. While a function is checked, the CPU's guard, which does nothing, stands there.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosstie.core.errors import BadInput

_ARRAY = "_ZN3c104impl26device_guard_impl_registryE"
# c10/core/DeviceType.h: these two numbers are part of every serialised tensor and do not change.
_CPU, _CUDA = 0, 1


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
    import torch

    library = Path(torch.__file__).parent / "lib" / ("libc10.dylib" if sys.platform == "darwin" else "libc10.so")
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(library)), _ARRAY)
    except (OSError, ValueError) as error:
        raise BadInput(f"preflight capture runs with PyTorch on Linux or macOS; not with {library}: {error}") from None
