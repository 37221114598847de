"""Copies of a GGUF file in which scales of tensors are multiplied: what a lost scale or a mixed-up dialect does."""

import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_F32, _Q4_1 = 0, 3
# Of 32 weights: two halves (scale and minimum), then four bits each.
_Q4_1_BYTES = 20


def _take(file: BinaryIO, form: str) -> Any:
    return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]


def _text(file: BinaryIO) -> str:
    return file.read(_take(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind == 9:
        inner, count = _take(file, "I"), _take(file, "Q")
        return [_value(file, inner) for _ in range(count)]
    return _take(file, _SCALARS[kind])


def _tensors(path: Path) -> tuple[dict[str, tuple[int, int, int]], int]:
    """Of each tensor: its type, how many elements it has, and where they begin in the file."""
    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        _take(file, "I")
        count, keys = _take(file, "Q"), _take(file, "Q")
        said = {}
        for _ in range(keys):
            name = _text(file)
            said[name] = _value(file, _take(file, "I"))
        listed = []
        for _ in range(count):
            name = _text(file)
            shape = [_take(file, "Q") for _ in range(_take(file, "I"))]
            listed.append((name, int(np.prod(shape)), _take(file, "I"), _take(file, "Q")))
        step = said.get("general.alignment", 32)
        begin = -(-file.tell() // step) * step
    return {name: (kind, size, begin + at) for name, size, kind, at in listed}, begin


def damaged(weights: Path, into: Path, tensors: str, factor: float) -> int:
    """Writes a copy with the tensors of these names (a regular expression) times `factor`; how many they were."""
    data = np.frombuffer(weights.read_bytes(), dtype=np.uint8).copy()
    found, _ = _tensors(weights)
    count = 0
    for name, (kind, size, at) in found.items():
        if not re.fullmatch(tensors, name):
            continue
        if kind == _Q4_1:
            blocks = data[at : at + size // 32 * _Q4_1_BYTES].reshape(-1, _Q4_1_BYTES)
            halves = blocks[:, :4].copy().view(np.float16) * np.float16(factor)
            blocks[:, :4] = halves.view(np.uint8).reshape(-1, 4)
        else:
            assert kind == _F32, f"{name}: a type that is not handled: {kind}"
            data[at : at + 4 * size] = (data[at : at + 4 * size].view(np.float32) * np.float32(factor)).view(np.uint8)
        count += 1
    into.write_bytes(data.tobytes())
    return count
