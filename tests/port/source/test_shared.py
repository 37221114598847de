"""Shared memory against 64 KB on gfx942 and 160 KB on gfx950."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names


@pytest.mark.parametrize(
    "body",
    [
        "__shared__ float s[32768];", "__shared__ __align__(16) half s[128][272];", "__shared__ float a[12288];\n__shared__ float b[12288];",
        "constexpr int kTile = 144;\n__shared__ float s[kTile][kTile];", "__shared__ float4 s[64 * 80], t[1];", "__shared__ unsigned char s[2][66000];",
        "alignas(128) __shared__ uint64_t s[9000];", "__shared__ int s[SIZE];", "__shared__ double s[sizeof(float) * 3000];",
    ],
)  # fmt: skip
def test_static_arrays_beyond_the_limit_are_found(body: str) -> None:
    text = "#define SIZE (20 * 1024)\n" + kernel(body)
    found = [one for one in findings(text, on="mi300x,mi355x") if one.check == "shared-memory"]
    assert [(one.severity, one.target) for one in found] == [("error", "mi300x")]
    assert "bytes of shared memory" in found[0].what


@pytest.mark.parametrize(
    "body",
    [
        "__shared__ float s[16384];", "__shared__ char s[65536];", "// __shared__ float s[99999];", "extern __shared__ float s[];", "float s[99999];",
        "__shared__ float s[N];", "#ifndef USE_ROCM\n__shared__ float s[99999];\n#endif", "__shared__ Unknown s[99999];",
    ],
)  # fmt: skip
def test_static_arrays_that_fit(body: str) -> None:
    assert "shared-memory" not in names(kernel(body))


def test_the_size_of_two_kernels_is_not_added() -> None:
    one = "__shared__ float s[10000];"
    assert "shared-memory" not in names(kernel(one) + kernel(one).replace(" k(", " k2("))


def test_over_both_limits() -> None:
    found = [
        one
        for one in findings(kernel("__shared__ float s[50000];"), on="mi300x,mi355x")
        if one.check == "shared-memory"
    ]
    assert [one.target for one in found] == [""]


def test_opt_ins_and_launches() -> None:
    opt = "void f() { cudaFuncSetAttribute((const void*)k, cudaFuncAttributeMaxDynamicSharedMemorySize, %s); }"
    assert ("shared-memory", 1) in checks(opt % "98304")
    assert [one.severity for one in findings(opt % "98304")] == ["error"]
    assert "shared-memory" not in names(opt % "49152")
    assert [one.severity for one in findings(opt % "bytes")] == ["unknown"]
    assert "shared-memory" in names("void f() { int smem = 96 * 1024; k<<<1, 256, smem, stream>>>(); }")
    assert "shared-memory" not in names("void f() { int smem = 32 * 1024; k<<<1, 256, smem, stream>>>(); }")
    assert "shared-memory" not in names("void f() { k<<<1, 256, bytes>>>(); }")
    assert "shared-memory" not in names(opt % "98304", on="mi355x")


def test_budgets_of_shared_memory_in_names_are_unknown() -> None:
    assert [one.severity for one in findings("constexpr int kMaxSmemBytes = 227 * 1024;")] == ["unknown"]
    assert not names("constexpr int kMaxSmemBytes = 48 * 1024;\nconstexpr int kRows = 99999;")


def test_odd_declarations_stop_nothing() -> None:
    assert "shared-memory" in names(kernel("__shared__ alignas unsigned char buf[100000];"))
