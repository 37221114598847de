"""What of a tree is read: encodings, binaries, links, sizes; and build files."""

import os
from pathlib import Path

import pytest

from crosstie.core.errors import BadInput
from crosstie_port.source import files
from crosstie_port.source.builds import build_hazards
from crosstie_port.source.check import preflight_source
from crosstie_port.source.files import Files, decoded, hip_builds, is_nvidia, read_files

ASM = 'void f() { asm volatile("bar.sync 0;"); }\n'


def test_files_are_chosen_by_their_kind(tmp_path: Path) -> None:
    for name in (
        "a.cu",
        "b.cuh",
        "c.hpp",
        "d.inl",
        "e.py",
        "CMakeLists.txt",
        "f.cmake",
        "Makefile",
        "g.md",
        "h.cu.in",
        "i.txt.in",
        "j.CU",
    ):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "k.cubin").write_bytes(b"\x7fELF\0")
    found = read_files(tmp_path)
    assert sorted(found.cpp) == ["a.cu", "b.cuh", "c.hpp", "d.inl", "h.cu.in", "j.CU"]
    assert sorted(found.python) == ["e.py"]
    assert sorted(found.build) == ["CMakeLists.txt", "Makefile", "f.cmake"]
    assert [(one.check, one.file, one.severity) for one in found.hazards] == [("device-binary", "k.cubin", "error")]


def test_folders_that_are_passed_over(tmp_path: Path) -> None:
    for folder in (".git", "__pycache__", "env", "src/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.cu").write_text(ASM)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    assert list(read_files(tmp_path).cpp) == ["src/deep/a.cu"]


def test_a_single_file_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "kernel.txt").write_text(ASM)
    assert list(read_files(tmp_path / "kernel.txt").cpp) == ["kernel.txt"]


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to read"):
        read_files(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(BadInput, match="nothing to read"):
        read_files(tmp_path)
    with pytest.raises(BadInput, match="does not exist"):
        read_files(tmp_path / "missing")


def test_links_that_go_round(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text(ASM)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "self.cu").symlink_to(tmp_path / "self.cu")
    found = read_files(tmp_path)
    assert list(found.cpp) == ["a.cu"]
    assert [(one.check, one.file) for one in found.hazards] == [("unread", "self.cu")]


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary.h").write_bytes(b"\0\1\2" * 100)
    (tmp_path / "large.cu").write_text("x" * 200)
    os.mkfifo(tmp_path / "pipe.cu")
    monkeypatch.setattr(files, "MOST_BYTES", 150)
    found = read_files(tmp_path)
    assert found.cpp == {}
    assert {(one.file, one.severity) for one in found.hazards} == {
        ("binary.h", "unknown"),
        ("large.cu", "unknown"),
        ("pipe.cu", "unknown"),
    }
    assert all(one.evidence and one.remedy for one in found.hazards)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\r\nb\rc", "a\nb\nc"), ("é".encode("latin-1"), "é"), ("é".encode(), "é"), (b"\xef\xbb\xbfa", "a"), ("a".encode("utf-16"), "a"), (b"a\0b", None), (b"", ""),
    ],
)  # fmt: skip
def test_encodings_are_told_apart(data: bytes, text: str | None) -> None:
    assert decoded(data) == text


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("project(a LANGUAGES CXX CUDA)", "cuda-build"), ("enable_language(CUDA)", "cuda-build"), ("find_package(CUDAToolkit REQUIRED)", "cuda-build"),
        ('set(CMAKE_CUDA_ARCHITECTURES "80;90")', "cuda-build"), ("NVFLAGS = -gencode arch=compute_90,code=sm_90", "nvcc-flag"), ("\tnvcc -o a a.cu", "cuda-build"),
        ("add_compile_options(--expt-relaxed-constexpr)", "nvcc-flag"), ("target_link_libraries(a CUDA::cudart)", "cuda-library"),
        ('list(APPEND CMAKE_CUDA_FLAGS "--threads 4")', "nvcc-flag"), ("enable_language(CXX CUDA)", "cuda-build"), ("\t$(TOOLKIT)/bin/nvcc -c $<", "cuda-build"), ("target_link_libraries(a PRIVATE nvrtc)", "cuda-library"),
        ('set(FLAGS "-arch=sm_${ARCH}")', "nvcc-flag"), ("if(CUDA_VERSION VERSION_LESS 11.0)", "cuda-build"),
    ],
)  # fmt: skip
def test_hazards_of_build_files_are_found(line: str, check: str) -> None:
    found = list(build_hazards("CMakeLists.txt", f"\n{line}\n"))
    assert check in {one.check for one in found}
    assert all(one.line == 2 and one.severity == "error" for one in found)
    # A comment says nothing; a file with a side for ROCm may do this on the other.
    assert list(build_hazards("CMakeLists.txt", f"# {line}\n")) == []
    assert {
        one.severity
        for one in build_hazards("CMakeLists.txt", f"if(USE_ROCM)\nenable_language(HIP)\nelse()\n{line}\nendif()\n")
    } == {"note"}
    assert list(build_hazards("CMakeLists.txt", "project(a LANGUAGES CXX)\nadd_library(a a.cpp)\n")) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if(USE_ROCM)\nenable_language(HIP)\nendif()\nfind_package(CUDA REQUIRED)\n", [("cuda-build", "unknown", 4)]),
        ("if(USE_ROCM)\nendif()\nlist(APPEND LIBS CUDA::cublas)\n", [("cuda-library", "unknown", 3)]),
        ("if(USE_ROCM)\nendif()\nfind_package(CUDA)\n", [("cuda-build", "note", 3)]),
        ("if(USE_ROCM)\nendif()\nset(CMAKE_CUDA_STANDARD 17)\n", [("cuda-build", "note", 3)]),
        ("if(USE_ROCM)\nendif()\nif(MSVC)\nfind_package(CUDA REQUIRED)\nendif()\n", [("cuda-build", "note", 4)]),
        ("if(USE_ROCM)\nreturn()\nendif()\nfind_package(CUDA REQUIRED)\n", [("cuda-build", "note", 4)]),
        (
            "if(USE_ROCM)\nendif()\nfunction(f)\nfind_package(CUDA REQUIRED)\nendfunction()\n",
            [("cuda-build", "note", 4)],
        ),
        ("# HIP\nproject(a LANGUAGES CXX)\n", []),
        ('set(HIP_ARCHS "gfx90a;gfx942")\n', [("target-list", "setting", 1)]),
        ('set(HIP_ARCHS "gfx90a;gfx942;gfx950")\n', []),
        ('set(HIP_ARCHS "gfx942")\n', []),
    ],
)
def test_what_cmake_asks_for_on_both_sides(text: str, expected: list[tuple[str, str, int]]) -> None:
    assert [(one.check, one.severity, one.line) for one in build_hazards("CMakeLists.txt", text)] == expected


def test_build_files_beside_one_for_hip() -> None:
    cuda = "project(x LANGUAGES CXX CUDA)\n"
    hip = "enable_language(HIP)\n"
    assert hip_builds({"CMakeLists.txt": cuda, "hip/CMakeLists.txt": hip}) == ["hip/CMakeLists.txt"]
    assert hip_builds({"third_party/x/CMakeLists.txt": hip, "a.cmake": "# enable_language(HIP)\n"}) == []
    assert {one.severity for one in build_hazards("CMakeLists.txt", cuda, ["hip/CMakeLists.txt"])} == {"note"}
    assert {one.severity for one in build_hazards("CMakeLists.txt", cuda + "# not for HIP\n")} == {"error"}


def test_files_that_are_for_nvidia_by_their_names() -> None:
    folders = {"backend", "backend/cuda", "backend/hip", "ext", "ext/cuda"}
    for path in (
        "a/cutlass_extensions/gemm.cu",
        "csrc/gemm_sm90.cu",
        "hopper/a.cuh",
        "a/sm100/b.cu",
        "backend/cuda/a.cuh",
    ):
        assert is_nvidia(path, folders), path
    for path in ("ext/cuda/norm.cu", "backend/hip/a.cuh", "csrc/gemm.cu", "csrc/small.cu"):
        assert not is_nvidia(path, folders), path


def test_such_files_are_notes_where_the_tree_has_a_side_for_amd(tmp_path: Path) -> None:
    text = '__global__ void k() { asm volatile("bar.sync 1, 64;"); }\n'
    (tmp_path / "gemm_sm90.cu").write_text(text)
    (tmp_path / "other.cu").write_text(text)

    def severities() -> dict[str, str]:
        found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
        return {one.where.file: one.severity for one in found if one.check == "inline-ptx"}

    assert severities() == {"gemm_sm90.cu": "error", "other.cu": "error"}
    (tmp_path / "ours.cu").write_text("#ifdef USE_ROCM\nvoid f();\n#endif\n")
    assert severities() == {"gemm_sm90.cu": "note", "other.cu": "error"}


def test_a_build_file_of_a_folder_for_nvidia_is_a_note(tmp_path: Path) -> None:
    for name in ("cuda/a.cu", "rocm/a.hip"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("#ifdef USE_ROCM\n#endif\n")
    (tmp_path / "cuda/CMakeLists.txt").write_text("find_package(CUDAToolkit REQUIRED)\n")
    found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
    assert [(one.check, one.severity) for one in found if one.check == "cuda-build"] == [("cuda-build", "note")]


@pytest.mark.parametrize("line", ["R = torch.version.hip", "if has_rocm: pass", "x = os.environ['ROCM_HOME']"])
def test_python_that_asks_for_rocm(line: str) -> None:
    assert Files(python={"a.py": line}).asks_for_hip
    assert not Files(python={"a.py": "rocm = 1  # has_rocmlike"}).asks_for_hip


def test_python_of_a_tree_that_asks_for_rocm_may_be_left_out_by_a_caller(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import pynvml\n")

    def severities() -> set[str]:
        return {one.severity for one in preflight_source(tmp_path, on="mi300x", hipify=False).findings}

    assert severities() == {"error"}
    (tmp_path / "b.py").write_text("import torch\nROCM = torch.version.hip is not None\n")
    assert severities() == {"unknown"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a/memory.nvidia.hpp.inc", True), ("a/memory.amd.hpp.inc", False), ("a/nvidia.hpp", True), ("a/b.nvidia", False)],
)
def test_a_file_is_nvidias_by_any_part_of_its_name(path: str, expected: bool) -> None:
    assert is_nvidia(path, ()) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("attention/a.cu", True), ("attention_rocm/a.cu", False), ("blas_cuda/a.cpp", True), ("blas_hip/a.cpp", False),
        ("src/sort.cu", True), ("src/sort_hip.cpp", False), ("src/other.cu", False), ("CudaStream.h", True),
        ("fmha/cuda/x.cu", True), ("fmha/hip_fmha/x.cpp", False), ("plain/x.cu", False),
        ("src/sort.hip", False), ("tl/nccl/x.c", True), ("tl/rccl/x.c", False),
    ],
)  # fmt: skip
def test_a_twin_for_amd_shows_that_a_name_is_nvidias(path: str, expected: bool) -> None:
    paths = [
        "attention/a.cu",
        "attention_rocm/a.cu",
        "blas_cuda/a.cpp",
        "blas_hip/a.cpp",
        "src/sort.cu",
        "src/sort_hip.cpp",
    ]
    paths += [
        "src/other.cu",
        "CudaStream.h",
        "HipStream.h",
        "fmha/cuda/x.cu",
        "fmha/hip_fmha/x.cpp",
        "plain/x.cu",
        "src/sort.hip",
        "tl/nccl/x.c",
        "tl/rccl/x.c",
    ]
    files = Files(cpp=dict.fromkeys(paths, ""))
    assert is_nvidia(path, files.folders, files.stems) == expected


def test_a_makefile_beside_one_for_hip(tmp_path: Path) -> None:
    for name, compiler in (("makefile", "nvcc"), ("makefile.hip", "hipcc")):
        (tmp_path / name).write_text(f"CC = {compiler}\na.o: a.cu\n\t$(CC) -c a.cu\n")
    report = preflight_source(tmp_path, on="mi300x", hipify=False, use_clang=False)
    assert {(one.where.file, one.severity) for one in report.findings} == {("makefile", "note")}


def test_a_header_that_only_files_for_nvidia_include(tmp_path: Path) -> None:
    for folder in ("cuda", "hip"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ptx.h").write_text('__device__ void f() { asm("ld.cs.global.v2.f64 {%0, %1}, [%2];"); }\n')
    (tmp_path / "cuda" / "load.h").write_text('#include "ptx.h"\n')
    (tmp_path / "hip" / "load.h").write_text("#ifdef USE_ROCM\nint x;\n#endif\n")
    report = preflight_source(tmp_path, on="mi300x", hipify=False, use_clang=False)
    assert not [one for one in report.findings if one.severity == "error"]


def test_folders_of_other_back_ends_are_not_judged(tmp_path: Path) -> None:
    for folder in ("csrc_xpu", "csrc"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.hpp").write_text("#include <cute/tensor.hpp>\n")
    report = preflight_source(tmp_path, on="mi300x", hipify=False, use_clang=False)
    assert {one.where.file for one in report.findings if one.check == "cutlass"} == {"csrc/a.hpp"}


def test_a_file_that_includes_its_twin_chooses_between_the_two(tmp_path: Path) -> None:
    text = (
        '#ifdef USE_ROCM\n#include "amd_common.h"\n#endif\n__global__ void k() { asm volatile("bar.sync 1, 64;"); }\n'
    )
    (tmp_path / "amd_common.h").write_text("")
    for given, severity in ((text, "error"), (text.replace("amd_common", "other"), "note")):
        (tmp_path / "cuda_common.h").write_text(given)
        found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
        assert {one.severity for one in found if one.check == "inline-ptx"} == {severity}


def test_cuda_in_strings_of_cython(tmp_path: Path) -> None:
    text = "cdef int f(x):\n    k = Kernel('n', '''\n  int v = __shfl_sync(0xffffffff, x, 0);\n''')\n"
    (tmp_path / "core.pyx").write_text(text)
    found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
    assert [(one.where.line, one.severity) for one in found if one.check == "mask-32-bit"] == [(3, "error")]
    (tmp_path / "core.pyx").write_text(text.replace("0xffffffff", "0xffffffffffffffffULL"))
    assert "mask-32-bit" not in {one.check for one in preflight_source(tmp_path, on="mi300x", hipify=False).findings}
