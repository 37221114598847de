"""Engine by release by accelerator: the verdicts are those of preflight, and every change has its reason."""

import re
from pathlib import Path

import pytest
from packaging.version import Version

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput, BadParameter
from crosstie.port.preflight import matrix as module
from crosstie.port.preflight.engine import engine_ends, engines
from crosstie.port.preflight.matrix import ReleaseMatrix, builds, matrix
from crosstie.port.preflight.model import preflight

CATALOG = Catalog()


@pytest.fixture(scope="module")
def v4() -> ReleaseMatrix:
    return matrix("deepseek-v4-flash", on="mi300x,h200", catalog=CATALOG)


def verdicts(of: ReleaseMatrix) -> dict[tuple[str, str], dict[str, str]]:
    return {(row.build.engine, row.build.version): row.verdicts for row in of.rows}


@pytest.mark.parametrize("release", ["vllm==0.32.0", "vllm==0.23.0", "sglang==0.5.18", "llama.cpp==10586"])
def test_a_cell_is_what_preflight_says(release: str, v4: ReleaseMatrix) -> None:
    name, _, version = release.partition("==")
    said = preflight("deepseek-v4-flash", on="mi300x,h200", engine=release, catalog=CATALOG)
    assert verdicts(v4)[name, version] == said.verdicts


def test_a_change_names_release_day_and_what_is_gone(v4: ReleaseMatrix) -> None:
    (change,) = [one for one in v4.changes if one.engine == "vllm" and one.accelerator == "mi300x"]
    assert (change.version, change.released) == ("0.24.0", "2026-06-28")
    assert (change.before, change.after) == ("will not run", "slow path")
    assert "does not load on gfx942" in change.why


def test_the_newest_release_comes_first_and_engines_in_the_files_order(v4: ReleaseMatrix) -> None:
    assert list(dict.fromkeys(row.build.engine for row in v4.rows)) == ["vllm", "sglang", "llama.cpp", "tgi"]
    for name in engines():
        versions = [Version(row.build.version) for row in v4.rows if row.build.engine == name]
        assert versions == sorted(versions, reverse=True)
        assert versions[0] == engines()[name].newest


def test_what_is_known_of_the_end_of_tgi(v4: ReleaseMatrix) -> None:
    assert verdicts(v4)["tgi", "3.3.7"] == {"mi300x": "not known", "h200": "not known"}
    assert {end.since for end in v4.ended} == {"2025-12-11", "2026-03-21"}
    assert all(end.source and end.date for end in engine_ends())


def test_builds_name_their_source_and_what_they_stand_on() -> None:
    for build in builds():
        assert re.match(r"PyPI |[\w.-]+/[\w.-]+@[0-9a-f]{8} ", build.source), build
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", build.released)
        for version in (build.cuda, build.rocm):
            assert not version or re.fullmatch(r"\d+(\.\d+){1,2}", version)


def test_what_is_asked_holds_for_every_release() -> None:
    slow = matrix("qwen3-32b", on="mi300x", engine="vllm", flags={"enforce-eager": "true"}, catalog=CATALOG)
    assert {row.verdicts["mi300x"] for row in slow.rows if Version(row.build.version) >= Version("0.25")} == {
        "slow path"
    }
    with pytest.raises(BadParameter, match="not one of"):
        matrix("qwen3-32b", on="mi300x", engine="vllm", features=["flying"], catalog=CATALOG)


@pytest.mark.parametrize("engine", ["vllm==0.28.0", "triton"])
def test_an_engine_without_a_table(engine: str) -> None:
    with pytest.raises(BadInput, match="unknown engine"):
        matrix("qwen3-32b", on="mi300x", engine=engine, catalog=CATALOG)


HEAD = "engine,version,released,cuda,rocm,cuda_image,rocm_image,source"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{HEAD}\nvllm,0.1.0,2026-01-01,,,,,\n", "line 2: source is empty"),
        (f"{HEAD}\nvllm,new,2026-01-01,,,,,a/b@12345678 x:1\n", "line 2: version 'new' is no release"),
        (f"{HEAD}\nvllm,0.1.0,2026-01-01\n", "line 2: must have 8 fields"),
        ("engine,release\nvllm,0.1.0\n", "line 1: columns must be engine,version,"),
        (f'{HEAD}\n"vllm,0.1.0\n', "not valid CSV"),
    ],
)
def test_a_bad_table_is_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "releases.csv"
    file.write_text(text)
    monkeypatch.setattr(module, "newest_file", lambda *_: file)
    with pytest.raises(BadData, match=said) as caught:
        builds.__wrapped__()
    assert str(file) in str(caught.value)
