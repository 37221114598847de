"""Compiles each job in a process of its own, forked from one that has everything imported.

A compiler may print its errors and succeed, hang, run out of memory or crash: all four are results here. Results are
kept on disk by content, so that a second run compiles nothing.
"""

import gc
import hashlib
import json
import os
import re
import resource
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import triton
from triton.compiler import ASTSource, compile
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from crosstie_port.kernels.jobs import CompileJob, def_line
from crosstie_port.kernels.machine_code import read_amdgcn, read_ptx, read_ttir

# Bumped when facts change their meaning: older results on disk are then left alone.
_FACTS = "2"
_KEPT = ("compiled", "failed")
_STDERR_LIMIT = 4000
# Variables that change what Triton and LLVM make.
_SWITCHES = ("TRITON_", "AMDGCN_", "LLVM_", "MLIR_", "DISABLE_", "HIP_", "PTXAS")

Result = dict[str, Any]


class Compiler:
    def __init__(self, target: Any, backend: Any, *, jobs: int, timeout_s: float, cache: Path | None):
        self._target, self._backend = target, backend
        self._jobs, self._timeout_s, self._cache = jobs, timeout_s, cache

    def results(self, jobs: Sequence[CompileJob], orphaned: Callable[[], bool]) -> Iterator[tuple[int, Result]]:
        """In the order in which they end. `orphaned` is asked now and then: nobody may be left to read them."""
        waiting = []
        for number, job in enumerate(jobs):
            kept = {"status": "refused"} if job.refused else self._kept(job)
            if kept is None:
                waiting.append(number)
            else:
                yield number, kept
        with selectors.DefaultSelector() as selector:
            running: dict[int, _Compilation] = {}
            try:
                while waiting or running:
                    while waiting and len(running) < self._jobs:
                        number = waiting.pop(0)
                        compilation = _Compilation(partial(self._compile, jobs[number]), self._timeout_s)
                        running[number] = compilation
                        selector.register(compilation.pipe, selectors.EVENT_READ, number)
                    soonest = min(one.deadline for one in running.values())
                    for key, _ in selector.select(min(1.0, max(0.0, soonest - time.monotonic()))):
                        running[key.data].read()
                    if orphaned():
                        return
                    for number, compilation in list(running.items()):
                        if compilation.ended():
                            selector.unregister(compilation.pipe)
                            del running[number]
                            result = compilation.result()
                            self._keep(jobs[number], result)
                            yield number, result
            finally:
                for compilation in running.values():
                    compilation.kill()

    def now(self, job: CompileJob) -> Result:
        return next(iter(self.results([job], lambda: False)))[1]

    def fewer_stages(self, job: CompileJob, lds_bytes: int) -> Result | None:
        """The deepest pipeline that fits, so that a remedy is one that was tried."""
        stages = job.options.get("num_stages") or self._backend.parse_options({}).num_stages
        for fewer in range(min(stages, 4) - 1, 0, -1):
            found = self.now(replace(job, options={**job.options, "num_stages": fewer}))
            if found["status"] == "compiled" and found["lds_bytes"] <= lds_bytes:
                return {"num_stages": fewer, "lds_bytes": found["lds_bytes"]}
        return None

    def _compile(self, job: CompileJob) -> Result:
        """In the child."""
        source = _source(job)
        try:
            compiled = compile(source, target=self._target, options=job.options)
        except BaseException as error:  # noqa: BLE001 - whatever the compiler raises is the result
            return {"status": "failed", "error": explain(error, job.function)}
        metadata = compiled.metadata
        facts = {
            "status": "compiled",
            "lds_bytes": metadata.shared,
            "num_warps": metadata.num_warps,
            "wave_width": getattr(metadata, "warp_size", self._target.warp_size),
            "num_stages": getattr(metadata, "num_stages", None),
            "num_ctas": getattr(metadata, "num_ctas", 1),
            "tensor_memory": getattr(metadata, "tmem_size", None) or 0,
        }
        if "amdgcn" in compiled.asm:
            return facts | read_amdgcn(compiled.asm["amdgcn"], compiled.asm["llir"])
        # ptxas tells registers and spills to its log alone, which TRITON_DUMP_PTXAS_LOG prints.
        return facts | {"ptx": compiled.asm["ptx"]}

    def _key(self, job: CompileJob) -> str:
        # Finds out, besides, which globals the code uses. Their values are baked into it, and older Tritons leave
        # them out of their own key.
        content = _source(job).hash()
        used = sorted((name, repr(value)) for (name, _), (value, _) in job.function.used_global_vals.items())
        parts = (
            _FACTS, str(triton.__version__), str(self._target), self._backend.hash(), content, repr(used),
            self._backend.parse_options(dict(job.options)).hash(), job.function.fn.__code__.co_filename,
            repr(sorted(item for item in os.environ.items() if item[0].startswith(_SWITCHES))),
        )  # fmt: skip
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _file(self, job: CompileJob) -> Path | None:
        if self._cache is None:
            return None
        try:
            return self._cache / f"{self._key(job)}.json"
        except Exception:  # noqa: BLE001 - a kernel whose dependencies Triton cannot hash fails when it is compiled
            return None

    def _kept(self, job: CompileJob) -> Result | None:
        file = self._file(job)
        try:
            return None if file is None else {**json.loads(file.read_bytes()), "cached": True}
        except (OSError, ValueError, TypeError):
            return None

    def _keep(self, job: CompileJob, result: Result) -> None:
        file = self._file(job)
        # A timeout or a crash may be the machine's fault today.
        if file is None or result["status"] not in _KEPT:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(result))
            unfinished.replace(file)
        except OSError:
            return


def _source(job: CompileJob) -> Any:
    return (job.source or ASTSource)(job.function, job.signature, job.constants, job.attributes)


class _Compilation:
    """A forked child, what it has printed, and what it has sent."""

    def __init__(self, work: Callable[[], Result], timeout_s: float):
        self.deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        # Triton writes what each stage made here, and leaves it there when a later stage crashes.
        self._stages = tempfile.TemporaryDirectory()
        self.pipe, writing = os.pipe()
        self._sent = b""
        self._open = True
        self._timed_out = False
        self._status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            os.environ["TRITON_CACHE_DIR"] = self._stages.name
            _in_child(work, self._printed.fileno(), writing)
        os.close(writing)

    def read(self) -> None:
        piece = os.read(self.pipe, 1 << 20)
        self._sent += piece
        self._open = bool(piece)

    def ended(self) -> bool:
        if self._open and time.monotonic() > self.deadline:
            self._timed_out = True
            self.kill()
        return not self._open

    def kill(self) -> None:
        """The whole session: ptxas is a child of the child."""
        self._open = False
        for end in (os.killpg, os.kill):
            try:
                end(self._child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._wait()
        self._stages.cleanup()

    def _wait(self) -> int:
        if self._status is None:
            self._status = os.waitpid(self._child, 0)[1]
        return self._status

    def result(self) -> Result:
        status = self._wait()
        os.close(self.pipe)
        self._printed.seek(0)
        printed = self._printed.read().decode(errors="replace")
        self._printed.close()
        if self._timed_out:
            return {"status": "timeout", "timeout_s": self._timeout_s, "printed": printed[-_STDERR_LIMIT:]}
        facts = _early_facts(Path(self._stages.name))
        self._stages.cleanup()
        try:
            found: Result = json.loads(self._sent)
        except ValueError:
            ended = _signal(status) if os.WIFSIGNALED(status) else f"exit status {os.waitstatus_to_exitcode(status)}"
            return {"status": "crashed", "ended": ended, "printed": printed[-_STDERR_LIMIT:], **facts}
        if "ptx" in found:
            found |= read_ptx(found.pop("ptx"), printed)
        return {**found, **facts, "printed": _worth_keeping(printed)}


def _in_child(work: Callable[[], Result], printed: int, writing: int) -> None:
    try:
        os.setsid()
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sent = json.dumps(work()).encode()
        while sent:
            sent = sent[os.write(writing, sent) :]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - reported as a crash, with this as what it printed
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        # Whatever went wrong, this process must not go on as a second parent.
        os._exit(70)


def _signal(status: int) -> str:
    number = os.WTERMSIG(status)
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _worth_keeping(printed: str) -> str:
    """Errors with the lines that follow them; ptxas's figures and Triton's warnings have been read already."""
    lines = printed.splitlines()
    kept: list[str] = []
    for number, line in enumerate(lines):
        if "error:" in line.lower() or "fatal" in line.lower():
            following = [one for one in lines[number : number + 3] if "info    :" not in one]
            kept += [one for one in following if one not in kept]
    return "\n".join(kept)[:_STDERR_LIMIT]


def _early_facts(folder: Path) -> Result:
    """From what the compiler had written when it ended, or stopped."""
    ttir = "".join(file.read_text() for file in sorted(folder.rglob("*.ttir")))
    source = "".join(file.read_text() for file in sorted(folder.rglob("*.source")))
    return read_ttir(ttir or source)


def explain(error: BaseException, function: Any) -> dict[str, Any]:
    """The innermost error that has a place; a kernel that calls a helper has one at the call and one in the helper."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        # Not __context__: of a failed ptxas that is the failed process, which says less.
        following = following.__cause__
    placed = [one for one in chain if isinstance(one, CompilationError) and hasattr(one.node, "lineno")]
    said, deepest = (_message(one) for one in ((placed or chain)[-1], chain[-1]))
    message = said if deepest in said else f"{said}: {deepest}"
    owner = _owner(placed[-1].src or "", function) if placed else function
    line = def_line(owner) + placed[-1].node.lineno - 1 if placed else 0
    return {
        "type": type(chain[-1]).__name__, "message": message, "file": owner.fn.__code__.co_filename, "line": line,
    }  # fmt: skip


def _message(error: BaseException) -> str:
    """The message without the excerpt of the source that Triton puts before it."""
    text = str(getattr(error, "error_message", None) or error) or type(error).__name__
    text = re.sub(r"^at \d+:\d+:\n(?:.*\n)*?\s*\^\n?", "", text)
    return " ".join(text.split())[:600] or type(error).__name__


def _owner(source: str, function: Any) -> Any:
    if function.src == source:
        return function
    candidates = (get_object for get_object in gc.get_objects() if isinstance(get_object, JITFunction))
    return next((candidate for candidate in candidates if candidate.src == source), function)


def import_error(error: BaseException, file: str) -> dict[str, Any]:
    """The last line of the author's own file on the way to an error, and the statement that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename) == Path(file)), None)
    message = " ".join(str(error).split())[:600]
    if frames and frames[-1].line:
        said = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
        message = f"{message} ({said})" if message else said
    return {"type": type(error).__name__, "message": message, "file": file, "line": line or 0}
