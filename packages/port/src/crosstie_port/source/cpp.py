"""What one C++ file has that ROCm lacks or takes otherwise: names, PTX, launches, conditions on NVIDIA's macros.

Lanes, masks and local memory have modules of their own; `hazards_in` asks all of them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from crosstie.core.finding import Severity
from crosstie_port.source.code import Code, also, streams
from crosstie_port.source.hazard import DATA_CENTRE_ISAS, SourceHazard, targets_in
from crosstie_port.source.lanes import LANE_RULES, macro_sizes
from crosstie_port.source.launches import LAUNCH_RULES
from crosstie_port.source.lexer import COMPARES, CppToken, closing, number
from crosstie_port.source.masks import MASK_RULES
from crosstie_port.source.project import NVIDIA_ONLY, Branch, Macros, Project, holds_under, rocm_defines
from crosstie_port.source.rules import NameRule, name_rules, ptx_rule, python_rules
from crosstie_port.source.strict import STRICT_RULES, switched

_WORDS = ("asm", "__asm__", "__asm")
_BETWEEN = ("volatile", "__volatile__", "__volatile", "goto", "inline")
_OPCODE = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[a-z0-9_]+)*)", re.IGNORECASE)
_AMD = re.compile(r"^(?:v|s|ds|buffer|global|flat|scratch|image|tbuffer|exp)_[a-z0-9_]+$|^(?:exec|vcc)", re.IGNORECASE)
# An instruction of PTX has a type or a state behind a dot; a register of it is named %laneid, %0 or p.
_PTX = re.compile(
    r"\.(?:[busf](?:8|16|32|64|128)|bf16|f16x2|b1|pred|reg|sync|global|shared|aligned|e4m3\w*|cta|gpu|sys)\b"
)
_SPECIAL = re.compile(r"%(laneid|warpid|smid|nsmid|globaltimer\w*|clock\w*|lanemask_\w+|gridid|ctaid|tid|ntid|nctaid"
                      r"|cluster\w*|dynamic_smem_size|total_smem_size|envreg\d+|is_explicit_cluster)")  # fmt: skip
# `void f() asm("symbol")` names a symbol.
_LABEL = re.compile(r"^(?:llvm\.[\w.]+|[A-Za-z_$][\w$@]*)$")
_HOST_CHIPS = re.compile(
    r"(?i)x86|i386|amd64|_x64|_ix86|aarch64|_arm|powerpc|ppc|riscv|s390|loongarch|(?:^|_)(?:sse|avx|neon)"
)
_LANGUAGES = (".cu", ".cuh")
_DEVICE = re.compile(r"__device__|__global__|cuda_runtime|<cuda")
_MOST_NAMED = 4
# Ampere, Hopper and Blackwell: what is true on none of them is for GPUs that nobody ports from.
_ARCHITECTURES = (800, 900, 1000)
_NVIDIA = {
    "__NVCC__": 1, "__CUDACC__": 1, "__CUDACC_VER_MAJOR__": 13, "__CUDACC_VER_MINOR__": 0, "CUDART_VERSION": 13000,
    "CUDA_VERSION": 13000, "__clang__": 0, "__HIPCC__": 0, "USE_ROCM": 0,
}  # fmt: skip
_REFUSAL = re.compile(
    r"static_assert|assert\s*\(|#\s*error|__trap|abort\s*\(|TORCH_CHECK|printf|not_?implemented|unsupported"
    r"|not supported|no_device_code|__builtin_unreachable|\bthrow\b",
    re.IGNORECASE,
)
# Hints to a scheduler that other targets do without.
_HINT = re.compile(r"griddepcontrol|GridDependency|ProgrammaticLaunch|launch_dependents|pdl|setmaxnreg", re.IGNORECASE)
_OLDER = "other NVIDIA GPUs"
_RELEASES = ("CUDART_VERSION", "CUDA_VERSION", "__CUDACC_VER_MAJOR__", "__CUDACC_VER_MINOR__")
_VERSIONS = dict.fromkeys(_RELEASES, "older releases of CUDA")
# Since then shuffles and votes take masks; HIP has both forms, so that the older side is right.
_MASKS_SINCE = 9000
_COMMENT = re.compile(r"//.*|/\*.*?\*/")
_OF_CUDA = re.compile(r"\s*#\s*include\s*<cu")
_LINES_OF_REST = 30
# Longer strings are messages, which may speak of anything.
_LONGEST_NAME = 40


def name_hazards(path: str, codes: Sequence[Code]) -> Iterator[SourceHazard]:
    project = codes[0].project
    unit = project.units[path]
    headers = [
        (directive.header, directive.line)
        for directive in unit.directives
        if directive.header and not unit.is_dead(directive.line)
    ]
    local = {other.rsplit("/", 1)[-1] for other in project.units}
    for rule in name_rules():
        if rule.unless_own and project.own_spaces & {one.partition("::")[0] for one in rule.qualified}:
            continue
        if (rule.unless and rule.unless.search(unit.text)) or (rule.requires and not rule.requires.search(unit.text)):
            continue
        lines = {line: header for header, line in headers if _names_header(rule, header, local)}
        foreign = not rule.qualified or project.includes(path, rule.headers)
        own = frozenset[str]() if foreign else project.own_spaces
        for code in codes:
            lines |= _places(rule, code, own)
        if (asked := rule.unless_asked) is not None:
            lines = {line: lines[line] for line in lines if not _is_asked(asked, unit.around(line, and_before=True))}
        # Behind `#ifdef NAME` it is there where it is used.
        lines = {line: name for line, name in lines.items() if not _is_given(name, unit.around(line))}
        if lines:
            first, *others = sorted(lines)
            hazard = codes[0].line_hazard(rule.id, rule.severity, rule.says, first, rule.remedy, rule.on, lines[first])
            yield replace(hazard, evidence=hazard.evidence + also(others))


def _is_asked(pattern: re.Pattern[str], sides: Iterable[Branch]) -> bool:
    """Whether a condition of the sides has a name that matches."""
    tokens = (token for side in sides for token in side.directive.tokens)
    return any(token.kind == "name" and pattern.search(token.text) for token in tokens)


def _is_given(name: str, sides: Iterable[Branch]) -> bool:
    absent = Macros(lambda other: False if other == name else None, lambda other: None)
    return any(one.directive.word != "else" and holds_under(one.directive, absent) is False for one in sides)


def _names_header(rule: NameRule, header: str, local: set[str]) -> bool:
    """A header of that name in the project itself is the project's own; one in a folder is the library's."""
    return any(header.startswith(wanted) and ("/" in wanted or header not in local) for wanted in rule.headers)


def _places(rule: NameRule, code: Code, own: frozenset[str]) -> dict[int, str]:
    """Lines and the name seen there; `own`: namespaces of the tree itself."""
    found: dict[int, str] = {}
    tokens = code.tokens
    for name, places in code.names.items():
        if not rule.names_it(name) or name in code.parameters:
            continue
        # A member of the project's own ends so; a variable of its own is declared here.
        is_own = (name.endswith("_") and name[0] != "_") or name in code.declarations
        if not is_own and not code.provided(name):
            for at in places:
                is_member = code.text(at - 1) in (".", "->") and not name.startswith(("shared", "cuda", "__"))
                if not is_member and not code.is_dropped(at):
                    found.setdefault(tokens[at].line, name)
    for space in {one.partition("::")[0] for one in rule.qualified} - own:
        for at in code.names.get(space, ()):
            name = f"{space}::{code.text(at + 2)}"
            is_whole = at + 2 < len(tokens) and code.text(at + 1) == "::" and code.text(at - 1) != "::"
            if is_whole and not rule.qualified.isdisjoint({name, f"{space}::*"}):
                found.setdefault(tokens[at].line, name)
    for at in code.matches(rule.pattern) if rule.pattern is not None else ():
        if rule.for_amd or not code.is_side_for_amd(at):
            found.setdefault(tokens[at].line, rule.id)
    for name in rule.members & code.names.keys():
        for at in code.names[name]:
            if code.text(at - 1) in (".", "->"):
                found.setdefault(tokens[at].line, name)
    if rule.numbers:
        for token in tokens:
            if token.kind == "number" and token.text.lower() in rule.numbers:
                found.setdefault(token.line, token.text)
    return found


def opcodes(assembly: str) -> list[str]:
    found: list[str] = []
    for statement in re.split(r"[;\n{}]", re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly)):
        plain = re.sub(r"^[\w$%]+\s*:(?!:)", "", statement.strip()).strip()
        if opcode := _OPCODE.match(plain):
            found.append(opcode[1].lower())
    return found


def assembly_hazards(code: Code) -> Iterator[SourceHazard]:
    for word in _WORDS:
        for at in code.names.get(word, ()):
            open_at = at + 1
            while code.text(open_at) in _BETWEEN:
                open_at += 1
            if (
                code.text(open_at) == "("
                and not _asks_for_host(code, at)
                and (hazard := _statement(code, at, open_at)) is not None
            ):
                yield hazard


def _asks_for_host(code: Code, at: int) -> bool:
    """Whether a condition around a place names a processor: `#elif defined(__x86_64__)`."""
    return _is_asked(_HOST_CHIPS, code.project.units[code.path].around(code.tokens[at].line))


def _statement(code: Code, at: int, open_at: int) -> SourceHazard | None:
    parts: list[str] = []
    pasted = False
    for token in code.tokens[open_at + 1 : closing(code.tokens, open_at)]:
        if token.text in (":", "::") and token.kind == "sign":
            break
        if token.kind == "string":
            parts.append(token.text)
        elif token.kind == "name":
            pasted = True
    body = "".join(parts)
    if "%[" in body and not code.path.endswith(_LANGUAGES):
        # Operands by name are GCC's, in other processors' assembly; CUDA's is written with %0.
        return None
    if not body.strip() and not pasted:
        # An empty statement orders the compiler's own memory accesses, on every target.
        return None
    names = opcodes(body)
    if _LABEL.match(body) and ptx_rule(body.lower()) is None:
        return None
    if names and all(_AMD.match(name) for name in names):
        return None
    known = [found for name in names if (found := ptx_rule(name)) is not None]
    on_device = code.path.endswith(_LANGUAGES) or _DEVICE.search(code.project.units[code.path].text)
    # Arm's instructions have dots as well.
    dotted = on_device and any("." in name for name in names)
    is_ptx = bool(_PTX.search(body) or _SPECIAL.search(body) or dotted)
    if not is_ptx and not (on_device and (known or pasted or names)):
        return None
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:_MOST_NAMED])
    if len(distinct) > _MOST_NAMED:
        shown += f" and {len(distinct) - _MOST_NAMED} more"
    special = _SPECIAL.search(body)
    if special is not None and special[0] not in shown:
        shown += f" {special[0]}"
    if not known:
        what = f"inline assembly ({shown or 'made by macros'}) that is not AMD's does not build for this target"
        return code.hazard("inline-ptx", "error", what, at, "write it in C++ or guard it with #ifndef USE_ROCM")
    first = next((rule for rule in known if rule.id != "arithmetic" and rule.id != "special-register"), known[0])
    what = f"inline PTX, {first.says}: {shown}"
    return code.hazard("inline-ptx", "error", what, at, first.remedy)


def _texts(code: Code) -> Iterator[SourceHazard]:
    """Libraries that are loaded and tools that are run by their names: dlopen("libcuda.so.1")."""
    text = code.project.units[code.path].text
    rules = [rule for rule in python_rules("string") if rule.id in ("cuda-library", "nvidia-tool")]
    for at, token in enumerate(code.tokens):
        if token.kind != "string" or len(token.text) > _LONGEST_NAME or code.is_for_amd(at):
            continue
        for rule in rules:
            named = rule.pattern is not None and rule.pattern.search(token.text)
            if named and not (rule.unless and rule.unless.search(text)):
                yield code.hazard(rule.id, rule.severity, rule.says, at, rule.remedy)


def _target_lists(code: Code) -> Iterator[SourceHazard]:
    """`#if defined(__gfx90a__) || defined(__gfx942__)`: a list of targets that a newer one is missing from."""
    unit = code.project.units[code.path]
    for side in unit.sides:
        named = targets_in(" ".join(token.text for token in side.directive.tokens))
        # Steppings of one chip are one: what stands behind them may be its FP8 dialect.
        chips = {re.sub("^gfx94[01]$", "gfx942", one) for one in named}
        if side.directive.word == "else" or unit.is_dead(side.directive.line) or len(chips) < 2:
            continue
        for isa in sorted(DATA_CENTRE_ISAS - named):
            if _holds_on(side, isa) is False and any(_holds_on(side, other) for other in named):
                what = f"a list of targets without {isa}, which takes the other side"
                remedy = f"add __{isa}__ where it has what the list stands for"
                yield code.line_hazard("target-list", "unknown", what, side.directive.line, remedy, isa)


def _holds_on(side: Branch, isa: str) -> bool | None:
    """Whether a condition holds in the pass over device code of one instruction set."""

    def defined(name: str) -> bool | None:
        return name.strip("_") == isa if name.startswith("__gfx") else rocm_defines(name)

    return holds_under(side.directive, Macros(defined, lambda name: None))


def architecture_hazards(code: Code) -> Iterator[SourceHazard]:
    unit = code.project.units[code.path]
    source = unit.text.split("\n")
    for side in unit.sides:
        names = {token.text for token in side.directive.tokens if token.kind == "name"}
        asked = names & (NVIDIA_ONLY | {"CUDA_VERSION"})
        if asked <= set(_RELEASES) and all(_asks_old(token) for token in side.directive.tokens):
            continue
        if not asked or side.directive.word == "else" or side.passed_over or unit.is_dead(side.directive.line):
            continue
        # The same condition speaks of ROCm, or the project sets the macro itself.
        settled = any(map(rocm_defines, names)) or any(code.project.definitions(name, code.path) for name in asked)
        name = "__CUDA_ARCH__" if "__CUDA_ARCH__" in asked else min(asked)
        found = (
            None
            if settled
            else (_judge(code, side, name, source) or _of_host(code, side, name) or _unset(code, side, name))
        )
        if found is not None:
            yield code.line_hazard("architecture-macro", found[0], found[1], side.directive.line, found[2])
    yield from _named(code)


def _unset(code: Code, side: Branch, name: str) -> tuple[Severity, str, str] | None:
    """`#if __CUDA_ARCH__ >= 800`, `#define HAS_BF16`: nothing but a switch, which other conditions ask for."""
    project = code.project
    made = {
        directive.name
        for directive in project.units[code.path].directives
        if directive.word == "define" and side.first <= directive.line <= side.last
    }
    lost = sorted(one for one in made if not project.definitions(one, code.path) and project.asks_for(one))
    if side.taken is not False or not lost:
        return None
    what = f"{_lacks(name)}: {lost[0]} is not set, and what asks for it is left out"
    return "note" if project.is_ported else "unknown", what, f"say for ROCm too whether {lost[0]} holds"


def _of_host(code: Code, side: Branch, name: str) -> tuple[Severity, str, str] | None:
    """`#ifdef __CUDA_ARCH__`, a macro for the device, `#else`, the same for the host."""
    unit = code.project.units[code.path]
    if name != "__CUDA_ARCH__" or side.directive.word not in ("ifdef", "if") or side.taken is not False:
        return None
    if any(token.text in COMPARES for token in side.directive.tokens) or not side.has_else:
        return None
    made = [directive for directive in unit.directives if directive.word == "define"]
    inside = {directive.name for directive in made if side.first <= directive.line <= side.last}
    twice = sorted(directive.name for directive in made if directive.name in inside and directive.line > side.last)
    if not twice:
        return None
    what = f"HIP never defines __CUDA_ARCH__, so device code gets the host's {twice[0]}"
    return "unknown", what, "ask for __HIP_DEVICE_COMPILE__ too, or for USE_ROCM where the device's side is right"


def _named(code: Code) -> Iterator[SourceHazard]:
    """`if (__CUDA_ARCH__ >= 800)` and `return CUDA_VERSION;` in plain code; `#define NEW (__CUDA_ARCH__ >= 800)`."""
    unit = code.project.units[code.path]
    for name in ("__CUDA_ARCH__", "CUDA_VERSION", "CUDART_VERSION"):
        if code.project.definitions(name, code.path):
            continue
        remedy = "ask in the preprocessor, with a side for ROCm: #if defined(USE_ROCM)"
        for at in code.names.get(name, ()):
            what = f"outside of conditions {name} is an unknown name: HIP and its headers do not define it"
            yield code.hazard("architecture-macro", "error", what, at, remedy)
        for directive in unit.directives:
            body = {token.text for token in directive.tokens[1:]} if directive.word == "define" else set()
            asks = name == "__CUDA_ARCH__" or not body.isdisjoint(COMPARES)
            if asks and name in body and not unit.is_dead(directive.line) and not any(map(rocm_defines, body)):
                what = f"{_lacks(name)}: {directive.name} is false in an #if, and no name elsewhere"
                yield code.line_hazard("architecture-macro", "unknown", what, directive.line, remedy)


def _on_nvidia(code: Code, side: Branch) -> list[bool | None]:
    """What the condition gives in device code of each architecture."""
    own = code.project.macros(code.path)

    def under(architecture: int) -> bool | None:
        def value(name: str) -> int | None:
            return architecture if name == "__CUDA_ARCH__" else _NVIDIA.get(name, own.value(name))

        def defined(name: str) -> bool | None:
            if name in _NVIDIA or name in NVIDIA_ONLY:
                return bool(_NVIDIA.get(name, 1))
            return own.defined(name)

        return holds_under(side.directive, Macros(defined, value))

    return [under(architecture) for architecture in _ARCHITECTURES]


def _asks_old(token: CppToken) -> bool:
    return token.kind != "number" or (number(token.text) or 0) <= _MASKS_SINCE


def _judge(code: Code, side: Branch, name: str, source: list[str]) -> tuple[Severity, str, str] | None:
    """How grave it is, what it is and what cures it, where a side that asks for `name` is a hazard."""
    on_nvidia = _on_nvidia(code, side)
    inside = source[side.first - 1 : side.last]
    rest = _COMMENT.sub("", "\n".join(source[side.last : side.last + _LINES_OF_REST]).split("#endif", 1)[0])
    never = all(held is False for held in on_nvidia)
    compares = any(token.text in COMPARES for token in side.directive.tokens)
    includes = name == "__NVCC__" and any(_OF_CUDA.match(line) for line in inside)
    if not (includes or _has_code(inside)) or side.taken is None or side.taken is not never:
        return None
    if name == "__CUDA_ARCH__" and not compares and (never or all(on_nvidia)):
        # `#ifndef __CUDA_ARCH__` is the host's side, and HIP's device code takes it too: often the same in plain C++.
        what = "HIP never defines __CUDA_ARCH__, so device code gets the host's side of this"
        remedy = "ask for __HIP_DEVICE_COMPILE__ too: #if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)"
        return "unknown", what, remedy
    if name == "__CUDA_ARCH__" and side.taken:
        what = "HIP does not define __CUDA_ARCH__, which then counts as 0: the side for the oldest GPUs is compiled"
        remedy = "ask for defined(__CUDA_ARCH__) as well, or add a side for ROCm (#if defined(USE_ROCM)) before it"
        return "unknown", what, remedy
    if side.taken:
        refuses = name in _VERSIONS and any(map(_REFUSAL.search, inside))
        what = f"{_lacks(name)}: this side is compiled, which refuses to run"
        return ("unknown", what, "ask for ROCm first: #if !defined(USE_ROCM) && ...") if refuses else None
    if not side.has_else:
        if all(_HINT.search(line) or not _has_code([line]) for line in inside):
            return None
        what = f"{_lacks(name)}: these {len(inside)} lines are left out, and nothing takes their place"
        return "unknown", what, "add a side for ROCm (#elif defined(USE_ROCM)), or ask for the feature that is meant"
    if _REFUSAL.search(rest):
        what = f"{_lacks(name)}: the other side is compiled, which refuses to run"
        return "unknown", what, "add a side for ROCm (#elif defined(USE_ROCM)) before the #else"
    what = f"{_lacks(name)}: the other side is compiled, which is meant for {_VERSIONS.get(name, _OLDER)}"
    remedy = "check that the #else side is right and fast enough, or add one for ROCm (#elif defined(USE_ROCM))"
    return "note" if name in _VERSIONS else "unknown", what, remedy


def _lacks(name: str) -> str:
    return (
        "HIPIFY makes HIP's version of CUDA_VERSION, 702 for ROCm 7.2"
        if name == "CUDA_VERSION"
        else f"HIP does not define {name}"
    )


def _has_code(lines: Sequence[str]) -> bool:
    plain = (_COMMENT.sub("", line).strip() for line in lines)
    return any(line and not line.startswith("#") for line in plain)


_RULES = (
    *LANE_RULES, *MASK_RULES, assembly_hazards, *LAUNCH_RULES, *STRICT_RULES, _texts,
)  # fmt: skip


def cpp_hazards(path: str, project: Project) -> list[SourceHazard]:
    return hazards_in(path, streams(path, project))


def hazards_in(path: str, codes: Sequence[Code]) -> list[SourceHazard]:
    """`codes`: the file's own code first, then the bodies of its macros."""
    hazards = list(name_hazards(path, codes))
    for of_file in (macro_sizes, architecture_hazards, switched, _target_lists):
        hazards += of_file(codes[0])
    for code in codes:
        for rule in _RULES:
            hazards += rule(code)
    project, unused = codes[0].project, _unused(codes[0])
    return [one for one in hazards if one.name not in unused and not project.left_out_on(path, one.line or 0, one.on)]


def _unused(code: Code) -> frozenset[str]:
    """Templates that only code for NVIDIA calls: nobody instantiates them on ROCm."""
    heads: dict[str, set[int]] = {}
    for function in code.functions:
        heads.setdefault(function.name, set()).add(code.tokens[function.head].line)
    templates = {one.name for one in code.functions if one.template}
    return frozenset(name for name in templates if not code.project.uses(name, code.path, heads[name]))
