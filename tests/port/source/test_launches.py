"""Launches, and what HIP's headers and clang refuse, each with a twin that is right."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

HOST = "void run(at::Tensor x, int64_t n, int rows) {{\n{}\n}}\n"


@pytest.mark.parametrize(
    "body",
    [
        "work<<<(n + 255) / 256, 256>>>(x);", "dim3 grid(div_up(x.numel(), 256)); work<<<grid, 256>>>(x);",
        "const auto blocks = ceil_div(x.size(0), 4); work<<<blocks, dim3(32, 4)>>>(x);",
        "int cols = (rows + 31) / 32; dim3 g(cols, std::min(rows, 65535)); work<<<g, 256>>>(x);",
        "MY_LAUNCH_KERNEL(work, dim3((n + 255) / 256), dim3(256), 0, stream, x);",
        "hipLaunchKernelGGL(work, (n + 255) / 256, 256, 0, 0, x);",
        "unsigned size = unsigned{1} << rows; unsigned blocks = std::max(1U, size / 2); work<<<blocks, 64>>>(x);",
    ],
)  # fmt: skip
def test_grids_without_a_cap_are_not_known(body: str) -> None:
    found = [one for one in findings(HOST.format(body)) if one.check == "grid-limit"]
    assert [(one.where.line, one.severity) for one in found] == [(2, "unknown")]


@pytest.mark.parametrize(
    "body",
    [
        "work<<<256, 256>>>(x);", "work<<<std::min<int64_t>((n + 255) / 256, 65535), 256>>>(x);", "work<<<rows, 256>>>(x);",
        "int blocks = capped_blocks(n, 256); work<<<blocks, 256>>>(x);", "work<<<(rows + 255) / 256, 256>>>(x);",
        "unsigned blocks = 1 << 10; work<<<blocks, 64>>>(x);",
        "CHECK(n < (1ull << 32)); work<<<(n + 255) / 256, 256>>>(x);", "work<<<dim3(rows, 8), 256>>>(x);",
    ],
)  # fmt: skip
def test_grids_that_stay_small(body: str) -> None:
    assert "grid-limit" not in names(HOST.format(body))


def test_launches_of_one_file_are_one_finding() -> None:
    found = findings(HOST.format("work<<<n / 64, 64>>>(x);\nmore<<<n / 64, 64>>>(x);"))
    assert [one.where.line for one in found if one.check == "grid-limit"] == [2]
    assert "and 1 more line: 3" in next(one.evidence for one in found if one.check == "grid-limit")


@pytest.mark.parametrize("kernel_name", ["work", "&work<float>", "(work<int, 4>)"])
def test_attributes_of_a_kernel(kernel_name: str) -> None:
    line = "cudaFuncSetAttribute({}, cudaFuncAttributePreferredSharedMemoryCarveout, 50);"
    assert ("kernel-attribute", 2) in checks(HOST.format(line.format(kernel_name)))
    for right in (f"(const void*){kernel_name}", f"reinterpret_cast<const void*>({kernel_name})"):
        assert "kernel-attribute" not in names(HOST.format(line.format(right)))
    member = [one for one in findings(HOST.format(line.format("spec.exec"))) if one.check == "kernel-attribute"]
    assert [one.severity for one in member] == ["unknown"]
    through = f"auto f = (void*){kernel_name}; " + line.format("f")
    assert "kernel-attribute" not in names(HOST.format(through))
    assert "kernel-attribute" not in names("void set(const void* f) {\n" + line.format("f") + "\n}\n")


@pytest.mark.parametrize(
    "body",
    [
        "half2* to = (half2*)out; atomicAdd(to + 1, v);", "atomicAdd(reinterpret_cast<__nv_bfloat16*>(out), v);",
        "__half* to = f(); atomicAdd(&to[n], v);", "half2 a, b; a = __hmax2(a, b);",
    ],
)  # fmt: skip
def test_overloads_that_hip_lacks(body: str) -> None:
    assert ("overload", 2) in checks(kernel(body))
    compat = (
        "#ifdef USE_ROCM\n__device__ void atomicAdd(half2* a, half2 b) { }\n#define __hmax2(a, b) mine(a, b)\n#endif\n"
    )
    assert "overload" not in names('#include "compat.cuh"\n' + kernel(body), compat_cuh=compat)


@pytest.mark.parametrize(
    "body", ["atomicAdd(out, 1.f);", "nv_bfloat162 a, b; a = __hmax2(a, b);", "atomicAdd(&count[n], 1);"]
)
def test_overloads_that_hip_has(body: str) -> None:
    assert "overload" not in names(kernel(body))


def test_functions_that_hip_has_as_well() -> None:
    own = "__device__ inline float atomicMax(float* at, float v) { return v; }\n"
    assert ("overload", 1) in checks(own)
    assert "overload" not in names(f"namespace mine {{\n{own}}}\n") | names(f"#ifndef USE_ROCM\n{own}#endif\n")
    assert "overload" not in names(own.replace("float*", "Half*")) | names("template <typename T> " + own)


def test_a_result_without_a_return() -> None:
    text = "template <typename T> __device__ __forceinline__ T last(const T* x, int n) {{\n  T v = x[0];\n  {}\n}}\n"
    assert ("clang-strictness", 1) in checks(text.format(""))
    assert "clang-strictness" not in names(text.format("return v;")) | names(kernel("out[0] = 1;"))
    assert "clang-strictness" not in names("struct S { __device__ S(int n) { m = n; } int m; };\n")


def test_the_nearest_declaration_has_the_type() -> None:
    """A name may be declared otherwise in the function before."""
    before = "__device__ float clip(float v, float lo) { return fmaxf(v, lo); }\n"
    pair = "__device__ nv_bfloat162 clip(nv_bfloat162 v, nv_bfloat162 lo) { return __hmax2(v, lo); }\n"
    assert "overload" not in names(before + pair)
    assert ("overload", 2) in checks(before + pair.replace("nv_bfloat162", "half2"))
