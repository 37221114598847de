"""Caps of grids as a patch: where the kernel loops over the grid, and nowhere else."""

import subprocess
from pathlib import Path

import pytest
from tests.port.source.test_work import found

from crosstie_port.source.fix import patch

LOOP = "for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) o[i] = 0;"
LAUNCH = "work<<<(n + 255) / 256, 256>>>(o, n);"


def source(body: str, launch: str = LAUNCH) -> str:
    kernel = f"__global__ void work(float* o, int64_t n) {{\n  {body}\n}}\n"
    return f"#include <cstdint>\n{kernel}void run(float* o, int64_t n) {{\n  {launch}\n}}\n"


def made_of(folder: Path, text: str) -> tuple[str, int]:
    (folder / "a.cu").write_text(text)
    before = found(folder)
    assert "grid-limit" in {one.check for one in before}
    made, cured = patch(before, folder)
    assert (folder / "a.cu").read_text() == text
    return made, cured


@pytest.mark.parametrize(
    "body",
    [
        LOOP,
        "for (int64_t row = blockIdx.x; row < n; row += gridDim.x) { if (threadIdx.x == 0) o[row] = 0; __syncthreads(); }",
        "CUDA_KERNEL_LOOP(i, n) { o[i] = 0; }",
    ],
)
def test_a_kernel_that_loops_over_the_grid_gets_a_cap(tmp_path: Path, body: str) -> None:
    made, cured = made_of(tmp_path, source(body))
    assert cured == 1
    assert "+  work<<<ROCM_GRID_CAP((n + 255) / 256), 256>>>(o, n);" in made
    assert "+#define ROCM_GRID_CAP(...) (__VA_ARGS__)" in made
    subprocess.run(["git", "apply", "-"], input=made, text=True, cwd=tmp_path, check=True)
    assert "grid-limit" not in {one.check for one in found(tmp_path)}


@pytest.mark.parametrize(
    "body",
    [
        # One thread an element, or one block a row: under a cap the rest would not be done.
        "int64_t i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) o[i] = 0;",
        "o[blockIdx.x] = 0;",
        # It loops, and something else depends on the block.
        f"{LOOP}\n  o[blockIdx.x] = 1;",
        f"{LOOP}\n  if (blockIdx.y == 0) o[0] = 1;",
        # The start serves the body as well, which then is not where the loop is.
        "int64_t first = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  for (int64_t i = first; i < n; i += blockDim.x * gridDim.x) o[first] = i;",
        # Each block takes its share by their number.
        "int64_t each = n / gridDim.x;\n  for (int64_t i = blockIdx.x * each; i < n; i += gridDim.x) o[i] = 0;",
        f"{LOOP}\n  cooperative_groups::this_grid().sync();",
        "for (int64_t i = threadIdx.x; i < n; i += blockDim.x) o[i * n + blockIdx.x] = 0;",
    ],
)
def test_a_kernel_that_needs_all_its_blocks_is_left_alone(tmp_path: Path, body: str) -> None:
    assert made_of(tmp_path, source(body)) == ("", 0)


@pytest.mark.parametrize(
    "launch",
    [
        "other<<<(n + 255) / 256, 256>>>(o, n);",
        "work<<<(n +\n 255) / 256, 256>>>(o, n);",
        "work<<<dim3((n + 255) / 256, 8), 256>>>(o, n);",
        "dim3 grid((n + 255) / 256); work<<<grid, 256>>>(o, n); work<<<grid, 128>>>(o, n);",
    ],
)
def test_launches_that_are_not_one_number_on_one_line_are_left_alone(tmp_path: Path, launch: str) -> None:
    assert made_of(tmp_path, source(LOOP, launch)) == ("", 0)


def test_of_two_launches_the_safe_one_is_capped_and_the_finding_stays(tmp_path: Path) -> None:
    body = f"{LAUNCH}\n  other<<<(n + 255) / 256, 256>>>(o, n);"
    text = source(LOOP, body) + "__global__ void other(float* o, int64_t n) { o[blockIdx.x] = 0; }\n"
    made, cured = made_of(tmp_path, text)
    assert cured == 0
    assert "+  work<<<ROCM_GRID_CAP(" in made
    assert "+  other" not in made
