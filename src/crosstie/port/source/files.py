"""Which files of a tree are read, and as what; what cannot be read is said, not passed over."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crosstie.core.errors import BadInput
from crosstie.port.source.building import binary_hazard
from crosstie.port.source.hazard import Hazard

CPP = frozenset({
    ".cu", ".cuh", ".h", ".hpp", ".hh", ".hxx", ".h++", ".cpp", ".cc", ".cxx", ".c", ".c++", ".inl", ".inc", ".ipp",
    ".tcc", ".impl", ".hip", ".in",
})  # fmt: skip
PYTHON = frozenset({".py"})
BINARIES = frozenset({".ptx", ".cubin", ".fatbin"})
BUILD_NAMES = frozenset({"CMakeLists.txt", "Makefile", "makefile", "GNUmakefile"})
BUILD = frozenset({".cmake", ".mk"})
_PASSED_OVER = frozenset({"__pycache__", "node_modules"})
# Generated tables are larger than anything that people write.
MOST_BYTES = 8_000_000
_SNIFFED = 8192


class Files(msgspec.Struct, kw_only=True):
    """Texts by path relative to the tree, and hazards of what is no text."""

    cpp: dict[str, str]
    python: dict[str, str]
    build: dict[str, str]
    hazards: list[Hazard]

    @property
    def count(self) -> int:
        return len(self.cpp) + len(self.python) + len(self.build)


def read_files(root: Path) -> Files:
    found = Files(cpp={}, python={}, build={}, hazards=[])
    if not root.exists():
        raise BadInput(f"{root} does not exist")
    base = root if root.is_dir() else root.parent
    for path in _walk(root):
        kind = _kind(path, chosen=path == root)
        name = path.relative_to(base).as_posix()
        if kind == "binary":
            found.hazards.append(binary_hazard(name, path.stat().st_size))
        elif kind:
            text = _read(path, name, found.hazards)
            if text is not None:
                {"cpp": found.cpp, "python": found.python, "build": found.build}[kind][name] = text
    if not found.count and not found.hazards:
        raise BadInput(f"nothing to read in {root}: no C++, CUDA or Python source and no build file")
    return found


def _walk(root: Path) -> Iterator[Path]:
    """Linked folders are not entered, so that a tree that links to itself ends."""
    if not root.is_dir():
        yield root
        return
    for folder, inside, names in os.walk(root):
        inside[:] = sorted(
            name
            for name in inside
            if not name.startswith(".") and name not in _PASSED_OVER and not Path(folder, name, "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            yield Path(folder, name)


def _kind(path: Path, chosen: bool) -> str:
    """What it is read as, "" for what is not read. A file that was named itself is read in any case."""
    suffix = path.suffix.lower()
    if path.name in BUILD_NAMES or suffix in BUILD:
        return "build"
    if suffix in PYTHON:
        return "python"
    if suffix in BINARIES:
        return "binary"
    if suffix in CPP and (suffix != ".in" or Path(path.stem).suffix.lower() in CPP):
        return "cpp"
    return "cpp" if chosen else ""


def _read(path: Path, name: str, hazards: list[Hazard]) -> str | None:
    try:
        known = path.stat()
        if not stat.S_ISREG(known.st_mode):
            # A pipe would be waited for without end.
            hazards.append(_unread(name, "no plain file"))
            return None
        size = known.st_size
        if size > MOST_BYTES:
            hazards.append(_unread(name, f"{size:,} bytes, more than the {MOST_BYTES:,} that are read"))
            return None
        data = path.read_bytes()
    except OSError as error:
        hazards.append(_unread(name, error.strerror or str(error)))
        return None
    text = decoded(data)
    if text is None:
        hazards.append(_unread(name, "no text: it holds zero bytes"))
    return text


def decoded(data: bytes) -> str | None:
    """UTF-8, UTF-16 with its mark, or else bytes as they are; None for what is no text. Lines end with a newline."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = data.decode("utf-16", errors="replace")
    elif b"\0" in data[:_SNIFFED]:
        return None
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unread(name: str, why: str) -> Hazard:
    return Hazard(
        check="unread",
        severity="unknown",
        what="this file was not read",
        file=name,
        line=None,
        evidence=why,
        remedy="check it by hand, or give it as text of less than 8 MB",
    )
