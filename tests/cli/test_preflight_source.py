"""`crosstie preflight source`: exit status, JSON, SARIF, and one line for a mistake."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "crosstie", "preflight", "source", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_findings_as_text_json_and_sarif(tmp_path: Path) -> None:
    source, sarif = tmp_path / "a.cu", tmp_path / "a.sarif"
    source.write_text('void f() {\n  asm volatile("bar.sync 0;");\n}\n')
    made = run(str(source), "--on", "mi300x", "--no-hipify", "--sarif", str(sarif))
    assert made.returncode == 1
    assert "a.cu:2 f" in made.stdout
    assert "mi300x  needs changes" in made.stdout
    assert "Nothing here ran on an AMD GPU." in made.stdout
    assert "\x1b" not in made.stdout
    assert made.stderr == ""
    results = json.loads(sarif.read_text())["runs"][0]["results"]
    assert results[0]["locations"][0]["physicalLocation"]["region"] == {"startLine": 2}
    answer = json.loads(run(str(source), "--on", "mi300x", "--no-hipify", "--json").stdout)
    assert answer["verdicts"] == {"mi300x": "needs changes"}
    assert answer["files"] == {"cpp": 1, "python": 0, "build": 0}
    assert answer["findings"][0]["where"] == {"file": "a.cu", "line": 2, "name": "f"}


def test_a_check_that_was_often_false_fails_no_tree_that_runs_on_amd(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("#include <cudnn.h>\n")
    assert run(str(tmp_path), "--on", "mi300x", "--no-hipify").returncode == 1
    (tmp_path / "b.cu").write_text("#ifdef USE_ROCM\n#endif\n")
    made = run(str(tmp_path), "--on", "mi300x", "--no-hipify")
    assert (made.returncode, "not known" in made.stdout) == (0, True)
    assert "on trees that run on AMD this check was false too often" in " ".join(made.stdout.split())


@pytest.mark.slow
def test_the_exit_status_says_how_bad_it_is(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text("torch.backends.cuda.matmul.allow_tf32 = True\n")
    assert run(str(source), "--on", "mi300x").returncode == 0
    assert run(str(source), "--on", "mi300x", "--fail-on", "note").returncode == 1
    for wrong in (
        ["/nowhere", "--on", "mi300x"],
        [str(source), "--on", "mi9999"],
        [str(source)],
        [str(source), "--on", "mi300x", "--clang", "x", "--no-clang"],
    ):
        made = run(*wrong)
        assert made.returncode == 2
        assert made.stderr.startswith("crosstie: ")
        assert len(made.stderr.splitlines()) == 1


@pytest.mark.slow
def test_known_findings_are_left_out_and_a_patch_is_written(tmp_path: Path) -> None:
    source, known, patch = tmp_path / "a.cu", tmp_path / "known.json", tmp_path / "port.patch"
    text = "__global__ void k(int* o) {\n  o[0] = __shfl_sync(0xffffffff, o[0], 1, 32);\n}\n"
    source.write_text(text)
    plain = (str(source), "--on", "mi300x", "--no-hipify")
    assert run(*plain, "--write-baseline", str(known), "--fix", str(patch)).returncode == 1
    assert source.read_text() == text
    assert "+  o[0] = __shfl_sync(ROCM_FULL_LANE_MASK, o[0], 1, 32);" in patch.read_text()
    again = run(*plain, "--baseline", str(known))
    assert again.returncode == 0
    assert "1 findings are known from the baseline" in again.stdout
    assert "mi300x  needs changes" in again.stdout
    wrong = run(*plain, "--baseline", str(tmp_path / "none.json"))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    answer = json.loads(run(*plain, "--json").stdout)
    assert answer["effort"] == [{"file": "a.cu", "rewrite": 0, "local": 0, "mechanical": 1}]
