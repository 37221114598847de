"""A shadow launch: a library's own code is called on a GPU that is not there, and what it would launch is recorded.

Libraries ask torch and Triton which GPU they run on, at import and at each launch, and choose configurations by the
answer. Everything here answers for the target and runs nothing. Triton makes signature, constants and attributes from
the arguments as ever, and calls a `compile` that records them and unwinds; everything before it is Triton's own.
"""

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import triton.compiler
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from crosstie_port.kernels.jobs import CompileJob


@dataclass(frozen=True)
class FakeGpu:
    """What libraries ask a GPU for."""

    isa: str
    backend: str
    wave_width: int
    lds_bytes: int
    compute_units: int
    name: str
    memory_bytes: int

    @property
    def arch(self) -> str | int:
        """As Triton names it: "gfx942", or 90."""
        return self.isa if self.backend == "hip" else int(self.isa.removeprefix("sm_"))

    @property
    def capability(self) -> tuple[int, int]:
        if isinstance(self.arch, int):
            return divmod(self.arch, 10)
        digits = self.arch.removeprefix("gfx")
        return int(digits[:-2]), int(digits[-2], 16)


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _once(call: Callable[[], object], *_: Any, quantiles: Sequence[float] | None = None, **__: Any) -> Any:
    """In place of a benchmark: what it would time is launched, and takes a millisecond."""
    call()
    return [1.0] * len(quantiles) if quantiles else 1.0


class Driver:
    """Triton's driver, so far as a launch asks it before it runs anything."""

    def __init__(self, device: FakeGpu):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget(device.backend, device.arch, device.wave_width)
        answers = {
            "get_current_target": self.target,
            "get_current_device": 0,
            "set_current_device": None,
            "get_current_stream": 0,
            "get_device_capability": device.capability,
            "get_benchmarker": _once,
            "clear_cache": None,
            "is_active": True,
        }
        for name, answer in answers.items():
            setattr(self, name, _always(answer))
        properties = {
            "max_shared_mem": device.lds_bytes,
            "multiprocessor_count": device.compute_units,
            "warpSize": device.wave_width,
            "max_num_regs": 65536,
            "arch": device.isa,
            "sm_clock_rate": 1_000_000,
            "mem_clock_rate": 1_000_000,
            "mem_bus_width": 8192,
            "max_threads_per_sm": 2048,
        }
        self.utils = SimpleNamespace(get_device_properties=_always(properties))
        self.launcher_cls = None

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def pretend(device: FakeGpu) -> None:
    """For the rest of this process. Torch is changed when somebody imports it, since many kernels do without."""
    import triton.testing
    from triton.backends import backends
    from triton.runtime import driver

    driver.set_active(Driver(device))
    for backend in backends.values():
        backend.driver.is_active = staticmethod(_always(backend.compiler.supports_target(driver.active.target)))
    triton.testing.do_bench = triton.testing.do_bench_cudagraph = _once
    # Scripts plot benchmarks when they are imported; they are no launches that anybody asked about.
    triton.testing.Mark.run = _always(None)
    if "torch" in sys.modules:
        _pretend_torch(sys.modules["torch"], device)
    else:
        sys.meta_path.insert(0, _AfterTorch(device))


class _AfterTorch(importlib.abc.MetaPathFinder):
    def __init__(self, device: FakeGpu):
        self._device = device

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            load, device = spec.loader.exec_module, self._device

            def then_pretend(module: types.ModuleType) -> None:
                load(module)
                _pretend_torch(module, device)

            vars(spec.loader)["exec_module"] = then_pretend
        return spec


class _Anything:
    """A stream, an event: whatever is called on it does nothing."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> "_Anything":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _pretend_torch(torch: Any, device: FakeGpu) -> None:
    hip = device.backend == "hip"
    torch.version.hip = "7.0.0" if hip else None
    torch.version.cuda = None if hip else "12.8"
    properties = types.SimpleNamespace(
        name=device.name,
        gcnArchName=f"{device.isa}:sramecc+:xnack-" if hip else "",
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.compute_units,
        warp_size=device.wave_width,
        shared_memory_per_block=min(device.lds_bytes, 65536 if hip else 49152),
        shared_memory_per_block_optin=device.lds_bytes,
        shared_memory_per_multiprocessor=device.lds_bytes,
        total_memory=device.memory_bytes,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        L2_cache_size=4 << 20,
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": device.capability,
        "get_device_name": device.name,
        "get_device_properties": properties,
        "get_arch_list": [device.isa],
        "synchronize": None,
        "init": None,
        "empty_cache": None,
        "set_device": None,
        "mem_get_info": (device.memory_bytes, device.memory_bytes),
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "initial_seed": 0,
    }
    silent = ("manual_seed", "manual_seed_all", "seed", "seed_all", "reset_peak_memory_stats", "ipc_collect")
    answers |= dict.fromkeys(silent)
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    for name in ("device", "device_of", "stream", "Stream", "Event", "current_stream", "default_stream"):
        setattr(torch.cuda, name, _Anything)
    torch.cuda._lazy_init = _always(None)
    # A default device would be asked after the mode below, which turns "cuda" into "cpu".
    torch.set_default_device = _always(None)
    # Nothing is computed, so a comparison of results has nothing to say; what comes after it may launch more.
    torch.allclose = _always(True)
    torch.testing.assert_close = _always(None)
    torch.Generator = _host_generator(torch.Generator)
    _looks_like_gpu(torch).__enter__()


def _host_generator(generator: Any) -> Any:
    class Generator(generator):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return generator.__new__(generator)

    return Generator


def _looks_like_gpu(torch: Any) -> Any:
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    gpu = torch.device("cuda", 0)
    constant = {
        tensor.is_cuda.__get__: True,
        tensor.is_cpu.__get__: False,
        tensor.device.__get__: gpu,
        tensor.get_device: 0,
        tensor.is_pinned: True,
    }
    same = {tensor.cuda, tensor.pin_memory}

    def on_host(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value

    class LooksLikeGpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func in constant:
                # A tensor on "meta" stays there.
                return constant[func] if tensor.device.__get__(args[0]).type == "cpu" else func(*args)
            if func in same:
                return args[0]
            if func is torch.device:
                return func(*args, **(kwargs or {}))
            keywords = {name: on_host(value) for name, value in (kwargs or {}).items()}
            keywords.pop("pin_memory", None)
            return func(*builtins.map(on_host, args), **keywords)

    return LooksLikeGpu()


def as_they_are() -> contextlib.AbstractContextManager[Any]:
    """Triton reads addresses and sizes of tensors itself; it needs no pretence and would be slowed by it."""
    torch = sys.modules.get("torch")
    return torch._C.DisableTorchFunction() if torch else contextlib.nullcontext()


class _NotedError(Exception):
    """Out of a launch whose job has been written down."""


class Launched:
    """In place of the compiled kernel. Code that asks it for registers gets them from a compilation of its own."""

    def __init__(self, compiled: Callable[[], dict[str, Any]]):
        self._compiled = compiled

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, _: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    @property
    def n_regs(self) -> int:
        facts = self._compiled()
        return int(facts.get("registers") or facts.get("vgprs") or 1)

    @property
    def n_spills(self) -> int:
        return int(self._compiled().get("vgpr_spills", 0))

    @property
    def metadata(self) -> SimpleNamespace:
        facts = self._compiled()
        return SimpleNamespace(shared=facts.get("lds_bytes", 0), num_warps=facts.get("num_warps", 4))


class LaunchRecorder:
    """Jobs in the order of their launches, each once."""

    def __init__(self, groups: "itertools.count[int]", compile_now: Callable[[CompileJob], dict[str, Any]]):
        self.jobs: list[CompileJob] = []
        self.left_out = 0
        self._groups = groups
        self._compile_now = compile_now
        self._seen: set[str] = set()
        self._tuning: int | None = None
        self._grid: tuple[int, ...] = ()

    def install(self, max_configs: int | None) -> None:
        run, recorder = JITFunction.run, self

        def launch(function: Any, *args: Any, grid: Any = None, warmup: bool = False, **options: Any) -> Any:
            with as_they_are():
                return recorder._launch(run, function, args, grid, options)

        def tune(tuner: Any, *args: Any, **options: Any) -> None:
            recorder._tune(tuner, args, options, max_configs)

        JITFunction.run = launch
        # A kernel takes this name from the package when it is first launched.
        triton.compiler.compile = recorder._record
        Autotuner.run = tune
        Autotuner.warmup = lambda tuner, *args, **options: tune(tuner, *args, **{**options, "warmup": True})

    def _launch(self, run: Any, function: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> Any:
        before = len(self.jobs)
        self._grid = _evaluated(grid, {**dict(zip(function.arg_names, args, strict=False)), **options})
        try:
            run(function, *args, grid=grid, warmup=True, **options)
        except _NotedError:
            pass
        except Exception as error:  # noqa: BLE001 - what Triton raises here, it would raise at a real launch
            given = {name: value for name, value in options.items() if name not in function.arg_names}
            self._add(
                CompileJob(function, {}, {}, {}, given, 0, refused=f"{type(error).__name__}: {error}"), str(given)
            )
        job = self.jobs[-1] if len(self.jobs) > before else None
        return Launched(lambda: self._compile_now(job) if job else {})

    def _tune(self, tuner: Any, args: tuple[Any, ...], options: dict[str, Any], max_configs: int | None) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        configs = tuner.prune_configs(options)
        self._tuning = next(self._groups) if len(configs) > 1 else None
        self.left_out += len(configs[max_configs:]) if max_configs else 0
        for config in configs[:max_configs]:
            if config.pre_hook is not None:
                config.pre_hook({**tuner.nargs, **options, **config.all_kwargs()})
            tuner.fn.run(*args, **{"grid": None, "warmup": True, **options}, **config.all_kwargs())
        tuner.nargs, tuner.best_config, self._tuning = None, configs[0], None

    def _record(self, source: Any, target: Any = None, options: dict[str, Any] | None = None, **_: Any) -> None:
        """In place of `triton.compile`."""
        job = CompileJob(
            source.fn, source.signature, source.constants, source.attrs, dict(options or {}), 0,
            grid=self._grid, source=type(source),
        )  # fmt: skip
        self._add(job, f"{source.hash()} {options}")
        raise _NotedError

    def _add(self, job: CompileJob, key: str) -> None:
        # The same launch again is nothing new; under an autotuner it still belongs to the group.
        name = f"{job.function.cache_key} {key} {self._tuning is not None} {job.refused}"
        if name in self._seen:
            return
        self._seen.add(name)
        job.group = next(self._groups) if self._tuning is None else self._tuning
        job.chosen_by_tuner = self._tuning is not None
        self.jobs.append(job)


def _evaluated(grid: Any, bound: dict[str, Any]) -> tuple[int, ...]:
    """Empty where a grid depends on what is not a constant."""
    try:
        found = grid(bound) if callable(grid) else grid
        return tuple(int(size) for size in found or ())
    except Exception:  # noqa: BLE001 - the grid is the library's code; without it one check is left out
        return ()
