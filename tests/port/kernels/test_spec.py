"""Specs: what they may say, and one line for each mistake."""

from pathlib import Path

import pytest
from tests.port.kernels.running_kernels import check

from crosstie.core.errors import BadData
from crosstie_port.kernels.spec import entries, read_spec_file

COPY = """
    @triton.jit
    def copy(x, o, n, N: tl.constexpr, KIND: tl.constexpr = None):
        i = tl.arange(0, N)
        v = tl.load(x + i, mask=i < n)
        tl.store(o + i, v if KIND is None else v.to(KIND), mask=i < n)
"""
WHOLE = """
[[kernel]]
name = "copy"
signature = { x = "*fp16", o = "*fp16:8", n = "i32" }
constexprs = { N = 256 }
num_warps = 8
options = { waves_per_eu = 2 }
large = ["x"]
only = ["hip", "sm_90"]
grid = [128, 2]
"""


def test_all_keys_of_a_spec_are_read(tmp_path: Path) -> None:
    file = tmp_path / "copy.toml"
    file.write_text(WHOLE)
    (entry,) = read_spec_file(file)
    assert entry.types == {"x": "*fp16", "o": "*fp16", "n": "i32"}
    assert entry.options == {"waves_per_eu": 2, "num_warps": 8}
    assert [entry.divides(name) for name in ("x", "o")] == [16, 8]
    assert entry.for_target("hip", "gfx942")
    assert entry.for_target("cuda", "sm_90")
    assert not entry.for_target("cuda", "sm_80")
    assert entry.grid == (128, 2)


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("[[kernel]\n", "", "is not TOML"),
        ("", "kernel", "must be a list of tables"),
        ("kernels = 1\n", "kernels", "unknown key"),
        ("[[kernel]]\n", "kernel 1.name", "must be the name"),
        ('[[kernel]]\nname = "a"\nwarps = 4\n', "kernel 1 (a).warps", "unknown key; known: constexprs"),
        ('[[kernel]]\nname = "a"\nsignature = { x = "half*" }\n', "kernel 1 (a).signature.x", "is no type"),
        ('[[kernel]]\nname = "a"\nsignature = { x = 128 }\n', "kernel 1 (a).signature.x", "constants go into"),
        ('[[kernel]]\nname = "a"\nsignature = { x = "*fp16:a" }\n', "kernel 1 (a).signature.x", "no whole number"),
        ('[[kernel]]\nname = "a"\nnum_warps = 0\n', "kernel 1 (a).num_warps", "above 0"),
        ('[[kernel]]\nname = "a"\nnum_warps = true\n', "kernel 1 (a).num_warps", "above 0"),
        ('[[kernel]]\nname = "a"\ngrid = [1, 2, 3, 4]\n', "kernel 1 (a).grid", "up to three"),
        ('[[kernel]]\nname = "a"\nlarge = "x"\n', "kernel 1 (a).large", "list of names"),
        ('[[kernel]]\nname = "a"\nconstexprs = 3\n', "kernel 1 (a).constexprs", "a table"),
        (
            '[[kernel]]\nname = "a"\nsignature = { x = "i32" }\nconstexprs = { x = 1 }\n',
            "kernel 1 (a).constexprs.x",
            "as well",
        ),
    ],
)
def test_mistakes_have_a_place(tmp_path: Path, text: str, key: str, reason: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(BadData) as error:
        read_spec_file(file)
    assert (error.value.file, error.value.key) == (str(file), key)
    assert reason in error.value.reason


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot be read"):
        read_spec_file(tmp_path / "none.toml")


def test_a_module_may_have_a_list_of_anything() -> None:
    with pytest.raises(BadData, match="must be a table"):
        entries("module.py", ["copy"])


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"name": "paste"}, "name"),
        ({"signature": {"x": "*fp16", "o": "*fp16"}}, "signature.n"),
        pytest.param({"constexprs": {}}, "constexprs.N", marks=pytest.mark.slow),
        pytest.param(
            {"signature": {"x": "*fp16", "o": "*fp16", "n": "i32", "N": "i32"}, "constexprs": {}},
            "signature.N",
            marks=pytest.mark.slow,
        ),
        # Each takes a process that imports Triton.
        pytest.param({"constexprs": {"N": 256, "M": 1}}, "M", marks=pytest.mark.slow),
        pytest.param({"constexprs": {"N": 256, "KIND": "tl.float17"}}, "constexprs.KIND", marks=pytest.mark.slow),
    ],
)
def test_what_does_not_agree_with_the_kernel(tmp_path: Path, entry: dict[str, object], key: str) -> None:
    right: dict[str, object] = {
        "name": "copy",
        "signature": {"x": "*fp16", "o": "*fp16", "n": "i32"},
        "constexprs": {"N": 256},
    }
    with pytest.raises(BadData) as error:
        check(tmp_path, COPY, ["gfx942"], [{**right, **entry}])
    assert error.value.key.endswith(f".{key}")


@pytest.mark.triton
def test_types_as_constants_and_arguments_that_are_not_passed(tmp_path: Path) -> None:
    source = COPY.replace("mask=i < n", "mask=True if n is None else i < n")
    entry = {
        "name": "copy",
        "signature": {"x": "*fp16", "o": "*fp32", "n": "none"},
        "constexprs": {"N": 256, "KIND": "tl.float32"},
    }
    (answer,) = check(tmp_path, source, ["gfx942"], [entry]).answers
    assert answer.compilations[0].compiled
    assert answer.compilations[0].job["signature"] == {"x": "*fp16", "o": "*fp32"}
