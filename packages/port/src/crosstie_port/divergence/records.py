"""The file of a recording: NumPy's .npz with JSON in it that says what it is of. Read strictly, written whole."""

import json
import os
import zipfile
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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

FORMAT = "crosstie-divergence"
# Of the file, and of where samples lie: a change of the latter makes older files incomparable. 1 has no names of
# tensors, no samples of weights, and masks as they were.
VERSION = 2
_READ = (1, VERSION)
LARGEST_FILE = 512 * 1024**2


@dataclass(frozen=True)
class RecordedTensor:
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

    def key(self, by_name: bool) -> tuple[str, int, str, int | str]:
        """What makes it the same tensor: a backend that is given no mask has the others in other places."""
        return self.module, self.call, self.side, self.name if by_name else self.place


@dataclass
class Recording:
    seed: int
    # The width of a head, 0 where nobody said.
    head: int
    # Names and shapes of the matrices among the parameters: what makes it the same model.
    weights: dict[str, list[int]]
    # Where it ran: device, architecture, releases, engine, rank of how many.
    machine: dict[str, str]
    entries: list[RecordedTensor] = field(default_factory=list)
    summaries: list[TensorSummary] = field(default_factory=list)
    # What of the model says how its numbers come about, such as "final_logit_softcapping".
    settings: dict[str, Any] = field(default_factory=dict)
    calls: int = 1
    # Of matrices among the parameters, and whether tensors have names.
    sampled: dict[str, Floats] = field(default_factory=dict)
    has_names: bool = True
    # The types of matrices that are kept in fewer than 16 bits.
    narrow: dict[str, str] = field(default_factory=dict)

    def of(self, entry: RecordedTensor) -> TensorSummary:
        return self.summaries[entry.summary]


_NUMBERS = ("norm", "mean", "largest", "nans", "infinities", "zeros")
_KEYS = ("seed", "head", "calls", "weights", "machine", "settings", "entries", "shapes", "dtypes", "hashes")


def write(recording: Recording, path: Path) -> None:
    kept = recording.summaries
    header = {
        # What was read without names stays a file without them.
        "format": FORMAT, "version": VERSION if recording.has_names else 1,
        "seed": recording.seed, "head": recording.head, "calls": recording.calls,
        "weights": recording.weights, "machine": recording.machine, "settings": recording.settings,
        "entries": [list(asdict(entry).values()) for entry in recording.entries],
        "shapes": [list(summary.shape) for summary in kept], "dtypes": [summary.dtype for summary in kept],
        "hashes": [one.hash for one in kept], "sampled": {name: len(one) for name, one in recording.sampled.items()},
        "narrow": recording.narrow,
    }  # fmt: skip

    def joined(name: str) -> NDArray[np.float32]:
        parts = np.concatenate([getattr(summary, name).ravel() for summary in kept] or [np.zeros(0)])
        # A mask holds the least number that there is, and its norm is beyond float32.
        most = float(np.finfo(np.float32).max)
        return np.where(np.isfinite(parts), np.clip(parts, -most, most), parts).astype(np.float32)

    arrays = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
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
        header = json.loads(bytes(arrays.pop("header")).decode())
    except FileNotFoundError:
        raise BadData(path, "", "no such file") from None
    except OSError as error:
        raise BadData(path, "", f"cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error, RecursionError):
        raise BadData(path, "", "not a recording of `crosstie diff --record`, or cut short") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadData(path, "format", f"not a recording of `crosstie diff --record` ({FORMAT})")
    if header.get("version") not in _READ:
        raise BadData(path, "version", f"{header.get('version')!r:.40}; this Crosstie reads {VERSION}: record again")
    for key in _KEYS:
        if key not in header:
            raise BadData(path, key, "missing")
    try:
        return _recording(header, arrays)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise BadData(path, "", f"damaged: {error}") from None


def _recording(header: dict[str, Any], arrays: dict[str, Any]) -> Recording:
    summaries, at = [], {"samples": 0, "rows": 0, "groups": 0, "weights": 0}

    def taken(name: str, count: int) -> Floats:
        begin, at[name] = at[name], at[name] + count
        found = arrays[name][begin : at[name]]
        if len(found) != count:
            raise ValueError(f"{name} end early")
        return np.asarray(found, dtype=np.float64)

    lengths = zip(header["shapes"], header["dtypes"], header["hashes"], arrays["numbers"], strict=True)
    for shape, dtype, digest, numbers in lengths:
        height, width = grid_size(tuple(shape))
        norm, mean, largest, nans, infinities, zeros = map(float, numbers)
        summary = TensorSummary(
            shape=tuple(map(int, shape)), dtype=str(dtype), hash=str(digest), norm=norm, mean=mean, largest=largest,
            nans=int(nans), infinities=int(infinities), zeros=int(zeros),
            samples=taken("samples", height * width * (len(LAYOUTS) + 1)),
            rows=taken("rows", 3 * min(matrix_size(tuple(shape))[0], MOST_ROWS)).reshape(-1, 3),
            groups=taken("groups", 3 * _groups(tuple(shape), int(header["head"]))).reshape(-1, 3),
        )  # fmt: skip
        summaries.append(summary)
    entries = [RecordedTensor(*one) for one in header["entries"]]
    if any(not 0 <= entry.summary < len(summaries) for entry in entries):
        raise ValueError("an entry without a summary")
    return Recording(
        seed=int(header["seed"]), head=int(header["head"]), weights=dict(header["weights"]),
        machine=dict(header["machine"]), settings=dict(header["settings"]), calls=int(header["calls"]),
        entries=entries, summaries=summaries, has_names=header["version"] > 1, narrow=dict(header.get("narrow", {})),
        sampled={str(name): taken("weights", int(count)) for name, count in header.get("sampled", {}).items()},
    )  # fmt: skip


def _groups(shape: tuple[int, ...], head: int) -> int:
    rows, columns = matrix_size(shape)
    return columns // group_width(columns, head) if rows * columns else 0
