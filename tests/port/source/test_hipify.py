"""HIPIFY on a copy: what it converts, what it leaves, and what happens without it."""

from pathlib import Path
from typing import Any

import pytest

from crosstie.core.finding import Finding
from crosstie_port.source import check
from crosstie_port.source.check import SourceReport, preflight_source


def checked(folder: Path, on: str = "mi300x", **options: Any) -> SourceReport:
    return preflight_source(folder, on=on, **{"use_clang": False, **options})


def write(folder: Path, text: str, name: str = "a.cu") -> Path:
    (folder / name).write_text(text)
    return folder


def leftovers(report: SourceReport) -> list[Finding]:
    return [one for one in report.findings if one.check.startswith("hipify")]


def test_what_is_converted(tmp_path: Path) -> None:
    source = "#include <cuda_runtime.h>\nvoid f(void* p) { cudaMalloc(&p, 4); cudaFree(p); cudaFree(p); }\n"
    report = checked(write(tmp_path, source))
    assert report.converted is not None
    assert report.converted.names == {"cudaFree": 2, "cudaMalloc": 1, "cuda_runtime.h": 1}
    assert report.converted.files.keys() == {"a.cu"}
    assert leftovers(report) == []
    assert report.verdicts == {"mi300x": "no hazard found"}


def test_the_sources_are_not_touched(tmp_path: Path) -> None:
    source = "void f(void* p) { cudaMalloc(&p, 4); }\n"
    checked(write(tmp_path, source))
    assert [one.name for one in tmp_path.iterdir()] == ["a.cu"]
    assert (tmp_path / "a.cu").read_text() == source


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("cudaMadeUpCall(1);", "cudaMadeUpCall"), ("cuGreenCtxCreate(&c);", "cuGreenCtxCreate"), ("x = CUDART_INF_F;", "CUDART_INF_F"),
        ("CUgreenCtx context;", "CUgreenCtx"), ("cublasMadeUp(h);", "cublasMadeUp"), ("__nv_madeup(x);", "__nv_madeup"),
    ],
)  # fmt: skip
def test_what_is_left(tmp_path: Path, line: str, name: str) -> None:
    found = leftovers(checked(write(tmp_path, f"void f() {{\n  {line}\n}}\n")))
    assert [(one.check, one.severity, one.where.line, one.where.name) for one in found] == [
        ("hipify-leftover", "error", 2, name)
    ]
    guarded = f"void f() {{\n#ifndef USE_ROCM\n  {line}\n#endif\n  // {line}\n}}\n"
    assert leftovers(checked(write(tmp_path, guarded))) == []


def test_headers_that_are_left(tmp_path: Path) -> None:
    found = leftovers(checked(write(tmp_path, "#include <cuda_runtime.h>\n#include <cuda_occupancy.h>\n")))
    assert [(one.check, one.where.line) for one in found] == [("hipify-header", 2)]
    (tmp_path / "cuda_own.h").write_text("int x;\n")
    assert leftovers(checked(write(tmp_path, '#include "cuda_own.h"\n'))) == []


def test_names_of_the_project_are_its_own(tmp_path: Path) -> None:
    source = "struct cudaThing { int x; };\nint cudaHelper(int a) { return a; }\nvoid f(cudaThing t) { cudaHelper(t.cudaMember); c10::cuda::cudaOther(); }\n"
    assert leftovers(checked(write(tmp_path, source))) == []


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "hipify_module", lambda: None)
    report = checked(write(tmp_path, 'void f() { cudaMalloc(&p, 4); asm volatile("bar.sync 0;"); }\n'))
    assert {(one.check, one.severity) for one in report.findings} == {
        ("hipify-missing", "unknown"),
        ("inline-ptx", "error"),
    }
    assert "pip install torch" in next(one.remedy for one in report.findings if one.check == "hipify-missing")
    clean = checked(write(tmp_path, "int x;\n"))
    assert [(one.check, one.severity) for one in clean.findings] == [("hipify-missing", "note")]
    assert report.converted is None


def test_a_file_that_it_fails_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("torch.utils.hipify.hipify_python")

    def fail(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(module, "preprocess_file_and_save_result", fail)
    report = checked(write(tmp_path, "int x;\n"))
    assert [(one.check, one.severity, one.evidence) for one in report.findings] == [
        ("hipify-failed", "unknown", "KeyError: 'broken'")
    ]


def test_nvidia_has_nothing_to_port(tmp_path: Path) -> None:
    write(tmp_path, 'void f() { asm volatile("bar.sync 0;"); }\n')
    report = checked(tmp_path, on="h200")
    assert report.verdicts == {"h200": "nothing to port"}
    assert [(one.check, one.severity) for one in report.findings] == [("nothing-to-port", "note")]
    both = checked(tmp_path, on="h200,mi300x")
    assert both.verdicts == {"h200": "nothing to port", "mi300x": "needs changes"}
    assert {one.target for one in both.findings} == {"h200", "mi300x"}


def test_odd_files_do_not_stop_it(tmp_path: Path) -> None:
    (tmp_path / "latin.cu").write_bytes("// é\nvoid f() { cudaFree(0); }\n".encode("latin-1"))
    (tmp_path / "empty.cu").write_text("")
    (tmp_path / "quote.cu").write_text('const char* s = "never closed\n#if\n#else\n/*')
    report = checked(tmp_path)
    assert report.cpp_files == 3
    assert report.converted is not None
    assert report.converted.names["cudaFree"] == 1


def test_names_that_a_macro_of_the_project_drops(tmp_path: Path) -> None:
    use = "#define cublasSetMathMode(handle, mode) {}\nint f() {{ return cublasSetMathMode(h, CUBLAS_MADE_UP); }}\n"
    assert leftovers(checked(write(tmp_path, use.format("0")))) == []
    assert [one.where.name for one in leftovers(checked(write(tmp_path, use.format("g(mode)"))))] == ["CUBLAS_MADE_UP"]


def test_a_file_for_one_instruction_set(tmp_path: Path) -> None:
    (tmp_path / "gfx950").mkdir()
    write(tmp_path / "gfx950", '__device__ void f() { asm volatile("trap;"); }\n')
    report = checked(tmp_path, "mi300x,mi355x")
    assert report.verdicts == {"mi300x": "no hazard found", "mi355x": "needs changes"}


def test_progress_names_each_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    checked(write(tmp_path, "void f();\n"), on_progress=lambda *now: seen.append(now))
    assert (1, 1, "reading a.cu") in seen
    assert (1, 1, "HIPIFY a.cu") in seen


@pytest.mark.parametrize(
    "own",
    [
        "typedef enum {} cutensorPlan_t;\ncutensorPlan_t plan;\n",
        "typedef enum { CUFFT_CB_LD_REAL = 2, CUFFT_CB_ST_REAL = 6 } kind;\nint f() { return CUFFT_CB_LD_REAL; }\n",
        "template <typename T>\nstd::unique_ptr<Op<T>> cudaHostReduce(int a);\nvoid f() { cudaHostReduce(1); }\n",
        "struct S { std::vector<Ptr<int>> cudaPtrs; void f() { cudaPtrs.push_back(1); } };\n",
        "#define DECLARE(name) void name(int* x)\nDECLARE(cudaSum);\nvoid f() { cudaSum(0); }\n",
        'const char* cublasGetStatusName(int s) { return "x"; }\nvoid f() { cublasGetStatusName(1); }\n',
    ],
)
def test_what_the_project_declares_is_its_own(tmp_path: Path, own: str) -> None:
    assert leftovers(checked(write(tmp_path, own))) == []


def test_names_of_hip_made_by_the_prefix_alone(tmp_path: Path) -> None:
    found = leftovers(checked(write(tmp_path, "#define gpuProp hipDeviceProp\nhipDeviceProp_t p;\n")))
    assert [(one.check, one.severity, one.where.line) for one in found] == [("hipify-name", "unknown", 1)]
    assert "hipDeviceProp_t" in found[0].remedy
