"""PyTorch's HIPIFY on a copy of the sources: what it converts, and its output for others to look at."""

import importlib
import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from crosstie.core.progress import OnProgress

_EXTENSIONS = (".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".hh", ".inl", ".in", ".inc", ".ipp")
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]""", re.MULTILINE)


class Hipified(msgspec.Struct, kw_only=True):
    """Per file: how often each name was converted, the text that came out; and the files that HIPIFY failed on."""

    converted: dict[str, dict[str, int]]
    outputs: dict[str, str]
    failed: dict[str, str]
    # The copy, with the converted files beside the originals, and where each came out.
    folder: Path
    paths: dict[str, Path]
    # What its maps replace headers by.
    counterparts: frozenset[str]

    def kept(self, path: str) -> frozenset[str]:
        return frozenset(_WORD.findall(self.outputs.get(path, "")))

    def kept_headers(self, path: str) -> frozenset[str]:
        return frozenset(_INCLUDE.findall(self.outputs.get(path, "")))

    def broken_headers(self, path: str, before: Iterable[str]) -> dict[str, str]:
        """Headers of which it replaced the last part alone: nvtx3/nvToolsExt.h becomes nvtx3/roctracer/roctx.h."""
        made = self.kept_headers(path) - set(before) - self.counterparts
        return {
            header: new
            for header in before
            for new in made
            if "/" in header and new.startswith(header.rpartition("/")[0] + "/") and _ends_so(new, self.counterparts)
        }

    def by_name(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for names in self.converted.values():
            total.update(names)
        return total


def hipify_module() -> Any | None:
    try:
        return importlib.import_module("torch.utils.hipify.hipify_python")
    except ImportError:
        return None


@contextmanager
def hipified(module: Any, texts: Mapping[str, str], on_progress: OnProgress) -> Iterator[Hipified]:
    """The user's own files are never written to: all of it happens in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="crosstie-hipify-") as folder:
        yield _convert(module, texts, Path(folder).resolve(), on_progress)


def _convert(module: Any, texts: Mapping[str, str], folder: Path, on_progress: OnProgress) -> Hipified:
    originals: dict[str, Path] = {}
    for path, text in texts.items():
        if PurePosixPath(path).suffix.lower() in _EXTENSIONS:
            copy = folder / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8", errors="replace")
            originals[path] = copy
    counterparts = frozenset(
        str(new) for old, new in module.PYTORCH_MAP.items() if old.endswith((".h", ".hpp", ".cuh"))
    )
    result = Hipified(converted={}, outputs={}, failed={}, folder=folder, paths={}, counterparts=counterparts)
    every = [copy.as_posix() for copy in originals.values()]
    stats: dict[str, list[Any]] = {"unsupported_calls": [], "kernel_launches": []}
    cleaner = module.GeneratedFileCleaner(keep_intermediates=True)
    said = io.StringIO()
    for number, (path, copy) in enumerate(originals.items(), 1):
        on_progress(number, len(originals), f"HIPIFY {path}")
        try:
            with redirect_stdout(said), redirect_stderr(said):
                module.preprocess_file_and_save_result(
                    folder.as_posix(), copy.as_posix(), every, [folder.as_posix()], stats, True, True, cleaner, False
                )
        except Exception as error:  # noqa: BLE001 - whatever it raises on one file, the others are still judged
            result.failed[path] = f"{type(error).__name__}: {error}"
            continue
        made = module.HIPIFY_FINAL_RESULT[copy.as_posix()].hipified_path
        out = Path(made) if made else copy
        text = out.read_text(encoding="utf-8", errors="replace")
        result.outputs[path], result.paths[path] = text, out
        result.converted[path] = _converted(module.PYTORCH_MAP, texts[path], text)
    for copy in originals.values():
        # It keeps results by path for the whole process.
        module.HIPIFY_FINAL_RESULT.pop(copy.as_posix(), None)
    return result


def _ends_so(header: str, counterparts: frozenset[str]) -> bool:
    return any(header.endswith("/" + one) for one in counterparts)


def _converted(known: Mapping[str, object], before: str, after: str) -> dict[str, int]:
    was, now = Counter(_WORD.findall(before)), Counter(_WORD.findall(after))
    gone = {name: count - now[name] for name, count in was.items() if name in known and count > now[name]}
    headers = set(_INCLUDE.findall(before)) - set(_INCLUDE.findall(after))
    return gone | {header: 1 for header in headers if header not in gone}
