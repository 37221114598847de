"""What build files ask for, and which C++ files a build for ROCm leaves out by lists in CMake and Python files."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec
from msgspec.structs import replace

from crosstie_port.source.code import also, shorten
from crosstie_port.source.files import Files, has_twin, hip_builds, uncommented
from crosstie_port.source.hazard import DATA_CENTRE_ISAS, SourceHazard, targets_in
from crosstie_port.source.project import both, either, negated
from crosstie_port.source.python import Known, ends_on_rocm, known_of, on_rocm, parsed
from crosstie_port.source.rules import python_rules

_BY_TORCH = re.compile(r"cpp_extension|CUDAExtension|hipify_torch|hipify_python|utils\.hipify|torch_hipify")
_COMMAND = re.compile(r"([A-Za-z_]\w*)\s*\(((?:[^()\"]|\"(?:[^\"\\]|\\.)*\"|\([^()]*\))*)\)")
_FOR_ROCM = re.compile(r"(?:^|/)setup_(?:rocm|hip|amd)\.py(?::|$)")
_SOURCE = re.compile(r"[\w./*{}$+-]+\.(?:cu|cuh|cpp|cc|cxx|c|hip)\b")
_VARIABLE = re.compile(r"\$\{[^}]*\}/?")
# How deep build files add each other.
_STEPS = 8
_ASKED = re.compile(r"\$\{(\w+)\}")
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


def left_out_by_lists(files: Files) -> dict[str, str]:
    """C++ files that only lists of sources for NVIDIA name, each with the list's place."""
    # Beside setup_rocm.py, which lists its own, other lists of the folder are NVIDIA's.
    twins = {path.rpartition("/")[0] for path in files.python if _FOR_ROCM.search(path)}
    by_name: dict[str, list[str]] = {}
    for path in files.cpp:
        by_name.setdefault(PurePosixPath(path).name, []).append(path)
    listed = [*_in_cmake(files, twins), *_in_python(files, twins)]
    used = (made for one in listed if one.taken is not False for made in _before_hipify(one.pattern))
    kept = {path for made in used for path in _meant(made, by_name)}
    return {
        path: one.place
        for one in reversed(listed)
        if one.taken is False
        for path in _meant(one.pattern, by_name)
        if one.removed or path not in kept
    }


def _in_cmake(files: Files, twins: Collection[str]) -> Iterator[_Listed]:
    """Lists of CMake decide what is left out below a file that chooses between the two."""
    asked = {path: _asked_with_amd(_commands(text)) for path, text in files.build.items()}
    stems = frozenset(path.rpartition(".")[0] for path in files.build)
    beside_amd = {path for path in files.build if has_twin(path, stems)}
    decides: dict[str, bool] = {}
    local: dict[str, list[_Command]] = {}
    for path, text in files.build.items():
        folder = path.rpartition("/")[0]
        above = [names for other, names in asked.items() if names is not None and _is_above(other, folder)]
        decides[path] = bool(above) or folder in twins or path in beside_amd
        local[path] = list(_cmake_commands(text, frozenset().union(*above)))
    # What a build for ROCm makes of folders and files that others add: each round follows one step further.
    added: dict[str, bool | None] = {}
    commands = local
    for _ in range(_STEPS):
        commands = {
            path: [replace(step, taken=both(_around(path, added, path in beside_amd), step.taken)) for step in read]
            for path, read in local.items()
        }
        now: dict[str, bool | None] = {}
        for path, read in commands.items():
            for name, taken in _adds(path, read):
                now[name] = either(now.get(name, False), taken)
        if now == added:
            break
        added = now
    used = _uses(command for read in commands.values() for command in read)
    for path, read in commands.items():
        for row in _by_cmake(path, read, used) if decides[path] else ():
            yield replace(row, taken=False) if path.rpartition("/")[0] in twins else row


def _around(path: str, added: Mapping[str, bool | None], is_nvidias: bool) -> bool | None:
    """What a build for ROCm makes of a build file, by who adds it or a folder around it."""
    while path and not is_nvidias:
        if path in added:
            return added[path]
        path = path.rpartition("/")[0]
    return not is_nvidias


def _adds(path: str, commands: Iterable[_Command]) -> Iterator[tuple[str, bool | None]]:
    folder, _, own = path.rpartition("/")
    for command in commands:
        if command.word in ("add_subdirectory", "include") and (given := _VARIABLE.sub("", command.given).split()):
            name = given[0].strip('"/')
            yield f"{folder}/{name}".removeprefix("/"), command.taken
            if folder and (own != "CMakeLists.txt" or "${" in command.given):
                # What a file included from above adds is meant from there.
                yield name, command.taken


def _uses(commands: Iterable[_Command]) -> dict[str, bool | None]:
    """Of each variable, whether a build for ROCm runs a command that asks for it."""
    uses: dict[str, bool | None] = {}
    for command in commands:
        for name in set(_ASKED.findall(command.given)) - {_filled(command)}:
            uses[name] = either(uses.get(name, False), command.taken)
    return uses


def _filled(command: _Command) -> str:
    """The variable that a command puts its list in."""
    words = command.given.split()
    if command.word == "set":
        return words[0] if words else ""
    return words[1] if command.word in ("list", "file") and len(words) > 1 else ""


def _in_python(files: Files, twins: Collection[str]) -> Iterator[_Listed]:
    """Lists of Python decide what is left out in a file that speaks of ROCm."""
    for path, text in files.python.items():
        if ".cu" in text and re.search(r"(?i)hip|rocm", text):
            beside = path.rpartition("/")[0] in twins and not _FOR_ROCM.search(path)
            for row in _by_python(path, text):
                yield replace(row, taken=False) if beside else row


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
    """Files whose path ends as a list's entry does, or is it after a slash; a star stands for names without a slash,
    two for any folders."""
    whole = pattern.startswith("/")
    ending = [part for part in pattern.split("/") if part not in ("", ".", "..")]
    names = by_name if "*" in ending[-1] else [ending[-1]]
    for name in names:
        for path in by_name.get(name, ()):
            parts = path.split("/")
            if (not whole or "**" in ending or len(parts) == len(ending)) and _ends_as(parts, ending):
                yield path


def _ends_as(parts: Sequence[str], ending: Sequence[str]) -> bool:
    if "**" in ending:
        at = ending.index("**")
        after = len(ending) - at - 1
        rest = parts[: len(parts) - after]
        inside = not at or any(_ends_as(rest[:end], ending[:at]) for end in range(at, len(rest) + 1))
        return inside and _ends_as(parts[len(rest) :], ending[at + 1 :])
    own = parts[len(parts) - len(ending) :]
    return len(parts) >= len(ending) and all(map(fnmatchcase, own, ending))


def _by_cmake(path: str, commands: Iterable[_Command], used: Mapping[str, bool | None]) -> Iterator[_Listed]:
    for one in commands:
        removed = one.word == "list" and one.given.split()[:1] == ["REMOVE_ITEM"]
        if removed and one.taken is not True:
            continue
        # A star stands for files of this folder, where no variable says otherwise.
        inside = "" if "${" in one.given else "/" + path[: path.rfind("/") + 1]
        taken = both(one.taken, used.get(_filled(one), True)) and not removed
        for found in _SOURCE.findall(_VARIABLE.sub("", one.given)):
            name = found.lstrip("/")
            if "*" in name:
                folder, slash, star = (inside + name).rpartition("/")
                deep = "**/" if "GLOB_RECURSE" in one.given else ""
                name = folder + slash + deep + star
            yield _Listed(name, f"{path}:{one.first}", taken, removed)


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
    folder = path[: path.rfind("/") + 1]
    for text, line in _paths(statement):
        if _SOURCE.fullmatch(text):
            # A star without a folder stands for files somewhere below.
            name = f"{folder}**/{text}" if text.startswith("*") else text.lstrip("/")
            yield _Listed(name, f"{path}:{line}", taken)


def _paths(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Strings, those that join() or a slash puts together as one: of what no string says, nothing."""
    parts: Sequence[ast.expr] = ()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        parts = node.args
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts = (node.left, node.right)
    if parts:
        read = [list(_paths(part)) for part in parts]
        if all(len(one) <= 1 for one in read):
            texts = [one[0][0].strip("/") for one in read if one]
            yield "/".join(texts), parts[0].lineno
            return
        yield from (path for one in read for path in one)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value, node.lineno
    else:
        for child in ast.iter_child_nodes(node):
            yield from _paths(child)
