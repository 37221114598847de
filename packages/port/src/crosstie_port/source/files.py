"""The files of a tree: C++, Python and build files as text, device binaries by name, and what build files ask for."""

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from crosstie.core.errors import BadInput
from crosstie_port.source.hazard import SourceHazard

_BUILDS_HIP = re.compile(
    r"(?i)enable_language\s*\(\s*HIP|LANGUAGES[^)]*\bHIP\b|check_language\s*\(\s*HIP|\bhipcc\b"
    r"|find_package\s*\(\s*(?:hip|roc(?:m|blas|prim|thrust|profiler|tracer)\w*)\b|STREQUAL\s+\"?(?:hip|rocm)\b"
)
_OF_OTHERS = re.compile(r"(?i)(?:^|/)(?:third_?party|3rd_?party|external|extern|vendor|deps|submodules|_deps)/")
# Files and folders that say by their names that they are for NVIDIA's GPUs; "cuda" does only beside one for AMD.
_NVIDIA_NAME = re.compile(
    r"(?i)^(?:nvidia|nv_\w+|hopper|blackwell|ampere|trtllm\w*|tensorrt\w*|cutlass\w*|cute_dsl|cudnn)$"
    r"|(?:^|_)(?:sm_?(?:[789]\d|1[0-2]\d)a?|hopper|blackwell|ampere|cutlass)(?:_|$)"
)
_AMD_NAME = re.compile(r"(?i)^(?:hip|rocm|amd|amdgpu|ck|(?:ck|hip|rocm)_\w+|aiter|\w+_(?:hip|rocm|amd))$")
_TWIN_WORDS = {
    "cuda": ("hip", "rocm", "amd"), "CUDA": ("HIP", "ROCM", "AMD"), "Cuda": ("Hip", "Rocm"), "nccl": ("rccl",),
}  # fmt: skip
_INCLUDED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[\"<](?:[^\">\n]*/)?(\w+)[.\w]*[\">]", re.MULTILINE)
_ASKS_FOR_HIP = re.compile(
    r"\bversion\.hip\b|(?i:\b(?:is|has|use|with)_(?:hip|rocm)\b)|(?:\b|_)(?:HIP|ROCM)_(?:HOME|PATH)\b"
)
_CPP = (
    ".cu", ".cuh", ".h", ".hpp", ".hh", ".hxx", ".h++", ".cpp", ".cc", ".cxx", ".c", ".c++", ".inl", ".inc", ".ipp",
    ".tcc", ".impl", ".hip", ".in",
)  # fmt: skip
_KINDS = {
    **dict.fromkeys(_CPP, "cpp"),
    **dict.fromkeys((".py", ".pyx", ".pxi"), "python"),
    **dict.fromkeys((".ptx", ".cubin", ".fatbin"), "binary"),
    **dict.fromkeys((".cmake", ".mk"), "build"),
}
_BUILD_NAME = re.compile(r"(?i)^(?:cmakelists\.txt|(?:gnu)?makefile(?:[._]\w+)?)$")
_PASSED_OVER = frozenset({"__pycache__", "node_modules"})
# Generated tables are larger than anything that people write.
MOST_BYTES = 8_000_000
_SNIFFED = 8192


def is_nvidia(path: str, folders: Collection[str], stems: Collection[str] = ()) -> bool:
    """Whether a file is for NVIDIA's GPUs by its name or that of a folder.

    `folders`: all that the tree has; `stems`: its files without their endings.
    """
    *parts, name = path.split("/")
    if name.endswith(".hip"):
        return False
    if any(_NVIDIA_NAME.search(part) for part in (*parts, *name.split(".")[:-1])):
        return True
    for index, part in enumerate((*parts, name.partition(".")[0])):
        inside, known = "/".join(parts[:index]), folders if index < len(parts) else stems
        if any("/".join((*parts[:index], twin)) in known for twin in _twins(part)):
            return True
        beside = (other.rpartition("/") for other in folders) if part.lower() == "cuda" and known is folders else ()
        if any(folder == inside and _AMD_NAME.match(other) for folder, _, other in beside):
            return True
    return False


def has_twin(path: str, stems: Collection[str]) -> bool:
    """Whether AMD's side of a file stands beside it: cuda.cmake and hip.cmake."""
    folder, slash, name = path.rpartition("/")
    return any(f"{folder}{slash}{twin}" in stems for twin in _twins(name.partition(".")[0]))


def includes_twin(path: str, text: str) -> bool:
    """Whether a file includes what AMD's side of it would be called: it chooses between the two."""
    twins = set(_twins(path.rpartition("/")[2].partition(".")[0]))
    return bool(twins) and not twins.isdisjoint(_INCLUDED.findall(text))


def _twins(name: str) -> Iterator[str]:
    """What AMD's side would be called beside NVIDIA's: attention and attention_rocm, blas_cuda and blas_hip."""
    if _AMD_NAME.match(name):
        return
    yield from (f"{name}_{other}" for other in ("rocm", "hip", "amd", "ck"))
    for word, others in _TWIN_WORDS.items():
        if re.search(rf"(?:^|_){word}(?:_|$)" if word != "Cuda" else word, name):
            yield from (name.replace(word, other) for other in others)


def hip_builds(builds: Mapping[str, str]) -> list[str]:
    """The project's own build files that ask for HIP."""
    return [
        path for path, text in builds.items() if _BUILDS_HIP.search(uncommented(text)) and not _OF_OTHERS.search(path)
    ]


def uncommented(text: str) -> str:
    return "\n".join(line.split("#", 1)[0] for line in text.split("\n"))


class Files(msgspec.Struct, kw_only=True):
    """Texts by path relative to the tree, and hazards of what is no text."""

    cpp: dict[str, str] = {}
    python: dict[str, str] = {}
    build: dict[str, str] = {}
    hazards: list[SourceHazard] = []

    @property
    def packages(self) -> frozenset[str]:
        """Of Python, by their folders."""
        inside = (path.split("/") for path in self.python if path.endswith("/__init__.py"))
        return frozenset(parts[-2] for parts in inside)

    @property
    def asks_for_hip(self) -> bool:
        """Whether any Python of the tree asks for ROCm."""
        return any(map(_ASKS_FOR_HIP.search, self.python.values()))

    @property
    def folders(self) -> frozenset[str]:
        return frozenset(
            "/".join(parts[:depth])
            for path in self.cpp
            for parts in [path.split("/")]
            for depth in range(1, len(parts))
        )

    @property
    def stems(self) -> frozenset[str]:
        """Of C++ files, by their paths up to the first dot of the name."""
        parts = (path.rpartition("/") for path in self.cpp)
        return frozenset(f"{folder}{slash}{name.partition('.')[0]}" for folder, slash, name in parts)

    @property
    def count(self) -> int:
        return len(self.cpp) + len(self.python) + len(self.build)


def source_paths(root: Path) -> Iterator[Path]:
    """The files that `read_files` reads."""
    return (path for path in _walk(root) if _kind(path, chosen=path == root))


def read_files(root: Path) -> Files:
    if not root.exists():
        raise BadInput(f"{root} does not exist")
    files = Files()
    texts = {"cpp": files.cpp, "python": files.python, "build": files.build}
    base = root if root.is_dir() else root.parent
    own_map: dict[str, str] = {}
    for path in _walk(root):
        if path.suffix == ".json" and "hipify" in path.name.lower():
            own_map |= _own_map(path)
        kind = _kind(path, chosen=path == root)
        name = path.relative_to(base).as_posix()
        if kind == "binary":
            what = "device code of NVIDIA, which no AMD GPU loads"
            evidence = f"{path.stat().st_size:,} bytes of {path.suffix.removeprefix('.')}"
            remedy = "build it from source with hipcc --genco --offload-arch=gfx942, or leave it out"
            files.hazards.append(SourceHazard("device-binary", "error", what, name, evidence, remedy))
        elif kind:
            try:
                texts[kind][name] = _read(path)
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                remedy = "check it by hand, or give it as text of less than 8 MB"
                files.hazards.append(SourceHazard("unread", "unknown", "this file was not read", name, why, remedy))
    if own_map:
        files.cpp = {name: _mapped(text, own_map) for name, text in files.cpp.items()}
    if not files.count and not files.hazards:
        raise BadInput(f"nothing to read in {root}: no C++, CUDA or Python source and no build file")
    return files


def _own_map(path: Path) -> dict[str, str]:
    """A project's own replacements, which HIPIFY takes beside its maps: {"custom_map": {"<cuda_fp8.h>": ...}}."""
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, object]).get("custom_map")
        return msgspec.convert(given or {}, dict[str, str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}


def _mapped(text: str, own_map: Mapping[str, str]) -> str:
    """HIPIFY's way: whole words, and headers with what is around them."""
    for old, new in own_map.items():
        if old in text:
            text = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", lambda _, new=new: new, text)  # type: ignore[misc]
    return text


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
    if _BUILD_NAME.match(path.name):
        return "build"
    suffix = path.suffix.lower()
    # Of templates, those of C++ files alone.
    kind = "" if suffix == ".in" and Path(path.stem).suffix.lower() not in _CPP else _KINDS.get(suffix, "")
    return kind or ("cpp" if chosen else "")


def _read(path: Path) -> str:
    """Raises OSError or ValueError with the reason why it is not read."""
    known = path.stat()
    if not stat.S_ISREG(known.st_mode):
        # A pipe would be waited for without end.
        raise ValueError("no plain file")
    if known.st_size > MOST_BYTES:
        raise ValueError(f"{known.st_size:,} bytes, more than the {MOST_BYTES:,} that are read")
    text = decoded(path.read_bytes())
    if text is None:
        raise ValueError("no text: it holds zero bytes")
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
