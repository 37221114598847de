"""What is to be compiled: kernels with their types, from a spec or from a launch that was overheard."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from crosstie.core.errors import BadData
from crosstie_port.kernels.spec import KernelSpec

_ALWAYS_SHOWN = ("num_warps", "num_stages")


@dataclass
class CompileJob:
    """One compilation. Jobs of one `group` are configurations among which an autotuner would choose."""

    function: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    group: int
    chosen_by_tuner: bool = False
    grid: tuple[int, ...] = ()
    # Why it cannot be launched at all, found before any compilation.
    refused: str = ""
    source: Callable[..., Any] | None = None

    def to_json(self, usual: dict[str, Any]) -> dict[str, Any]:
        """For people and for JSON: which kernel, launched how. `usual`: options that need no mention."""
        names = self.function.arg_names
        constants = {
            names[path[0]] + "".join(f"[{index}]" for index in path[1:]): value
            for path, value in self.constants.items()
        }
        return {
            "kernel": self.function.fn.__qualname__,
            "module": self.function.fn.__module__,
            "file": self.function.fn.__code__.co_filename,
            "line": def_line(self.function),
            "signature": {name: str(kind) for name, kind in self.signature.items() if kind != "constexpr"},
            "constexprs": {name: _word(value) for name, value in constants.items()},
            "options": {
                name: _word(value)
                for name, value in self.options.items()
                if name in _ALWAYS_SHOWN or (value is not None and value != usual.get(name))
            },
            "group": self.group,
            "chosen_by_tuner": self.chosen_by_tuner,
            "grid": list(self.grid),
            "refused": self.refused,
        }


def _word(value: object) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(getattr(value, "__name__", value))


def def_line(function: Any) -> int:
    """Of `def`, below the decorators, counted as in the file."""
    lines, first = inspect.getsourcelines(function.fn)
    return first + next((n for n, line in enumerate(lines) if line.lstrip().startswith("def ")), 0)


def jit_function(candidate: object) -> Any:
    """The kernel under autotuners, heuristics and a library's own wrappers; None if there is none."""
    for _ in range(8):
        if isinstance(candidate, JITFunction):
            return candidate
        candidate = getattr(candidate, "fn", None)
        if candidate is None or inspect.isfunction(candidate):
            return None
    return None


def _layers(candidate: Any) -> tuple[list[Any], dict[str, Callable[[dict[str, Any]], Any]]]:
    """Configurations and heuristics that stand around a kernel in its decorators."""
    configs: list[Any] = []
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while not isinstance(candidate, JITFunction):
        if isinstance(candidate, Autotuner):
            configs = list(candidate.configs)
        elif isinstance(candidate, Heuristics):
            heuristics |= candidate.values
        candidate = candidate.fn
    return configs, heuristics


def jobs_of(entry: KernelSpec, candidate: Any, backend: Any, groups: "itertools.count[int]") -> Iterator[CompileJob]:
    """Every configuration of its autotuner, or the one that the spec gives."""
    (configs, heuristics), group = _layers(candidate), next(groups)
    function = jit_function(candidate)
    unknown = sorted((set(entry.types) | set(entry.constants)) - set(function.arg_names))
    if unknown:
        raise BadData(entry.file, f"{entry.where}.{unknown[0]}", f"{entry.kernel} has no such argument")
    configs = configs[: entry.max_configs] or [None]
    for config in configs:
        tuned = {} if config is None else config.all_kwargs()
        constants = {**entry.constants, **{n: v for n, v in tuned.items() if n in function.arg_names}}
        options = {**{n: v for n, v in tuned.items() if n not in function.arg_names}, **entry.options}
        for name, compute in heuristics.items():
            if name not in constants:
                constants[name] = _computed(entry, name, compute, {**entry.types, **constants, **options})
        yield _job(entry, function, constants, options, backend, group, tuned=len(configs) > 1)


def left_out(entry: KernelSpec, candidate: Any) -> int:
    """Configurations that the spec does not want compiled."""
    return 0 if entry.max_configs is None else max(0, len(_layers(candidate)[0]) - entry.max_configs)


def _computed(entry: KernelSpec, name: str, compute: Callable[[dict[str, Any]], Any], known: dict[str, Any]) -> Any:
    try:
        return compute(known)
    except Exception as error:  # noqa: BLE001 - a heuristic is the author's code and may raise anything
        reason = f"its heuristic needs what a spec does not have ({type(error).__name__}: {error}); give the value"
        raise BadData(entry.file, f"{entry.where}.constexprs.{name}", reason) from None


def _job(
    entry: KernelSpec, function: Any, constants: dict[str, Any], options: dict[str, Any], backend: Any, group: int,
    tuned: bool,
) -> CompileJob:  # fmt: skip
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for number, parameter in enumerate(function.params):
        name = parameter.name
        kind = entry.types.get(name) or (None if name in constants else parameter.annotation_type or None)
        if kind is None or kind == "none":
            signature[name] = "constexpr"
            if name in constants:
                values[number,] = _constant(entry, name, constants[name])
            elif kind is None and parameter.has_default:
                values[number,] = parameter.default
            elif kind == "none":
                values[number,] = None
            else:
                where = "constexprs" if parameter.is_constexpr else "signature"
                raise BadData(entry.file, f"{entry.where}.{where}.{name}", "missing: the kernel needs this argument")
        elif parameter.is_constexpr:
            raise BadData(entry.file, f"{entry.where}.signature.{name}", "is a constexpr: it needs a value, not a type")
        else:
            signature[name] = kind
            attributes[number,] = _attributes(entry, name, kind, backend)
    refused = refused_options(backend, options)
    return CompileJob(
        function, signature, values, attributes, options, group, tuned, entry.grid, refused, _source(function)
    )


def _source(function: Any) -> Callable[..., Any] | None:
    """Gluon has a front end of its own; None is Triton's."""
    if not getattr(function, "is_gluon", bool)():
        return None
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _constant(entry: KernelSpec, name: str, value: Any) -> Any:
    """TOML has no word for a type: "tl.float16" is one."""
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language

        kind = getattr(triton.language, value.removeprefix("tl."), None)
        if kind is None:
            raise BadData(entry.file, f"{entry.where}.constexprs.{name}", f"triton.language has no '{value[3:]}'")
        return kind
    return tuple(value) if isinstance(value, list) else value


def _attributes(entry: KernelSpec, name: str, kind: str, backend: Any) -> list[list[Any]]:
    """As a launch would find them, in the words of the backend: D is divisible by 16, S lies within 2 GiB."""
    letters = ""
    if (kind.startswith("*") or kind[0] in "iu") and entry.divides(name) % 16 == 0:
        letters += "D"
    if kind.startswith("*") and name not in entry.large and backend.target.backend == "hip":
        letters += "S"
    parsed: list[list[Any]] = backend.parse_attr(letters)
    return parsed


def refused_options(backend: Any, options: dict[str, Any]) -> str:
    """What Triton's launch would say of options that this backend does not have, or does not take."""
    try:
        known = backend.parse_options(dict(options)).__dict__
    except Exception as error:  # noqa: BLE001 - backends raise ValueError, AssertionError and what not
        return f"{type(error).__name__}: {error}"
    unknown = [name for name, value in options.items() if name not in known and value is not None]
    return f"KeyError: Keyword argument {unknown[0]} was specified but unrecognised" if unknown else ""
