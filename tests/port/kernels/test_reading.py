"""What is read from compiled text, and limits by instruction set."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie_port.kernels.checks import is_foreign, mnemonics
from crosstie_port.kernels.machine_code import read_amdgcn, read_ptx, read_ttir
from crosstie_port.kernels.targets import isas, target

TTIR = """
#loc = loc("/src/k.py":3:0)
#loc1 = loc(unknown)
#loc2 = loc("/src/k.py":9:20)
#loc3 = loc("/src/helpers.py":4:8)
#loc4 = loc(callsite(#loc3 at #loc2))
#loc5 = loc("acc"(#loc4))
module {
  tt.func public @k(%a: !tt.ptr<f8E4M3FN> loc("a"(#loc))) {
    %x = tt.fp_to_fp %w : tensor<64x32xf8E4M3FNUZ> -> tensor<64x32xf16> loc(#loc4)
    %y = tt.dot %x, %b, %c, inputPrecision = tf32 : tensor<64x32xf16> * tensor<32x64xf16> -> tensor<64x64xf32> loc(#loc5)
    %z = tt.elementwise_inline_asm "mov.b32 $0, $1;\\0Aret;" {constraints = "=r,r", packed_element = 1 : i32, pure = true} %y : tensor<64x64xf32> -> tensor<64x64xf32> loc(#loc2)
  } loc(#loc)
} loc(#loc)
"""
AMDGCN = """
\t.loc\t1 11 16                         ; k.py:11:16
\tv_mfma_f32_32x32x8_f16 v[32:47], v[172:173], v[124:125], v[32:47]
\tv_mfma_f32_32x32x8_f16 v[32:47], v[172:173], v[124:125], v[32:47]
\t.loc\t1 0 16                          ; k.py:0:16
\tv_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], v[0:3]
; Occupancy: 2
amdhsa.kernels:
  - .agpr_count:     4
    .private_segment_fixed_size: 24
    .sgpr_spill_count: 1
    .vgpr_count:     208
    .vgpr_spill_count: 3
"""


def test_a_dot_in_an_inlined_helper_is_placed_in_the_helper() -> None:
    facts = read_ttir(TTIR)
    (dot,) = facts["dots"]
    assert (dot["file"], dot["line"], dot["shapes"]) == ("/src/helpers.py", 4, [[64, 32], [32, 64]])
    # Cast where the dot is: by the front end, not by the author.
    assert dot["upcast_from"] == "f8E4M3FNUZ"
    assert facts["inline_assembly"] == [
        {"text": "mov.b32 $0, $1;\nret;", "constraints": "=r,r", "file": "/src/k.py", "line": 9}
    ]


def test_a_cast_that_the_author_wrote_is_none_of_the_front_end() -> None:
    elsewhere = TTIR.replace("tensor<64x32xf16> loc(#loc4)", "tensor<64x32xf16> loc(#loc2)")
    assert read_ttir(elsewhere)["dots"][0]["upcast_from"] == ""


def test_registers_and_matrix_instructions_by_line() -> None:
    llir = "declare i32 @llvm.amdgcn.workitem.id.x()\ndeclare float @__nv_expf(float) #2\n"
    facts = read_amdgcn(AMDGCN, llir)
    assert facts["unresolved"] == ["__nv_expf"]
    assert (facts["vgprs"], facts["agprs"], facts["vgpr_spills"], facts["scratch_bytes"]) == (208, 4, 3, 24)
    assert facts["waves_by_registers"] == 2
    assert facts["matrix"] == {"v_mfma_f32_32x32x8_f16": 2, "v_mfma_f32_16x16x32_fp8_fp8": 1}
    assert set(facts["matrix_at"]) == {"k.py:11", ""}


def test_what_ptxas_says() -> None:
    log = "8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\nUsed 255 registers, used 1 barriers"
    facts = read_ptx("\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {a};\n\twgmma.fence.sync.aligned;", log)
    assert (facts["registers"], facts["spill_bytes"], facts["scratch_bytes"]) == (255, 16, 8)
    assert facts["matrix"] == {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": 1}
    # A Triton that keeps the log to itself.
    assert read_ptx("", "")["registers"] is None


@pytest.mark.parametrize(
    ("text", "on_amd", "on_nvidia"),
    [
        ("mov.b32 $0, $1;", True, False),
        ("{\n.reg .pred p;\n@p shfl.sync.bfly.b32 $0, $1, 1, 31, -1;\n}", True, False),
        ("v_exp_f32 $0, $1", False, True),
        ("s_waitcnt vmcnt(0)\nds_bpermute_b32 $0, $1, $2", False, True),
        ("// nothing but a word\n", False, False),
        ("", False, False),
    ],
)
def test_whose_assembly_it_is(text: str, on_amd: bool, on_nvidia: bool) -> None:
    assert (is_foreign(text, "hip"), is_foreign(text, "cuda")) == (on_amd, on_nvidia)


def test_labels_and_predicates_are_no_mnemonics() -> None:
    assert mnemonics("again: @p bra again; /* mov.b32 */ add.u32 $0, $1, 1;") == ["bra", "add.u32"]


def test_limits_agree_with_the_catalog(catalog: Catalog) -> None:
    for accelerator in catalog.accelerators.values():
        limits = isas()[accelerator.chip.isa.value]
        assert limits.lds_bytes == accelerator.chip.lds.si, accelerator.id
        assert limits.wave_width == accelerator.chip.wave_width.value, accelerator.id
        assert limits.unit_lds_bytes >= limits.lds_bytes


@pytest.mark.parametrize(
    ("isa", "lds"),
    [
        ("gfx942", 65_536),
        ("gfx950", 163_840),
        ("sm_80", 166_912),
        ("sm_89", 101_376),
        ("sm_90", 232_448),
        ("sm_100", 232_448),
        ("sm_120", 101_376),
    ],
)
def test_limits_of_a_workgroup(isa: str, lds: int) -> None:
    assert target(Catalog([]), isa).lds_bytes == lds


def test_names_of_targets() -> None:
    catalog = Catalog([])
    assert target(catalog, "H100").isa == "sm_90"
    assert target(catalog, "gfx90a").backend == "hip"
    with pytest.raises(BadInput, match="instruction sets are known as well"):
        target(catalog, "mi300y")
    with pytest.raises(BadInput, match="known instruction sets"):
        target(catalog, "sm_61")
