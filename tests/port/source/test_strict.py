"""What nvcc takes in device code and clang's HIP front end refuses, each with a twin that it takes."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

ARRAY = "struct Lens { std::array<float, 6> poly; float& at(int i); };\n"


@pytest.mark.parametrize(
    "text",
    [
        "__device__ float f(Lens lens) { return lens.poly.at(1); }", "struct Model { __host__ __device__ Model(Lens l)\n: a(1), b{2} { a = l.poly.at(0); } };",
        "__global__ void k(std::array<int, 4> sizes) { out[0] = sizes.at(2); }",
    ],
)  # fmt: skip
def test_a_checked_element_throws(text: str) -> None:
    strict = [one for one in findings(ARRAY + text) if one.check == "clang-strictness"]
    assert [one.severity for one in strict] == ["error"]
    for other in ("lens.at(1)", "tensors.at(1)"):
        assert "clang-strictness" not in names(ARRAY + f"__device__ float f(Lens lens) {{ return {other}; }}")
    assert "clang-strictness" not in names(ARRAY + "float f(Lens lens) { return lens.poly.at(1); }")


def test_deduced_arguments_of_a_template() -> None:
    for line in ("auto a = std::array{1, 2};", "std::tuple t(n, 1);", "auto p = std::pair(n, 2);"):
        assert ("clang-strictness", 2) in checks(kernel(line)), line
        assert "clang-strictness" not in names(f"void f(int n) {{ {line} }}"), line
    assert "clang-strictness" not in names(kernel("std::array<int, 2> a = {1, 2};\nauto p = std::make_pair(n, 2);"))


def test_the_smaller_of_two_in_a_constant() -> None:
    assert ("clang-strictness", 1) in checks("static constexpr int rows = std::min(8, kItems);\n")
    assert "clang-strictness" not in names("int rows = std::min(8, items);\n")
    assert "clang-strictness" not in names("static constexpr int rows = std::min(8, kItems);\n", name="host.cpp")


def overloads(text: str) -> list[tuple[int | None, str]]:
    return [(one.where.line, one.severity) for one in findings(text) if one.check == "overload"]


def test_operators_of_vectors_are_there_twice() -> None:
    add = "__device__ float2& operator+=(float2& a, const float2& b) { a.x += b.x; return a; }\n"
    assert overloads(add) == [(1, "error")]
    assert overloads(add.replace("+=(", "*(")) == [(1, "unknown")]
    # A template of HIP's loses to a function of one's own, and a number beside a vector is none of its own.
    assert overloads(add.replace("+=(", "-(")) == overloads(add.replace("const float2&", "float")) == []
    assert overloads(add.replace("float2", "Vector")) == overloads(f"#ifndef USE_ROCM\n{add}#endif\n") == []


def test_a_function_that_ends_the_thread_needs_no_return() -> None:
    text = "{0}__device__ int pick(int n) {{\n  {1};\n}}\n"
    macro = "#define REFUSE() do {{ abort(); }} while (0)\n".format()
    function = "[[noreturn]] __device__ void refuse(const char* why);\n"
    assert "clang-strictness" not in names(text.format(macro, "REFUSE()")) | names(
        text.format(function, 'refuse("no")')
    )
    assert ("clang-strictness", 2) in checks(text.format(function.replace("[[noreturn]] ", ""), 'refuse("no")'))


@pytest.mark.parametrize("condition", ["#ifdef {}", "#ifndef {}", "#if defined({}) && N > 1"])
def test_a_macro_that_hip_no_longer_sets(condition: str) -> None:
    text = condition.format("__HIP_PLATFORM_HCC__") + "\nint lanes;\n#endif\n"
    assert ("architecture-macro", 1) in checks(text)
    assert "architecture-macro" not in names(text.replace("HCC", "AMD"))
    both = "#if defined(__HIP_PLATFORM_HCC__) || defined(__HIP_PLATFORM_AMD__)\nint lanes;\n#endif\n"
    assert "architecture-macro" not in names(both)


def test_half_operators_that_only_nvcc_gets() -> None:
    undefined = "#undef __CUDA_NO_HALF_OPERATORS__\n"
    assert ("half-flags", 1) in checks(undefined)
    assert "half-flags" not in names(undefined + "#undef __HIP_NO_HALF_OPERATORS__\n")
    assert "half-flags" not in names(f"#ifndef USE_ROCM\n{undefined}#endif\n")


def test_a_type_of_data_is_no_type_of_computing() -> None:
    call = "cublasGemmEx(h, t, t, m, n, k, &a, A, CUDA_R_16F, m, B, CUDA_R_16F, k, &b, C, CUDA_R_16F, m, {0}, algo);"
    assert overloads(kernel(call.format("CUDA_R_32F"))) == [(2, "error")]
    assert overloads(kernel("cudaDataType_t type = pick();\n" + call.format("type"))) == [(3, "error")]
    assert overloads(kernel("cublasComputeType_t type = pick();\n" + call.format("type"))) == []
    assert overloads(kernel(call.format("CUBLAS_COMPUTE_32F"))) == []


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("template <class T> __device__ inline T max(T a, T b) { return a > b ? a : b; }", "overload"),
        ("__device__ void atomicAdd(half* p, half v) { add(p, v); }", "overload"),
        ("template __device__ double percentile<double>(const double* v);", "device-linking"),
        ("extern __device__ int counter;", "device-linking"), ("struct Info { __device__ ~Info() { drop(); } };", "clang-strictness"),
        ("struct It { __device__ It(int* p) {} __device__ It& operator++() { ++at; return *this; } };", "clang-strictness"),
        ("void f() { cudaLaunchKernel(run, 1, 1, args, 0, s); }", "kernel-attribute"),
        ("void f() { cudaFuncGetAttributes(&a, run); }", "kernel-attribute"),
        ("constexpr int kWarpSize = 32;\nvoid f() { dim3 block(kWarpSize, kWarpSize); }", "launch-size"),
        ("__device__ int f(int n) { return std::clamp(n, 0, 9); }", "clang-strictness"), ("auto size = rocprim::detail::align_size(n);", "cub-internal"),
        ("template <class T> __global__ void k(const T* rows) { float f = __ldg(&rows[0]); }", "overload"),
        ("__device__ __nv_bfloat16 cast(int v) { return static_cast<float>(v); }", "half-flags"),
        ("#if !defined(CUDA_VERSION) || CUDA_VERSION < 12040\nvoid f() { throw 1; }\n#else\nvoid f() { run(); }\n#endif", "architecture-macro"),
        ("#ifdef __CUDA_ARCH__\n#define CHECK(x) assert(x)\n#else\n#define CHECK(x) refuse(x)\n#endif", "architecture-macro"),
    ],
)  # fmt: skip
def test_what_nvcc_takes_and_hipcc_does_not(text: str, check: str) -> None:
    assert check in names(text + "\n")
    assert check not in names(f"#ifndef USE_ROCM\n{text}\n#endif\n")


@pytest.mark.parametrize(
    "text",
    [
        "namespace own { template <class T> __device__ T max(T a, T b) { return a; } }", "int max(int a, int b) { return a; }",
        "#if HIP_VERSION < 71300000\n__device__ void atomicAdd(half* p, half v) { add(p, v); }\n#endif", "extern __shared__ int rows[];",
        "template <class T> __device__ T twice(T x) { return x; }", "struct Info { __host__ __device__ ~Info() { drop(); } };",
        "void f() { cudaLaunchKernel((void*)run, 1, 1, args, 0, s); }", "constexpr int kTile = 32;\nvoid f() { dim3 block(kTile, kTile); }",
        "#ifdef __CUDA_ARCH__\n#define CHECK(x) assert(x)\n#endif", "template <class T> __global__ void k(const float* rows) { float f = __ldg(&rows[0]); }",
        "int f(int n) { return std::clamp(n, 0, 9); }", "__device__ float cast(int v) { return static_cast<float>(v); }", "#if CUDA_VERSION < 12040\nvoid f() { run(); }\n#endif",
    ],
)  # fmt: skip
def test_what_both_take(text: str) -> None:
    unwanted = {
        "overload",
        "device-linking",
        "clang-strictness",
        "kernel-attribute",
        "launch-size",
        "architecture-macro",
    }
    assert names(text + "\n").isdisjoint(unwanted)


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("float3 v = {x, y};", "error"),
        ("float4 v{1.0f};", "unknown"),
        ("int4 a[4] = {0};", "error"),
        ("float2 v = {x, y};", None),
        ("int4 a[2] = {};", None),
        ("float4 v = {make(x)};", None),
        ("int4 a[2] = {make_int4(0, 0, 0, 0), b};", None),
    ],
)
def test_too_few_values_in_the_braces_of_a_vector(line: str, severity: str | None) -> None:
    found = [one.severity for one in findings(kernel(line)) if one.check == "clang-strictness"]
    assert found == ([severity] if severity else [])


def test_a_typed_pointer_where_hip_takes_void() -> None:
    call = "cudaHostGetDevicePointer(&device, host, 0);"
    assert "overload" in names("void f(int* host) { int* device; " + call + " }")
    assert "overload" not in names("void f(int* host) { void* device; " + call + " }")
    assert "overload" not in names(
        "void f(int* host) { int* device; cudaHostGetDevicePointer(reinterpret_cast<void**>(&device), host, 0); }"
    )


def test_a_cast_to_the_templates_type_is_read_with_ldg() -> None:
    text = "template <typename T> __global__ void k(void* x, T* y) { y[0] = __ldg((T*)x + 1); }"
    assert "overload" in names(text)


def test_an_atomic_of_ones_own_that_hip_has() -> None:
    own = "__device__ unsigned long atomicAdd(unsigned long* at, unsigned long v) { return v; }\n"
    assert overloads(own) == [(1, "error")]
    assert overloads(own.replace("unsigned long", "long long")) == overloads(f"namespace n {{\n{own}}}\n") == []


@pytest.mark.parametrize(
    "line",
    ["while (atomicCAS(lock, 0, 1) != 0);", "while (atomicExch(lock, 1)) { __nanosleep(20); }", "if (locks[n].try_lock()) { n = 0; }"],
)  # fmt: skip
def test_lanes_that_wait_for_a_lock_of_their_wavefront(line: str) -> None:
    assert ("lane-spin", 2) in checks(kernel(line))
    assert "lane-spin" not in names(kernel(f"if (threadIdx.x == 0) {{ {line} }}"))
    assert "lane-spin" not in names(f"void f(int n) {{\n{line}\n}}")


def test_loops_of_atomics_that_wait_for_nobody() -> None:
    for line in ("while (n != atomicCAS(at, n, n + 1)) { n = *at; }", "do { n = *at; } while (n > 0);"):
        assert "lane-spin" not in names(kernel(line)), line


def test_a_loop_without_a_condition_is_prose() -> None:
    assert not names("all bits are stored while\nthe rest of it waits\n", name="notes.h.in")
