"""How tests are sorted: every mark is known, used and told; a quick run imports nothing heavy; a skip can fail a run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.needs import NEEDS, OWN_ENVIRONMENT, marks, marks_of_module
from tests.no_skips import SKIPPED

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.parent.name not in ("cases", "cases2", "cases3"))
# pytest's own.
BUILT_IN = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings"}
HEAVY = {"transformers", "triton"}


def test_every_mark_is_known_and_every_known_one_is_used() -> None:
    texts = {path: path.read_text() for path in FILES}
    named = {path: set(re.findall(r"pytest\.mark\.([a-z]\w*)", text)) for path, text in texts.items()}
    known = {*NEEDS, *OWN_ENVIRONMENT}
    assert {path: unknown for path, found in named.items() if (unknown := found - known - BUILT_IN)} == {}
    # Parsed until one is found that is no text of a test: to parse all takes seconds.
    assert [
        name
        for name in known
        if not any(name in found and name in marks(ast.parse(texts[path])) for path, found in named.items())
    ] == []


def test_marks_are_found_with_and_without_arguments(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest\npytestmark = [pytest.mark.slow, pytest.mark.usefixtures('x')]\n@pytest.mark.storm\ndef f(): pass\n"
    )
    assert marks_of_module(file) == {"slow", "usefixtures"}
    assert set(marks(ast.parse(file.read_text()))) == {"slow", "usefixtures", "storm"}


def imported_at_once(text: str) -> set[str]:
    """What importing a module imports, by first names; nothing of a file that has no heavy word."""
    found: set[str] = set()
    if not any(name in text for name in HEAVY):
        return found
    for node in ast.parse(text).body:
        match node:
            case ast.Import(names=names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
            case ast.Assign(
                value=ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name)), *_])
            ):
                found.add(name.partition(".")[0])
    return found


def test_what_is_heavy_is_imported_by_modules_that_are_marked() -> None:
    assert imported_at_once("from triton import jit\nx = pytest.importorskip('transformers')\nimport os") == HEAVY | {
        "os"
    }
    heavy = [path for path in FILES if path.name.startswith("test_") and imported_at_once(path.read_text()) & HEAVY]
    assert [path for path in heavy if not marks_of_module(path) & {*NEEDS, *OWN_ENVIRONMENT}] == []
    assert heavy


def test_every_room_keeps_quick_tests() -> None:
    rooms = {path.parent for path in FILES if path.name.startswith("test_")} - {ROOT / "tests" / "engines"}
    quick = {path.parent for path in FILES if path.name.startswith("test_") and not marks_of_module(path)}
    assert rooms - quick == set()


def test_the_makefile_has_a_target_for_each_own_environment() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name.replace("_", "-") for name in OWN_ENVIRONMENT} <= targets


SKIPS = "import pytest\ndef test_one(): pass\n@pytest.mark.skip(reason='no engine here')\ndef test_two(): pass\n"
SKIPS_AS_A_WHOLE = "import pytest\npytest.importorskip('no_such_library')\n"


def outcome(folder: Path, text: str, *options: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(text)
    plugins = ["-p", "tests.needs", "-p", "tests.no_skips", "-p", "no:cacheprovider"]
    got = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *options, "--rootdir", folder, "-c", os.devnull, folder],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    return got.returncode, got.stdout


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_skip_fails_the_run_that_allows_none(processes: str, tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text(SKIPS_AS_A_WHOLE)
    status, said = outcome(tmp_path, SKIPS, "--no-skips", "-n", processes)
    assert (status, "1 passed, 2 skipped" in said) == (SKIPPED, True), said
    assert "skipped, and --no-skips was given" in said
    assert "no engine here" in said
    assert "no_such_library" in said


@pytest.mark.slow
def test_a_skip_beside_a_failure_is_not_lost_when_the_failure_passes_the_second_time(tmp_path: Path) -> None:
    assert outcome(tmp_path, f"{SKIPS}\ndef test_fails(): assert 0\n", "--no-skips")[0] == SKIPPED
    assert outcome(tmp_path, "def test_fails(): assert 0\n", "--no-skips")[0] == 1


@pytest.mark.slow
def test_a_skip_is_allowed_elsewhere_and_no_skip_is_fine_everywhere(tmp_path: Path) -> None:
    assert outcome(tmp_path, SKIPS)[0] == 0
    assert outcome(tmp_path, "def test_one(): pass\n", "--no-skips")[0] == 0


@pytest.mark.slow
def test_a_quick_run_leaves_out_what_is_marked_and_imports_no_file_marked_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "test_heavy.py").write_text(
        "import pytest\npytestmark = pytest.mark.slow\nraise RuntimeError('imported')\n"
    )
    text = "import pytest\ndef test_one(): pass\n@pytest.mark.slow\ndef test_two(): assert False\n"
    status, said = outcome(tmp_path, text, "--quick")
    assert (status, "1 passed, 1 deselected" in said) == (0, True), said
    assert outcome(tmp_path, text)[0] == 2
    (tmp_path / "test_heavy.py").unlink()
    own = text + "@pytest.mark.vllm_cpu\ndef test_three(): assert False\n"
    assert "1 failed, 1 passed, 1 deselected" in outcome(tmp_path, own)[1]
    assert "1 failed, 3 deselected" not in outcome(tmp_path, own, "-m", "vllm_cpu")[1]
