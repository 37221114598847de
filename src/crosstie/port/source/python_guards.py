"""Conditions of Python code as a run on ROCm meets them: true, false or open.

Only what is certainly false there is left out; both sides of an open condition are read.
"""

import ast
import re
from collections.abc import Mapping, Sequence

import msgspec

from crosstie.port.source.guards import both, either, negated

# A name that asks for AMD and nothing besides: is_hip, _IS_ROCM, use_rocm, current_platform.is_rocm, ROCM_HOME.
_AMD_WORDS = frozenset({"rocm", "hip", "amd", "amdgpu"})
_NVIDIA_WORDS = frozenset({"cuda", "nvidia", "nvcc"})
_BESIDES = frozenset({
    "is", "use", "using", "on", "has", "have", "with", "running", "build", "platform", "gpu", "device", "available",
    "enabled", "backend", "torch", "pytorch", "version", "home", "current", "target", "get", "for", "supported",
})  # fmt: skip
# What asks for either of the two: true on ROCm.
_EITHER = frozenset({"is_cuda_alike", "is_cuda_or_rocm", "is_cuda_or_hip", "is_gpu"})
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_ELSEWHERE = frozenset({"win32", "darwin", "cygwin", "Windows", "Darwin", "nt"})
_SYSTEM = frozenset({"sys.platform", "platform.system", "os.name"})
_NAMES_OF_AMD = frozenset({"hip", "rocm", "amd", "hcc"})
_BACKEND = re.compile(r"(?i)backend|vendor|platform|target")
_ON = frozenset({"1", "on", "true", "yes"})
_LEAVES = frozenset({"exit", "_exit", "quit", "skip", "abort", "fail"})
_DEEPEST = 12


class Known(msgspec.Struct, kw_only=True):
    """Of one file: what names are set to where they are set once, what loops run over, what functions return, and what
    is imported."""

    values: Mapping[str, ast.expr]
    loops: Mapping[str, Sequence[ast.expr]]
    returns: Mapping[str, ast.expr]
    imported: frozenset[str]


def known_of(tree: ast.Module) -> Known:
    values: dict[str, list[ast.expr]] = {}
    loops: dict[str, list[ast.expr]] = {}
    returns: dict[str, ast.expr] = {}
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            if isinstance(node.iter, ast.Tuple | ast.List):
                loops.setdefault(node.target.id, []).extend(node.iter.elts)
        elif isinstance(node, ast.FunctionDef):
            given = [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
            if len(given) == 1 and given[0] is not None:
                returns[node.name] = given[0]
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
    return Known(
        values={name: found[0] for name, found in values.items() if len(found) == 1},
        loops=loops,
        returns=returns,
        imported=frozenset(imported),
    )


def on_rocm(test: ast.expr, known: Known, depth: int = 0) -> bool | None:
    """Whether a condition holds on ROCm; None where the text alone does not tell."""
    if depth > _DEEPEST:
        return None
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return negated(on_rocm(operand, known, depth + 1))
        case ast.BoolOp(op=operator, values=values):
            joined = both if isinstance(operator, ast.And) else either
            held = on_rocm(values[0], known, depth + 1)
            for other in values[1:]:
                held = joined(held, on_rocm(other, known, depth + 1))
            return held
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _compared(left, operator, right, known, depth)
        case ast.Call():
            return _called(test, known, depth)
        case ast.Name(id=name):
            if name in known.values:
                return on_rocm(known.values[name], known, depth + 1)
            return False if name == "TYPE_CHECKING" else _named(name, name in known.imported)
        case ast.Attribute():
            return _attribute(dotted(test))
    return None


def _attribute(full: str) -> bool | None:
    if full.endswith("version.hip"):
        return True
    if full.endswith(("version.cuda", "typing.TYPE_CHECKING")):
        return False
    # A tensor's is_cuda holds on ROCm as well, so an attribute is not asked about NVIDIA.
    return _named(full.rpartition(".")[2], asks_nvidia=False)


def _named(name: str, asks_nvidia: bool) -> bool | None:
    """By the words of a name: True where it asks for AMD, False where it asks for NVIDIA."""
    if name.lower().strip("_") in _EITHER:
        return True
    words = {word.lower() for word in _WORDS.findall(name)}
    if words & _AMD_WORDS and words <= _AMD_WORDS | _BESIDES:
        return True
    # CUDA_HOME and use_cuda say too little: torch calls AMD's GPUs cuda.
    if asks_nvidia and words & _NVIDIA_WORDS and words <= _NVIDIA_WORDS | {"is", "platform", "on"}:
        return False
    return None


def _called(call: ast.Call, known: Known, depth: int) -> bool | None:
    full = dotted(call.func)
    name = full.rpartition(".")[2]
    arguments = [one.value for one in call.args if isinstance(one, ast.Constant)]
    if full == "torch.cuda.is_available":
        return True
    if name == "bool" and len(call.args) == 1:
        return on_rocm(call.args[0], known, depth + 1)
    if name in ("getattr", "hasattr") and len(call.args) > 1 and dotted(call.args[0]).endswith("version"):
        if name == "hasattr":
            return None
        return {"hip": True, "cuda": False}.get(str(arguments[0])) if arguments else None
    if name == "getenv" or (name == "get" and "environ" in full):
        return _named(str(arguments[0]), asks_nvidia=False) if arguments else None
    if name == "startswith" and isinstance(call.func, ast.Attribute):
        asked = dotted(call.func.value)
        return False if asked in _SYSTEM and arguments and str(arguments[0]) in ("win", "darwin") else None
    if full in known.returns:
        return on_rocm(known.returns[full], known, depth + 1)
    return _named(name, asks_nvidia=True)


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr, known: Known, depth: int) -> bool | None:
    same = isinstance(operator, ast.Is | ast.Eq)
    if not same and not isinstance(operator, ast.IsNot | ast.NotEq | ast.In | ast.NotIn):
        return None
    if isinstance(operator, ast.In | ast.NotIn):
        holds = None
        if isinstance(left, ast.Constant) and str(left.value).lower() in ("rocm", "hip", "+rocm"):
            holds = True
        return negated(holds) if isinstance(operator, ast.NotIn) else holds
    if not isinstance(right, ast.Constant):
        return None
    if right.value is None or isinstance(right.value, bool):
        held = on_rocm(left, known, depth + 1)
        # A function answers True or False, never None; a version is None where it is not that platform.
        equal = negated(held) if not right.value else held
    else:
        equal = _equals(left, str(right.value), known, depth)
    return equal if same else negated(equal)


def _equals(left: ast.expr, text: str, known: Known, depth: int) -> bool | None:
    asked = dotted(left.func) if isinstance(left, ast.Call) else dotted(left)
    if asked in _SYSTEM:
        return False if text in _ELSEWHERE else text.lower() in ("linux", "posix")
    if text.lower() in _NAMES_OF_AMD:
        return True
    if text.lower() in ("cuda", "nvidia"):
        # A torch device is called cuda on ROCm; a back end or a platform is not.
        return False if _BACKEND.search(asked.rpartition(".")[2]) else None
    return on_rocm(left, known, depth + 1) if text.lower() in _ON else None


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text, "" for what is no chain of names; a call in it counts as the name that is called."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value.func) if isinstance(node.value, ast.Call) else dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def leaves(body: list[ast.stmt]) -> bool:
    """Whether a block never reaches what follows it."""
    if not body:
        return False
    last = body[-1]
    if isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break):
        return True
    if isinstance(last, ast.If):
        return leaves(last.body) and leaves(last.orelse)
    return (
        isinstance(last, ast.Expr)
        and isinstance(last.value, ast.Call)
        and dotted(last.value.func).rpartition(".")[2] in _LEAVES
    )


def ends_on_rocm(statement: ast.stmt, known: Known) -> bool:
    """Whether ROCm never gets past a statement: an early return, a refusal, an assertion."""
    if isinstance(statement, ast.Assert):
        return on_rocm(statement.test, known) is False and not isinstance(statement.test, ast.Constant)
    if isinstance(statement, ast.If):
        held = on_rocm(statement.test, known)
        return (held is True and leaves(statement.body)) or (held is False and leaves(statement.orelse))
    return False


def skipped_on_rocm(decorators: list[ast.expr], known: Known) -> bool:
    """`@pytest.mark.skipif(is_hip(), ...)`."""
    return any(
        isinstance(one, ast.Call)
        and dotted(one.func).rpartition(".")[2] in ("skipif", "skipIf")
        and bool(one.args)
        and on_rocm(one.args[0], known) is True
        for one in decorators
    )
