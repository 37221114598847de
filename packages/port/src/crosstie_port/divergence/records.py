"""The file of a recording: NumPy's .npz with JSON in it that says what it is of. Read strictly, written whole."""

import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.core.errors import BadData, BadInput
from crosstie_port.divergence.digest import (
    LAYOUTS,
    MOST_ROWS,
    Floats,
    TensorSummary,
    grid_size,
    group_width,
    matrix_size,
)

FORMAT: Final = "crosstie-divergence"
# Of the file, and of where samples lie: a change of the latter makes older files incomparable.
VERSION: Final = 2
LARGEST_FILE = 512 * 1024**2


class RecordedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that went into a module or came out, in the order in which modules began and ended."""

    module: str
    # The class of the module, and whether it has none inside.
    kind: str
    leaf: bool
    call: int
    # "in" or "out", and the place among the tensors there.
    side: str
    place: int
    # Which of the summaries.
    summary: int
    # Its keyword or its number among the arguments, and the way to it in there, such as "position_embeddings.0".
    name: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What makes it the same tensor: a backend that is given no mask has the others in other places."""
        return self.module, self.call, self.side, self.name


class RecordedRun(msgspec.Struct, kw_only=True):
    """What a recording is of."""

    seed: int
    # The width of a head, 0 where nobody said.
    head: int
    # Names and shapes of the matrices among the parameters: what makes it the same model.
    weights: dict[str, list[int]]
    # Where it ran: device, architecture, releases, engine, rank of how many.
    machine: dict[str, str]
    entries: list[RecordedTensor] = []
    # What of the model says how its numbers come about, such as "final_logit_softcapping".
    settings: dict[str, Any] = {}
    calls: int = 1
    # The types of matrices that are kept in fewer than 16 bits.
    narrow: dict[str, str] = {}


class Recording(RecordedRun, kw_only=True):
    summaries: list[TensorSummary] = []
    # Of matrices among the parameters.
    sampled: dict[str, Floats] = {}

    def of(self, entry: RecordedTensor) -> TensorSummary:
        return self.summaries[entry.summary]


class _Header(RecordedRun, kw_only=True):
    """The JSON in a file; of summaries what is no number, of sampled weights how many there are."""

    format: Literal["crosstie-divergence"] = FORMAT
    version: Literal[2] = VERSION
    shapes: list[tuple[int, ...]]
    dtypes: list[str]
    hashes: list[str]
    sampled: dict[str, int]


class _Begun(msgspec.Struct):
    """Enough to tell a file of another release from one that is damaged."""

    format: str
    version: int


_NUMBERS = ("norm", "mean", "largest", "nans", "infinities", "zeros")
_COMMON = RecordedRun.__struct_fields__


def write(recording: Recording, path: Path) -> None:
    kept = recording.summaries
    header = _Header(
        **{name: getattr(recording, name) for name in _COMMON},
        shapes=[summary.shape for summary in kept], dtypes=[summary.dtype for summary in kept],
        hashes=[summary.hash for summary in kept], sampled={name: len(one) for name, one in recording.sampled.items()},
    )  # fmt: skip

    def joined(name: str) -> NDArray[np.float32]:
        parts = np.concatenate([getattr(summary, name).ravel() for summary in kept] or [np.zeros(0)])
        # A mask holds the least number that there is, and its norm is beyond float32.
        most = float(np.finfo(np.float32).max)
        return np.where(np.isfinite(parts), np.clip(parts, -most, most), parts).astype(np.float32)

    arrays = {
        "header": np.frombuffer(msgspec.json.encode(header), dtype=np.uint8),
        "numbers": np.array([[getattr(summary, name) for name in _NUMBERS] for summary in kept], dtype=np.float64),
        "samples": joined("samples"), "rows": joined("rows"), "groups": joined("groups"),
        "weights": np.concatenate([*recording.sampled.values(), np.zeros(0)]).astype(np.float32),
    }  # fmt: skip
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as opened:
            np.savez_compressed(opened, **arrays)  # type: ignore[arg-type]
        os.replace(part, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> Recording:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise BadData(path, "", "far too large for a recording")
        # Opened here: np.load leaves a file open that is cut short.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        header = bytes(arrays.pop("header"))
        begun = msgspec.json.decode(header, type=_Begun)
    except FileNotFoundError:
        raise BadData(path, "", "no such file") from None
    except OSError as error:
        raise BadData(path, "", f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error, RecursionError):
        raise BadData(path, "", "not a recording of `crosstie diff --record`, or cut short") from None
    if begun.format != FORMAT:
        raise BadData(path, "format", f"not a recording of `crosstie diff --record` ({FORMAT})")
    if begun.version != VERSION:
        raise BadData(path, "version", f"{begun.version}; this Crosstie reads {VERSION}: record again")
    try:
        return _recording(msgspec.json.decode(header, type=_Header), arrays)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadData(path, "", f"damaged: {error}") from None


def _recording(header: _Header, arrays: dict[str, Any]) -> Recording:
    summaries, at = [], {"samples": 0, "rows": 0, "groups": 0, "weights": 0}

    def taken(name: str, count: int) -> Floats:
        begin, at[name] = at[name], at[name] + count
        found = arrays[name][begin : at[name]]
        if len(found) != count:
            raise ValueError(f"{name} end early")
        return np.asarray(found, dtype=np.float64)

    for shape, dtype, digest, numbers in zip(
        header.shapes, header.dtypes, header.hashes, arrays["numbers"], strict=True
    ):
        height, width = grid_size(shape)
        norm, mean, largest, nans, infinities, zeros = map(float, numbers)
        summary = TensorSummary(
            shape=shape, dtype=dtype, hash=digest, norm=norm, mean=mean, largest=largest,
            nans=int(nans), infinities=int(infinities), zeros=int(zeros),
            samples=taken("samples", height * width * (len(LAYOUTS) + 1)),
            rows=taken("rows", 3 * min(matrix_size(shape)[0], MOST_ROWS)).reshape(-1, 3),
            groups=taken("groups", 3 * _groups(shape, header.head)).reshape(-1, 3),
        )  # fmt: skip
        summaries.append(summary)
    if any(not 0 <= entry.summary < len(summaries) for entry in header.entries):
        raise ValueError("an entry without a summary")
    weights = {name: taken("weights", count) for name, count in header.sampled.items()}
    return Recording(**{name: getattr(header, name) for name in _COMMON}, summaries=summaries, sampled=weights)


def _groups(shape: tuple[int, ...], head: int) -> int:
    rows, columns = matrix_size(shape)
    return columns // group_width(columns, head) if rows * columns else 0
