"""Places in the source that count on 32 lanes a warp, which compile without complaint where a wave has 64."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from crosstie.core.finding import Finding, Severity
from crosstie_port.kernels.compilation import Compilation

# Names of a warp's width, and names that are multiplied or divided by it.
_WIDTH = re.compile(
    r"(?i)(warp|wave|wavefront|simd)_?(size|sz|width|lanes)|(lanes|threads)_?(per|in)_?(a_)?(warp|wave)|^(warp|(num_?)?lanes)$"
)
_COUNTED = re.compile(r"(?i)(^|_)(num_?)?(warps?|waves?|lanes?|threads?|tid)(_|$)|thread_?id|lane_?id|warp_?id")
# A condition that tells platforms apart has thought of this already.
_PLATFORM = re.compile(r"(?i)hip|rocm|amd|gfx|cuda|nvidia|warp_?size|wave")
_OPERATIONS = (ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)
# The same on powers of two: `tid & 31`, `tid >> 5`.
_BITS = {ast.BitAnd: 31, ast.RShift: 5, ast.LShift: 5}
_THREADS = "num_threads"


def wave_hints(compilations: Iterable[Compilation]) -> Iterator[Finding]:
    """Once for each kernel and target; what was compiled is not asked again, this is read in the source."""
    trees: dict[str, ast.Module | None] = {}
    seen: set[tuple[str, int, str]] = set()
    for compilation in compilations:
        if compilation.wave_width != 64:
            continue
        file = str(compilation.job["file"])
        if file not in trees:
            trees[file] = _parsed(file)
        tree = trees[file]
        found = list(_in_source(tree, compilation)) if tree else []
        for line, severity, what, evidence in [*found, *_in_constants(compilation)]:
            key = (compilation.target.name, line, what)
            if key not in seen:
                seen.add(key)
                yield Finding(
                    check="wave64-assumption", severity=severity, what=what, where=compilation.place(file, line),
                    evidence=evidence, grounds="read", target=compilation.target.name,
                    remedy="take the width from the target: 64 lanes on CDNA, 32 on RDNA and NVIDIA",
                )  # fmt: skip


def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return None


Hint = tuple[int, Severity, str, str]


def _in_constants(compilation: Compilation) -> Iterator[Hint]:
    for name, value in compilation.job["constexprs"].items():
        if value == 32 and not isinstance(value, bool) and _WIDTH.search(name):
            what = f"{compilation.kernel} is launched with {name} = 32 on waves of 64"
            yield int(compilation.job["line"]), "slow", what, f"{name} = 32 among the constants of the launch"


def _in_source(tree: ast.Module, compilation: Compilation) -> Iterator[Hint]:
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    kernel = compilation.kernel.rsplit(".", 1)[-1]
    concerned = [node for name, node in functions.items() if name == kernel or kernel in _names(node)]
    if kernel in functions:
        concerned += [functions[name] for name in _names(functions[kernel]) if name in functions]
    loose = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    used = {name for node in concerned for name in _names(node)}
    for node in concerned:
        yield from _hints(node, compilation.kernel)
    for constant in loose:
        targets = constant.targets if isinstance(constant, ast.Assign) else [constant.target]
        if any(isinstance(target, ast.Name) and target.id in used for target in targets):
            yield from _hints(constant, compilation.kernel)


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _hints(root: ast.AST, kernel: str) -> Iterator[Hint]:
    for node in _without_platform_branches(root):
        name, value = _named_value(node)
        if name and _is(value, 32) and _WIDTH.search(name):
            yield node.lineno, "slow", f"{kernel} counts on warps of 32 lanes", f"{name} = 32"  # type: ignore[attr-defined]
        elif name == "num_warps" and value is not None and any(map(_divides_by_32, ast.walk(value))):
            said = f"num_warps = {ast.unparse(value)}"
            yield value.lineno, "slow", f"{kernel} counts on warps of 32 lanes", said
        elif isinstance(node, ast.BinOp) and (said := _counted(node)):
            yield node.lineno, "slow", f"{kernel} counts on warps of 32 lanes", said
        elif isinstance(node, ast.Call) and _identifier(node.func) == _THREADS:
            what = f"{kernel} asks CUDA's num_threads(), which is half of the threads on waves of 64"
            yield node.lineno, "error", what, "triton.language.extra.cuda.num_threads is num_warps x 32 on every target"


def _counted(node: ast.BinOp) -> str:
    """Warps, threads or lanes with the width of a warp, as written; "" for anything else."""
    sides = (node.left, node.right)
    width = 32 if isinstance(node.op, _OPERATIONS) else _BITS.get(type(node.op))
    if width is None or not any(_is(side, width) for side in sides):
        return ""
    return ast.unparse(node) if any(_COUNTED.search(_identifier(side)) for side in sides) else ""


def _divides_by_32(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp):
        return False
    return (isinstance(node.op, ast.FloorDiv | ast.Div) and _is(node.right, 32)) or (
        isinstance(node.op, ast.RShift) and _is(node.right, 5)
    )


def _without_platform_branches(root: ast.AST) -> Iterator[ast.AST]:
    if isinstance(root, ast.If | ast.IfExp) and _PLATFORM.search(ast.unparse(root.test)):
        return
    yield root
    for child in ast.iter_child_nodes(root):
        yield from _without_platform_branches(child)


def _named_value(node: ast.AST) -> tuple[str, ast.expr | None]:
    """The name and the value of an assignment or a keyword."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return _identifier(node.targets[0]), node.value
    if isinstance(node, ast.AnnAssign):
        return _identifier(node.target), node.value
    if isinstance(node, ast.keyword):
        return node.arg or "", node.value
    return "", None


def _is(value: ast.expr | None, number: int) -> bool:
    if isinstance(value, ast.Call) and _identifier(value.func) == "constexpr" and value.args:
        value = value.args[0]
    return isinstance(value, ast.Constant) and value.value == number and not isinstance(value.value, bool)


def _identifier(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return node.id if isinstance(node, ast.Name) else ""
