"""The process that imports the author's code, collects what it would launch on one target, and compiles all of it.

It reads a request as one line of JSON and answers in lines of JSON. It may run in another environment than Crosstie's
own (a container's, with its Triton), so it needs the standard library and Triton alone.
"""

import ast
import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, TextIO

from crosstie.core.errors import BadData, BadInput, BadParameter, CrosstieError
from crosstie_port.kernels.spec import KernelSpec, entries, read_spec_file

LAUNCH_PREFIX = "crosstie_launch"
SPEC_NAME = "CROSSTIE_KERNELS"
_JIT = ("jit", "autotune", "heuristics")
# Names under which a module may have triton without importing it from there, as `from vllm.triton_utils import triton`.
_USUAL = {"triton", "gluon"}

_MOST_MISSING = 5

Say = Callable[[dict[str, Any]], None]


@dataclass
class FoundKernel:
    name: str
    file: str
    line: int
    # The kernel with its autotuner and heuristics; None where it is made inside a function.
    candidate: Any
    # A function that kernels call, and nobody can launch.
    helper: bool
    # From another module.
    imported: bool

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "candidate"}


def main() -> None:
    request = json.loads(sys.stdin.readline())
    # What the author's code prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        _run(request, lambda said: _say(answers, said))
    except BadData as error:
        _say(answers, {"bad": ["BadData", error.file, error.key, error.reason]})
    except BadParameter as error:
        _say(answers, {"bad": ["BadParameter", error.parameter, error.rest]})
    except CrosstieError as error:
        _say(answers, {"bad": ["BadInput", str(error)]})
    answers.close()
    # Torch and others keep threads that may take their time.
    os._exit(0)


def _say(answers: TextIO, said: dict[str, Any]) -> None:
    answers.write(json.dumps(said) + "\n")
    answers.flush()


def _run(request: dict[str, Any], say: Say) -> None:
    _quiet_surroundings()
    try:
        import triton
        from triton.compiler import make_backend
    except ImportError:
        raise BadInput("preflight kernels needs triton: pip install triton") from None
    from crosstie_port.kernels.compiling import Compiler
    from crosstie_port.kernels.shadow import Driver, FakeGpu, LaunchRecorder, pretend

    device = FakeGpu(**request["device"])
    _Missing.watch()
    say({"phase": f"importing {Path(request['what']).name} for {device.isa}"})
    target = Driver(device).target
    backend = make_backend(target)
    usual = backend.parse_options({}).__dict__
    cache = Path(request["cache"]) if request["cache"] else None
    compiler = Compiler(target, backend, jobs=request["jobs"], timeout_s=request["timeout_s"], cache=cache)
    pretend(device)
    # By default a signal that nobody handles: code that hangs inside a C library ends as well.
    signal.alarm(int(request["collect_timeout_s"]))
    groups = itertools.count()
    recorder = LaunchRecorder(groups, compiler.now)
    recorder.install(request["max_configs"])
    module, stopped = load(request["what"])
    kernels = kernels_in(module)
    if stopped is not None and not kernels and not recorder.jobs:
        why = f"cannot be imported: {stopped['type']}: {stopped['message']}"
        raise BadData(request["what"], f"line {stopped['line']}" if stopped["line"] else "", why)
    jobs, unwanted = _specified(request, device, module, kernels, backend, groups)
    failures = ([stopped] if stopped else []) + _launch_all(request, module, device, say)
    jobs += recorder.jobs
    signal.alarm(0)
    say(
        {
            "triton": triton.__version__,
            "jobs": [job.to_json(usual) for job in jobs],
            "found": [kernel.to_json() for kernel in kernels],
            "failures": failures,
            "left_out": recorder.left_out + unwanted,
        }
    )
    for number, result in compiler.results(jobs, _orphaned):
        if result.get("lds_bytes", 0) > device.lds_bytes:
            result["fits_with"] = compiler.fewer_stages(jobs[number], device.lds_bytes)
        say({"number": number, "result": result})
    say({"done": True})


def _quiet_surroundings() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    # torch.compile around a wrapper would run its own compiler instead of the wrapper.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    # A result of an earlier run in Triton's own cache would come without what the compiler printed.
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"


def _orphaned() -> bool:
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and not os.read(0, 1)


class _Missing:
    """The last finder of all: what is asked of it, nobody has. Code that goes on without a module fails later, with
    `'NoneType' object is not callable` or the like."""

    names: ClassVar[dict[str, None]] = {}

    @classmethod
    def watch(cls) -> None:
        sys.meta_path.append(cls)

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> None:
        if path is None:
            cls.names[name] = None

    @classmethod
    def behind(cls, error: BaseException | None) -> list[str]:
        """What could not be imported on the way to this error; else what may be None or undefined because of it."""
        first = error
        while error is not None:
            if isinstance(error, ImportError) and error.name:
                return [error.name]
            error = error.__cause__ or error.__context__
        vague = isinstance(first, NameError) or "NoneType" in str(first)
        # The latest: libraries ask for many that they do well without.
        return [name for name in cls.names if name not in sys.stdlib_module_names][-_MOST_MISSING:] if vague else []


class _FromSource(SourceFileLoader):
    """Compiled bytes of a file that was changed within a second, and kept its size, would be taken for the new ones."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load(what: str) -> tuple[ModuleType, dict[str, Any] | None]:
    """A file, or a module by its dotted name; and where a file stopped that went on to run its kernels when imported.

    Scripts do: their kernels are there, and what they would have launched until then has been noted.
    """
    from crosstie_port.kernels.compiling import import_error

    file = Path(what)
    root, name = _in_package(file) if what.endswith(".py") else (Path.cwd(), what)
    sys.path.insert(0, str(root))
    if not what.endswith(".py") or "." in name:
        try:
            return importlib.import_module(name), None
        except Exception as error:  # noqa: BLE001 - the author's code may raise anything
            fault = import_error(error, what)
            raise BadInput(f"{what}: cannot be imported: {fault['type']}: {fault['message']}") from None
    spec = importlib.util.spec_from_file_location(name, file, loader=_FromSource(name, str(file)))
    if spec is None or spec.loader is None:
        raise BadData(file, "", "is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs, because pickles and dataclasses look a module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above
        return module, {"launcher": file.name, **import_error(error, what), "missing": _Missing.behind(error)}
    return module, None


def _in_package(file: Path) -> tuple[Path, str]:
    """The folder to import from, and the name there: a file of a package may import its neighbours relatively."""
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    if len(parts) == 1 and (parts[0] in sys.modules or parts[0] in sys.stdlib_module_names):
        parts = [f"kernels_of_{parts[0]}"]
    return folder, ".".join(parts)


def _specified(
    request: dict[str, Any], device: Any, module: ModuleType, found: list[FoundKernel], backend: Any, groups: Any
) -> tuple[list[Any], int]:
    """Jobs, and how many configurations the spec leaves out."""
    from crosstie_port.kernels.jobs import jobs_of, left_out

    spec: list[KernelSpec] = read_spec_file(Path(request["spec"])) if request["spec"] else []
    written = getattr(module, SPEC_NAME, None)
    if written is not None:
        spec += entries(f"{module.__file__ or module.__name__}", written)
    kernels = {kernel.name: kernel.candidate for kernel in found if kernel.candidate is not None}
    jobs: list[Any] = []
    unwanted = 0
    for entry in spec:
        if entry.kernel not in kernels:
            named = ", ".join(sorted(kernels)) or "none"
            raise BadData(entry.file, f"{entry.where}.name", f"the module has no such kernel; it has {named}")
        if entry.for_target(device.backend, device.isa):
            jobs += jobs_of(entry, kernels[entry.kernel], backend, groups)
            unwanted += left_out(entry, kernels[entry.kernel])
    return jobs, unwanted


def _launch_all(request: dict[str, Any], module: ModuleType, device: Any, say: Say) -> list[dict[str, Any]]:
    """Calls every launcher; one that stops early is reported, with what it had launched until then kept."""
    from crosstie_port.kernels.compiling import import_error

    launchers = [getattr(module, name) for name in sorted(vars(module)) if name.startswith(LAUNCH_PREFIX)]
    launchers = [one for one in launchers if callable(one)] + [_launcher(one, module) for one in request["launch"]]
    failures = []
    for launcher in launchers:
        code = getattr(launcher, "__code__", None)
        file = code.co_filename if code else request["what"]
        say({"phase": f"launching {getattr(launcher, '__name__', '?')} for {device.isa}"})
        try:
            with contextlib.redirect_stdout(sys.stderr):
                launcher(device) if code and code.co_argcount else launcher()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the author's code may raise anything
            fault = {**import_error(error, file), "missing": _Missing.behind(error)}
            failures.append({"launcher": getattr(launcher, "__name__", "?"), **fault})
    return failures


def _launcher(named: str, module: ModuleType) -> Any:
    where, _, name = named.rpartition(":")
    home = load(where)[0] if where else module
    found = getattr(home, name, None)
    if not callable(found):
        raise BadParameter("launch", f"{named}: {getattr(home, '__name__', where)} has no function '{name}'")
    return found


def kernels_in(module: ModuleType) -> list[FoundKernel]:
    from crosstie_port.kernels.jobs import def_line, jit_function

    kernels: dict[tuple[str, int], FoundKernel] = {}
    for name, candidate in list(vars(module).items()):
        function = jit_function(candidate)
        if function is None:
            continue
        own = function.fn.__module__ == module.__name__
        line = def_line(function)
        file = function.fn.__code__.co_filename
        kernels.setdefault(
            (file, line), FoundKernel(name, file, line, candidate, _returns_value(function.parse()), not own)
        )
    # Names that the kernels' own code calls: such a function is compiled with its caller.
    called: set[str] = set()
    for kernel in kernels.values():
        function = jit_function(kernel.candidate)
        calls = (node.func for node in ast.walk(function.parse()) if isinstance(node, ast.Call))
        called |= {call.id for call in calls if isinstance(call, ast.Name)} - {function.__name__}
    for kernel in kernels.values():
        kernel.helper |= jit_function(kernel.candidate).__name__ in called
    source = getattr(module, "__file__", None)
    if source:
        for name, line in _in_source(Path(source)):
            kernels.setdefault((source, line), FoundKernel(name, source, line, None, False, False))
    return sorted(kernels.values(), key=lambda kernel: kernel.line)


def _returns_value(tree: ast.AST) -> bool:
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))


def _in_source(file: Path) -> list[tuple[str, int]]:
    """Functions decorated with triton.jit anywhere in the file, by the line of their `def`."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    # What the file calls triton itself, and its decorators.
    modules, names = set(_USUAL), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "triton"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in _JIT}
    return [
        (node.name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_jit(expr, modules, names) for expr in node.decorator_list)
        if not _returns_value(node)
    ]


def _is_jit(decorator: ast.expr, modules: set[str], names: set[str]) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(name, ast.Attribute):
        return name.attr in _JIT and isinstance(name.value, ast.Name) and name.value.id in modules
    return isinstance(name, ast.Name) and name.id in names
