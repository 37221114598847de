"""Inline PTX by instruction, and assembly that is none."""

import pytest
from tests.port.source.snippets import checks, findings, kernel, names

from crosstie_port.source.cpp import opcodes
from crosstie_port.source.rules import ptx_rule, ptx_rules


@pytest.mark.parametrize(
    ("assembly", "kind"),
    [
        ("cp.async.cg.shared.global [%0], [%1], 16;", "async-copy"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1];", "tma"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];", "matrix-load"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0}, {%1}, {%2}, {%3};", "matrix"),
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0}, %1, %2;", "warpgroup-matrix"),
        ("mbarrier.init.shared.b64 [%0], %1;", "barrier"),
        ("bar.sync 1, 128;", "barrier"),
        ("griddepcontrol.wait;", "dependent-launch"),
        ("prmt.b32 %0, %1, %2, %3;", "permute"),
        ("lop3.b32 %0, %1, %2, %3, 0xEA;", "permute"),
        ("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];", "load"),
        ("st.release.sys.global.u32 [%0], %1;", "store"),
        ("red.async.relaxed.cluster.shared::cluster [%0], %1;", "tma"),
        ("red.global.add.f32 [%0], %1;", "atomic"),
        ("membar.sys;", "fence"),
        ("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;", "convert"),
        ("mov.u32 %0, %laneid;", "special-register"),
        ("fma.rn.f16x2 %0, %1, %2, %3;", "arithmetic"),
        ("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p trap; }", "arithmetic"),
    ],
)
def test_instructions(assembly: str, kind: str) -> None:
    found = ptx_rule(opcodes(assembly)[0])
    assert found is not None
    assert found.id == kind
    finding = findings(kernel(f'asm volatile("{assembly}" : "=r"(n));'))
    assert [(one.check, one.where.line, one.severity) for one in finding] == [("inline-ptx", 2, "error")]
    assert finding[0].remedy
    assert opcodes(assembly)[0] in finding[0].what


def test_every_class_has_words_and_no_opcode_stands_twice() -> None:
    every = [opcode for one in ptx_rules() for opcode in one.opcodes]
    assert len(every) == len(set(every))
    assert all(one.says and one.remedy and one.source for one in ptx_rules())


@pytest.mark.parametrize(
    "statement",
    [
        'asm volatile("" ::: "memory");', 'asm volatile("s_waitcnt vmcnt(0)");', 'asm("v_cvt_pk_fp8_f32 %0, %1, %2" : "=v"(a) : "v"(b), "v"(c));',
        '// asm volatile("bar.sync 0;");', 'const char* s = "asm volatile(bar.sync)";', '#ifndef USE_ROCM\nasm volatile("bar.sync 0;");\n#endif',
        'asm volatile("s_nop 0\\n\\ts_barrier");',
    ],
)  # fmt: skip
def test_assembly_that_is_no_ptx_is_left_alone(statement: str) -> None:
    assert "inline-ptx" not in names(kernel(statement))


def test_inline_assembly_is_found_in_every_spelling() -> None:
    for word in ("asm", "asm volatile", "__asm__", "__asm__ __volatile__", "asm volatile inline"):
        assert "inline-ptx" in names(kernel(f'{word}("membar.gl;");'))
    parts = 'asm volatile(\n  "{\\n"\n  "  mov.b64 %0, {%1, %2};\\n"\n  "}\\n"\n  : "=l"(x) : "r"(a), "r"(b));'
    assert ("inline-ptx", 2) in checks(kernel(parts))
    assert "inline-ptx" in names(kernel('asm volatile(R"(bar.sync 0;)");'))
    assert ("inline-ptx", 2) in checks('#define FENCE() \\\n  asm volatile("membar.gl;")\n')
    assert "inline-ptx" in names(kernel("asm volatile(FENCE_TEXT);"))


def test_assembly_of_a_cpu_is_no_hazard() -> None:
    assert not names('void pause() { asm volatile("pause"); __asm__("cpuid" : "=a"(a)); }', name="host.cpp")
    assert not names('extern "C" int f() asm("symbol");', name="host.cpp")
    named = 'float f(int h) { float r; asm volatile("fcvt.ps.f16 %[r], %[h]" : [r] "=f"(r) : [h] "r"(h)); return r; }'
    assert not names(named, name="host.h")
    assert "inline-ptx" in names(named.replace("%[r], %[h]", "%0, %1"), name="host.h")
    assert "inline-ptx" in names('void f() { asm volatile("mov.u32 %0, %smid;" : "=r"(x)); }', name="host.h")
