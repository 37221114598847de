"""A shadow launch: a library's own code is called, and what it would have launched is written down instead.

Triton makes signature, constants and attributes from the arguments as ever, and calls a `compile` that notes them and
unwinds; everything before it is Triton's own.
"""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.compiler
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from crosstie.port.kernels.fake_device import as_they_are
from crosstie.port.kernels.jobs import Job


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


class Recorder:
    """Jobs in the order of their launches, each once."""

    def __init__(self, groups: "itertools.count[int]", compile_now: Callable[[Job], dict[str, Any]]):
        self.jobs: list[Job] = []
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
            self._add(Job(function, {}, {}, {}, given, 0, refused=f"{type(error).__name__}: {error}"), str(given))
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
        job = Job(
            source.fn, source.signature, source.constants, source.attrs, dict(options or {}), 0,
            grid=self._grid, source=type(source),
        )  # fmt: skip
        self._add(job, f"{source.hash()} {options}")
        raise _NotedError

    def _add(self, job: Job, key: str) -> None:
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
