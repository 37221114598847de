"""Files that a build for ROCm leaves out by its lists of sources, and how it comes to HIP."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from tests.port.source.snippets import kernel

from crosstie_port.source.builds import left_out_by_lists, may_hipify
from crosstie_port.source.check import OFTEN_FALSE, preflight_source
from crosstie_port.source.files import Files

HAZARD = kernel('asm volatile("bar.sync 1, 64;");')
CPP = dict.fromkeys(("src/a.cu", "src/b.cu", "src/b_amd.cpp", "src/cuda_c.cc", "src/cuda/d.cu"), "")


def left_out(cmake: str = "", python: str = "") -> set[str]:
    builds = {"src/CMakeLists.txt": cmake} if cmake else {}
    return set(left_out_by_lists(Files(cpp=CPP, build=builds, python={"setup.py": python} if python else {})))


@pytest.mark.parametrize(
    ("cmake", "expected"),
    [
        ("if(USE_ROCM)\nset(S b_amd.cpp)\nelse()\nset(S a.cu b.cu)\nendif()", {"src/a.cu", "src/b.cu"}),
        ("if(NOT USE_ROCM)\nlist(APPEND S a.cu)\nendif()\nset(S b.cu)", {"src/a.cu"}),
        ("if(USE_CUDA)\nset(S a.cu)\nelseif(USE_HIP)\nset(S b.cu)\nendif()", {"src/a.cu"}),
        # Both lists have it; no list at all; nothing asks for AMD.
        ("if(USE_CUDA)\nset(S a.cu)\nendif()\nif(USE_ROCM)\nset(S a.cu)\nendif()", set()),
        ("if(SOMETHING)\nset(S a.cu)\nendif()\nif(USE_ROCM)\nendif()", set()),
        ("if(USE_CUDA)\nset(S a.cu)\nendif()", set()),
        # Set on ROCm too: AMD is asked for inside of it.
        ("if(USE_CUDA)\nif(USE_ROCM)\nendif()\nset(S a.cu)\nendif()", set()),
        ('if(LANG STREQUAL "CUDA")\nset(S a.cu)\nendif()\nif(LANG STREQUAL "HIP")\nendif()', {"src/a.cu"}),
        ("if(USE_CUDA AND X)\nset(S a.cu)\nendif()\nif(USE_ROCM)\nendif()", {"src/a.cu"}),
        ("if(USE_CUDA OR USE_ROCM)\nset(S a.cu)\nendif()", set()),
        ("if(USE_CUDA)\nif(USE_HIP)\nmessage(FATAL_ERROR)\nendif()\nset(S a.cu)\nendif()", {"src/a.cu"}),
        ("file(GLOB S *.cu)\nif(USE_HIP)\nlist(REMOVE_ITEM S src/a.cu)\nendif()", {"src/a.cu"}),
        ("file(GLOB S *.cu)\nif(X)\nlist(REMOVE_ITEM S src/a.cu)\nendif()\nif(USE_HIP)\nendif()", set()),
        # Asked for with AMD first, and alone inside.
        (
            'if(L STREQUAL "CUDA" OR L STREQUAL "HIP")\nif(L STREQUAL "CUDA")\nset(S a.cu)\nendif()\n'
            'if(L STREQUAL "HIP")\nset(S b.cu)\nendif()\nendif()',
            {"src/a.cu"},
        ),
        ("if((USE_CUDA))\nset(S a.cu)\nendif()\nif(USE_ROCM)\nendif()", set()),
        ("if(USE_ROCM)\nelse()\nfile(GLOB S ${DIR}/cuda/*.cu) # a.cu\nendif()", {"src/cuda/d.cu"}),
        # What HIPIFY made of it is compiled.
        ("if(USE_CUDA)\nset(S cuda_c.cc)\nendif()\nif(USE_ROCM)\nset(S ${OUT}/hip_c.cc)\nendif()", set()),
        ("if(USE_CUDA)\nset(S a.cu)\nendif()\nif(USE_ROCM)\nset(S hip/a.hip)\nendif()", set()),
        ("if(USE_ROCM)\nset(S", set()),
        ("if(USE_CUDA_TOOLKIT)\nset(S a.cu)\nendif()\nif(USE_ROCM_TOOLKIT)\nendif()", {"src/a.cu"}),
        # Who builds for AMD sets it too.
        ("if(USE_ROCM)\nset(USE_CUDA ON)\nendif()\nif(USE_CUDA)\nset(S a.cu)\nendif()", set()),
        ("if(USE_ROCM)\nelse()\nset(USE_CUDA ON)\nendif()\nif(USE_CUDA)\nset(S a.cu)\nendif()", {"src/a.cu"}),
    ],
)
def test_lists_of_cmake(cmake: str, expected: set[str]) -> None:
    assert left_out(cmake) == expected


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("s = ['src/a.cu']\nif not torch.version.hip:\n    s += ['src/b.cu']", {"src/b.cu"}),
        ("s = ['src/a.cu', 'src/b.cu']\nif not torch.version.hip:\n    s += ['src/b.cu']", set()),
        ("def f():\n    if is_rocm():\n        return\n    s = [d / 'src' / 'a.cu']", {"src/a.cu"}),
        ("if torch.version.hip:\n    s = ['x']\nelse:\n    s = ['src/a.cu']", {"src/a.cu"}),
        ("if rocm or x:\n    s = ['src/a.cu']", set()),
        ("if not rocm:\n    s = ['nowhere.cu', 'words about a.cu']", set()),
        ("if not rocm\n    s = ['a.cu']", set()),
    ],
)
def test_lists_of_python(python: str, expected: set[str]) -> None:
    assert left_out(python=python) == expected


def test_lists_below_a_file_that_chooses_between_the_two() -> None:
    chooses, lists = "if(USE_ROCM)\nelseif(USE_CUDA)\nendif()\n", "if(USE_CUDA)\nset(S a.cu)\nendif()\n"
    assert set(left_out_by_lists(Files(cpp=CPP, build={"CMakeLists.txt": chooses, "src/CMakeLists.txt": lists}))) == {
        "src/a.cu"
    }
    assert not left_out_by_lists(Files(cpp=CPP, build={"CMakeLists.txt": "", "src/CMakeLists.txt": lists}))
    assert not left_out_by_lists(Files(cpp=CPP, build={"other/CMakeLists.txt": chooses, "src/CMakeLists.txt": lists}))
    # A star in another folder takes none of these, one in the same folder does.
    for folder, expected in (("other", {"src/a.cu"}), ("src", set())):
        star = {"CMakeLists.txt": chooses, "src/CMakeLists.txt": lists, f"{folder}/more.cmake": "file(GLOB S *.cu)\n"}
        assert set(left_out_by_lists(Files(cpp=CPP, build=star))) == expected


def test_a_setup_of_its_own_for_rocm_lists_all_that_is_built() -> None:
    python = {"src/setup_rocm.py": "s = ['a.cu'] # hip", "src/setup.py": "s = ['a.cu', 'b.cu'] # hip"}
    assert set(left_out_by_lists(Files(cpp=CPP, python=python))) == {"src/b.cu"}
    cmake = {"src/CMakeLists.txt": "set(S a.cu cuda/d.cu)"}
    assert set(left_out_by_lists(Files(cpp=CPP, python=python, build=cmake))) == {"src/b.cu", "src/cuda/d.cu"}
    del python["src/setup_rocm.py"]
    assert not left_out_by_lists(Files(cpp=CPP, python=python))


def test_what_is_left_out_is_a_note_and_its_headers_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text("if(USE_ROCM)\nset(S b.cu)\nelse()\nset(S a.cu)\nendif()\n")
    (tmp_path / "a.cu").write_text('#include "a.h"\n#ifdef USE_ROCM\n#endif\n' + HAZARD)
    (tmp_path / "a.h").write_text(HAZARD)
    (tmp_path / "b.cu").write_text(HAZARD)
    found = [one for one in preflight_source(tmp_path, on="mi300x", hipify=False).findings if one.check == "inline-ptx"]
    assert {one.where.file: one.severity for one in found} == {"a.cu": "note", "b.cu": "error"}
    assert "CMakeLists.txt:4 leaves this file out" in next(one.what for one in found if one.severity == "note")


def test_headers_beside_sources_that_are_all_left_out(tmp_path: Path) -> None:
    """Sources that the build makes include them."""
    (tmp_path / "CMakeLists.txt").write_text("if(USE_ROCM)\nset(S b.cu)\nelse()\nset(S mma/a.cu)\nendif()\n")
    (tmp_path / "mma").mkdir()
    for name in ("mma/a.cu", "mma/tile.h", "b.cu", "b.h"):
        (tmp_path / name).write_text("#ifdef USE_ROCM\n#endif\n" + HAZARD)
    found = [one for one in preflight_source(tmp_path, on="mi300x", hipify=False).findings if one.check == "inline-ptx"]
    assert {one.where.file for one in found if one.severity == "error"} == {"b.cu", "b.h"}
    (tmp_path / "b.cu").write_text('#include "mma/tile.h"\n#ifdef USE_ROCM\n#endif\n')
    found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
    assert "mma/tile.h" in {one.where.file for one in found if one.severity == "error"}


def test_half_in_an_extension_of_pytorch(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("__global__ void k(half* x) { x[0] = x[1]; }\n")
    build = tmp_path / "setup.py"

    def flags(text: str) -> list[tuple[int | None, str]]:
        build.write_text(text)
        found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
        return [(one.where.line, one.severity) for one in found if one.check == "half-flags"]

    made = "from torch.utils.cpp_extension import CUDAExtension\nCUDAExtension('k', ['a.cu'], extra_compile_args={0})\n"
    assert flags(made.format("[]")) == [(2, "setting")]
    assert flags(made.format("['-U__HIP_NO_HALF_CONVERSIONS__']")) == []
    assert flags("import os\n") == []
    (tmp_path / "a.cu").write_text("__global__ void k(float* x) { /* half of it */ x[0] = x[1]; }\n")
    assert flags(made.format("[]")) == []


@pytest.mark.slow
def test_the_code_of_other_back_ends_is_not_read(tmp_path: Path) -> None:
    for folder in ("cpu", "xpu", "gpu"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.h").write_text(HAZARD)
    found = preflight_source(tmp_path, on="mi300x").findings
    assert {one.where.file for one in found if one.where.file.endswith(".h")} == {"gpu/a.h"}


def test_a_tree_that_knows_both_dialects(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#ifdef USE_ROCM\n#endif\nvoid cuda(at::Tensor t) { t.to(at::kFloat8_e4m3fn); }\n")
    (tmp_path / "b.cu").write_text("")

    def severity() -> list[str]:
        found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
        return [one.severity for one in found if one.check == "fp8-dialect"]

    assert severity() == ["error"]
    (tmp_path / "b.cu").write_text("int to_fnuz(int x);\n")
    assert severity() == ["unknown"]


@pytest.mark.parametrize(
    ("build", "python", "expected"),
    [
        ("", "", True),
        ("enable_language(HIP)", "", False),
        ("enable_language(HIP)", "from torch.utils.cpp_extension import CUDAExtension", True),
        ("project(x LANGUAGES CXX HIP)\nhipify_torch()", "", True),
    ],
)
def test_whether_hipify_is_the_way_to_hip(build: str, python: str, expected: bool) -> None:
    files = Files(build={"CMakeLists.txt": build}, python={"setup.py": python})
    assert may_hipify(files) == expected


def test_a_map_of_the_project_is_applied_first(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#include <cuda_fp8.h>\n" + kernel("CUfunc_cache x; CUfunc_caches y;"))
    assert "fp8-types" in {one.check for one in preflight_source(tmp_path, on="mi300x", hipify=False).findings}
    own = tmp_path / "hipify_map.json"
    own.write_text('{"custom_map": {"<cuda_fp8.h>": "\\"own_fp8.h\\""}}')
    assert preflight_source(tmp_path, on="mi300x", hipify=False).findings == []
    for broken in ("{", "[]", '{"custom_map": [1]}', "{}"):
        own.write_text(broken)
        assert preflight_source(tmp_path, on="mi300x", hipify=False).findings != []


def test_checks_that_were_often_false_are_those_of_the_record() -> None:
    table = Path(__file__).parents[3] / "benchmarks" / "results" / "source_precision.csv"
    judged = Counter((row["check"], row["judged"]) for row in csv.DictReader(table.read_text().splitlines()))
    gone = {"launch-braces", "nested-launch", "warp-partials"}
    false = {check: judged[check, "false"] for check, _ in judged if check not in gone}
    assert {check for check, n in false.items() if n > 1 and n > 0.35 * (n + judged[check, "right"])} == OFTEN_FALSE


def test_checks_that_were_often_false_are_no_errors_where_the_tree_runs_on_amd(tmp_path: Path) -> None:
    text = "#include <cuda/std/atomic>\nvoid f() { cusolverSpCreate(0); }\n"

    def severities() -> dict[str, str]:
        found = preflight_source(tmp_path, on="mi300x", use_clang=False).findings
        return {one.check: one.severity for one in found}

    (tmp_path / "a.cu").write_text(text)
    assert severities() == {"libcudacxx": "error", "hipify-leftover": "error"}
    (tmp_path / "a.cu").write_text("#ifdef USE_ROCM\nint lanes();\n#endif\n" + text)
    assert severities() == {"libcudacxx": "unknown", "hipify-leftover": "unknown"}


def test_files_that_still_speak_of_cuda_where_nothing_converts_them(tmp_path: Path) -> None:
    (tmp_path / "both.cuh").write_text(
        "#ifdef USE_ROCM\n#include <hip/hip_runtime.h>\n#define cudaFree hipFree\n#else\n#include <cuda_runtime.h>\n#endif\n"
    )
    (tmp_path / "old.cuh").write_text('#include "both.cuh"\n#include <cuda_runtime.h>\n')
    (tmp_path / "calls.cpp").write_text(
        '#include "both.cuh"\nvoid f(void* p) {\n  cudaFree(p);\n  cudaMemset(p, 0, 1);\n}\n'
    )

    def told() -> set[tuple[str | None, int | None]]:
        report = preflight_source(tmp_path, on="mi300x", hipify=False, use_clang=False)
        return {(one.where.file, one.where.line) for one in report.findings if one.check == "cuda-header"}

    assert told() == {("old.cuh", 2), ("calls.cpp", 4)}
    (tmp_path / "setup.py").write_text("from torch.utils.cpp_extension import CUDAExtension\n")
    assert told() == set()


def test_what_a_choosing_file_adds_or_uses_for_nvidia_alone_is_left_out() -> None:
    folders = {
        "CMakeLists.txt": "if(USE_CUDA)\nadd_subdirectory(src)\nelseif(USE_HIP)\nadd_subdirectory(amd)\nendif()\n",
        "src/CMakeLists.txt": "add_library(x a.cu)\n",
    }
    assert set(left_out_by_lists(Files(cpp=CPP, build=folders))) == {"src/a.cu"}
    folders["amd/CMakeLists.txt"] = "add_library(x ../src/a.cu)\n"
    assert not left_out_by_lists(Files(cpp=CPP, build=folders))
    used = "set(S a.cu)\nif(USE_HIP)\nadd_library(x b.cu)\nelse()\nadd_library(x ${S})\nendif()\n"
    read = left_out_by_lists(Files(cpp=CPP, build={"src/CMakeLists.txt": used}))
    assert set(read) == {"src/a.cu"}


def test_included_files_and_twins() -> None:
    build = {
        "CMakeLists.txt": "if(B STREQUAL CUDA)\ninclude(cmake/one.cmake)\nelseif(B STREQUAL HIP)\nendif()\n",
        "cmake/one.cmake": "add_subdirectory(src)\n",
        "src/CMakeLists.txt": "add_library(x a.cu)\n",
    }
    assert set(left_out_by_lists(Files(cpp=CPP, build=build))) == {"src/a.cu"}
    build = {"cmake/cuda.cmake": "add_library(x src/a.cu)\n", "cmake/hip.cmake": "add_library(x src/b.cu)\n"}
    read = left_out_by_lists(Files(cpp=CPP, build=build))
    assert set(read) == {"src/a.cu"}


def test_a_back_end_that_is_asked_for_by_name_is_a_side_for_amd(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#include <cudnn.h>\n")
    for build, severity in (("add_library(x b.cu)", "error"), ('if(BACKEND STREQUAL "rocm")\nendif()', "unknown")):
        (tmp_path / "CMakeLists.txt").write_text(build)
        found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
        assert [one.severity for one in found if one.check == "cudnn"] == [severity]


def test_a_build_file_of_nvidias_by_name_leaves_nothing_out_of_a_tree_without_amd() -> None:
    assert not left_out_by_lists(Files(cpp=CPP, build={"src/sm90/CMakeLists.txt": "add_library(x a.cu)\n"}))
