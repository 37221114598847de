"""What contributors and releases rely on: workflows, templates, hooks, wheels, release notes."""

import ast
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.packages import SOURCES

import crosstie

ROOT = Path(__file__).parents[2]
YAML = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"])
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NOTES = runpy.run_path(str(ROOT / "tools" / "release_notes.py"))["notes"]
PACKAGES: dict[str, dict[str, Any]] = {
    folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())
    for folder in (".", "./packages/gateway", "./packages/port")
}
GATEWAY = PACKAGES["./packages/gateway"]


MERGE = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("file", YAML, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_yaml_file_is_read(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_ci_runs_what_a_contributor_runs() -> None:
    jobs = workflow("ci.yml")["jobs"]
    assert commands(jobs["all"]) == [".ci/run"]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13", "3.14"]
    targets = {word for job in jobs.values() for line in commands(job) for word in re.findall(r"make ([\w-]+)", line)}
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"test", "docs"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_pythons_that_are_tested_are_those_that_are_promised_and_built() -> None:
    (promised,) = {
        tuple(re.findall(r"Python :: (3\.\d+)", "\n".join(package["project"]["classifiers"])))
        for package in PACKAGES.values()
    }
    tested = workflow("ci.yml")["jobs"]["quick"]["strategy"]["matrix"]["python"]
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-", " ".join(GATEWAY["tool"]["cibuildwheel"]["build"]))]
    assert [*promised] == tested == built


def test_templates_ask_for_something() -> None:
    templates = [file for file in YAML if file.parent.name == "ISSUE_TEMPLATE" and file.name != "config.yml"]
    assert len(templates) == 3
    for file in templates:
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= set(form)
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_a_wheel_is_tried_and_must_be_compiled() -> None:
    assert any("tools/check_compiled.py" in line for line in GATEWAY["tool"]["cibuildwheel"]["test-command"])
    assert GATEWAY["tool"]["cibuildwheel"]["environment"] == {"CROSSTIE_COMPILE": "1"}


def test_the_version_is_said_everywhere_the_same() -> None:
    assert {package["project"]["version"] for package in PACKAGES.values()} == {crosstie.__version__}
    for folder in ("./packages/gateway", "./packages/port"):
        assert f"crosstie=={crosstie.__version__}" in PACKAGES[folder]["project"]["dependencies"]


def test_every_package_has_its_licence_and_an_address() -> None:
    for folder, package in PACKAGES.items():
        assert (ROOT / folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
        assert package["project"]["urls"]


def unknown_remedies(text: str) -> list[str]:
    """What `pip install` is told to take that a checkout does not have: a folder, or an extra of one."""
    found = []
    for line in re.findall(r"pip install ([^`#\n)]*)", text):
        for folder, extras in re.findall(r"(?<![\w/-])(\.(?:/[\w/]+)?)(?:\[([a-z,-]+)\])?(?=['\" ]|$)", line):
            known = PACKAGES[folder]["project"].get("optional-dependencies", {}) if folder in PACKAGES else {}
            if folder not in PACKAGES or not {*extras.split(",")} - {""} <= known.keys():
                found.append(f"{folder}[{extras}]")
        # No index has it yet.
        found += re.findall(r"(?<![\w/.-])crosstie[\w-]*(?:\[[a-z,-]+\])?(?=['\" ]|$)", line)
    return found


def extras_that_messages_name(code: str) -> list[str]:
    """What `MissingExtra` and `to_install` are called with: `./packages/gateway[redis]`; "?" for what is worked out."""
    named = []
    for call in ast.walk(ast.parse(code)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            continue
        words = [str(word.value) if isinstance(word, ast.Constant) else "?" for word in call.args]
        if call.func.id == "MissingExtra":
            extra, package = (*words[1:], "crosstie")[:2]
        elif call.func.id == "to_install":
            package, extra = words
        else:
            continue
        folder = "." if package == "crosstie" else f"./packages/{package.removeprefix('crosstie-')}"
        named.append(f"{folder}[{extra}]")
    return named


EXTRAS = {
    f"{folder}[{extra}]"
    for folder in PACKAGES
    for extra in PACKAGES[folder]["project"].get("optional-dependencies", {})
}


def test_what_users_are_told_to_install_is_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    files = [file for folder in SOURCES.values() for file in folder.rglob("*.py") if file.name != "errors.py"]
    texts = {file: file.read_text() for file in (*pages, *files)}
    assert {str(file): wrong for file, text in texts.items() if (wrong := unknown_remedies(text))} == {}
    naming = [texts[file] for file in files if re.search("MissingExtra|to_install", texts[file])]
    named = {remedy for code in naming for remedy in extras_that_messages_name(code)}
    assert len(named) > 10
    assert named <= EXTRAS
    told = "".join(texts[page] for page in pages)
    for remedy in EXTRAS - named - {".[dev]", ".[docs]"}:
        folder, extra = remedy[:-1].split("[")
        assert re.search(rf"{re.escape(folder)}\[[a-z,-]*\b{extra}\b", told), f"nobody is told of {remedy}"


def test_a_sentence_of_its_own_would_be_found() -> None:
    """Messages take the sentence from `core.errors.to_install`, so that it changes in one place."""
    own = [
        file
        for folder in SOURCES.values()
        for file in folder.rglob("*.py")
        if re.search(r"pip install '?\./?\S*\[", file.read_text()) and file.name != "errors.py"
    ]
    assert own == []


def test_a_remedy_that_does_not_work_would_be_found() -> None:
    assert unknown_remedies("`pip install '.[plot]'` pip install . './packages/gateway[redis,jwt]'") == []
    assert unknown_remedies("pip install '.[redis]'") == [".[redis]"]
    assert unknown_remedies("pip install ./packages/gate") == ["./packages/gate[]"]
    assert unknown_remedies("pip install 'crosstie[plot]'") == ["crosstie[plot]"]


def test_no_page_keeps_the_marks_of_a_merge() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/**/*.toml"), *ROOT.glob(".github/**/*.yml")]
    assert [str(file) for file in texts if ".venv" not in str(file) and MERGE.search(file.read_text())] == []
    assert MERGE.search("a\n<<<<<<< HEAD\nb")


def test_an_extra_that_is_not_there_would_be_found() -> None:
    code = 'raise MissingExtra("a", "plot")\nMissingExtra("b", "jwt", "crosstie-gateway")\nto_install("crosstie-port", "x")'
    assert extras_that_messages_name(code) == [".[plot]", "./packages/gateway[jwt]", "./packages/port[x]"]
    assert "./packages/port[x]" not in EXTRAS


def test_a_source_tree_that_is_not_installed_knows_its_version() -> None:
    """Metadata of an installation is not there beside it: who asks for it loses what was measured until then."""
    asked = re.compile(r"""(?:version|distribution|metadata)\(\s*["']crosstie["']|package_name=["']crosstie""")
    files = [file for folder in SOURCES.values() for file in folder.rglob("*.py")]
    found = [file for file in files if asked.search(file.read_text())]
    assert not found


def test_the_notes_of_a_version_are_its_section() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.2.0 (2026-12-01)\n\n- second\n\n## 0.1.0\n\n- first\n"
    assert NOTES(changelog, "0.2.0") == "- second\n"
    with pytest.raises(SystemExit, match=r"no section for 0\.3\.0"):
        NOTES(changelog, "0.3.0")


def test_changes_have_a_place() -> None:
    assert re.search(r"^## Unreleased$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
