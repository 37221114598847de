"""Masks and ballots of 32 bits, each with a twin of 64."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names


@pytest.mark.parametrize(
    "mask",
    ["0xffffffff", "0xFFFFFFFFu", "~0u", "-1", "0xffff", "(1u << 16) - 1", "unsigned(-1)", "(unsigned)-1", "static_cast<uint32_t>(-1)", "FULL_MASK", "kAll", "mask", "lanes"],
)  # fmt: skip
def test_masks_of_32_bits_are_found(mask: str) -> None:
    before = "#define FULL_MASK 0xffffffff\nconstexpr unsigned kAll = 0xffffffffu;\n"
    text = before + kernel(
        f"unsigned mask = 1;\nconst uint32_t lanes = 3;\nfloat v = __shfl_xor_sync({mask}, out[0], 1);"
    )
    assert ("mask-32-bit", 6) in checks(text)
    # 64-bit masks are HIP's on every target.
    assert ("mask-32-bit", 6) in checks(text, on="rx-7900-xtx")


@pytest.mark.parametrize(
    "call",
    [
        "__ballot_sync({}, n > 0)",
        "__any_sync({}, n)",
        "__all_sync({}, n)",
        "__syncwarp({})",
        "__match_any_sync({}, n)",
        "__shfl_sync({}, n, 0)",
        "__shfl_down_sync({}, n, 1)",
        "__shfl_up_sync({}, n, 1)",
        "__reduce_add_sync({}, n)",
    ],
)
def test_every_call_with_a_mask_is_found(call: str) -> None:
    assert ("mask-32-bit", 2) in checks(kernel(call.format("0xffffffff") + ";"))
    assert not names(kernel(call.format("0xffffffffffffffffULL") + ";")) & {
        "mask-32-bit",
        "mask-32-lanes",
        "mask-unknown",
    }


@pytest.mark.parametrize(
    "mask",
    [
        "0xffffffffffffffffULL",
        "~0ull",
        "__activemask()",
        "wide",
        "uint64_t(-1)",
        "static_cast<unsigned long long>(-1)",
        "1ull << 3",
        "all",
    ],
)
def test_masks_that_are_right(mask: str) -> None:
    body = (
        f"unsigned long long wide = ~0ull;\nauto all = __activemask();\nfloat v = __shfl_xor_sync({mask}, out[0], 1);"
    )
    assert not names(kernel(body)) & {"mask-32-bit", "mask-32-lanes", "mask-unknown"}


def test_a_mask_of_64_bits_for_32_lanes() -> None:
    text = kernel("__syncwarp(0xffffffffull);")
    assert ("mask-32-lanes", 2) in checks(text)
    assert "mask-32-lanes" not in names(text, on="rx-7900-xtx")


def test_a_mask_of_another_function_is_another_one() -> None:
    other = "__device__ int any(unsigned mask, int x) { return x; }\n"
    call = "__device__ int f(lanes_t mask, int x) { return __ballot_sync(mask, x); }\n"
    assert "mask-32-bit" not in names(other + call)
    assert "mask-32-bit" in names(other + call.replace("lanes_t", "unsigned"))
    assert "mask-32-bit" in names("const unsigned mask = 7;\n" + other + call.replace("lanes_t mask, ", ""))


def test_a_mask_whose_width_is_not_seen_is_not_known() -> None:
    found = findings(kernel("__any_sync(helper(), 1);"))
    assert [(one.check, one.severity) for one in found] == [("mask-unknown", "unknown")]


def test_masks_in_macros_and_through_headers() -> None:
    macro = "#define REDUCE(v) \\\n  v += __shfl_xor_sync(0xffffffff, v, 1)\n"
    assert ("mask-32-bit", 2) in checks(macro)
    assert "mask-32-bit" not in names("#define SHFL(m, v) __shfl_xor_sync(m, v, 1)\n")
    call = '#include "masks.h"\n' + kernel("__syncwarp(FULL);")
    assert "mask-32-bit" in names(call, masks_h="#define FULL 0xffffffff\n")
    assert "mask-32-bit" not in names(call, masks_h="#define FULL 0xffffffffffffffffull\n")


def test_comments_strings_and_own_functions_are_no_calls() -> None:
    assert not names('// __syncwarp(0xffffffff)\nconst char* s = "__syncwarp(0xffffffff)";')
    assert "mask-32-bit" not in names("template <class T> __device__ T __shfl_sync(unsigned mask, T v, int lane);\n")


@pytest.mark.parametrize(
    "line",
    [
        "unsigned b = __ballot(n > 0);", "uint32_t b = __ballot_sync(~0ull, n > 0);", "int b = __activemask();",
        "unsigned b; b = __ballot(n > 0);", "int c = __popc(__ballot(n > 0));", "int c = __ffs(__ballot(n));",
        "auto b = __ballot(n); int c = __popc(b);", "auto b = (unsigned)__ballot(n);", "using lanes = unsigned int; lanes b = __ballot(n);", "auto b = static_cast<uint32_t>(__ballot(n));",
        "int c = __clz(__ballot(n));",
    ],
)  # fmt: skip
def test_ballots_kept_in_32_bits_are_found(line: str) -> None:
    assert ("ballot-truncated", 2) in checks(kernel(line))
    assert "ballot-truncated" not in names(kernel(line), on="rx-7900-xtx")


@pytest.mark.parametrize(
    "line",
    [
        "unsigned long long b = __ballot(n > 0);", "uint64_t b = __ballot_sync(~0ull, n);", "auto b = __ballot(n);", "int c = __popcll(__ballot(n));",
        "if (__ballot(n)) out[0] = 1;", "bool any = __ballot(n) != 0;", "int c = __popc(n);", "unsigned b = n;", "// unsigned b = __ballot(n);",
        "bool any = !__ballot(n);",
    ],
)  # fmt: skip
def test_ballots_that_are_right(line: str) -> None:
    assert "ballot-truncated" not in names(kernel(line))


def test_a_ballot_returned_in_32_bits() -> None:
    assert "ballot-truncated" in names("__device__ unsigned vote(int p) { return __ballot(p); }")
    assert "ballot-truncated" not in names("__device__ unsigned long long vote(int p) { return __ballot(p); }")


def test_bits_of_lanes_in_32_bits_are_found() -> None:
    assert ("lane-bit", 2) in checks(kernel("unsigned below = (1u << lane) - 1;"))
    assert "lane-bit" not in names(kernel("unsigned long long below = (1ull << lane) - 1;\nint x = 1 << n;"))
    assert "lane-bit" not in names(kernel("unsigned bit = 1u << (lane & 31);\nunsigned b = 1u << (lane_id % 32);"))
    assert ("lane-bit", 2) in checks(kernel("unsigned bit = 1u << (lane & 63);"))


def test_where_a_ballot_goes() -> None:
    array = "__shared__ {} votes[16];\nvotes[threadIdx.x / warpSize] = __ballot(n > 0);"
    assert ("ballot-truncated", 3) in checks(kernel(array.format("uint32_t")))
    assert "ballot-truncated" not in names(kernel(array.format("uint64_t")))
    pointer = "__global__ void k({}* __restrict__ o, int n) {{\n  o[0] = __ballot(n);\n}}\n"
    assert ("ballot-truncated", 2) in checks(pointer.format("unsigned"))
    assert "ballot-truncated" not in names(pointer.format("uint64_t"))
    given = "__device__ int count({} m) {{ return 1; }}\n" + kernel("out[0] = count(__ballot(n));").replace(
        "{", "{{"
    ).replace("}", "}}")
    assert ("ballot-truncated", 3) in checks(given.format("unsigned"))
    assert "ballot-truncated" not in names(given.format("unsigned long long"))


def test_a_mask_of_32_lanes_with_their_width_is_not_known() -> None:
    call = "out[0] = __shfl_sync(0xffffffffULL, out[0], 1{});"
    assert [one.severity for one in findings(kernel(call.format(""))) if one.check == "mask-32-lanes"] == ["error"]
    assert [one.severity for one in findings(kernel(call.format(", 32"))) if one.check == "mask-32-lanes"] == [
        "unknown"
    ]


def test_a_ballot_of_a_part_of_the_wavefront() -> None:
    assert "ballot-truncated" in names(kernel("int b = static_cast<int>(__ballot(n));"))
    assert "ballot-truncated" not in names(kernel("int b = static_cast<int>(__ballot(n) >> (part * 32));"))


def test_a_shuffle_for_one_more_type_takes_the_place_of_none() -> None:
    own = "__device__ Half __shfl_xor_sync(unsigned mask, Half v, int by) {{ return {0}; }}\n"
    use = kernel("float v = __shfl_xor_sync(0xffffffff, out[0], 1);")
    assert ("mask-32-bit", 3) in checks(own.format("__shfl_xor_sync(mask, v.data(), by)") + use)
    assert ("mask-32-bit", 3) not in checks(own.format("exchanged(v, by)") + use)
