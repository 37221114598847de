"""The truth of graph capture on a real GPU: each case of a case file is captured, replayed and compared with eager.

    python benchmarks/capture_truth.py OUT.csv                       # tests/port/capture/cases, about 610 functions
    python benchmarks/capture_truth.py OUT.csv --models              # tiny transformers models instead
    python benchmarks/capture_truth.py OUT.csv --cases FILE.py ...   # any file with CASES, State and inputs(dev, seed)
    python benchmarks/capture_truth.py OUT.csv --device cpu          # no capture: only whether each case runs eagerly

How a case is run. A State and static inputs of seed 0 are made; the function is called three times on a side stream,
as PyTorch's documentation prescribes; it is captured once with `torch.cuda.graph`; then inputs of seeds 1, 1, 2 and 3
are copied into the static tensors, and the graph is replayed after each copy.

What it is compared with. A twin State in a freshly loaded case module goes through the same three calls and then
through four eager calls on the same static tensors with the same four inputs. Capturing runs no kernel, so no call of
the twin stands for it: a replay must do what the next eager call would have done. A Python counter agrees at the
first replay (capture has counted up as that call would have) and differs at the second; a sum kept in a device tensor
agrees at all.

    ok      captured, and all four replays equal the twin's four calls
    stale   captured, and a replay differs from the twin's call in value, shape or structure
    error   capture or a replay raised, or the process died there; the message has the first cause, too
    broken  the function does not run eagerly on this machine, or took too long: no truth

A case that draws from the device's generator (its `random` attribute is set, or the twin's outputs follow the device's
seed and nothing else) is `ok` if the shapes agree and two replays on the same inputs differ as two eager calls do.

Two more columns say what other definitions would have answered, for cases where it matters: `fresh` compares the
first replay with one call on a new State, `same` the last replay with one more eager call on the captured State.
"""

import argparse
import csv
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "port" / "capture" / "cases"
MODELS = FOLDER / "tiny_transformers.py"
NOT_CASES = {"__init__.py", "setting.py", MODELS.name}
COLUMNS = ("case", "verdict", "message", "torch", "fresh", "same")
WARM_UPS = 3
SEEDS = (1, 1, 2, 3)
PROCESSES = 12
LIMIT_S = 60.0
MODELS_LIMIT_S = 240.0  # importing transformers alone takes many seconds when a dozen processes do it
Row = dict[str, str]
FORK = multiprocessing.get_context("fork")  # torch is imported once; CUDA is first touched in the child


class Run:
    """One State and one set of static inputs, in a case module loaded for it alone: globals are state, too."""

    def __init__(self, file: Path, name: str, device: str) -> None:
        module = load(file)
        random.seed(0)
        torch.manual_seed(0)
        self.device = device
        self.inputs: Callable[[str, int], tuple[Any, ...]] = module.inputs
        self.function = module.CASES[name]
        self.state = module.State(device)
        self.static = tuple(module.inputs(device, 0))

    def call(self) -> Any:
        return self.function(self.state, *self.static)

    def warm_up(self) -> None:
        for _ in range(WARM_UPS):
            self.call()

    def feed(self, seed: int) -> None:
        for static, new in zip(self.static, self.inputs(self.device, seed), strict=True):
            static.copy_(new)

    def eager(self, device_seed: int = 0) -> Iterator[Any]:
        """The outputs of the twin's calls, on the host."""
        if self.device == "cuda":
            torch.cuda.manual_seed(device_seed)
        self.warm_up()
        for seed in SEEDS:
            self.feed(seed)
            yield on_host(self.call())


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"case_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_host(value: Any) -> Any:
    """A copy that later replays cannot write to."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [on_host(part) for part in value]
    return value


def same_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point() or a.is_complex():
            return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
        return bool(torch.equal(a, b))
    return type(a) is type(b) and parts(a, b, same_values, lambda: bool(a == b))


def same_shapes(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return bool(a.shape == b.shape and a.dtype == b.dtype)
    return type(a) is type(b) and parts(a, b, same_shapes, lambda: True)


def parts(a: Any, b: Any, same: Callable[[Any, Any], bool], otherwise: Callable[[], bool]) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return otherwise()


def says(error: BaseException) -> str:
    """The error in a line, and the first one where leaving the capture raised another on top of it."""
    first = error
    while first.__context__ is not None:
        first = first.__context__
    lines = [
        f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"[:200] for e in (error, first)
    ]
    return lines[0] if lines[0] == lines[1] else f"{lines[0]} | first: {lines[1]}"


def judge(file: Path, name: str, device: str, say: Callable[[str], None]) -> Row:
    """One case in this process; `say` tells the parent how far it has come, in case this process dies."""
    say("broken")
    try:
        run = Run(file, name, device)
        if device == "cpu":
            first, again = list(run.eager()), list(Run(file, name, device).eager())
            return {"verdict": "eager", "message": "" if all(map(same_values, first, again)) else "varies by itself"}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run.warm_up()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever a case raises is its answer
        return {"verdict": "broken", "message": says(error)}
    say("error")
    replays = []
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run.call()
    except Exception as error:  # noqa: BLE001
        return {"verdict": "error", "message": says(error)}
    try:
        for seed in SEEDS:
            run.feed(seed)
            graph.replay()
            torch.cuda.synchronize()
            replays.append(on_host(out))
    except Exception as error:  # noqa: BLE001
        return {"verdict": "error", "message": f"replay: {says(error)}"}
    say("broken")
    try:
        twin = list(Run(file, name, device).eager())
        verdict, message = compare(file, name, device, replays, twin, getattr(run.function, "random", False))
    except Exception as error:  # noqa: BLE001
        return {"verdict": "broken", "message": f"eager after capture: {says(error)}"}
    return {"verdict": verdict, "message": message, **other_definitions(file, name, device, run, replays)}


def compare(file: Path, name: str, device: str, replays: list[Any], twin: list[Any], drawn: bool) -> tuple[str, str]:
    wrong = [i for i, pair in enumerate(zip(replays, twin, strict=True)) if not same_values(*pair)]
    if not wrong and not drawn:
        return "ok", ""
    if not drawn:
        again, other = (list(Run(file, name, device).eager(seed)) for seed in (0, 1))
        drawn = all(map(same_values, twin, again)) and not all(map(same_values, twin, other))
    if drawn and not same_values(twin[0], twin[1]):
        if not all(map(same_shapes, replays, twin)):
            return "stale", "drawn on the device; shapes differ"
        repeats = same_values(replays[0], replays[1])
        return ("stale", "two replays drew the same") if repeats else ("ok", "drawn on the device")
    return ("stale", f"first at replay {wrong[0] + 1}") if wrong else ("ok", "")


def other_definitions(file: Path, name: str, device: str, run: Run, replays: list[Any]) -> Row:
    def answer(of: Run, replay: Any) -> str:
        try:
            return "ok" if same_values(on_host(of.call()), replay) else "stale"
        except Exception as error:  # noqa: BLE001
            return says(error)

    fresh = Run(file, name, device)
    fresh.feed(SEEDS[0])
    run.feed(SEEDS[-1])
    return {"fresh": answer(fresh, replays[0]), "same": answer(run, replays[-1])}


def child(pipe: Any, work: Callable[..., Any], *arguments: Any) -> None:
    """In the forked process: prints and device-side messages are no part of the answer."""
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        answer = work(*arguments, lambda phase: pipe.send(("phase", phase)))
    except Exception as error:  # noqa: BLE001
        answer = {"verdict": "broken", "message": says(error)}
    pipe.send(("answer", answer))
    pipe.close()
    os._exit(0)  # a context that a failed capture has poisoned may not live to be torn down


class Child:
    def __init__(self, limit_s: float, work: Callable[..., Any], *arguments: Any) -> None:
        self.pipe, theirs = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=child, args=(theirs, work, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.until = time.monotonic() + limit_s
        self.phase = "broken"

    def answer(self) -> Any:
        """What it found, or None while it still runs."""
        try:
            while self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "answer":
                    return self.end(value)
                self.phase = value
        except EOFError:
            self.process.join()
            return {"verdict": self.phase, "message": f"the process died with status {self.process.exitcode}"}
        if time.monotonic() > self.until:
            self.process.kill()
            return self.end({"verdict": "broken", "message": f"still running after the limit; was at: {self.phase}"})
        return None

    def end(self, value: Any) -> Any:
        self.process.join()
        self.pipe.close()
        return value


def names_of(file: Path, say: Callable[[str], None]) -> list[str]:
    return list(load(file).CASES)


def find_cases(files: list[Path]) -> list[tuple[Path, str]]:
    found: list[tuple[Path, str]] = []
    for file in files:
        listing = Child(MODELS_LIMIT_S, names_of, file)
        while (names := listing.answer()) is None:
            multiprocessing.connection.wait([listing.pipe], timeout=1)
        if isinstance(names, dict):
            raise SystemExit(f"{file}: {names['message']}")
        found += [(file, name) for name in names]
    twice = [name for name, count in Counter(name for _, name in found).items() if count > 1]
    if twice:
        raise SystemExit(f"names used twice: {', '.join(twice)}")
    return found


def judge_all(cases: list[tuple[Path, str]], device: str, processes: int, limit_s: float) -> Iterator[tuple[str, Row]]:
    waiting = list(reversed(cases))
    running: dict[str, Child] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            file, name = waiting.pop()
            running[name] = Child(limit_s, judge, file, name, device)
        multiprocessing.connection.wait([one.pipe for one in running.values()], timeout=1)
        for name, one in list(running.items()):
            if (row := one.answer()) is not None:
                del running[name]
                yield name, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--models", action="store_true", help="tiny transformers models, one step each")
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    files = [MODELS] if options.models else sorted(f for f in FOLDER.glob("*.py") if f.name not in NOT_CASES)
    cases = [one for one in find_cases(options.cases or files) if options.only is None or one[1] in options.only]
    order = {name: i for i, (_, name) in enumerate(cases)}
    begun = time.monotonic()
    rows: list[Row] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for name, row in judge_all(cases, options.device, options.processes, MODELS_LIMIT_S if options.models else LIMIT_S):
        rows.append({"case": name, "torch": torch.__version__, **row})
        if len(rows) % 25 == 0 or len(rows) == len(cases):  # what a time limit cuts off must not take the rest along
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, restval="")
                writer.writeheader()
                writer.writerows(sorted(rows, key=lambda row: order[row["case"]]))
    counts = Counter(row["verdict"] for row in rows)
    said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{len(rows)} cases: {said}; torch {torch.__version__}, {time.monotonic() - begun:.0f} s")
    for row in rows:
        if row["verdict"] == "broken":
            print(f"broken {row['case']}: {row['message']}")


if __name__ == "__main__":
    main()
