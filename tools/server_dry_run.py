"""Manifests tried by an API server, as it would hold them to all of its rules: kubectl's server-side dry run.

Nothing is made by that.

    server_dry_run.py [FOLDER...] [--namespace NAME]

Without folders: those of example fleets (both vendors, a replica on two nodes, prefill and decode apart, KServe, Ray).
kubectl's cluster is asked, in a namespace that is there (`default` unless another is named). Exit status 1 where
something is refused; 0 where all is taken, and also, saying so, where there is no cluster.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What `crosstie recipe` is asked for, by the folder that it goes to.
EXAMPLES = {
    "both-vendors": "--fleet examples/fleets/two_vendors.toml --as kubernetes",
    "two-nodes": "deepseek-v3 --on h200 --dp 16 --ep 16 --as kubernetes",
    "apart": "deepseek-r1 --on mi355x --disaggregated 1xTP8:2xTP8 --connector vllm-nixl --as kubernetes",
    "kserve": "llama-3.1-8b --on mi300x --as kserve",
    "rayservice": "llama-3.1-8b --on h200 --as rayservice",
}
_MISSING = re.compile(r'no matches for kind "(\w+)" in version "([\w./-]+)"')


def server_version() -> str:
    """Of the cluster that kubectl has; "" where it has none."""
    try:
        asked = ["kubectl", "version", "--request-timeout=10s"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"Server Version: (\S+)", done.stdout)
    return found[1] if found else ""


def refusals(folder: Path, namespace: str) -> Iterator[str]:
    """What the API server says against the files of a folder, a line each."""
    for file in sorted(folder.glob("*.yaml")):
        # Who applies them: `kubectl apply -k` reads it and sends the others.
        if file.name == "kustomization.yaml":
            continue
        asked = ["kubectl", "apply", "--dry-run=server", "--validate=strict", "--namespace", namespace]
        asked += ["--output=name", "-f", str(file)]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
        print(f"{folder.name}/{file.name}: {len(done.stdout.splitlines())} taken")
        missing = dict.fromkeys(_MISSING.findall(done.stderr))
        for kind, version in missing:
            yield (
                f"{folder.name}/{file.name}: the cluster has no {kind} ({version}): install it, or leave the file out "
                "of kustomization.yaml"
            )
        if done.returncode and not missing:
            yield from (f"{folder.name}/{file.name}: {line}" for line in done.stderr.strip().splitlines())


def written(folder: Path) -> list[Path]:
    for name, words in EXAMPLES.items():
        asked = [sys.executable, "-m", "crosstie", "recipe", *words.split(), "-o", str(folder / name)]
        subprocess.run(asked, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [folder / name for name in EXAMPLES]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--namespace", default="default")
    given = parser.parse_args(words)
    version = server_version()
    if not version:
        print("no API server is at hand (kubectl and a kubeconfig): no server-side dry run was made")
        return 0
    print(f"API server {version}, namespace {given.namespace}")
    with tempfile.TemporaryDirectory() as made:
        found = [line for one in given.folders or written(Path(made)) for line in refusals(one, given.namespace)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
