"""Many runs at once: fleets x policies x loads x seeds, on all cores or on a Ray cluster, with the same answers.

A run depends on its case and its traffic alone, both of which are drawn from seeds; so where it runs changes nothing.
Ctrl-C ends a sweep with the runs that are done.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any

from msgspec.structs import replace

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadInput, MissingExtra
from crosstie.core.fleet import Fleet
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.run_result import Run, SimulatedCase
from crosstie.decide.plan.runs import run
from crosstie.decide.plan.traffic import (
    ClosedTraffic,
    Traffic,
    closed,
    poisson,
    recorded,
    recorded_loads,
    sessions_of,
)
from crosstie.route.build import Tables

# Requests of a run that nobody gave a number for: of so many seconds, within bounds.
_USUAL_S, _FEW, _MANY = 300.0, 5000, 30_000


@dataclass(frozen=True, slots=True)
class RequestSource:
    """Where the requests of a run come from: a workload's classes, or a trace."""

    workload: Workload | None
    trace: Trace | None = None
    class_name: str | None = None
    # Of all classes together, in place of the workload's or the trace's own.
    requests_per_s: float | None = None
    requests: int | None = None
    # In a closed loop, at once: of a trace, or in place of what the workload says.
    sessions: int | None = None

    @property
    def is_closed(self) -> bool:
        """Whether prompts wait for the answers before them: sessions, unless their requests are given a rate."""
        if self.sessions is not None:
            return True
        asked = self.workload.classes if self.workload is not None and self.trace is None else ()
        return self.requests_per_s is None and any(request_class.sessions is not None for request_class in asked)

    def traffic(self, fleet: Fleet, load: float, seed: int) -> Traffic | ClosedTraffic:
        if self.is_closed:
            return self._closed(fleet, load, seed)
        if self.trace is not None:
            return recorded(
                self.trace, fleet, class_name=self.class_name, requests_per_s=self.requests_per_s, load=load,
                count=self.requests, seed=seed,
            )  # fmt: skip
        assert self.workload is not None
        rate = load * (self.requests_per_s or sum(one.requests_per_s for one in self.workload.classes))
        count = self.requests or int(min(max(rate * _USUAL_S, _FEW), _MANY))
        return poisson(self.workload, count, self.requests_per_s, load, seed)

    def _closed(self, fleet: Fleet, load: float, seed: int) -> ClosedTraffic:
        if self.trace is not None:
            assert self.sessions is not None
            live = max(round(self.sessions * load), 1)
            loads, notes = recorded_loads(self.trace, fleet, self.class_name, live)
            return closed(loads, None, self.requests, seed, notes)
        assert self.workload is not None
        loads = sessions_of(self.workload, load, self.sessions)
        if not loads:
            raise BadInput(f"--sessions: no class of {self.workload.name} has sessions")
        rest = tuple(request_class for request_class in self.workload.classes if request_class.sessions is None)
        if not rest:
            return closed(loads, None, self.requests, seed)
        beside = replace(self.workload, classes=rest)
        rate = load * sum(request_class.requests_per_s for request_class in rest)
        return closed(loads, lambda span_s: poisson(beside, max(int(rate * span_s), 1), None, load, seed),
                      self.requests, seed)  # fmt: skip


def one_run(catalog: Catalog, source: RequestSource, case: SimulatedCase, tables: Tables | None = None) -> Run:
    """`tables`: what runs before this one have tabulated of the same catalog."""
    return run(catalog, case, source.traffic(case.fleet, case.load, case.seed), tables)


@dataclass(frozen=True, slots=True)
class Swept:
    """In the order of the cases; fewer than those where it was interrupted."""

    runs: list[Run]
    cases: int

    @property
    def interrupted(self) -> bool:
        return len(self.runs) < self.cases


def sweep(
    catalog: Catalog, source: RequestSource, cases: Sequence[SimulatedCase], *, processes: int | None = None,
    ray: str | None = None, on_progress: OnProgress = no_progress,
) -> Swept:  # fmt: skip
    """`ray`: the address of a cluster, or "local" for one on this machine; else as many processes as there are cores,
    and none beside this one for a single case."""
    many = processes or os.cpu_count() or 1
    if ray is not None:
        results = _on_ray(catalog, source, cases, ray)
    elif many == 1 or len(cases) == 1:
        tables = Tables()
        results = ((number, one_run(catalog, source, case, tables)) for number, case in enumerate(cases))
    else:
        results = _on_processes(catalog, source, cases, min(many, len(cases)))
    runs: dict[int, Run] = {}
    try:
        on_progress(0, len(cases), "simulating")
        for number, result in results:
            runs[number] = result
            on_progress(len(runs), len(cases), "simulating")
    except KeyboardInterrupt:
        if not runs:
            raise
    return Swept([runs[number] for number in sorted(runs)], len(cases))


# Of a worker: what all its cases have in common.
_COMMON: dict[str, Any] = {}


def _prepare(catalog: Catalog, source: RequestSource) -> None:
    # Ctrl-C reaches every process of a terminal; what is to end is this one's parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _COMMON["catalog"], _COMMON["source"], _COMMON["tables"] = catalog, source, Tables()


def _prepared_run(case: SimulatedCase) -> Run:
    return one_run(_COMMON["catalog"], _COMMON["source"], case, _COMMON["tables"])


def _on_processes(
    catalog: Catalog, source: RequestSource, cases: Sequence[SimulatedCase], processes: int
) -> Iterator[tuple[int, Run]]:
    """As they end. Processes are started afresh: a copy of this one would have its threads' locks, not its threads."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _prepare, (catalog, source))
    left: dict[Future[Run], int] = {}
    # Not concurrent.futures.wait: interrupted, it may keep a lock of a run for which the pool's shutdown then waits.
    ended: SimpleQueue[Future[Run]] = SimpleQueue()
    try:
        for number, case in enumerate(cases):
            begun = pool.submit(_prepared_run, case)
            left[begun] = number
            begun.add_done_callback(ended.put)
        while left:
            done = ended.get()
            yield left.pop(done), done.result()
    finally:
        if left:
            # A run takes minutes where a trace is long: nobody waits for those that were begun.
            for process in list((pool._processes or {}).values()):
                process.terminate()
        pool.shutdown(cancel_futures=True)


def _on_ray(
    catalog: Catalog, source: RequestSource, cases: Sequence[SimulatedCase], address: str
) -> Iterator[tuple[int, Run]]:
    ray = ray_library()
    began = not ray.is_initialized()
    if began:
        _connect(ray, address)
    try:
        # What all cases have in common goes to the cluster once.
        common = ray.put((catalog, source))
        task: Callable[..., Any] = ray.remote(_ray_run).remote
        left = {task(common, case): number for number, case in enumerate(cases)}
        while left:
            done, _ = ray.wait(list(left), num_returns=1)
            for ended in done:
                yield left.pop(ended), ray.get(ended)
    finally:
        if began:
            ray.shutdown()


def _ray_run(common: tuple[Catalog, RequestSource], case: SimulatedCase) -> Run:
    return one_run(*common, case)


def ray_library() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra("--ray needs Ray", "ray") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options["include_dashboard"] = False
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon:
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=10.0).close()
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"--ray {address}: no cluster answers there: {error}") from None
