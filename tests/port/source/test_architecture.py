"""Conditions on NVIDIA's macros, and what a build for ROCm makes of them."""

import pytest
from tests.port.source.snippets import findings, kernel, names


def severities(text: str) -> list[str]:
    return [one.severity for one in findings(text) if one.check == "architecture-macro"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (kernel("#if __CUDA_ARCH__ >= 800\nfast();\n#endif"), "unknown"),
        ("#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900\nfast();\n#else\nslow();\n#endif", "unknown"),
        ("#if __CUDA_ARCH__ >= 800\nfast();\n#else\nassert(false);\n#endif", "unknown"),
        ("#ifdef __CUDA_ARCH__\ndevice();\n#else\nhost();\n#endif", "unknown"),
        ("#ifndef __CUDA_ARCH__\nhost();\n#else\ndevice();\n#endif", "unknown"),
        ("#ifdef __CUDA_ARCH__\ndevice();\n#else\nthrow 1;\n#endif", "unknown"),
        ("#ifdef __CUDA_ARCH__\ndevice();\n#endif", "unknown"),
        # An undefined macro counts as 0.
        ("#if __CUDA_ARCH__ < 700\nold();\n#else\nnow();\n#endif", "unknown"),
        ("#if CUDART_VERSION >= 12000\nnewer();\n#else\nolder();\n#endif", "note"),
        ("#if CUDART_VERSION >= 12000\nnewer();\n#endif", "unknown"),
        ("#ifdef SOMETHING\n#if __CUDA_ARCH__ >= 800\nfast();\n#endif\n#endif", "unknown"),
        # A switch alone, which other conditions ask for; outside of the preprocessor the name is unknown.
        ("#if __CUDA_ARCH__ >= 800\n#define HAS_BF16 1\n#endif\n#ifdef HAS_BF16\nfast();\n#endif", "unknown"),
        ("#define NEW (__CUDA_ARCH__ >= 800)\n#if NEW\nfast();\n#endif", "unknown"),
        (
            "#define HAS_BF16 (defined(CUDART_VERSION) && CUDART_VERSION >= 11000)\n#if HAS_BF16\nf();\n#endif",
            "unknown",
        ),
        (kernel("if (__CUDA_ARCH__ >= 800) fast();"), "error"),
        ("int version() { return CUDA_VERSION; }", "error"),
        # HIPIFY knows __CUDACC__, not this.
        ("#ifdef __NVCC__\n#include <curand_kernel.h>\n#else\n#include <random>\n#endif", "unknown"),
        # HIPIFY makes HIP's version of CUDA's, which is less than any.
        ("#if CUDA_VERSION >= 13000\nnewer();\n#endif", "unknown"),
        ("#if CUDA_VERSION >= 13000\nnewer();\n#else\nolder();\n#endif", "note"),
    ],
)
def test_each_side_of_an_architecture_test_has_its_severity(text: str, expected: str) -> None:
    assert severities(text) == [expected]
    assert all(one.remedy for one in findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700\nold();\n#else\nnow();\n#endif", "#if __CUDA_ARCH__ == 750\nturing();\n#endif",
        "#if __CUDA_ARCH__ >= 800 || defined(USE_ROCM)\nfast();\n#endif", "#ifndef USE_ROCM\n#if __CUDA_ARCH__ >= 800\nfast();\n#endif\n#endif",
        "#ifdef USE_ROCM\nours();\n#elif __CUDA_ARCH__ >= 800\nfast();\n#else\nassert(0);\n#endif", "// #if __CUDA_ARCH__ >= 800", "#if __CUDA_ARCH__ >= 800\n// nothing\n#endif", "#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 600\nf();\n#endif",
        "#if __CUDA_ARCH__ >= 900\nasm volatile(\"griddepcontrol.wait;\");\n#endif",
        "#ifdef USE_ROCM\n#define CUDA_VERSION HIP_VERSION\n#endif\nint version() { return CUDA_VERSION; }",
        "#define __CUDA_ARCH__ 800\n#if __CUDA_ARCH__ >= 800\nfast();\n#endif",
        "#if __CUDA_ARCH__ >= 800\n#define HAS_BF16 1\n#endif", "#ifdef __NVCC__\n#include <vector>\n#endif", "#define V CUDART_VERSION", "#define NEW (defined(USE_ROCM) || __CUDA_ARCH__ >= 800)",
        "#if __CUDA_ARCH__ >= 800\n#define LANES 4\n#else\n#define LANES 2\n#endif\n#if LANES > 2\nf();\n#endif",
        "#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)\ndevice();\n#else\nhost();\n#endif",
    ],
)  # fmt: skip
def test_sides_that_are_right(text: str) -> None:
    assert severities(text) == []


@pytest.mark.parametrize(
    ("condition", "on", "expected"),
    [
        ("defined(__gfx90a__) || defined(__gfx942__)", "mi355x", {"target-list"}),
        ("defined(__gfx90a__) || defined(__gfx942__)", "mi300x", set()),
        ("!defined(__gfx90a__) && !defined(__gfx942__)", "mi355x", set()),
        ("defined(__gfx90a__) || defined(__gfx942__) || defined(__GFX9__)", "mi355x", set()),
        ("defined(__gfx942__)", "mi355x", set()),
        ("defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)", "mi355x", set()),
    ],
)
def test_lists_of_targets_without_a_newer_one(condition: str, on: str, expected: set[str]) -> None:
    text = f"#if {condition}\nint a() {{ return 1; }}\n#else\nint a() {{ return 2; }}\n#endif\n"
    assert names(text, on=on) & {"target-list"} == expected
