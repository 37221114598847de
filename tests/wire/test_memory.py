"""What servers ask of the allocator."""

import ctypes
import subprocess
import sys

import pytest

# How many blocks have pages of their own, by glibc's `mallinfo2`, before and after 4 MiB, once 16 MiB were let go.
BLOCKS = """
import ctypes
from crosstie.wire.loops import settle_memory

class Info(ctypes.Structure):
    _fields_ = [(str(at), ctypes.c_size_t) for at in range(10)]

{settle}
info = ctypes.CDLL(None).mallinfo2
info.restype = Info
gone = bytes(2**24)
del gone
before = getattr(info(), "3")
kept = bytes(2**22)
print(getattr(info(), "3") - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another library than glibc")
@pytest.mark.parametrize(("settle", "more"), [("settle_memory()", "1"), ("", "0")])
def test_long_bodies_have_pages_that_are_moved_and_not_copied_as_they_grow(settle: str, more: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", BLOCKS.format(settle=settle)], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == more
