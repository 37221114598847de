"""The device as a stand-in for one part or another: what it says it is, and rules of capture that differ."""
# mypy: allow-untyped-defs, allow-untyped-calls

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import one_in
from torch.nn.attention import SDPBackend, sdpa_kernel

from crosstie.core.errors import BadData, BadInput
from crosstie_port.capture.check import check
from crosstie_port.capture.hazards import CaptureResult
from crosstie_port.capture.parts import part, stand_ins

F = torch.nn.functional


def inputs(device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 32, generator=generator).to(device), torch.tensor([16, 32], dtype=torch.int32).to(device)


def on(function: Any, name: str) -> CaptureResult:
    return check(function, inputs, on=name)


def grouped(x, ends):
    weights = torch.ones(2, 32, 32, device=x.device, dtype=torch.bfloat16)
    return torch._grouped_mm(x.bfloat16(), weights, offs=ends)


def grouped_single(x, ends):
    return torch._grouped_mm(x, torch.ones(2, 32, 32, device=x.device), offs=ends)


def scaled(kind):
    def scaled(x, ends):
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(x.to(kind), x.to(kind).t().contiguous().t(), one, one, out_dtype=torch.bfloat16)

    return scaled


def scaled_by_arch(x, ends):
    fnuz = torch.version.hip and "gfx942" in torch.cuda.get_device_properties(0).gcnArchName
    return scaled(torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn)(x, ends)


def attention(*backends, size=32, masked=False):
    def attention(x, ends):
        q = x.repeat(1, size // 32)[None]
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros_like(x) if masked else None)

    return attention


def product_on_a_new_stream(x, ends):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        out = y @ x
    torch.cuda.current_stream().wait_stream(side)
    return out


KEPT: dict[str, Any] = {}


def product_on_a_kept_stream(x, ends):
    side = KEPT.setdefault("side", torch.cuda.Stream())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = x @ x
    torch.cuda.current_stream().wait_stream(side)
    return out


def hip_branch(x, ends):
    return x * x.max().item() if torch.version.hip else x


def warp_wide(x, ends):
    return x * torch.cuda.get_device_properties(0).warp_size


GROUPED = {"h200": "ok", "b200": "ok", "mi355x": "error", "mi300x": "error", "l40s": "error", "gfx1100": "error"}


@pytest.mark.parametrize("name", one_in(3, GROUPED))
def test_grouped_products_copy_offsets_to_the_host_where_there_is_no_grouped_kernel(name: str) -> None:
    assert on(grouped, name).verdict == GROUPED[name]
    assert on(grouped_single, name).verdict == "error"


def test_the_grouped_kernel_of_rocm_has_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = on(grouped, "mi300x").hazards
    assert found.kind == "pageable-copy"
    assert "ROCM_ALLOW_GROUP_GEMM_CK=1" in found.remedy
    assert "GroupedBlas.cpp:782" in found.remedy
    monkeypatch.setenv("ROCM_ALLOW_GROUP_GEMM_CK", "1")
    assert on(grouped, "mi300x").verdict == "ok"
    assert on(grouped, "gfx1100").verdict == "error"


@pytest.mark.parametrize(
    ("name", "ocp", "fnuz"),
    [
        ("h200", "ok", "error"),
        ("mi300x", "error", "ok"),
        pytest.param("mi325x", "error", "ok", marks=pytest.mark.slow),
        pytest.param("mi355x", "ok", "error", marks=pytest.mark.slow),
    ],
)
def test_fp8_products_by_dialect(name: str, ocp: str, fnuz: str) -> None:
    assert on(scaled(torch.float8_e4m3fn), name).verdict == ocp
    assert on(scaled(torch.float8_e4m3fnuz), name).verdict == fnuz
    assert on(scaled_by_arch, name).verdict == "ok"


@pytest.mark.slow
def test_attention_backends_of_each_part() -> None:
    assert on(attention(SDPBackend.CUDNN_ATTENTION), "h200").verdict == "ok"
    (found,) = on(attention(SDPBackend.CUDNN_ATTENTION), "mi300x").hazards
    assert "none" in found.what
    assert on(attention(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION), "mi300x").verdict == "ok"
    assert on(attention(SDPBackend.FLASH_ATTENTION, size=320), "h200").verdict == "error"
    assert on(attention(SDPBackend.FLASH_ATTENTION, size=320), "mi300x").verdict == "ok"
    assert on(attention(SDPBackend.FLASH_ATTENTION, masked=True), "mi300x").verdict == "error"


def test_a_library_handle_is_made_for_each_stream_on_rocm() -> None:
    assert on(product_on_a_new_stream, "h200").verdict == "ok"
    (found,) = on(product_on_a_new_stream, "mi300x").hazards
    assert "hipBLASLt" in found.what
    assert on(product_on_a_kept_stream, "mi300x").verdict == "ok"


def test_what_a_port_adds_is_run() -> None:
    assert on(hip_branch, "h200").verdict == "ok"
    assert on(hip_branch, "mi300x").verdict == "error"
    assert torch.version.hip is None
    assert on(warp_wide, "mi300x").verdict == "ok"


def test_properties_are_those_of_the_part() -> None:
    mi300x, h200 = part("mi300x").properties, part("h200").properties
    assert (mi300x.name, mi300x.major, mi300x.minor) == ("AMD Instinct MI300X", 9, 4)
    assert (mi300x.gcnArchName, mi300x.warp_size) == ("gfx942:sramecc+:xnack-", 64)
    # As PyTorch printed it on one: 196592MB.
    assert mi300x.total_memory // 2**20 == 196_592
    assert (h200.name, h200.major, h200.warp_size, h200.gcnArchName) == ("NVIDIA H200", 9, 32, "")
    assert (part("mi355x").properties.minor, part("b200").properties.major) == (5, 10)


def test_every_row_names_its_source() -> None:
    data = stand_ins()
    rows = [*data.properties, *data.refusals, *data.attention, *data.limits]
    assert len(rows) > 15
    assert all(row.source for row in rows)
    rules = data.refusals
    assert all("@" in rule.source and ":" in rule.source for rule in rules)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[versions]\n[[refusals]]\nid = "x"\nisas = ["gfx"]\noperations = ["mm"]\nkind = "odd"\nwhat = "w"\nremedy = "r"\n'
         'source = "s"', "refusals[0].kind"),
        ('[versions]\n[[limits]]\nisas = ["gfx"]\nwhat = "w"', "limits[0].source"),
        ('[versions]\n[[limit]]\nisas = ["gfx"]', "limit"),
    ],
)  # fmt: skip
def test_slips_in_the_data_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "stand_ins.toml"
    file.write_text(text)
    with pytest.raises(BadData, match="stand_ins") as error:
        stand_ins(file)
    assert said in str(error.value)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(BadInput, match="mi3000x"):
        on(warp_wide, "mi3000x")
