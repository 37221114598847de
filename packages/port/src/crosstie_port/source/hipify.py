"""PyTorch's HIPIFY on a copy of the sources: what it converts, and the names and headers of CUDA that it leaves."""

import importlib
import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from crosstie.core.finding import Severity
from crosstie.core.progress import OnProgress
from crosstie_port.source.code import Code, also, shorten
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import closing
from crosstie_port.source.project import Project
from crosstie_port.source.rules import explained, name_rules

_EXTENSIONS = (".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".hh", ".inl", ".in", ".inc", ".ipp")
_WORD = re.compile(r"[A-Za-z_]\w*")
_INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]""", re.MULTILINE)
_CUDA_NAME = re.compile(
    r"^(?:cuda[A-Z]\w+|cu[A-Z]\w+|CU_[A-Z]\w+|CU[a-z]\w+|CUDA_(?:[RC]_\d\w*|ERROR_\w+|\w+_(?:DESC|PARAMS)\w*)|CUDART_\w+"
    r"|cu(?:blas|sparse|fft|rand|solver|file|pti|tensor)(?:[A-Z]|_create|_init)\w*|CU(?:BLAS|SPARSE|FFT|RAND|SOLVER)_\w+"
    r"|nvrtc[A-Z]\w+|nvtx[A-Z]\w+|__nv_\w+|nv_(?:bfloat16|half)\w*|__nvcuda\w*)$"
)
_CUDA_HEADER = re.compile(
    r"^(?:cuda|cub/|cu(?:blas|fft|rand|solver|sparse|pti|file)|nv(?!idia)|crt/|sm_\d|device_launch_parameters"
    r"|device_functions|math_constants|builtin_types|driver_types|texture_fetch|helper_cuda|channel_descriptor"
    r"|cooperative_groups|library_types|vector_types|vector_functions|device_atomic|common_functions)"
)
_OF_HIP = re.compile(r"\b(?:hip|HIP)\w+")
_PREFIX = re.compile(
    r"^(?:cuda(?=[A-Z])|cu(?=(?:blas|fft|rand|sparse|solver|[A-Z]))|CUDA(?=_)|CU(?=(?:BLAS|FFT|RAND|SPARSE|SOLVER)?_))"
)
_NOT_TYPES = frozenset({
    "return", "else", "do", "case", "throw", "co_return", "new", "delete", "goto", "not", "and", "or", "const",
    "volatile",
})  # fmt: skip
_INTRODUCE = frozenset({"struct", "class", "enum", "namespace", "union", "typename", "concept", "using"})
_TORCH = frozenset({"c10", "at", "torch", "cuda", "native"})


class Hipified(msgspec.Struct, kw_only=True):
    """Per file: how often each name was converted, the text that came out; and the files that HIPIFY failed on."""

    converted: dict[str, dict[str, int]]
    outputs: dict[str, str]
    failed: dict[str, str]
    # The copy, with the converted files beside the originals, and where each came out.
    folder: Path
    paths: dict[str, Path]
    sources: Mapping[str, str]
    misnamed: Mapping[str, str]

    def kept_headers(self, path: str) -> frozenset[str]:
        return frozenset(_INCLUDE.findall(self.outputs.get(path, "")))


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
    result = Hipified(
        converted={}, outputs={}, failed={}, folder=folder, paths={}, sources=texts,
        misnamed=misnamed(module.PYTORCH_MAP),
    )  # fmt: skip
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


def _converted(known: Mapping[str, object], before: str, after: str) -> dict[str, int]:
    was, now = Counter(_WORD.findall(before)), Counter(_WORD.findall(after))
    gone = {name: count - now[name] for name, count in was.items() if name in known and count > now[name]}
    headers = set(_INCLUDE.findall(before)) - set(_INCLUDE.findall(after))
    return gone | {header: 1 for header in headers if header not in gone}


class CudaNames(msgspec.Struct, kw_only=True):
    """Per file: names with their lines, headers with theirs, and the names that the project declares itself."""

    used: dict[str, dict[str, list[int]]] = {}
    headers: dict[str, dict[str, int]] = {}
    declared: set[str] = set()


def collect(path: str, codes: Sequence[Code], names: CudaNames) -> None:
    project = codes[0].project
    unit = project.units[path]
    used: dict[str, list[int]] = {}
    for code in codes:
        for name, places in code.names.items():
            if not _CUDA_NAME.match(name) or name in code.parameters:
                continue
            for at in places:
                role = "other" if code.is_dropped(at) else _role(code, at)
                if role == "used" and code.is_declared_by_macro(at):
                    role = "declared"
                if role == "declared":
                    names.declared.add(name)
                elif role == "used" and not code.provided(name):
                    used.setdefault(name, []).append(code.tokens[at].line)
    names.used[path] = used
    local = {other.rsplit("/", 1)[-1] for other in project.units}
    names.headers[path] = {
        one.header: one.line
        for one in unit.directives
        if _CUDA_HEADER.match(one.header) and not unit.is_dead(one.line) and one.header.rsplit("/", 1)[-1] not in local
    }


def _role(code: Code, at: int) -> str:
    """Whether a name is declared here, used here, or belongs to something else (a member, a name of torch)."""
    before, after = code.text(at - 1), code.text(at + 1)
    if before in (".", "->"):
        return "other"
    if before == "::":
        return "other" if code.text(at - 2) in _TORCH else "used"
    if before in _INTRODUCE or (before in ("*", "&", ">", ">>") and after in ("=", ";", "[", "{")):
        return "declared"
    if before in (">", ">>", "*", "&") and after == "(" and code.function(at) is None:
        return "declared"
    if (before == "}" and after == ";") or (before in ("{", ",") and after == "=" and _is_enumerator(code, at)):
        return "declared"
    if before in ("*", "&") and after == "(" and code.text(closing(code.tokens, at + 1) + 1) == "{":
        return "declared"
    typed = at > 0 and code.tokens[at - 1].kind == "name" and before not in _NOT_TYPES
    if typed and after in ("(", "=", ";", ",", ")", "[", "{", ":"):
        return "declared"
    return "used" if after in ("(", "<") or not re.match(r"^cu[A-Z]", code.text(at)) else "other"


def _is_enumerator(code: Code, at: int) -> bool:
    """Whether a name stands in the braces of an enum."""
    for index in range(at - 1, max(0, at - 200), -1):
        if code.text(index) == "{":
            return "enum" in (code.text(index - 1), code.text(index - 2), code.text(index - 3))
    return False


def leftover_hazards(project: Project, names: CudaNames, result: Hipified) -> Iterator[SourceHazard]:
    """What stays as it is after HIPIFY, what it breaks, and the files that it could not convert."""
    for path in result.outputs:
        source = project.units[path].text.split("\n")
        for check, name, lines, what, remedy in _leftovers(path, names, result):
            first, *others = sorted(set(lines))
            evidence = shorten(source[first - 1]) + also(others)
            severity: Severity = "unknown" if check == "hipify-name" else "error"
            yield SourceHazard(check, severity, what, path, evidence, remedy, first, name=name, grounds="computed")
    for path, why in result.failed.items():
        what, remedy = "HIPIFY could not convert this file", "convert it by hand"
        yield SourceHazard("hipify-failed", "unknown", what, path, why, remedy, grounds="computed")


def _lines_of(text: str, pattern: str) -> list[int]:
    return [text.count("\n", 0, match.start()) + 1 for match in re.finditer(pattern, text)]


def misnamed(known: Mapping[str, str]) -> dict[str, str]:
    """Names that one would make of CUDA's by its prefix alone, where the map has another: hipDeviceProp."""
    made = set(known.values())
    return {
        guess: new
        for old, new in known.items()
        if new.lower().startswith("hip")
        and (guess := _PREFIX.sub(lambda match: "HIP" if match[0].isupper() else "hip", old)) not in made
        and guess != old
    }


def _leftovers(path: str, names: CudaNames, result: Hipified) -> Iterator[tuple[str, str, Sequence[int], str, str]]:
    """Check, name, lines, what is wrong and its remedy."""
    kept = frozenset(_WORD.findall(result.outputs[path]))
    for name, lines in names.used[path].items():
        if name in kept and name not in names.declared and not explained(name):
            what = f"HIPIFY leaves {name} as it is, and HIP has nothing of that name"
            remedy = "replace it by hand under #ifdef USE_ROCM, or guard its use with #ifndef USE_ROCM"
            yield "hipify-leftover", name, lines, what, remedy
    for name in sorted(set(_OF_HIP.findall(result.sources[path])) & result.misnamed.keys() - names.declared):
        lines = _lines_of(result.sources[path], rf"\b{name}\b")
        what = f"HIP may have no {name}: HIPIFY's map makes {result.misnamed[name]} of the name of CUDA behind it"
        yield "hipify-name", name, lines, what, f"write {result.misnamed[name]}"
    headers, kept_headers = names.headers[path], result.kept_headers(path)
    known = tuple(header for rule in name_rules() for header in rule.headers)
    for header, line in headers.items():
        if header in kept_headers and not header.startswith(known):
            what = f"HIPIFY leaves the header {header} as it is, and ROCm has none of that name"
            remedy = "include its counterpart of HIP under #ifdef USE_ROCM, or guard it with #ifndef USE_ROCM"
            yield "hipify-header", header, [line], what, remedy
