"""The warp's size where only run time knows it, each with a twin that is right."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

BY_TARGET = "#if defined(__GFX9__)\n#define WARP_SIZE 64\n#else\n#define WARP_SIZE 32\n#endif\n"
LAUNCH = "void run(int n) {{\n  work<<<n / {0}, {0}>>>(n);\n}}\n"


@pytest.mark.parametrize(
    "line",
    [
        "hipcub::WarpReduce<float, {}> reduce;", "__shared__ typename Reduce::Storage storage[THREADS / {}];",
        "__shared__ float sums[4 * (THREADS / {}) * 2];", "constexpr int warps = 256 / {};", "static_assert({} == 64);",
        "if constexpr ({} == 64) out[0] = 1;", "int grid[8][{}];", "step<256 / {}>(out);",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", ["warpSize", "HIPCUB_WARP_THREADS", "rocprim::warp_size()", "LANES"])
def test_no_constant_is_made_of_what_only_run_time_knows(line: str, size: str) -> None:
    made = "#define LANES (warpSize)\n"
    found = [one for one in findings(made + kernel(line.format(size))) if one.check == "warp-size-constant"]
    assert [(one.where.line, one.severity) for one in found] == [(3, "error")]
    assert "warp-size-constant" not in names("constexpr int lanes = 64;\n" + kernel(line.format("lanes")))


@pytest.mark.parametrize(
    "line",
    [
        "int warp = threadIdx.x / warpSize;", "out[n / warpSize] = 1;", "if (n < warpSize && n > 3) out[0] = 1;",
        "for (int i = 0; i < warpSize; i++) out[i] = 1;", "int w = prop.warpSize;", "return x[warpSize];",
    ],
)  # fmt: skip
def test_uses_at_run_time_are_right(line: str) -> None:
    assert "warp-size-constant" not in names(kernel(line))


@pytest.mark.parametrize(
    "text",
    [
        "void run(int n) {\n  int warpSize = ask();\n  work<<<n / warpSize, warpSize>>>(n);\n}\n",
        "void run(int n) {\n  const index_t warpSize = GPU_WARP_SIZE;\n  work<<<n / warpSize, warpSize>>>(n);\n}\n",
        "void run(int n, int warpSize) {\n  work<<<n / warpSize, warpSize>>>(n);\n}\n",
        "#define RUN(n) void run##n() {\\\n  int warpSize = ask();\\\n  work<<<n / warpSize, warpSize>>>(n);\\\n}\n",
    ],
)
def test_a_variable_of_ones_own_may_be_called_so(text: str) -> None:
    assert "warp-size-host" not in names(text)


def test_a_variable_of_another_function_does_not_count() -> None:
    other = "int half() {\n  int warpSize = ask();\n  return warpSize / 2;\n}\n"
    assert ("warp-size-host", 6) in checks(other + LAUNCH.format("warpSize"))


def test_the_host_does_not_know_the_devices_width() -> None:
    assert ("warp-size-host", 2) in checks(LAUNCH.format("warpSize"))
    assert {one.severity for one in findings(LAUNCH.format("C10_WARP_SIZE")) if one.check == "warp-size-host"} == {
        "unknown"
    }
    # In the pass over host code the macro is 32, whatever the GPU has.
    assert ("warp-size-host", 7) in checks(BY_TARGET + LAUNCH.format("WARP_SIZE"))
    assert "warp-size-host" not in names(BY_TARGET + LAUNCH.format("WARP_SIZE"), on="rx-7900-xtx")
    wide = BY_TARGET.replace("SIZE 32", "SIZE 64")
    assert "warp-size-host" in names(wide + LAUNCH.format("WARP_SIZE"), on="rx-7900-xtx")
    assert "warp-size-host" not in names(wide + LAUNCH.format("WARP_SIZE"))


@pytest.mark.parametrize("head", ["__global__ void", "__device__ int", "DEVICE_INLINE int", "static constexpr int"])
def test_device_code_knows_it(head: str) -> None:
    text = f"{head} f(int n) {{\n  return n / WARP_SIZE;\n}}\n"
    assert "warp-size-host" not in names(BY_TARGET + text) | names(text.replace("WARP_SIZE", "C10_WARP_SIZE"))
