"""A model's folder of safetensors files as one set of tensors, with or without an index; read where needed only."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData
from crosstie.port.checkpoint.headers import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")
CHUNK_BYTES = 1 << 22


class Checkpoint:
    """Tensors by name. Nothing of them is held: `read` and `chunks` open the file each time."""

    def __init__(self, folder: Path, headers: Mapping[str, Header], index: Path | None, *, is_remote: bool = False):
        self.folder, self.index = folder, index
        # Of a repository the headers alone are here: there is nothing to read from.
        self.is_remote = is_remote
        # By file name, in the order of their names.
        self.headers = dict(headers)
        self.tensors: dict[str, TensorInfo] = {}
        for header in self.headers.values():
            for name, info in header.tensors.items():
                if name in self.tensors:
                    raise BadData(header.file, name, f"is in {self.tensors[name].file.name} as well")
                self.tensors[name] = info

    @property
    def nbytes(self) -> int:
        return sum(header.size for header in self.headers.values())

    def __getitem__(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def read(self, name: str, most: int | None = None) -> bytes:
        """A tensor's bytes, or the first `most` of them."""
        info = self.tensors[name]
        length = info.nbytes if most is None else min(most, info.nbytes)
        return b"".join(self._pieces(info, length, max(length, 1)))

    def chunks(self, name: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
        """All of a tensor's bytes, `size` at a time."""
        info = self.tensors[name]
        return self._pieces(info, info.nbytes, size)

    def _pieces(self, info: TensorInfo, length: int, size: int) -> Iterator[bytes]:
        try:
            with info.file.open("rb", buffering=0) as opened:
                opened.seek(info.offset)
                while length:
                    piece = opened.read(min(size, length))
                    if not piece:
                        raise BadData(info.file, "", "became shorter while it was read")
                    length -= len(piece)
                    yield piece
        except OSError as error:
            raise BadData(info.file, "", f"cannot be read: {error.strerror}") from None


def open_checkpoint(folder: Path) -> Checkpoint:
    """The headers of all shards that the index names; without one, model.safetensors or all that there are."""
    if not folder.is_dir():
        raise BadData(folder, "", "not a model's folder")
    index = _index(folder)
    if index is not None:
        weight_map = read_weight_map(index)
        shards = sorted(set(weight_map.values()))
        there = set(os.listdir(folder))
        for name in shards:
            if name not in there:
                raise BadData(folder / name, "", f"missing: {index.name} names it")
        headers = {name: read_header(folder / name) for name in shards}
        compare(index, weight_map, headers)
        return Checkpoint(folder, headers, index)
    if (folder / _SINGLE).is_file():
        return Checkpoint(folder, {_SINGLE: read_header(folder / _SINGLE)}, None)
    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    if not names:
        raise BadData(folder, "", f"no *{SUFFIX} file in it")
    _check_numbers(folder, names)
    return Checkpoint(folder, {name: read_header(folder / name) for name in names}, None)


def _index(folder: Path) -> Path | None:
    usual = folder / INDEX
    # A link that leads nowhere is an index that is missing, not a model without one.
    if usual.is_file() or usual.is_symlink():
        return usual
    others = sorted(folder.glob(f"*{SUFFIX}.index.json"))
    return others[0] if len(others) == 1 and not (folder / _SINGLE).is_file() else None


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor -> shard, each shard a plain name in the same folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadData(index, "weight_map", "must be an object that names a shard for each tensor")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(SUFFIX):
            raise BadData(index, f"weight_map.{tensor}", f"must name a {SUFFIX} file, not {shard!r:.80}")
        # Links as the Hugging Face cache has them are fine: they were put there, not named by the file.
        if set(shard) & {"/", "\\", "\0"} or shard.startswith("."):
            raise BadData(index, f"weight_map.{tensor}", f"'{shard:.120}' leaves the model's folder")
    return weight_map


def compare(index: Path, weight_map: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard].tensors:
            raise BadData(index, f"weight_map.{tensor}", f"{shard} has no such tensor")
    for shard, header in headers.items():
        for tensor in header.tensors:
            if tensor not in weight_map:
                raise BadData(header.file, tensor, f"not in {index.name}")
            if weight_map[tensor] != shard:
                raise BadData(header.file, tensor, f"{index.name} says that it is in {weight_map[tensor]}")


def _check_numbers(folder: Path, names: list[str]) -> None:
    """model-00002-of-00004.safetensors without its neighbours is a part of a model."""
    for match in filter(None, map(_NUMBERED.fullmatch, names)):
        total = int(match["total"])
        together = {
            int(other["number"])
            for other in filter(None, map(_NUMBERED.fullmatch, names))
            if (other["stem"], int(other["total"])) == (match["stem"], total)
        }
        # Mistral and others count from one, a few from zero.
        if together not in (set(range(1, total + 1)), set(range(total))):
            raise BadData(folder, match[0], f"{len(together)} of {total} such shards are there, and no {INDEX}")
