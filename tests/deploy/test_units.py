"""The systemd unit and the container file, as far as they can be checked without systemd running or a registry."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosstie.core.fleet import Serving
from crosstie_gateway.cli.serve import command

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "crosstie.service"
CONTAINER = ROOT / "deploy" / "container" / "Containerfile"
ANALYZE = shutil.which("systemd-analyze")
JQ = shutil.which("jq")
with_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def analyze(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    # The installed command is not there.
    unit = tmp_path / "crosstie.service"
    unit.write_text(text.replace("/opt/crosstie/bin/crosstie", shutil.which("true") or "/bin/true"))
    return subprocess.run([ANALYZE, *arguments, str(unit)], capture_output=True, text=True, timeout=60, check=False)


@with_systemd
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    found = analyze(tmp_path, UNIT.read_text(), "verify", "--man=no")
    assert (found.returncode, found.stderr) == (0, "")


@with_systemd
def test_systemd_would_say_what_it_does_not_know(tmp_path: Path) -> None:
    found = analyze(tmp_path, UNIT.read_text().replace("ProtectHome=", "ProtectHouse="), "verify", "--man=no")
    assert "ProtectHouse" in found.stderr


@with_systemd
def test_the_unit_is_shut_off_from_the_machine(tmp_path: Path) -> None:
    found = analyze(tmp_path, UNIT.read_text(), "security", "--offline=true", "--threshold=20")
    assert found.returncode == 0, found.stdout[-400:]


def test_the_unit_drains_longer_than_the_gateway_and_reloads_as_it_does() -> None:
    said = settings()
    assert said["Type"] == ["notify"]
    # Hooks that load models inherit the socket, and are not to speak for the gateway.
    assert said["NotifyAccess"] == ["main"]
    assert float(said["TimeoutStopSec"][0]) > 2 * Serving().drain_s
    assert said["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert said["KillSignal"] == ["SIGTERM"]
    assert said["Restart"] == ["on-failure"]
    assert int(said["LimitNOFILE"][0]) >= 65536


def options_of(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def test_options_of_both_files_are_those_of_the_command() -> None:
    known = options_of(CliRunner().invoke(command, ["--help"]).output)
    example = (UNIT.parent / "environment.example").read_text()
    asked = options_of(" ".join(settings()["ExecStart"] + settings()["Environment"]))
    asked |= options_of(next(line for line in example.splitlines() if line.startswith("CROSSTIE_OPTIONS=")))
    asked |= options_of(CONTAINER.read_text().partition("ENTRYPOINT")[2])
    assert {"--host", "--port", "--log-format", "--record"} <= asked <= known


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", CONTAINER.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_container_file_is_multi_stage_without_root_and_without_a_compiler_in_the_end() -> None:
    lines = instructions()
    stages = [value for name, value in lines if name == "FROM"]
    assert len(stages) == 2
    # The usual public base, by its release and not by whatever is latest.
    assert all(stage.startswith("docker.io/library/python:${PYTHON}") for stage in stages)
    (python,) = [value for name, value in lines if name == "ARG"]
    assert re.fullmatch(r"PYTHON=3\.\d+-slim-\w+", python)
    last = lines[max(at for at, (name, _) in enumerate(lines) if name == "FROM") :]
    by_name = dict(last)
    assert by_name["USER"] == "10001:10001"
    assert "gcc" not in str(last)
    assert "/health" in by_name["HEALTHCHECK"]
    # podman's own format would leave it out, with no more than a warning.
    assert "podman build --format docker " in CONTAINER.read_text()
    assert by_name["STOPSIGNAL"] == "SIGTERM"
    assert [name for name, _ in last].index("USER") < [name for name, _ in last].index("ENTRYPOINT")
    assert "ADD" not in {name for name, _ in lines}
    known = {
        "ARG",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "LABEL",
        "RUN",
        "STOPSIGNAL",
        "USER",
        "VOLUME",
        "WORKDIR",
    }
    assert {name for name, _ in lines} <= known


def test_what_the_container_file_copies_and_installs_exists() -> None:
    copied = [value.split()[:-1] for name, value in instructions() if name == "COPY" and "--from" not in value]
    files = {file for line in copied for file in line}
    assert {"src", "packages/gateway", "pyproject.toml", "constraints.txt"} <= files
    assert all((ROOT / file).exists() for file in files)
    extras = tomllib.loads((ROOT / "packages/gateway/pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"'\./packages/gateway\[([a-z,]+)\]'", CONTAINER.read_text())
    assert set(wanted.split(",")) <= extras.keys()
    # Manifests run this image, and their fleets have kube:// backends.
    assert "kubernetes" in wanted
    (compiled,) = re.findall(r"import (crosstie[\w.]+) as m; assert", CONTAINER.read_text())
    assert importlib.util.find_spec(compiled)


@pytest.mark.skipif(JQ is None, reason="jq is not installed")
def test_what_the_runbook_looks_for_is_found_among_lines_that_are_no_json() -> None:
    journal = "".join(
        (
            "Started crosstie.service - Crosstie gateway.\n",
            " pool     model          each\n",
            "137\n",
            '{"event":"request","outcome":"cut","attempts":2,"time":"t","request_id":"r","backend":"b","code":"upstream_cut"}\n',
            '{"event":"record_failed","message":"NOT RECORDING"}\n',
        )
    )
    filters = re.findall(r"\| (jq [^|']*'[^']+')", (ROOT / "docs" / "operations.md").read_text())
    assert len(filters) == 3
    for one in filters:
        found = subprocess.run(one, shell=True, input=journal, capture_output=True, text=True, timeout=60, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        assert len(found.stdout.splitlines()) == 1
