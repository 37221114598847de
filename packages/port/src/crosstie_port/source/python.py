"""Python code in, hazards out: imports, attributes and strings that differ on ROCm, and CUDA text inside of strings.

What a condition keeps from ROCm is left out.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import msgspec
from msgspec.structs import replace

from crosstie.core.finding import Severity
from crosstie_port.source.code import also, shorten
from crosstie_port.source.cpp import cpp_hazards
from crosstie_port.source.hazard import DATA_CENTRE_ISAS, SourceHazard, targets_in
from crosstie_port.source.project import Project, both, either, negated
from crosstie_port.source.rules import PythonRule, passes_for_hopper, python_rules

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
_CUDA_TEXT = re.compile(
    r"__global__|__device__|\basm\s+volatile|threadIdx\.|\b__(?:shfl\w*|ballot|any|all)_sync\s*\(|\b__syncthreads\s*\("
)
_LONG_STRING = re.compile(r"(\"\"\"|''')(.*?)\1", re.DOTALL)
_CYTHON = (".pyx", ".pxi")
_WARP_SIZE = re.compile(r"(?i)^_*(?:k_?)?(?:warp_?size|threads_per_warp|lanes_per_warp)$")
_MOST_THREADS = 1024
# Also the keys of an extension's compiler flags.
_TOOLS = frozenset({"nvcc", "ptxas"})


class Known(msgspec.Struct, frozen=True):
    """Of one file: what names are set to where they are set once, what loops run over, what functions return, and what
    is imported."""

    values: Mapping[str, ast.expr]
    loops: Mapping[str, Sequence[ast.expr]]
    returns: Mapping[str, ast.expr]
    imported: frozenset[str]


def parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # Escapes that Python itself warns about are not this command's business.
        warnings.simplefilter("ignore")
        return ast.parse(text)


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
    set_once = {name: exprs[0] for name, exprs in values.items() if len(exprs) == 1}
    return Known(set_once, loops, returns, frozenset(imported))


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
            return reduce(joined, (on_rocm(expr, known, depth + 1) for expr in values))
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
    if isinstance(operator, ast.In | ast.NotIn):
        asks = isinstance(left, ast.Constant) and str(left.value).lower() in ("rocm", "hip", "+rocm")
        return isinstance(operator, ast.In) if asks else None
    if not isinstance(operator, ast.Is | ast.Eq | ast.IsNot | ast.NotEq) or not isinstance(right, ast.Constant):
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
    last = body[-1] if body else None
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
        isinstance(decorator, ast.Call)
        and dotted(decorator.func).rpartition(".")[2] in ("skipif", "skipIf")
        and bool(decorator.args)
        and on_rocm(decorator.args[0], known) is True
        for decorator in decorators
    )


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, text: str, known: Known, own: frozenset[str]):
        self.path, self.text, self.lines, self._known, self._own = path, text, text.split("\n"), known, own
        # Calls of get_device_capability whose answer is compared on the spot with what is no hazard.
        self._harmless: set[int] = set()
        self.found: list[SourceHazard] = []
        # CUDA texts with the line on which each begins, and whether its lines are lines of the file.
        self.cuda: list[tuple[str, int, bool]] = []
        self._aliases: dict[str, str] = {}
        self._tried = 0
        self._documentation: set[int] = set()

    def _add(self, phrase: PythonRule, node: ast.AST, name: str, severity: Severity | None = None) -> None:
        if phrase.unless is not None and phrase.unless.search(self.text):
            return
        self._hazard(phrase.id, severity or phrase.severity, phrase.says, node, phrase.remedy, phrase.on, name)

    def _hazard(
        self, check: str, severity: Severity, what: str, node: ast.AST, remedy: str, on: str = "rocm", name: str = ""
    ) -> None:
        line = getattr(node, "lineno", 1)
        evidence = shorten(self.lines[line - 1]) if line <= len(self.lines) else ""
        self.found.append(SourceHazard(check, severity, what, self.path, evidence, remedy, line, on, name))

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                self._sequence(value)
            elif isinstance(value, ast.AST):
                self.visit(value)

    def _sequence(self, nodes: Sequence[object]) -> None:
        """One after the other, up to a statement that ROCm does not get past."""
        for node in nodes:
            if isinstance(node, ast.AST):
                self.visit(node)
            if isinstance(node, ast.stmt) and ends_on_rocm(node, self._known):
                return

    def _choice(self, node: ast.If | ast.IfExp) -> None:
        self._condition(node.test)
        held = on_rocm(node.test, self._known)
        for side, left_out in ((node.body, False), (node.orelse, True)):
            if held is not left_out:
                self._sequence(side if isinstance(side, list) else [side])

    visit_If = visit_IfExp = _choice  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        if dotted(node.test).rpartition(".")[2] in ("CUDA_HOME", "CUDA_PATH"):
            what = "a build for ROCm has no CUDA_HOME, and stops here"
            self._hazard("cuda-home", "error", what, node, "ask for ROCM_HOME as well", name="CUDA_HOME")
            return
        self._condition(node.test)

    def _condition(self, test: ast.expr) -> None:
        """A test of which platform it is has no hazard in it; what stands beside one may."""
        if isinstance(test, ast.BoolOp):
            self.visit_BoolOp(test)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._condition(test.operand)
        elif on_rocm(test, self._known) is None:
            self.visit(test)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`torch.version.hip is None and f()`: on ROCm the second is never asked. Where the whole is settled, what
        asks for NVIDIA in it does no harm: `CUDA_HOME is None and ROCM_HOME is None`."""
        if on_rocm(node, self._known) is not None:
            return
        ends = isinstance(node.op, ast.Or)
        for value in node.values:
            self._condition(value)
            if on_rocm(value, self._known) is ends:
                return

    def visit_Try(self, node: ast.Try) -> None:
        caught = any(
            handler.type is None or re.search(r"Import|ModuleNotFound|Exception", ast.unparse(handler.type))
            for handler in node.handlers
        )
        self._tried += caught
        self._sequence(node.body)
        self._tried -= caught
        for part in (node.handlers, node.orelse, node.finalbody):
            self._sequence(part)

    def _body(self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Documentation says things about CUDA without doing them."""
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            self._documentation.add(id(first.value))
        if isinstance(node, ast.Module) or not skipped_on_rocm(node.decorator_list, self._known):
            self.generic_visit(node)

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _body  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.asname:
                self._aliases[alias.asname] = alias.name
            self._import(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not node.module:
            return
        for alias in node.names:
            self._aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        if not self._import(node.module, node):
            for alias in node.names:
                self._import(f"{node.module}.{alias.name}", node)

    def _import(self, module: str, node: ast.AST) -> bool:
        if module.partition(".")[0] in self._own:
            return False
        for phrase in python_rules("module"):
            for name in phrase.names:
                if module == name or module.startswith(name + "."):
                    # Caught: what happens without it is the code's own choice.
                    self._add(phrase, node, module, "note" if self._tried else None)
                    return True
        return False

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if id(node) in self._harmless:
            return
        if not self._named(dotted(node), node):
            self.generic_visit(node)

    def _named(self, full: str, node: ast.AST) -> bool:
        for phrase in python_rules("attribute"):
            if full and any(full == name or self._resolved(full) == name for name in phrase.names):
                self._add(phrase, node, full)
                return True
        return False

    def visit_Name(self, node: ast.Name) -> None:
        self._named(self._aliases.get(node.id, ""), node)

    def _resolved(self, full: str) -> str:
        head, dot, rest = full.partition(".")
        return self._aliases.get(head, head) + dot + rest

    def visit_Call(self, node: ast.Call) -> None:
        if on_rocm(node, self._known) is not None:
            # Asks which of the two it is, as it should.
            return
        name = dotted(node.func).rpartition(".")[2]
        if name in ("add_argument", "add_option"):
            # A program's own options may be called as a compiler's.
            self._documentation.update(map(id, node.args))
        self._by_text(node, name)
        for keyword in node.keywords:
            if keyword.arg == "libraries":
                self._libraries(keyword.value)
            if keyword.arg == "num_warps":
                self._warps(keyword.value)
            if keyword.arg == "num_ctas" and isinstance(keyword.value, ast.Constant) and keyword.value.value != 1:
                self._hazard("triton-nvidia", "error", "clusters of blocks are NVIDIA's alone", keyword.value,
                             "leave num_ctas at 1 on ROCm", name="num_ctas")  # fmt: skip
        self.generic_visit(node)

    def _by_text(self, node: ast.Call, name: str) -> None:
        """Modules, attributes and libraries that are named in a string."""
        texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in ("import_module", "__import__") and texts:
            self._import(texts[0], node)
        elif name == "find_library" and texts:
            self._libraries(node.args[0])
        elif name == "getattr" and texts and len(node.args) > 1:
            self._named(f"{dotted(node.args[0])}.{texts[0]}", node)
        elif name == "append" and texts and "lib" in dotted(node.func).lower():
            self._libraries(node.args[0])
        elif name in ("get", "setdefault", "pop") and texts and "environ" not in dotted(node.func):
            self._keys(node.args[0])

    def _keys(self, *nodes: ast.expr) -> None:
        """Strings that name something, `flags["nvcc"]`, and run nothing."""
        self._documentation.update(id(one) for one in nodes if isinstance(one, ast.Constant) and one.value in _TOOLS)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self._keys(node.slice)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """`{"num_warps": 32}`, as autotuners are told."""
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "num_warps":
                self._warps(value)
            # A key such as "nvcc" names something; what stands under it is looked at.
            self.visit(value)

    def _libraries(self, value: ast.expr) -> None:
        """`libraries=["cudart"]` of an extension is -lcudart."""
        for one in ast.walk(value):
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                self._string(one, f"-l{one.value}")

    def _warps(self, node: ast.expr) -> None:
        """A number, a name that is set to one, or a loop's name that becomes one after the other."""
        named = node.id if isinstance(node, ast.Name) else ""
        possible = self._known.loops.get(named) or [self._known.values.get(named, node)]
        numbers = [one.value for one in possible if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        most = max(numbers, default=0)
        threads = most * 64
        if threads > _MOST_THREADS:
            what = f"num_warps={most} is {threads:,} threads here, more than the {_MOST_THREADS:,} of a block"
            self._hazard("triton-warps", "error", what, node, "give at most 16 on gfx9", "wave64", "num_warps")

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._size(target, node.value)
        self.generic_visit(node)

    visit_Assign = visit_AnnAssign = _assignment  # noqa: N815

    def _size(self, target: ast.expr, value: ast.expr | None) -> None:
        name = dotted(target).rpartition(".")[2]
        if name == "num_warps" and value is not None:
            self._warps(value)
        if _WARP_SIZE.match(name) and isinstance(value, ast.Constant) and value.value == 32:
            what = f"{name} says that a warp has 32 lanes, a wavefront of this target has 64"
            remedy = "take torch.cuda.get_device_properties(0).warp_size"
            self._hazard("warp-size", "unknown", what, value, remedy, "wave64", name)

    def visit_Compare(self, node: ast.Compare) -> None:
        if on_rocm(node, self._known) is not None:
            return
        self._keys(node.left, *node.comparators)
        asked = _compared_major(node)
        if asked is not None and not passes_for_hopper(*asked):
            self._harmless |= {id(one) for one in ast.walk(node.left) if isinstance(one, ast.Attribute)}
        else:
            self._capability(node)
        self.generic_visit(node)

    def _targets(self, node: ast.Tuple | ast.List | ast.Set) -> None:
        """`("gfx90a", "gfx942")`: a list of targets that a newer one is missing from."""
        named = {target for one in node.elts if isinstance(one, ast.Constant) for target in targets_in(str(one.value))}
        for isa in sorted(DATA_CENTRE_ISAS - named) if len(named) > 1 else ():
            remedy = f"add {isa} where it has what the list stands for"
            self._hazard("target-list", "unknown", f"a list of targets without {isa}", node, remedy, isa, isa)
        self.generic_visit(node)

    visit_List = visit_Set = visit_Tuple = _targets  # noqa: N815

    def _capability(self, node: ast.Compare) -> None:
        """`props.major >= 9`."""
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Attribute) and side.attr == "major" and self._is_properties(side.value):
                what = "a compute capability is taken as a number: ROCm answers 9.4 for gfx942 and 9.5 for gfx950"
                self._hazard("compute-capability", "error", what, node, "ask for gcnArchName on ROCm", "gfx9", "major")

    def _is_properties(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Name) and value.id in self._known.values:
            value = self._known.values[value.id]
        return "prop" in ast.unparse(value).lower()

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and id(node) not in self._documentation:
            self._string(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [str(part.value) if isinstance(part, ast.Constant) else "formatted" for part in node.values]
        self._string(node, "".join(parts))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part)

    def _string(self, node: ast.expr, value: str) -> None:
        if _CUDA_TEXT.search(value):
            opening = self.lines[node.lineno - 1][node.col_offset :]
            begins = re.match(r"[a-zA-Z]{0,2}(?:'''|\"\"\")(\\?)", opening)
            self.cuda.append((value, node.lineno + bool(begins and begins[1]), begins is not None))
            return
        for phrase in python_rules("string"):
            assert phrase.pattern is not None
            if len(value) < 400 and phrase.pattern.search(value):
                # A tool that is called and may be missing: what happens without it is the code's own choice.
                self._add(phrase, node, value[:40], "note" if self._tried and phrase.id == "nvidia-tool" else None)
                return


def _compared_major(node: ast.Compare) -> tuple[str, int] | None:
    """Sign and number of `capability() >= (8, 0)`, `capability()[0] == 9` and `props.major >= 10`."""
    signs = {ast.GtE: ">=", ast.LtE: "<=", ast.Gt: ">", ast.Lt: "<", ast.Eq: "==", ast.NotEq: "!="}
    if len(node.ops) != 1 or type(node.ops[0]) not in signs:
        return None
    right = node.comparators[0]
    first = right.elts[0] if isinstance(right, ast.Tuple) and right.elts else right
    if not isinstance(first, ast.Constant) or not isinstance(first.value, int):
        return None
    left = ast.unparse(node.left)
    of_device = "get_device_capability" in left or left.endswith(".major")
    return (signs[type(node.ops[0])], first.value) if of_device else None


def python_hazards(path: str, text: str, own: frozenset[str] = frozenset()) -> list[SourceHazard]:
    """`own`: packages of the tree itself, which it may import whatever they are called elsewhere. Of Cython only CUDA
    in its strings is read."""
    if path.endswith(_CYTHON):
        texts = [found for found in _LONG_STRING.finditer(text) if _CUDA_TEXT.search(found[2])]
        chunks = [(found[2], text.count("\n", 0, found.start(2)) + 1) for found in texts]
        return [hazard for chunk, line in chunks for hazard in _embedded(path, chunk, line, has_lines=True)]
    try:
        tree = parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else None
        what = "this file is no Python that could be read"
        return [SourceHazard("unread", "unknown", what, path, shorten(str(error)), "check it by hand", line)]
    try:
        reader = _Reader(path, text, known_of(tree), own)
        reader.visit(tree)
    except RecursionError:
        what, why = "this file is nested too deeply to be read", "expressions nested beyond Python's recursion limit"
        return [SourceHazard("unread", "unknown", what, path, why, "check it by hand", 1)]
    return _once(reader.found) + [hazard for chunk in reader.cuda for hazard in _embedded(path, *chunk)]


def _once(hazards: list[SourceHazard]) -> list[SourceHazard]:
    """The same thing said again and again in one file is one finding, with the lines of the others."""
    kept: dict[tuple[str, str, str], list[SourceHazard]] = {}
    for hazard in hazards:
        kept.setdefault((hazard.check, hazard.what, hazard.severity), []).append(hazard)
    return [
        replace(same[0], evidence=same[0].evidence + also(sorted({one.line or 0 for one in same[1:]})))
        for same in kept.values()
    ]


def _embedded(path: str, text: str, line: int, has_lines: bool) -> Iterator[SourceHazard]:
    """CUDA text in a string, read as a file of its own, with the lines of the file that holds it."""
    project = Project({f"{path}.cu": text})
    for hazard in cpp_hazards(f"{path}.cu", project):
        at = line + (hazard.line or 1) - 1 if has_lines else line
        yield replace(hazard, file=path, line=at)
