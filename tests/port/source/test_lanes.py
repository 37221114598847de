"""32-lane assumptions, each with a twin that is right on 64 lanes."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

SHUFFLE = "float v = __shfl_xor(out[0], 1);"
AMONG_32 = "float v = __shfl_xor(out[0], 1, 32);"


@pytest.mark.parametrize(
    "line",
    [
        "#define WARP_SIZE 32", "#define WARP_SIZE (1 << 5)", "constexpr int kWarpSize = 32;", "static const int warp_size = 32;",
        "enum { THREADS_PER_WARP = 32 };", "#define LOG_WARP_SIZE 5", "constexpr int warp_size() { return 32; }",
        "template <int WARP_SIZE = 32> void f();",
    ],
)  # fmt: skip
def test_warp_sizes_as_constants_are_found(line: str) -> None:
    found = findings(line + "\n" + kernel(SHUFFLE))
    assert [(one.check, one.where.line, one.severity) for one in found] == [("warp-size", 1, "error")]
    assert found[0].remedy
    assert line.strip() in found[0].evidence
    assert checks(line + "\n" + kernel(SHUFFLE), on="rx-7900-xtx") == []


@pytest.mark.parametrize(
    "line",
    [
        "#define WARP_SIZE 64", "// #define WARP_SIZE 32", 'const char* s = "WARP_SIZE = 32";', "constexpr int kWarpTileSize = 32;",
        "#ifdef USE_ROCM\n#define WARP_SIZE 64\n#else\n#define WARP_SIZE 32\n#endif", "constexpr int kRows = 32;", "#define WARP_SIZE warpSize",
    ],
)  # fmt: skip
def test_sizes_that_are_right(line: str) -> None:
    assert "warp-size" not in names(line + "\n" + kernel(SHUFFLE))


def test_a_size_without_lanes_that_talk_is_not_known() -> None:
    assert [one.severity for one in findings("#define WARP_SIZE 32\n")] == ["unknown"]


@pytest.mark.parametrize(
    "line",
    [
        "int lane = threadIdx.x % 32;", "int lane = threadIdx.x & 31;", "int lane = threadIdx.x & 0x1f;", "int lane = threadIdx.x & (32 - 1);", "constexpr int WARP = 32; int w = threadIdx.x / WARP;", "float w = blockDim.x / 32.f;", "int warp = threadIdx.x >> 5;",
        "int warp = threadIdx.x / 32;", "int w = (threadIdx.x + threadIdx.y * blockDim.x) / 32;", "int t = threadIdx.x; int w = t / 32;",
        "int nwarps = blockDim.x / 32;", "int nwarps = (blockDim.x + 31) / 32;", "if (threadIdx.x < 32) out[0] = 1;",
        "int const tid = threadIdx.x; out[tid >> 5] = v;", "const int num_warps = NUM_THREADS / 32;", "int threads = num_warps_per_block * 32;",
    ],
)  # fmt: skip
def test_arithmetic_on_lanes_is_found(line: str) -> None:
    with_lanes = [one for one in findings(kernel(f"{SHUFFLE}\n{line}")) if one.check == "lane-arithmetic"]
    assert [(one.where.line, one.severity) for one in with_lanes] == [(3, "error")]
    alone = [one for one in findings(kernel(line)) if one.check == "lane-arithmetic"]
    assert [one.severity for one in alone] == ["unknown"]
    assert "lane-arithmetic" not in names(kernel(line), on="rx-7900-xtx")


@pytest.mark.parametrize(
    "line",
    [
        "int lane = threadIdx.x % warpSize;", "int lane = threadIdx.x & 63;", "constexpr int W = 64; int w = threadIdx.x / W;", "constexpr int WORDS = 32; int w = threadIdx.x / WORDS;", "int w = threadIdx.x / width;", "constexpr int kColsPerRow = 32; int c = threadIdx.x % kColsPerRow;", "int warp = threadIdx.x >> 6;", "int half = n / 32;",
        "int block = n >> 5;", "int x = bits & 31;", "// int lane = threadIdx.x % 32;", "int row = threadIdx.x / 16;",
        "#ifndef USE_ROCM\nint lane = threadIdx.x % 32;\n#endif", "int words = (n + 31) / 32;", "int bits = words * 32;", "int offset = threadIdx.x * 32;", "if (threadIdx.x < 64) out[0] = 1;",
        'printf("threadIdx.x % 32");', "bool upper = lane_id >= 32;",
    ],
)  # fmt: skip
def test_arithmetic_that_is_right(line: str) -> None:
    assert "lane-arithmetic" not in names(kernel(f"{SHUFFLE}\n{line}"))


def test_32_and_warp_size_in_one_function() -> None:
    ported = "#if defined(USE_ROCM)\n#define LANES __AMDGCN_WAVEFRONT_SIZE\n#endif\n"
    mixed = ported + kernel("int tid = threadIdx.x;\nint w = tid / 32;\nout[w * warpSize] = out[tid];")
    found = [one for one in findings(mixed) if one.check == "lane-arithmetic"]
    assert [(one.where.line, one.severity) for one in found] == [(6, "error")]
    assert "line: 7" in found[0].evidence
    for right in (
        mixed.replace("/ 32", "/ warpSize"),
        mixed.replace("warpSize", "32"),
        mixed.replace("int tid", "int warpSize = 32, tid"),
    ):
        assert "error" not in {one.severity for one in findings(right) if one.check == "lane-arithmetic"}


@pytest.mark.parametrize(
    "body",
    [
        "for (int o = 16; o > 0; o >>= 1) v += __shfl_down(v, o);",
        "for (int o = 16; o > 0; o /= 2) { v += __shfl_xor_sync(m, v, o); }",
        "constexpr int W = 32; for (int o = W / 2; o; o >>= 1) v += __shfl_xor(v, o);",
        "for (int o = 32 / 2; o; o = o / 2) v += __shfl_xor(v, o);",
        "for (int o = 1; o < 32; o <<= 1) { v += __shfl_up(v, o); }",
        "for (int o = 1; o <= 16; o *= 2) { v += __shfl_xor(v, o); }",
        "v += __shfl_xor(v, 16); v += __shfl_xor(v, 8);\nv += __shfl_xor(v, 4); v += __shfl_xor(v, 2); v += __shfl_xor(v, 1);",
        "v = __shfl_sync(m, v, 31);",
    ],
)
def test_reductions_over_32_lanes_are_found(body: str) -> None:
    text = kernel("unsigned long long m = ~0ull;\nfloat v = out[0];\n" + body)
    assert ("warp-reduction", 4) in checks(text)
    assert "warp-reduction" not in names(text, on="rx-7900-xtx")


@pytest.mark.parametrize(
    "body",
    [
        "for (int o = warpSize / 2; o > 0; o >>= 1) v += __shfl_down(v, o);",
        "for (int o = 32; o > 0; o >>= 1) v += __shfl_down(v, o);",
        "for (int o = 16; o > 0; o >>= 1) v += __shfl_down(v, o, 32);",
        "for (int o = 16; o > 0; o >>= 1) v += out[o];",
        "v += __shfl_xor(v, 32);\nv += __shfl_xor(v, 16);",
        "v += __shfl_xor(v, 16, 32);",
        "for (int o = 1; o < 64; o <<= 1) { v += __shfl_up(v, o); }",
        "v = __shfl(v, 63);",
    ],
)
def test_reductions_that_are_right(body: str) -> None:
    assert "warp-reduction" not in names(kernel("float v = out[0];\n" + body))


def test_warp_size_as_a_constant() -> None:
    assert ("warp-size-constant", 2) in checks(kernel("constexpr int warps = 256 / warpSize;"))
    assert ("warp-size-constant", 2) in checks(kernel("__shared__ float s[warpSize];"))
    assert ("warp-size-constant", 2) in checks(kernel("__shared__ float s[1024 / warpSize];"))
    assert "warp-size-constant" not in names(kernel("out[n / warpSize] = 1;"))
    assert "warp-size-constant" not in names(kernel("int warps = 256 / warpSize;\nfloat x = s[warpSize];"))
    assert "warp-size-constant" not in names("int f(hipDeviceProp_t p) { constexpr int a = 1; return p.warpSize; }")


def severities(text: str, check: str, **others: str) -> set[str]:
    return {one.severity for one in findings(text, **others) if one.check == check}


def test_code_for_amd_knows_its_lanes() -> None:
    guarded = kernel(f"{SHUFFLE}\n#ifdef USE_ROCM\nint upper = threadIdx.x / 32;\n#endif")
    assert "lane-arithmetic" not in names(guarded)
    own = kernel(f"{SHUFFLE}\n#ifdef AMD_MFMA_AVAILABLE\nint upper = threadIdx.x / 32;\n#endif")
    assert "lane-arithmetic" not in names(own)


def test_converted_code_has_the_lanes_of_cuda() -> None:
    text = "#include <hip/hip_runtime.h>\n" + kernel(SHUFFLE + "\nint upper = threadIdx.x / 32;")
    assert severities(text, "lane-arithmetic") == {"unknown"}
    aware = text.replace("__global__", "#if defined(__GFX9__)\n#endif\n__global__", 1)
    assert "lane-arithmetic" not in names(aware)
    commented = text.replace("__global__", "// __GFX9__\n__global__", 1)
    assert severities(commented, "lane-arithmetic") == {"unknown"}


SIZE = "constexpr int warp_size = 32;\n"
KNOWS = "#ifdef __GFX9__\nconstexpr int physical = 64;\n#else\nconstexpr int physical = 32;\n#endif\n"


def test_groups_of_32_lanes_that_are_meant_are_notes() -> None:
    assert severities(KNOWS + SIZE + kernel(SHUFFLE), "warp-size") == {"note"}
    assert severities(SIZE + kernel(SHUFFLE), "warp-size") == {"error"}
    # A header that knows of both widths speaks for code that leaves the exchange to it, not for other exchanges.
    included = '#include "common.h"\n' + SIZE
    assert severities(included + kernel("out[0] = warp_reduce(out[1]);"), "warp-size", common_h=KNOWS) == {"unknown"}
    assert severities(included + kernel("out[0] = __shfl_xor(out[1], 1);"), "warp-size", common_h=KNOWS) == {"unknown"}
    half = kernel("for (int o = 16; o > 0; o >>= 1) out[0] += __shfl_xor(out[0], o);")
    assert severities(half, "warp-reduction") == {"error"}
    assert severities(KNOWS + half, "warp-reduction") == {"unknown"}


def test_the_other_side_of_gfx9_is_not_for_64_lanes() -> None:
    text = kernel("#ifdef __GFX9__\n{}\n#else\n{}\n#endif")
    narrow, wide = "unsigned m = __ballot(n);", "unsigned long long m = __ballot(n);"
    assert "ballot-truncated" not in names(text.replace("{}", wide, 1).replace("{}", narrow, 1))
    assert "ballot-truncated" in names(text.replace("{}", narrow, 1).replace("{}", wide, 1))


def test_a_reduction_in_a_while_loop() -> None:
    loop = "int o = {};\nwhile (o > 0) {{ out[0] += __shfl_down(out[0], o{}); o >>= 1; }}"
    assert ("warp-reduction", 3) in checks(kernel(loop.format("16", "")))
    assert "warp-reduction" not in names(kernel(loop.format("warpSize / 2", "")))
    assert "warp-reduction" not in names(kernel(loop.format("16", ", 32")))
    assert "warp-reduction" not in names(kernel("int o = 16;\nwhile (o > 0) { out[o] = 1; o >>= 1; }"))


def test_shuffles_among_32_lanes_are_right_on_64() -> None:
    assert severities(kernel(f"{AMONG_32}\nint lane = threadIdx.x % 32;"), "lane-arithmetic") == {"unknown"}
    own = "__device__ float shfl_xor(float v, int by, int width) { return v; }\n"
    loop = "for (int o = 16; o > 0; o >>= 1) out[0] += shfl_xor(out[0], o{});"
    assert "warp-reduction" not in names(own + kernel(loop.format(", 32")))
    assert "warp-reduction" in names(own + kernel(loop.format("")))
    # One step swaps the halves of 32 lanes, which is no reduction.
    assert "warp-reduction" not in names(kernel("out[0] = __shfl_xor(out[0], 16);"))


def test_parts_of_32_that_are_no_warps() -> None:
    group = "constexpr int QK8_1 = 32;\n" + kernel(f"{SHUFFLE}\nint q = threadIdx.x / QK8_1;")
    assert "lane-arithmetic" not in names(group)
    assert severities(kernel("int group = threadIdx.x / 32;"), "lane-arithmetic") == {"note"}


def test_64_lanes_are_wrong_where_a_wavefront_has_32() -> None:
    plain = "#define WARP_SIZE 64\n" + kernel(SHUFFLE)
    assert [(one.check, one.severity) for one in findings(plain, on="rx-7900-xtx")] == [("warp-size", "error")]
    assert names(plain) == set()
    by_target = "#if defined(__GFX9__)\n#define WARP_SIZE 64\n#else\n#define WARP_SIZE 32\n#endif\n" + kernel(SHUFFLE)
    assert names(by_target, on="rx-7900-xtx") == names(by_target) == set()


def test_a_tree_with_a_side_for_rocm_may_mean_its_32_lanes() -> None:
    text = kernel(f"{SHUFFLE}\nint lane = threadIdx.x % 32;")
    assert severities(text, "lane-arithmetic") == {"error"}
    ported = "#ifdef USE_ROCM\nvoid f();\n#endif\n"
    assert severities(text, "lane-arithmetic", compat_h=ported) == {"unknown"}


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("for (int i = lane_id; i < n; i += 32) out[i] = 0;", "lane-arithmetic"),
        ("for (int i = threadIdx.y; i < n; i += 32) out[i] = 0;", None),
        ("for (int i = threadIdx.x; i < n; i += 32) s += x[i]; s = WarpReduce(t).Sum(s);", "lane-arithmetic"),
        ("int warp_id = get_thread_id<1>() >> 5;", "lane-arithmetic"),
        ("for (int i = send_lane_id; i < n; i += 32) out[i] = 0;", "lane-arithmetic"),
        ("float second = lane_id + 32 < n ? x[lane_id + 32] : 0;", "lane-arithmetic"),
        ("float second = row + 32 < n ? x[row + 32] : 0;", None),
        ("constexpr int kMaxWarps = 32;", "launch-size"),
        ("int each = 32 / num_warp_groups;", "launch-size"),
        ("int each = 32 / groups;", None),
        ("v += __shfl_down(0xffffffff, v, 2);", "overload"),
        ("v += __shfl_down(v, 2, 32);", None),
    ],
)
def test_steps_blocks_and_masks_of_32_lanes(line: str, check: str | None) -> None:
    found = names(kernel(line)) & {"lane-arithmetic", "launch-size", "overload"}
    assert found == ({check} if check else set())


def test_a_warp_of_one_shifted_by_five() -> None:
    assert "warp-size" in names("constexpr unsigned warp_max_threads() { return 1 << 5; }")
