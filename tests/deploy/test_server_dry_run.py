"""The tool that has manifests tried by a real API server, with a kubectl that answers as one was seen to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "server_dry_run.py"
REFUSED = 'Error from server (BadRequest): Deployment in version "v1" cannot be handled: unknown field "spec.x"'
MISSING = 'error: resource mapping not found for name: "a" namespace: "" from "x": no matches for kind "InferencePool" in version "inference.networking.k8s.io/v1"\\nensure CRDs are installed first'


def tried(folder: Path, answer: str, *, cluster: bool = True) -> subprocess.CompletedProcess[str]:
    programs = folder / "bin"
    programs.mkdir()
    version = 'echo "Server Version: v1.38.0"' if cluster else "echo no server >&2; exit 1"
    program = programs / "kubectl"
    program.write_text(f"#!/bin/sh\nif [ $1 = version ]; then {version}; exit; fi\n{answer}\n")
    program.chmod(0o755)
    manifests = folder / "m"
    manifests.mkdir()
    for name in ("a.yaml", "kustomization.yaml"):
        (manifests / name).write_text("kind: ConfigMap\n")
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    asked = [sys.executable, str(TOOL), str(manifests)]
    return subprocess.run(asked, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    done = tried(tmp_path, "exit 9", cluster=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "no server-side dry run was made" in done.stdout


def test_what_is_taken_is_counted(tmp_path: Path) -> None:
    done = tried(tmp_path, "echo configmap/a; echo service/b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["API server v1.38.0, namespace default", "m/a.yaml: 2 taken"]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (REFUSED, f"m/a.yaml: {REFUSED}\n"),
        (MISSING, "m/a.yaml: the cluster has no InferencePool (inference.networking.k8s.io/v1): install it, or leave the file out of kustomization.yaml\n"),
    ],
    ids=["refused", "missing"],
)  # fmt: skip
def test_what_is_refused_is_told_and_what_to_do(tmp_path: Path, said: str, told: str) -> None:
    done = tried(tmp_path, f"printf '{said}\\n' >&2; exit 1")
    assert (done.returncode, done.stderr) == (1, told)
