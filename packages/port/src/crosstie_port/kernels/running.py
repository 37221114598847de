"""One child for each instruction set; their answers in, compilations with what they concern out."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

import crosstie.core.errors
from crosstie.core.errors import BadData, BadInput, BadParameter
from crosstie.core.progress import OnProgress, Progress, no_progress
from crosstie_port.kernels.compilation import Compilation
from crosstie_port.kernels.targets import KernelTarget

# Importing a library and calling its wrappers; each compilation has a limit of its own.
_COLLECT_TIMEOUT_S = 600
_GRACE_S = 5.0

# Makes these two packages, and nothing else of this environment, importable in an interpreter that may be another one.
_BOOT = """
import importlib.util as u, os, sys
sys.path[:] = [p for p in sys.path if p]
for home in sys.argv[1:]:
    name = os.path.basename(home)
    s = u.spec_from_file_location(name, home + "/__init__.py", submodule_search_locations=[home])
    sys.modules[name] = m = u.module_from_spec(s)
    s.loader.exec_module(m)
from crosstie_port.kernels.child import main
main()
"""


class KernelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is compiled, and how."""

    # A file's absolute path, or a module's dotted name.
    what: str
    spec: str | None = None
    launch: tuple[str, ...] = ()
    jobs: int = 2
    timeout_s: float = 120.0
    max_configs: int | None = None
    cache: Path | None = None
    # The interpreter that has the Triton to compile with.
    python: str = sys.executable


class TargetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one target."""

    target: KernelTarget
    triton: str
    compilations: list[Compilation]
    found: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    left_out: int


def compile_kernels(
    options: KernelOptions, targets: Sequence[KernelTarget], on_progress: OnProgress = no_progress
) -> list[TargetResult]:
    """In the order of the targets. Those of one instruction set share their compilations."""
    one_each = {target.isa: target for target in reversed(targets)}
    together = min(len(one_each), options.jobs)
    on_progress(0, 0, f"starting {options.python} for {', '.join(one_each)}")
    progress = Progress(on_progress, "compilations")
    children: list[subprocess.Popen[bytes]] = []
    try:
        with ThreadPoolExecutor(together) as pool:
            try:
                waiting = {
                    isa: pool.submit(_child, options, target, max(1, options.jobs // together), progress, children)
                    for isa, target in one_each.items()
                }
                answers = {isa: future.result() for isa, future in waiting.items()}
            finally:
                # A child whose input has closed stops compiling and ends, so that the threads end as well.
                for child in children:
                    if child.stdin is not None:
                        child.stdin.close()
    finally:
        for child in children:
            _end(child)
    return [_on(target, answers[target.isa]) for target in targets]


def _on(target: KernelTarget, replies: dict[str, Any]) -> TargetResult:
    results = replies["results"]
    compilations = [Compilation(job=job, result=results[n], target=target) for n, job in enumerate(replies["jobs"])]
    said = {key: replies[key] for key in ("triton", "found", "failures", "left_out")}
    return TargetResult(target=target, compilations=compilations, **said)


def _child(
    options: KernelOptions, target: KernelTarget, jobs: int, progress: Progress, children: list[subprocess.Popen[bytes]]
) -> dict[str, Any]:  # fmt: skip
    asked = msgspec.to_builtins(options, enc_hook=str)
    request = {**asked, "jobs": jobs, "collect_timeout_s": _COLLECT_TIMEOUT_S, "device": target.device}
    homes = [str(Path(crosstie.core.errors.__file__).parents[1]), str(Path(__file__).parents[1])]
    with tempfile.TemporaryFile() as printed:
        try:
            child = subprocess.Popen(
                [options.python, "-c", _BOOT, *homes],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BadParameter("python", f"{options.python}: {error.strerror}") from None
        children.append(child)
        replies = _replies(child, request, progress)
        if replies is None:
            printed.seek(0)
            raise BadInput(_why(options.what, target, child.wait(), printed.read().decode(errors="replace")))
    return replies


def _replies(child: subprocess.Popen[bytes], request: dict[str, Any], progress: Progress) -> dict[str, Any] | None:
    """All that it says; None if it ends before it is done."""
    if child.stdin is None or child.stdout is None:
        return None
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        return None
    replies: dict[str, Any] = {}
    for line in child.stdout:
        said = json.loads(line)
        if "bad" in said:
            bad = said["bad"]
            raise {"BadData": BadData, "BadParameter": BadParameter, "BadInput": BadInput}[bad[0]](*bad[1:])
        if "phase" in said:
            progress.say(said["phase"])
        elif "jobs" in said:
            replies = {**said, "results": {}}
            progress.add(total=len(said["jobs"]))
        elif "number" in said:
            replies["results"][said["number"]] = said["result"]
            progress.add(1)
        elif "done" in said:
            return replies
    return None


def _why(what: str, target: KernelTarget, status: int, printed: str) -> str:
    if status == -signal.SIGALRM:
        return f"{what}: importing and launching it for {target.isa} took more than {_COLLECT_TIMEOUT_S} s"
    ended = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    lines = [line for line in printed.strip().splitlines() if line.strip()]
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return f"{what}: importing or launching it for {target.isa} ended the process by {ended}{last}"


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if child.stdout is not None:
        child.stdout.close()
