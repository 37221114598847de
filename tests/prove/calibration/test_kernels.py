"""Tables of kernel times: what each kind costs by hand, and every fault by its line."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, UnknownName
from crosstie.core.estimate import CONSTANTS
from crosstie.prove.calibration.kernels import KINDS, KernelPredictor, MeasuredKernel, read_kernels, subject_of_kernel
from crosstie.prove.calibration.regression import Regression, gather

HEAD = "accelerator,stack,kind,format,seconds,m,n,k"
GOOD = "h200,vllm,gemm,bf16,1e-4,64,4096,4096"


def table(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "kernels.csv"
    file.write_text("\n".join((HEAD, *lines)) + "\n")
    return file


def test_a_table_is_read(tmp_path: Path) -> None:
    (found,) = read_kernels(table(tmp_path, GOOD))
    assert found == MeasuredKernel(
        accelerator="h200", stack="vllm", kind="gemm", format="bf16", seconds=1e-4, m=64.0, n=4096.0, k=4096.0
    )
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(table(tmp_path, GOOD).read_bytes()))
    assert read_kernels(packed) == [found]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (GOOD.replace("gemm", "magic"), "line 3: has an unknown kind or no time"),
        (GOOD.replace("1e-4", "0"), "line 3: has an unknown kind or no time"),
        (GOOD.replace("1e-4", "-1"), "line 3: has an unknown kind or no time"),
        (GOOD.replace("1e-4", "nan"), "line 3: has an unknown kind or no time"),
        (GOOD.replace("1e-4", "inf"), "line 3: has an unknown kind or no time"),
        (GOOD.replace("1e-4", "fast"), "line 3: Expected `float`"),
        (GOOD.replace("1e-4", ""), "line 3: Object missing required field `seconds`"),
        (GOOD.replace("h200", ""), "line 3: Object missing required field `accelerator`"),
        (GOOD.replace(",64,", ",nan,"), "line 3: m is negative or not finite"),
        (GOOD.replace(",64,", ",-64,"), "line 3: m is negative or not finite"),
        (GOOD.replace(",64,", ",many,"), "line 3: Expected `float`"),
    ],
)
def test_a_fault_is_named_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(BadData) as refused:
        read_kernels(table(tmp_path, GOOD, line))
    assert reason in str(refused.value)
    assert "kernels.csv" in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress("\n".join((HEAD, *[GOOD] * 200)).encode())
    for raw in (whole[:-9], whole[:30] + b"\xff\xff\xff\xff" + whole[34:], HEAD.encode() + b"\n\xff\xfe"):
        file = tmp_path / "kernels.csv"
        file.write_bytes(raw)
        with pytest.raises(BadData, match=r"kernels\.csv: (cannot be read|is not UTF-8)"):
            read_kernels(file)
    with pytest.raises(BadData, match="cannot be read: No such file"):
        read_kernels(tmp_path / "none.csv")


def kernel(**changes: object) -> MeasuredKernel:
    plain: dict[str, object] = {
        "accelerator": "h200",
        "stack": "vllm",
        "kind": "gemm",
        "format": "bf16",
        "seconds": 1.0,
    }
    return MeasuredKernel(**{**plain, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("accelerator", "tpu"), ("stack", "mystery"), ("format", "fp7")])
def test_unknown_names_are_refused(catalog: Catalog, field: str, value: str) -> None:
    wrong = kernel(**{field: value, "m": 1.0, "n": 1.0, "k": 1.0})
    with pytest.raises(UnknownName, match=value):
        gather(catalog, [], [wrong]) and Regression(catalog, gather(catalog, [], [wrong]))


def ones(count: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    return {name: np.ones(count) for name in CONSTANTS}


def test_large_kernels_run_at_the_rates_of_the_catalog(catalog: Catalog) -> None:
    """So large that nothing but one rate counts."""
    h200 = catalog.accelerator("h200")
    made = catalog.efficiency(h200)
    n = 65536.0
    gemm = kernel(m=n, n=n, k=n)
    stream = kernel(m=1.0, n=n, k=n)
    decode = kernel(kind="attention-decode", batch=512.0, context=65536.0, heads=32.0, kv_heads=8.0, head_dim=128.0)
    halved = kernel(kind="attention-decode", batch=512.0, context=65536.0, heads=32.0, kv_heads=8.0, head_dim=128.0,
                    kv_format="fp8")  # fmt: skip
    prefill = kernel(kind="attention-prefill", batch=4.0, context=65536.0, heads=32.0, kv_heads=8.0, head_dim=128.0)
    predictor = KernelPredictor(catalog, [gemm, stream, decode, halved, prefill])
    predictor.correct(ones(5))
    got = predictor.predict()
    peak = h200.flop_per_s("bf16")
    assert peak
    assert got[0] == pytest.approx(2 * n**3 / (peak * made.compute["bf16"].value), rel=0.02)
    assert got[1] == pytest.approx(n * n * 2 / (h200.memory_bytes_per_s * made.weights["16"].value), rel=0.02)
    cache = 512 * 65536 * 2 * 8 * 128 * 2
    assert got[2] == pytest.approx(cache / (h200.memory_bytes_per_s * made.cache.value), rel=0.02)
    assert got[3] == pytest.approx(got[2] / 2, rel=0.02)
    assert got[4] == pytest.approx(4 * 4 * 65536**2 / 2 * 32 * 128 / (peak * made.attention.value), rel=0.02)


def test_tiny_kernels_take_the_time_to_start(catalog: Catalog) -> None:
    predictor = KernelPredictor(catalog, [kernel(m=1.0, n=8.0, k=8.0)])
    predictor.correct(ones(1))
    once = float(predictor.predict()[0])
    assert once == pytest.approx(catalog.efficiency(catalog.accelerator("h200")).kernel.si, rel=0.02)
    predictor.correct({**ones(1), "kernel": np.array([2.0])})
    assert float(predictor.predict()[0]) == pytest.approx(2 * once, rel=0.02)


def test_experts_are_read_as_far_as_they_are_visited(catalog: Catalog) -> None:
    shape = {"kind": "mixture", "hidden": 4096.0, "inner": 2048.0, "topk": 2.0, "experts": 64.0}
    one, few, spread = (
        kernel(**shape, tokens=1.0), kernel(**shape, tokens=8.0), kernel(**shape, tokens=8.0, ep=8.0),
    )  # fmt: skip
    predictor = KernelPredictor(catalog, [one, few, spread])
    predictor.correct({**ones(3), "kernel": np.full(3, 1e-9)})
    got = predictor.predict()
    # One token visits two experts; eight visit 64 x (1 - (62/64)^8) = 14.4 of them.
    assert got[1] / got[0] == pytest.approx(14.4 / 2, rel=0.05)
    assert got[2] == pytest.approx(got[1] / 8, rel=0.05)


def test_many_tokens_of_experts_are_arithmetic(catalog: Catalog) -> None:
    """Every expert has its rows, rounded up to whole tiles: half a tile of eight more each."""
    many = kernel(kind="mixture", hidden=8192.0, inner=8192.0, topk=2.0, experts=64.0, tokens=65536.0)
    predictor = KernelPredictor(catalog, [many])
    predictor.correct(ones(1))
    h200 = catalog.accelerator("h200")
    made = catalog.efficiency(h200)
    peak = h200.flop_per_s("bf16")
    assert peak
    flop = (65536 * 2 + 8 * 64) * 2 * 3 * 8192 * 8192
    rate = peak * made.compute["bf16"].value * made.experts.value
    assert float(predictor.predict()[0]) == pytest.approx(flop / rate, rel=0.02)


def test_more_work_is_never_faster_and_order_does_not_matter(catalog: Catalog) -> None:
    kernels = [
        kernel(m=64.0, n=4096.0, k=4096.0),
        kernel(m=128.0, n=4096.0, k=4096.0),
        kernel(kind="all-reduce", gpus=8.0, bytes=1e6),
        kernel(kind="all-reduce", gpus=8.0, bytes=1e8),
        kernel(format="fp8", m=64.0, n=4096.0, k=4096.0),
        kernel(accelerator="mi300x", m=64.0, n=4096.0, k=4096.0),
    ]
    got = KernelPredictor(catalog, kernels).predict()
    assert got[1] >= got[0]
    assert got[3] > 5 * got[2]
    assert got[4] < got[0]
    np.testing.assert_allclose(KernelPredictor(catalog, kernels[::-1]).predict(), got[::-1])


def test_a_kernel_speaks_for_its_scopes_only(catalog: Catalog) -> None:
    assert subject_of_kernel(catalog, kernel(format="fp8")).bits == "8-bit"
    assert subject_of_kernel(catalog, kernel(kind="mixture")).kind == "mixture"
    attention = subject_of_kernel(catalog, kernel(kind="attention-decode"))
    assert (attention.bits, attention.kind, attention.model, attention.family) == ("", "", "", "hopper")
    assert len(KINDS) == 5
