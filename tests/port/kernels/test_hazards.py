"""Each hazard by a kernel that has it, and a twin beside it that has not."""

import textwrap
from pathlib import Path

import pytest
from tests.port.kernels.running_kernels import HEADER, MATMUL, MATMULS, check, matmul

from crosstie_port.kernels.report import preflight_kernels

pytestmark = pytest.mark.triton

ELEMENTS = {"x": "*fp32", "o": "*fp32"}


def elementwise(name: str, **more: object) -> dict[str, object]:
    return {"name": name, "signature": ELEMENTS, "constexprs": {"N": 256}, **more}


def test_lds_beyond_a_workgroup_and_the_pipeline_that_fits(tmp_path: Path) -> None:
    wide = matmul("*fp16", (256, 128, 64), num_stages=3, num_warps=8)
    found = check(tmp_path, MATMULS, ["gfx942", "gfx950"], [wide, matmul("*fp16", (64, 64, 64), "twin")])
    over = found.of("matmul", "gfx942")["lds-over-limit"]
    assert over.severity == "error"
    assert "98,304" in over.what
    assert "65,536" in over.what
    assert over.remedy == "num_stages=2 compiles to 49,152 bytes there"
    assert found.verdicts["gfx942"] == "will not run"
    assert found.of("twin", "gfx942") == {}
    # 160 KiB there.
    assert "lds-over-limit" not in found.of("matmul", "gfx950")


def test_unaligned_arguments_need_less(tmp_path: Path) -> None:
    """The reason why arguments are taken as divisible unless the spec says otherwise."""
    odd = dict.fromkeys(("a", "b", "K", "stride_a", "stride_b"), 1)
    entries = [matmul("*fp16", (64, 64, 64)), matmul("*fp16", (64, 64, 64), divisibility=odd)]
    aligned, unaligned = check(tmp_path, MATMUL, ["gfx950"], entries).answers[0].compilations
    assert aligned.lds_bytes > unaligned.lds_bytes


COPIES = """
    @triton.jit
    def copy(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))

    @triton.jit
    def twin(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))
"""


def test_too_many_threads_on_wide_waves(tmp_path: Path) -> None:
    entries = [elementwise("copy", num_warps=32), elementwise("twin", num_warps=16)]
    found = check(tmp_path, COPIES, ["gfx942", "sm_90"], entries)
    over = found.of("copy", "gfx942")["threads-over-limit"]
    assert over.severity == "error"
    assert "2,048" in over.what
    assert over.remedy == "num_warps=16 at most here"
    assert "threads-over-limit" not in found.of("twin", "gfx942")
    assert found.verdicts["sm_90"] == "ready"


def test_a_grid_that_is_refused(tmp_path: Path) -> None:
    """HIP counts threads along the first axis, CUDA blocks along the others."""
    entries = [elementwise("copy", grid=[2**24]), elementwise("twin", grid=[1, 70000])]
    found = check(tmp_path, COPIES, ["gfx942", "sm_90"], entries)
    assert [(f.where.name, f.target, f.check) for f in found.findings] == [
        ("copy", "gfx942", "grid-over-limit"),
        ("twin", "sm_90", "grid-over-limit"),
    ]


def test_registers_that_spill_are_found(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def crossed(x, y, o, N: tl.constexpr):
        i = tl.arange(0, N)
        a, b = tl.load(x + i), tl.load(y + i)
        tl.store(o + i, a * tl.sum(b) + b * tl.sum(a) + tl.max(a) * tl.min(b))
    """
    source += source.replace("crossed", "twin")
    signature = {"x": "*fp32", "y": "*fp32", "o": "*fp32"}
    entry = {"name": "crossed", "signature": signature, "constexprs": {"N": 4096}, "num_warps": 1}
    # Few registers a lane, by the option that each backend has for it.
    few = [
        {**entry, "options": {"waves_per_eu": 8}, "only": ["hip"]},
        {**entry, "options": {"maxnreg": 32}, "only": ["cuda"]},
    ]
    found = check(tmp_path, source, ["gfx942", "sm_90"], [*few, {**entry, "name": "twin", "constexprs": {"N": 512}}])
    for isa in ("gfx942", "sm_90"):
        assert found.of("crossed", isa)["register-spill"].severity == "slow"
        assert found.of("twin", isa) == {}
        assert found.verdicts[isa] == "slow path"


def test_simds_without_a_wave(tmp_path: Path) -> None:
    entries = [matmul("*fp16", (64, 64, 256), num_warps=2), matmul("*fp16", (64, 64, 64), "twin")]
    found = check(tmp_path, MATMULS, ["gfx942"], entries)
    idle = found.of("matmul", "gfx942")["low-occupancy"]
    assert idle.severity == "slow"
    assert "limited by LDS" in idle.evidence
    assert found.of("twin", "gfx942") == {}


def test_a_dot_without_matrix_instructions(tmp_path: Path) -> None:
    entries = [matmul("*fp16", (1, 32, 32)), matmul("*fp16", (16, 32, 32), "twin")]
    found = check(tmp_path, MATMULS, ["gfx942", "sm_90"], entries)
    bare = found.of("matmul", "gfx942")["dot-without-matrix"]
    assert bare.severity == "slow"
    assert bare.where.line == 11
    assert "dot-without-matrix" not in found.of("twin", "gfx942")
    # NVIDIA's front end pads the tile, so the same kernel is sound there.
    assert "dot-without-matrix" not in found.of("matmul", "sm_90")


def test_one_good_dot_does_not_hide_a_bad_one(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def two(a, b, c, o, p):
        i, j = tl.arange(0, 64), tl.arange(0, 1)
        right = tl.load(b + i[:, None] * 64 + i[None, :])
        tl.store(o + i[:, None] * 64 + i[None, :], tl.dot(tl.load(a + i[:, None] * 64 + i[None, :]), right))
        tl.store(p + j[:, None] * 64 + i[None, :], tl.dot(tl.load(c + j[:, None] * 64 + i[None, :]), right))
    """
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "o": "*fp32", "p": "*fp32"}
    found = check(tmp_path, source, ["gfx942"], [{"name": "two", "signature": types}])
    assert found.of("two", "gfx942")["dot-without-matrix"].where.line == 9


def test_fp8_of_the_other_dialect_is_found(tmp_path: Path) -> None:
    """`matmul` in OCP's e4m3, `twin` in e4m3fnuz: each is the hazard where the other is native."""
    entries = [matmul("*fp8e4nv", (64, 64, 64)), matmul("*fp8e4b8", (64, 64, 64), "twin")]
    found = check(tmp_path, MATMULS, ["gfx942", "gfx950", "sm_90", "sm_80"], entries)
    upcast = found.of("matmul", "gfx942")["fp8-upcast"]
    assert upcast.severity == "slow"
    assert "_f16" in upcast.evidence
    assert "fp8e4b8" in upcast.remedy
    assert "fp8-upcast" not in found.of("twin", "gfx942")
    assert "fp8-upcast" not in found.of("matmul", "gfx950")
    assert "fp8e4nv" in found.of("twin", "gfx950")["fp8-upcast"].remedy
    assert found.of("matmul", "sm_90") == {}
    assert "fp8e4nv" in found.of("twin", "sm_90")["fp8-unsupported"].remedy
    assert "fp8-unsupported" in found.of("matmul", "sm_80")


def test_a_scaled_dot_is_emulated_before_gfx950(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def scaled(a, sa, b, sb, o, N: tl.constexpr):
        i, s = tl.arange(0, N), tl.arange(0, N // 32)
        left, right = tl.load(a + i[:, None] * N + i[None, :]), tl.load(b + i[:, None] * N + i[None, :])
        up = tl.load(sa + i[:, None] * (N // 32) + s[None, :])
        down = tl.load(sb + i[:, None] * (N // 32) + s[None, :])
        tl.store(o + i[:, None] * N + i[None, :], tl.dot_scaled(left, up, "e4m3", right, down, "e4m3"))
    """
    types = {"a": "*fp8e4nv", "sa": "*u8", "b": "*fp8e4nv", "sb": "*u8", "o": "*fp32"}
    entry = {"name": "scaled", "signature": types, "constexprs": {"N": 64}}
    found = check(tmp_path, source, ["gfx942", "gfx950"], [entry])
    assert found.of("scaled", "gfx942")["scaled-dot-emulated"].severity == "slow"
    assert found.verdicts["gfx950"] == "ready"


def test_inline_assembly_of_the_other_vendor(tmp_path: Path) -> None:
    """One that the assembler refuses, one that it takes in silence, one behind a condition, one of AMD's own."""
    source = """
    @triton.jit
    def refused(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x + i)], tl.float32, True, 1)
        tl.store(o + i, v)

    @triton.jit
    def silent(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
        tl.store(o + i, v)

    @triton.jit
    def guarded(x, o, N: tl.constexpr, PTX: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        if PTX:
            v = tl.inline_asm_elementwise("ex2.approx.f32 $0, $1;", "=f,f", [v], tl.float32, True, 1)
        else:
            v = tl.exp2(v)
        tl.store(o + i, v)

    @triton.jit
    def native(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.inline_asm_elementwise("v_exp_f32 $0, $1", "=v,v", [tl.load(x + i)], tl.float32, True, 1)
        tl.store(o + i, v)
    """
    guarded = {**elementwise("guarded"), "constexprs": {"N": 256, "PTX": False}}
    entries = [elementwise("refused"), elementwise("silent"), guarded, elementwise("native")]
    found = check(tmp_path, source, ["gfx942", "sm_90"], entries)
    assert {f.where.name: f.check for f in found.findings if f.target == "gfx942"} == {
        "refused": "inline-ptx",
        "silent": "inline-ptx",
    }
    silent = found.of("silent", "gfx942")["inline-ptx"]
    assert silent.severity == "error"
    assert "constraint 'f'" in silent.evidence
    assert silent.where.line == 13
    assert {f.where.name: f.check for f in found.findings if f.target == "sm_90"} == {"native": "inline-amdgcn"}


def test_options_and_calls_that_only_nvidia_has(tmp_path: Path) -> None:
    source = """
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    @triton.jit
    def foreign(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, cuda_libdevice.tanh(tl.load(x + i)))

    @triton.jit
    def portable(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, libdevice.tanh(tl.load(x + i)))

    @triton.jit
    def limited(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))

    @triton.jit
    def clustered(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i))
    """
    limited = elementwise("limited", options={"maxnreg": 128})
    entries = [elementwise("foreign"), elementwise("portable"), limited, elementwise("clustered", num_ctas=2)]
    found = check(tmp_path, source, ["gfx942", "sm_90"], entries)
    assert "cuda-libdevice" in found.of("foreign", "gfx942")
    assert "waves_per_eu" in found.of("limited", "gfx942")["launch-option"].remedy
    assert "thread-block-clusters" in found.of("clustered", "gfx942")
    assert found.of("portable", "gfx942") == {}
    assert found.verdicts["sm_90"] == "ready"


def test_a_function_that_nothing_defines(tmp_path: Path) -> None:
    """AMD's linker lets it pass; libdevice is linked and printing is no call to the outside."""
    source = """
    from triton.language import core
    from triton.language.extra import libdevice

    @core.extern
    def unknown(x, _semantic=None):
        table = {(core.dtype("fp32"),): ("__nobody_has_this", core.dtype("fp32"))}
        return core.extern_elementwise("", "", [x], table, is_pure=True, _semantic=_semantic)

    @triton.jit
    def outside(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, unknown(tl.load(x + i)))

    @triton.jit
    def inside(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        v = tl.load(x + i)
        tl.device_print("v", v)
        tl.store(o + i, libdevice.erf(v))
    """
    found = check(tmp_path, source, ["gfx942"], [elementwise("outside"), elementwise("inside")])
    missing = found.of("outside", "gfx942")["unresolved-function"]
    assert missing.severity == "error"
    assert "__nobody_has_this" in missing.evidence
    assert found.of("inside", "gfx942") == {}


def test_precision_that_a_target_lacks(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def product(a, b, o, HOW: tl.constexpr):
        i = tl.arange(0, 32)
        at = i[:, None] * 32 + i[None, :]
        tl.store(o + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=HOW))
    """
    types = {"a": "*fp32", "b": "*fp32", "o": "*fp32"}
    entry = {"name": "product", "signature": types, "constexprs": {"HOW": "tf32"}}
    found = check(tmp_path, source, ["gfx942", "gfx950"], [entry])
    assert found.verdicts == {"gfx942": "ready", "gfx950": "will not run"}
    error = found.of("product", "gfx950")["input-precision"]
    assert error.where.line == 8
    twin = check(tmp_path, source, ["gfx950"], [{**entry, "constexprs": {"HOW": "ieee"}}])
    assert [(f.check, f.severity) for f in twin.findings] == [("fp32-dot", "note")]


def test_an_error_in_a_helper_is_placed_in_the_helper(tmp_path: Path) -> None:
    source = """
    @triton.jit
    def helper(x):
        return x.frobnicate()

    @triton.jit
    def caller(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, helper(tl.load(x + i)))
    """
    error = check(tmp_path, source, ["gfx942"], [elementwise("caller")]).of("caller", "gfx942")["compile-error"]
    assert error.severity == "error"
    assert error.where.line == 6
    assert "frobnicate" in error.evidence


NOT_IN_THIS_RELEASE = """
    @triton.jit
    def old(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.no_such_function(tl.load(x + i)))

    @triton.jit
    def narrow(x, o, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(o + i, tl.load(x + i).to(tl.float8e4b8).to(tl.float32))
"""


def test_what_fails_on_every_target_is_a_matter_of_tritons_release(tmp_path: Path) -> None:
    entries = [elementwise("old"), elementwise("narrow")]
    found = check(tmp_path, NOT_IN_THIS_RELEASE, ["gfx942", "sm_90"], entries)
    triton = found.answers[0].triton
    for target in ("gfx942", "sm_90"):
        failure = found.of("old", target)["compile-error"]
        assert f"a matter of this code with Triton {triton}, not of the part" in failure.what
        assert "--python" in failure.remedy
    # On one vendor's part alone it is not known.
    alone = check(tmp_path, NOT_IN_THIS_RELEASE, ["gfx942", "gfx950"], [elementwise("old")])
    failure = alone.of("old", "gfx942")["compile-error"]
    assert "not of the part" not in failure.what
    assert "with sm_90 in --on" in failure.remedy
    # What one part refuses and another takes is the part's.
    assert not any("not of the part" in one.what for one in found.findings if one.where.name == "narrow")


LAUNCHES = """
    try:
        from a_module_that_is_missing import fused
    except ImportError:
        fused = None

    @triton.jit
    def copy(x, o, N: tl.constexpr):
        tl.store(o + tl.arange(0, N), tl.load(x + tl.arange(0, N)))

    def crosstie_launch_straight():
        import another_that_is_missing

    def crosstie_launch_behind():
        fused(1)
"""


def test_a_missing_import_is_named(tmp_path: Path) -> None:
    found = check(tmp_path, LAUNCHES, ["gfx942"], [elementwise("copy")])
    straight = found.of("crosstie_launch_straight", "gfx942")["missing-import"]
    assert "another_that_is_missing cannot be imported" in straight.what
    assert "another_that_is_missing in the environment" in straight.remedy
    behind = found.of("crosstie_launch_behind", "gfx942")["missing-import"]
    assert "perhaps because a_module_that_is_missing" in behind.what


def test_progress_is_told_from_the_first_moment(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    launch = "def crosstie_launch_one(): copy[(1,)](torch.zeros(64), torch.zeros(64), N=64)\n"
    file.write_text(f"import torch\n{HEADER}{textwrap.dedent(COPIES)}\n{launch}")
    told: list[tuple[int, int, str]] = []
    preflight_kernels(file, on="gfx942", cached=False, on_progress=lambda *said: told.append(said))
    words = [what for _, _, what in told]
    assert words[0] == f"reading {file}"
    assert words[1].endswith("for gfx942")
    assert "importing steps.py for gfx942" in words
    assert "launching crosstie_launch_one for gfx942" in words
    assert told[-1][:2] == (1, 1)
