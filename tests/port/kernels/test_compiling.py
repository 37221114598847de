"""Compilers that hang, crash or speak to nobody; results on disk; autotuners."""

import os
import textwrap
from pathlib import Path

import pytest
from tests.port.kernels.running_kernels import HEADER, check

from crosstie.catalog.library import Catalog
from crosstie_port.kernels.running import KernelOptions, compile_kernels
from crosstie_port.kernels.targets import target

pytestmark = pytest.mark.triton

COPY = """
    @triton.jit
    def copy(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))
"""
# What runs while the compiler does; of all modules, Triton lets kernels call `copy` and `math`.
WHILE_COMPILING = """
    import copy as copying
    import os
    import signal

    class Crash:
        def __copy__(self):
            os.kill(os.getpid(), signal.SIGSEGV)

    class Print:
        def __copy__(self):
            os.write(2, b"error: something is wrong")

    DEEDS = {"crash": Crash(), "print": Print(), "nothing": 0}

    @triton.constexpr_function
    def now(what):
        copying.copy(DEEDS[what])
        return 1

    @triton.jit
    def busy(x, o, N: tl.constexpr, WHAT: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i) + now(WHAT))
"""
TYPES = {"x": "*fp32", "o": "*fp32"}


def entry(name: str, **constants: object) -> dict[str, object]:
    return {"name": name, "signature": TYPES, "constexprs": {"N": 256, **constants}}


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def unrolled(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        for k in tl.static_range(100_000_000):
            v = v * k
        tl.store(o + i, v)
    """
    found = check(tmp_path, source, ["gfx942"], [entry("unrolled")], timeout_s=2.0)
    assert found.of("unrolled", "gfx942")["compile-timeout"].severity == "unknown"
    assert found.verdicts["gfx942"] == "not known"


def test_a_crash_is_a_finding_and_the_rest_goes_on(tmp_path: Path) -> None:
    entries = [entry("busy", WHAT="crash"), entry("busy", WHAT="print"), entry("busy", WHAT="nothing"), entry("copy")]
    found = check(tmp_path, WHILE_COMPILING + COPY, ["gfx942"], entries)
    crash = found.of("busy", "gfx942")["compiler-crash"]
    assert crash.severity == "error"
    assert "SIGSEGV" in crash.evidence
    # Compiled, but not in silence.
    silent = found.of("busy", "gfx942")["silent-compile-error"]
    assert silent.severity == "error"
    assert "something is wrong" in silent.evidence
    assert "1 of 3 configurations" in silent.evidence
    assert found.of("copy", "gfx942") == {}


def test_results_are_kept_by_content(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def compiled(source: str, size: int, on: str = "gfx942") -> list[bool]:
        spec = [{"name": "copy", "signature": TYPES, "constexprs": {"N": size}}]
        answers = check(tmp_path, source, [on], spec, cache=cache).answers
        return [not one.result.get("cached") for one in answers[0].compilations]

    helped = "\n    SCALE = tl.constexpr(2)\n" + COPY.replace("tl.load(x + i)", "tl.load(x + i) * SCALE")
    assert compiled(helped, 256) == [True]
    assert compiled(helped, 256) == [False]
    assert compiled(helped, 512) == [True]
    assert compiled(helped, 256, "gfx950") == [True]
    # A global that is baked into the code.
    assert compiled(helped.replace("constexpr(2)", "constexpr(3)"), 256) == [True]
    # What was cut short is compiled again.
    for file in cache.iterdir():
        file.write_text("{")
    assert compiled(helped, 256) == [True]


def test_a_crash_is_not_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    check(tmp_path, WHILE_COMPILING, ["gfx942"], [entry("busy", WHAT="crash")], cache=cache)
    assert not cache.exists() or os.listdir(cache) == []


TUNED = """
    @triton.autotune(configs=[triton.Config({"N": 512}, num_warps=warps) for warps in WARPS], key=[])
    @triton.heuristics({"EVEN": lambda args: args["N"] % 2 == 0})
    @triton.jit
    def tuned(x, o, N: tl.constexpr, EVEN: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))
"""


def test_an_autotuner_passes_over_what_does_not_fit(tmp_path: Path) -> None:
    source = "\n    WARPS = [4, 32]\n" + TUNED
    found = check(tmp_path, source, ["gfx942"], [{"name": "tuned", "signature": TYPES}])
    over = found.of("tuned", "gfx942")["threads-over-limit"]
    assert over.severity == "note"
    assert "1 of 2 configurations" in over.evidence
    assert found.verdicts["gfx942"] == "ready"
    assert [one.job["constexprs"]["EVEN"] for one in found.answers[0].compilations] == [True, True]


def test_an_autotuner_with_nothing_left_fails(tmp_path: Path) -> None:
    source = "\n    WARPS = [32, 64]\n" + TUNED
    found = check(tmp_path, source, ["gfx942"], [{"name": "tuned", "signature": TYPES}])
    assert found.of("tuned", "gfx942")["threads-over-limit"].severity == "error"
    first = check(tmp_path, source, ["gfx942"], [{"name": "tuned", "signature": TYPES, "max_configs": 1}])
    assert len(first.answers[0].compilations) == 1
    assert [f.severity for f in first.findings if f.check == "configurations-left-out"] == ["unknown"]


def test_progress_counts_compilations(tmp_path: Path) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(HEADER + textwrap.dedent(COPY) + f"\nCROSSTIE_KERNELS = {[entry('copy')]!r}\n")
    seen: list[tuple[int, int, str]] = []
    compile_kernels(KernelOptions(what=str(file)), [target(Catalog([]), "gfx942")], lambda *now: seen.append(now))
    phases = [what for done, total, what in seen if not total]
    assert any("importing kernels.py for gfx942" in what for what in phases)
    assert seen[len(phases) :] == [(0, 1, "compilations"), (1, 1, "compilations")]
