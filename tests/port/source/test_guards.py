"""Which side of a condition is read: only what a build for ROCm certainly leaves out is left out."""

from pathlib import Path

import pytest
from tests.port.source.snippets import checks, kernel, names

from crosstie_port.source.check import preflight_source

HAZARD = 'asm volatile("bar.sync 1, 64;");'


@pytest.mark.parametrize(
    "condition",
    [
        "#if 0", "#ifndef USE_ROCM", "#if !defined(USE_ROCM)", "#ifdef __NVCC__", "#if defined(__HIP_PLATFORM_NVIDIA__)",
        "#if !defined(__HIP_PLATFORM_AMD__)", "#ifndef __HIPCC__", "#if !defined(GGML_USE_HIP) && __CUDA_ARCH__ >= 800",
        "#ifndef PADDLE_WITH_HIP", "#if !PADDLE_WITH_HIP", "#if !defined(__HIP_PLATFORM_HCC__)", "#ifdef __CUDACC_RTC__", "#if !TORCH_HIP_VERSION_MAJOR && !defined(ENABLE_ROCM)", "#if defined(USE_ROCM) && 0", "#if __CUDA_ARCH__ >= 900", "#ifdef __CUDA_ARCH__", "#ifndef MYLIB_USE_ROCM",
    ],
)  # fmt: skip
def test_code_that_amd_never_compiles_is_left_out(condition: str) -> None:
    assert "inline-ptx" not in names(kernel(f"{condition}\n{HAZARD}\n#endif"))


@pytest.mark.parametrize(
    "condition",
    [
        "#ifndef HIP_LAUNCH_CHECKS", "#ifndef AMD_EPYC_TUNING", "#ifndef SHIP_IT", "#ifndef USE_HIP_GRAPHS", "#if 1", "#ifdef USE_ROCM", "#ifdef __CUDACC__", "#ifdef USE_CUDA", "#ifdef SOMETHING", "#ifndef SOMETHING",
        "#if SOMETHING > 3", "#if CUDA_VERSION < 11000", "#if defined(__HIP_PLATFORM_AMD__)",
        "#ifdef MYLIB_NO_ROCM", "#if defined(SOMETHING) || !defined(USE_ROCM)", "#if", "#if )(", "#ifdef __gfx942__",
    ],
)  # fmt: skip
def test_code_that_amd_may_compile_is_read(condition: str) -> None:
    assert "inline-ptx" in names(kernel(f"{condition}\n{HAZARD}\n#endif"))


def test_sides_of_else_and_elif_are_told_apart() -> None:
    def reads(*sides: str) -> bool:
        return "inline-ptx" in names(kernel("\n".join(sides) + "\n#endif"))

    assert not reads("#ifdef USE_ROCM", "f();", "#else", HAZARD)
    assert reads("#ifndef USE_ROCM", "f();", "#else", HAZARD)
    assert reads("#ifdef SOMETHING", "f();", "#elif defined(USE_ROCM)", HAZARD)
    assert not reads("#ifdef USE_ROCM", "f();", "#elif defined(SOMETHING)", HAZARD)
    assert not reads("#if 0", "f();", "#elif 0", HAZARD)


def test_nested_conditions() -> None:
    assert "inline-ptx" not in names(kernel(f"#ifndef USE_ROCM\n#ifdef A\n{HAZARD}\n#endif\n{HAZARD}\n#endif"))
    assert "inline-ptx" in names(kernel(f"#ifndef USE_ROCM\n#ifdef A\n#endif\n#endif\n{HAZARD}"))


def test_macros_of_the_project_decide() -> None:
    sets = "#ifndef USE_ROCM\n#define HAS_PTX 1\n#endif\n"
    assert "inline-ptx" not in names(sets + kernel(f"#ifdef HAS_PTX\n{HAZARD}\n#endif"))
    assert "inline-ptx" in names("#define HAS_PTX 1\n" + kernel(f"#if HAS_PTX\n{HAZARD}\n#endif"))
    assert "inline-ptx" not in names("#define HAS_PTX 0\n" + kernel(f"#if HAS_PTX\n{HAZARD}\n#endif"))
    # In another file: the same where only NVIDIA's side sets it, but a plain macro elsewhere does not count here.
    body = kernel(f"#ifdef HAS_PTX\n{HAZARD}\n#endif")
    assert "inline-ptx" not in names(body, config_h=sets)
    negated = kernel(f"#ifndef HAS_PTX\n{HAZARD}\n#endif")
    assert "inline-ptx" in names(negated, config_h="#define HAS_PTX 1\n")
    assert "inline-ptx" not in names('#include "config.h"\n' + negated, config_h="#define HAS_PTX 1\n")


def test_an_include_guard_hides_nothing() -> None:
    guarded = f"#ifndef A_H\n#define A_H\n{kernel(HAZARD)}\n#endif\n"
    assert "inline-ptx" in names(guarded, name="a.h")


def test_a_header_that_only_the_side_for_nvidia_includes() -> None:
    user = '#ifdef USE_ROCM\n#include "amd.h"\n#else\n#include "nvidia.h"\n#endif\n'
    assert "inline-ptx" not in names(kernel(HAZARD), name="nvidia.h", user_cu=user)
    assert "inline-ptx" in names(kernel(HAZARD), name="nvidia.h", user_cu='#include "nvidia.h"\n')


def test_names_that_the_project_provides_for_rocm() -> None:
    call = kernel("float v = __shfl_xor_sync(0xffffffff, out[0], 4);")
    shim = "#ifdef USE_ROCM\n#define __shfl_xor_sync(mask, v, lane) __shfl_xor(v, lane)\n#endif\n"
    assert "mask-32-bit" in names(call)
    assert "mask-32-bit" not in names(shim + call)
    assert "mask-32-bit" not in names('#include "compat.h"\n' + call, compat_h=shim)
    # One that this file does not include is of no help to it.
    assert "mask-32-bit" in names(call, compat_h=shim)


def test_conditions_of_templates_are_read() -> None:
    sides = "{%- if is_rocm %}\nours();\n{%- else %}\n" + HAZARD + "\n{%- endif %}\n"
    assert "inline-ptx" not in names(kernel(sides))
    assert "inline-ptx" in names(kernel(sides.replace("is_rocm", "not is_rocm")))
    assert "inline-ptx" in names(kernel(sides.replace("is_rocm", "weighted")))
    assert "inline-ptx" not in names(kernel(sides.replace("is_rocm", "is_rocm or weighted")))
    assert "inline-ptx" in names(kernel(sides.replace("is_rocm", "is_rocm and weighted")))


def test_the_side_for_newer_cuda_is_left_out() -> None:
    """HIPIFY makes HIP's version of CUDA's."""
    assert names(kernel(f"#if CUDA_VERSION >= 9000\n{HAZARD}\n#else\nolder();\n#endif")) == set()
    assert "inline-ptx" in names(kernel(f"#if CUDA_VERSION >= 9000\nnewer();\n#else\n{HAZARD}\n#endif"))


PORTED = "#ifdef USE_ROCM\nint lanes();\n#endif\n"
CHAIN = "#if defined(JAX_GPU_CUDA)\nint nvidia();\n#elif defined(JAX_GPU_HIP)\nint amd();\n#endif\n"
EITHER = "#if defined(GOOGLE_CUDA) || defined(TENSORFLOW_USE_ROCM)\nint any();\n#endif\n"


@pytest.mark.parametrize(
    ("before", "condition", "severity"),
    [
        (PORTED, "#if NVJPEG_FOUND", "note"),
        (PORTED, "#if defined USE_NVIDIA_CUVS", "note"),
        (PORTED, "#if defined(USE_CUDNN) && SOMETHING", "note"),
        (PORTED, "#if defined(USE_CUDNN) || SOMETHING", "error"),
        (PORTED, "#ifdef NO_CUDNN", "error"),
        # The other side of what is missing; and a library that HIP has under another name.
        (PORTED, "#ifndef NVJPEG_FOUND\n#else", "note"),
        (PORTED, "#ifndef SOMETHING\n#else", "error"),
        (PORTED, "#ifdef CUSOLVER_AVAILABLE", "unknown"),
        (PORTED, "#ifdef GOOGLE_CUDA", "error"),
        # The project's own switch, and what stands beside it where either will do.
        (EITHER, "#ifdef GOOGLE_CUDA", None),
        (EITHER, "#ifdef GOOGLE_TPU", "error"),
        (CHAIN, "#ifdef JAX_GPU_CUDA", None),
        (CHAIN, "#if JAX_GPU_CUDA", None),
        (CHAIN, "#ifndef JAX_GPU_CUDA", "error"),
        (CHAIN, "#ifdef JAX_GPU_CUDA_GRAPHS", "error"),
        (CHAIN.replace("JAX_GPU_CUDA", "JAX_CUDA_GRAPHS"), "#ifdef JAX_CUDA_GRAPHS", "error"),
        (CHAIN.replace("defined(JAX_GPU_CUDA)", "!defined(ON_CUDA)"), "#ifdef ON_CUDA", "error"),
        # HIPIFY makes AMD's names of these.
        (CHAIN.replace("JAX_GPU_CUDA", "USE_CUDA"), "#ifdef USE_CUDA", "error"),
        (CHAIN.replace("JAX_GPU_CUDA", "__CUDACC__"), "#ifdef __CUDACC__", "error"),
        # Two that differ in one word, each asked for by itself.
        ("#ifdef UCL_HIP\n#endif\n", "#ifdef UCL_CUDADR", None),
        ("#ifdef UCL_HIP\n#endif\n", "#ifdef XYZ_CUDADR", "error"),
        (PORTED, "#ifdef HAS_GEMM_SM80", "note"),
        (PORTED, "#ifdef HAS_GEMM_80", "error"),
        # Of ROCm 7.2.
        (PORTED, "#if HIP_VERSION_MAJOR < 7", None),
        (PORTED, "#if ROCM_VERSION >= 70000", "error"),
        (PORTED, "#if defined(__CUDACC__) && defined(__HIP_PLATFORM_AMD__)\n#else", None),
        (PORTED, "#if defined(__CUDACC__)\n#else", "error"),
        # A tree without a side for AMD has all of it before it.
        ("", "#if NVJPEG_FOUND", "error"),
    ],
)
def test_a_switch_that_asks_for_nvidia(tmp_path: Path, before: str, condition: str, severity: str | None) -> None:
    (tmp_path / "a.cu").write_text(before + kernel(f"{condition}\n{HAZARD}\n#endif"))
    found = preflight_source(tmp_path, on="mi300x", hipify=False).findings
    assert next((one.severity for one in found if one.check == "inline-ptx"), None) == severity


EITHER_OF = "#ifdef USE_ROCM\n#define EITHER(amd, nvidia) amd\n#else\n#define EITHER(amd, nvidia) nvidia\n#endif\n"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("EITHER(__shfl_down(x, 1), __shfl_down_sync(0xffffffff, x, 1));", False),
        ("EITHER(__shfl_down_sync(0xffffffff, x, 1), __shfl_down(x, 1));", True),
    ],
)
def test_an_argument_that_a_macro_drops_for_amd(line: str, found: bool) -> None:
    assert ("mask-32-bit" in names(EITHER_OF + kernel(line))) == found


def test_a_tree_that_hipcc_compiles_as_it_is(tmp_path: Path) -> None:
    """There __CUDACC__ is NVIDIA's, where another side asks for __HIPCC__."""
    both = "#if defined(__CUDACC__)\nint nvidia();\n#elif defined(__HIPCC__)\nint amd();\n#endif\n"
    (tmp_path / "a.cu").write_text(both + kernel(f"#ifdef __CUDACC__\n{HAZARD}\n#endif"))
    for build, found in (("", True), ("enable_language(HIP)", False)):
        (tmp_path / "CMakeLists.txt").write_text(build)
        report = preflight_source(tmp_path, on="mi300x", hipify=False)
        assert any(one.check == "inline-ptx" for one in report.findings) == found


def test_a_macro_that_only_nvidias_side_uses() -> None:
    macro = f"#define CHECK_IT(x) do {{ {HAZARD} }} while (0)\n#ifdef USE_ROCM\nint lanes();\n#endif\n"
    used = kernel("CHECK_IT(n);")
    assert "inline-ptx" in names(macro), "whoever includes it may use it"
    assert "inline-ptx" in names(macro + used)
    assert "inline-ptx" not in names(macro + f"#ifndef USE_ROCM\n{used}#endif\n// CHECK_IT(n)\n")
    assert "inline-ptx" in names(macro + f"#ifndef USE_ROCM\n{used}#endif\n#define ALSO(x) CHECK_IT(x)\n")


def test_both_arms_of_a_condition_on_the_target() -> None:
    text = "#if defined(__gfx942__)\nconst float fp8_max = 224.f;\n#else\nconst float fp8_max = 448.f;\n#endif\n"
    assert "fp8-range" not in names(text)
    assert ("fp8-range", 4) in checks(text.replace("#if defined", "#if !defined"))


def test_a_template_that_only_nvidias_side_calls() -> None:
    ballot = "template <int N> __device__ int vote(bool p) {\n  unsigned m = __ballot_sync(~0u, p);\n  return m;\n}\n"
    call = "__global__ void k(int* out) { out[0] = vote<4>(true); }\n"
    guarded = f"#ifndef USE_ROCM\n{call}#endif\n"
    assert "mask-32-bit" not in names(ballot + guarded)
    assert ("mask-32-bit", 2) in checks(ballot + guarded + call)
    # Nobody calls it here: whoever includes this may.
    assert ("mask-32-bit", 2) in checks(ballot + "#ifndef USE_ROCM\nint n;\n#endif\n")


PTX = 'asm volatile("membar.sys;" ::: "memory");'


@pytest.mark.parametrize(
    ("before", "condition"),
    [
        ("#ifdef __CLION_IDE__\n#define __CUDA_ARCH__ 900\n#endif\n", "#if __CUDA_ARCH__"),
        ("", "#ifdef __MY_DTK__"),
        ("", "#ifdef USE_SYCL"),
        ("", "#if defined(__x86_64__)"),
    ],
)
def test_what_a_build_for_rocm_on_linux_leaves_out(before: str, condition: str) -> None:
    assert "inline-ptx" not in names(f"{before}{condition}\n__global__ void k() {{ {PTX} }}\n#endif\n")
    assert "inline-ptx" in names(f"{before}#ifdef SOMETHING\n__global__ void k() {{ {PTX} }}\n#endif\n")


def test_the_other_side_of_a_condition_may_ask_for_nvidia(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text(
        "#if defined(USE_ROCM) && !FORCE_NVSHMEM_API\nint team;\n#else\nusing team = nvshmem_team_t;\n#endif\n"
        "#ifndef DISABLE_SM90_FEATURES\ncudaLaunchConfig_t config;\n#endif\n"
    )
    report = preflight_source(tmp_path, on="mi300x", hipify=False, use_clang=False)
    assert {(one.check, one.severity) for one in report.findings} == {
        ("nvshmem", "note"),
        ("cluster-launch", "setting"),
    }


def test_a_name_of_the_projects_own_is_none_of_cudas() -> None:
    assert "nvshmem" not in names("void f() { auto nvshmem_rank = 3; g(nvshmem_rank); }")
    assert "compute-capability" not in names(
        "constexpr auto cudaDevAttrComputeCapabilityMajor = hipDeviceAttributeComputeCapabilityMajor;"
    )
