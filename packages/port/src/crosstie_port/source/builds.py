"""What build files ask for, and which C++ files a build for ROCm leaves out by lists in CMake and Python files."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec
from msgspec.structs import replace

from crosstie_port.source.code import also, shorten
from crosstie_port.source.files import Files, hip_builds, uncommented
from crosstie_port.source.hazard import DATA_CENTRE_ISAS, SourceHazard, targets_in
from crosstie_port.source.project import both, either, negated
from crosstie_port.source.python import Known, ends_on_rocm, known_of, on_rocm, parsed
from crosstie_port.source.rules import python_rules

_BY_TORCH = re.compile(r"cpp_extension|CUDAExtension|hipify_torch|hipify_python|utils\.hipify|torch_hipify")
_COMMAND = re.compile(r"([A-Za-z_]\w*)\s*\(((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\([^()]*\))*)\)")
_FOR_ROCM = re.compile(r"(?:^|/)setup_(?:rocm|hip|amd)\.py(?::|$)")
_SOURCE = re.compile(r"[\w./*{}$+-]+\.(?:cu|cuh|cpp|cc|cxx|c|hip)\b")
_VARIABLE = re.compile(r"\$\{[^}]*\}/?")
_AMD = re.compile(r"(?i)^(?:\w+_)?(?:rocm|hip|amd|amdgpu)(?:_found|_enabled|_support|_platform|_toolkit)?$")
_NVIDIA = re.compile(r"(?i)^(?:\w+_)?(?:cuda|nvidia)(?:_found|_enabled|_support|_compiler|_toolkit)?$")
_ON = frozenset({"ON", "TRUE", "1", "YES"})
_KNOWS_ROCM = re.compile(r"(?<![A-Za-z])(?:HIP|ROCM|hipcc|rocm|hip)(?![a-z])")
# Rows about what ROCm itself has and takes away.
_OF_ROCM = frozenset({"hip-release"})
# A package that is only looked for.
_OPTIONAL = re.compile(r"(?i)find_package\s*\((?![^)]*\bREQUIRED\b)|check_language")
_WORD = re.compile(r"\"[^\"]*\"|[()]|[^\s()\"]+")


class _Side(msgspec.Struct):
    """A side of an if() that is open: what it asks, whether one before it held, and what holds around it."""

    held: bool | None
    before: bool | None
    outer: bool | None


class _Command(msgspec.Struct, frozen=True):
    word: str
    given: str
    first: int
    last: int
    # Whether a build for ROCm runs it: True, False, or None where that is open.
    taken: bool | None = None


class _Listed(msgspec.Struct, frozen=True):
    pattern: str
    place: str
    # Whether a build for ROCm reads the list: True, False, or None where that is open.
    taken: bool | None
    # It is taken out of all lists.
    removed: bool = False


def may_hipify(files: Files) -> bool:
    """Whether PyTorch's HIPIFY may convert the tree: it is asked for, or nothing shows another way to HIP."""
    return not hip_builds(files.build) or by_torch(files)


def by_torch(files: Files) -> bool:
    """Whether anything asks for PyTorch's HIPIFY, or for its extensions, which run it."""
    return any(map(_BY_TORCH.search, (*files.python.values(), *files.build.values())))


def files_left_out(files: Files) -> dict[str, str]:
    """C++ files that only lists for NVIDIA name, each with the list's place."""
    # Beside setup_rocm.py, which lists its own, other lists of the folder are NVIDIA's.
    twins = {path.rpartition("/")[0] for path in files.python if _FOR_ROCM.search(path)}
    asked = {path: _asked_with_amd(_commands(text)) for path, text in files.build.items()}
    listed: list[_Listed] = []
    for path, text in files.build.items():
        folder = path.rpartition("/")[0]
        above = [names for other, names in asked.items() if names is not None and _is_above(other, folder)]
        if above or folder in twins:
            listed += _by_cmake(path, text, frozenset().union(*above))
    for path, text in files.python.items():
        if ".cu" in text and re.search(r"(?i)hip|rocm", text):
            listed += _by_python(path, text)
    beside = [one.place.rpartition("/")[0] in twins and not _FOR_ROCM.search(one.place) for one in listed]
    listed = [replace(one, taken=False) if other else one for one, other in zip(listed, beside, strict=True)]
    out = [one for one in listed if one.taken is False]
    if not out:
        return {}
    used = [one for one in listed if one.taken is not False]
    by_name: dict[str, list[str]] = {}
    for path in files.cpp:
        by_name.setdefault(PurePosixPath(path).name, []).append(path)
    kept = {path for one in used for pattern in _before_hipify(one.pattern) for path in _meant(pattern, by_name)}
    return {
        path: one.place
        for one in reversed(out)
        for path in _meant(one.pattern, by_name)
        if one.removed or path not in kept
    }


def _is_above(path: str, folder: str) -> bool:
    """Whether a build file is in a folder or in one around it."""
    return f"{folder}/".startswith(path[: path.rfind("/") + 1])


def _before_hipify(pattern: str) -> Iterator[str]:
    """What HIPIFY makes it of: hip_ring.cc of cuda_ring.cc, ring_hip.cc of ring.cc, hip/a.hip of a.cu."""
    yield pattern
    ending = pattern.removesuffix(".hip") + ".cu" if pattern.endswith(".hip") else pattern
    for made in (ending, ending.replace("_hip.", ".")):
        yield made
        yield re.sub("hip", "cuda", made)
        yield re.sub("(^|/)hip/", r"\1", made)


def _meant(pattern: str, by_name: Mapping[str, list[str]]) -> Iterator[str]:
    """Files whose path ends as a list's entry does; a star stands for names without a slash."""
    ending = [part for part in pattern.split("/") if part not in ("", ".", "..")]
    names = by_name if "*" in ending[-1] else [ending[-1]]
    for name in names:
        for path in by_name.get(name, ()):
            parts = path.split("/")[-len(ending) :]
            if len(parts) == len(ending) and all(map(fnmatchcase, parts, ending)):
                yield path


def _by_cmake(path: str, text: str, shared: frozenset[str]) -> Iterator[_Listed]:
    for one in _cmake_commands(text, shared):
        removed = one.word == "list" and one.given.split()[:1] == ["REMOVE_ITEM"]
        if removed and one.taken is not True:
            continue
        # A star stands for files of this folder, where no variable says otherwise.
        inside = "" if "${" in one.given else path[: path.rfind("/") + 1]
        for name in _SOURCE.findall(_VARIABLE.sub("", one.given)):
            yield _Listed(
                inside + name if "*" in name else name, f"{path}:{one.first}", one.taken and not removed, removed
            )


def _commands(text: str) -> list[_Command]:
    plain = uncommented(text)

    def line(offset: int) -> int:
        return plain.count("\n", 0, offset) + 1

    found = _COMMAND.finditer(plain)
    return [_Command(match[1].lower(), match[2], line(match.start()), line(match.end())) for match in found]


def _cmake_commands(text: str, shared: frozenset[str]) -> Iterator[_Command]:
    """Commands but those of if(), with what a build for ROCm makes of them; `shared`: NVIDIA's switches that it sets
    as well."""
    stack: list[_Side] = []
    rest: bool | None = True
    for one in _commands(text):
        word, given = one.word, one.given
        taken = both(rest, both(stack[-1].outer, stack[-1].held) if stack else True)
        if word in ("if", "function", "macro"):
            # Whoever calls a function may ask first.
            held = _holds(given, shared) if word == "if" else None
            stack.append(_Side(held, held, taken))
        elif word in ("elseif", "else") and stack:
            top = stack[-1]
            asked = True if word == "else" else _holds(given, shared)
            top.held, top.before = both(negated(top.before), asked), either(top.before, asked)
        elif word in ("endif", "endfunction", "endmacro") and stack:
            stack.pop()
        elif word == "return":
            rest = both(rest, negated(taken))
        else:
            yield replace(one, taken=taken)


def build_hazards(path: str, text: str, hip_builds: Sequence[str] = ()) -> Iterator[SourceHazard]:
    """One finding a row and file. Where the file has a side for ROCm as well, or another file is that side, only what
    CMake asks for on every side is more than a note."""
    plain = uncommented(text)
    beside = next((other for other in hip_builds if other != path), "")
    aside = f"; {beside} builds for HIP, so this may be one side of two" if beside else ""
    lines, always = plain.split("\n"), set[int]()
    if _KNOWS_ROCM.search(plain):
        aside = "; the file speaks of ROCm too, so this may be one side of two"
        shared = _asked_with_amd(_commands(text))
        commands = () if shared is None else _cmake_commands(text, shared)
        run = (one for one in commands if one.taken is True and one.word not in ("set", "option"))
        always = {line for one in run for line in range(one.first, one.last + 1)}
    for rule in python_rules("build"):
        assert rule.pattern is not None
        places = [number for number, line in enumerate(lines, 1) if rule.pattern.search(line)]
        # What a release of ROCm takes away concerns its side above all.
        severity = "note" if aside and rule.id not in _OF_ROCM else rule.severity
        says = rule.says + aside
        sure = [one for one in places if one in always and not _OPTIONAL.search(lines[one - 1])]
        if sure and severity == "note" and rule.severity == "error":
            places, severity = sure, "unknown"
            says = f"{rule.says}; the file speaks of ROCm too, and asks for this on both sides"
        if places:
            evidence = shorten(text.split("\n")[places[0] - 1]) + also(places[1:])
            yield SourceHazard(rule.id, severity, says, path, evidence, rule.remedy, places[0], rule.on)
    for number, line in enumerate(lines, 1):
        named = targets_in(line)
        for isa in sorted(DATA_CENTRE_ISAS - named) if len(named) > 1 else ():
            says, remedy = f"a list of targets without {isa}", f"add {isa}, or give the list from outside"
            yield SourceHazard("target-list", "setting", says, path, shorten(line), remedy, number, isa)


def _asked_with_amd(commands: Sequence[_Command]) -> frozenset[str] | None:
    """Names of NVIDIA's switches inside of which the file asks for AMD, or that it sets for AMD, so that both are set;
    None: it never asks."""
    around: list[set[str]] = []
    for_amd: list[bool] = []
    shared: set[str] = set()
    asks = False
    for number, one in enumerate(commands):
        word, given = one.word, one.given
        names = {each.strip('"${}') for each in _WORD.findall(given)}
        amd = any(map(_AMD.match, names))
        if word == "if":
            if amd:
                asks = True
                # `if(USE_HIP) message(FATAL_ERROR ...)`: the two are not set together.
                refuses = "FATAL_ERROR" in commands[number + 1].given if number + 1 < len(commands) else False
                shared |= {name for outer in around for name in outer if not refuses}
            # Of `CUDA OR HIP` neither is set for the other's sake.
            positive = not amd and not any(each.upper() == "NOT" for each in names)
            around.append({name for name in names if positive and _NVIDIA.match(name)})
            for_amd.append(amd)
        elif word in ("elseif", "else") and around:
            asks = asks or (amd and word == "elseif")
            for_amd[-1] = amd and word == "elseif"
        elif word == "set" and any(for_amd) and not _ON.isdisjoint(one.given.upper().split()):
            shared |= {name for name in names if _NVIDIA.match(name)}
        elif word == "endif" and around:
            around.pop()
            for_amd.pop()
    return frozenset(shared) if asks else None


def _holds(condition: str, shared: frozenset[str]) -> bool | None:
    """Whether a condition of CMake holds on ROCm: names, NOT, AND, OR, and comparisons with a platform's name."""
    words = _WORD.findall(condition)
    if "(" in words:
        return None
    parts: list[list[str]] = [[]]
    signs: list[str] = []
    for word in words:
        if word.upper() in ("AND", "OR"):
            signs.append(word.upper())
            parts.append([])
        else:
            parts[-1].append(word)
    held = _part(parts[0], shared)
    for sign, part in zip(signs, parts[1:], strict=True):
        held = (both if sign == "AND" else either)(held, _part(part, shared))
    return held


def _part(words: list[str], shared: frozenset[str]) -> bool | None:
    if words and words[0].upper() == "NOT":
        return negated(_part(words[1:], shared))
    plain = [word.strip('"${}') for word in words if word.upper() not in ("DEFINED", "TARGET")]
    if len(plain) == 3 and plain[1].upper() in ("STREQUAL", "MATCHES"):
        plain = plain[2:]
    if len(plain) != 1:
        return None
    if _AMD.match(plain[0]):
        return True
    return False if _NVIDIA.match(plain[0]) and plain[0] not in shared else None


def _by_python(path: str, text: str) -> list[_Listed]:
    try:
        tree = parsed(text)
        found: list[_Listed] = []
        _statements(path, tree.body, known_of(tree), True, found)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Said of the file by those who read it for hazards.
        return []
    return found


def _statements(path: str, body: list[ast.stmt], known: Known, taken: bool | None, found: list[_Listed]) -> None:
    for statement in body:
        if isinstance(statement, ast.If):
            held = on_rocm(statement.test, known)
            _statements(path, statement.body, known, both(taken, held), found)
            _statements(path, statement.orelse, known, both(taken, negated(held)), found)
        else:
            inner = [one for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt)]
            if inner:
                _statements(path, inner, known, taken, found)
            else:
                found += _strings(path, statement, taken)
        if ends_on_rocm(statement, known):
            taken = False


def _strings(path: str, statement: ast.stmt, taken: bool | None) -> Iterator[_Listed]:
    for one in ast.walk(statement):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and _SOURCE.fullmatch(one.value):
            yield _Listed(one.value, f"{path}:{one.lineno}", taken)
