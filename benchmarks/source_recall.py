"""How much of what ports to ROCm had to change `crosstie preflight source` would have said (source_ports.toml).

    git clone https://github.com/state-spaces/mamba clones/state-spaces+mamba    # and the others that the table names
    python benchmarks/source_recall.py clones                    # every hazard, found or missed
    python benchmarks/source_recall.py clones --only mamba
    python benchmarks/source_recall.py clones --errors pytorch/FBGEMM:fbgemm_gpu   # what it holds against a ported tree

Each row is a hazard that a commit removed. The tree is read as it was before that commit; a hazard counts as found
where a finding that is more than a note, and of a check that the row names, points at most three lines beside it.
"""

import argparse
import re
import subprocess
import tempfile
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

from crosstie.core.finding import Finding
from crosstie_port.source.check import preflight_source

TABLE = Path(__file__).with_suffix("").parent / "source_ports.toml"
NEAR = 3
_MORE = re.compile(r"more lines?: ([\d, ]+)")


def clone(folder: Path, repository: str) -> Path | None:
    joined = repository.replace("/", "+")
    candidates = [folder / joined / "repo", folder / joined, folder / repository, folder / repository.split("/")[1]]
    return next((one for one in candidates if one.exists()), None)


@cache
def findings(
    repository: Path, commit: str, under: tuple[str, ...], on: str, hipify: bool = False
) -> tuple[Finding, ...]:
    """The names of files in findings are relative to the tree."""
    with tempfile.TemporaryDirectory(prefix="crosstie-recall-") as folder:
        archive = subprocess.run(
            ["git", "-C", str(repository), "archive", commit, "--", *under], check=True, capture_output=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return tuple(preflight_source(folder, on=on, hipify=hipify, use_clang=False).findings)


def places(finding: Finding) -> set[int]:
    more = _MORE.search(finding.evidence)
    others = [int(one) for one in more[1].split(",") if one.strip()] if more else []
    return {finding.where.line or 0, *others}


def found(row: dict[str, object], repository: Path) -> tuple[bool, str]:
    before, file = f"{row['commit']}^", str(row["file"])
    text = subprocess.run(
        ["git", "-C", str(repository), "show", f"{before}:{file}"], check=True, capture_output=True
    ).stdout.decode(errors="replace")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if re.search(str(row["line"]), line)]
    if not lines:
        raise SystemExit(f"{row['commit']}: nothing in {file} matches {row['line']}")
    # What HIPIFY leaves is looked at where a row asks for it: on a whole tree it takes minutes.
    hipify = any("hipify" in check for check in row["checks"])  # type: ignore[attr-defined]
    judged = findings(repository, before, tuple(row["under"]), str(row.get("on", "mi300x")), hipify)  # type: ignore[arg-type]
    near = [
        one
        for one in judged
        if one.where.file == file
        and one.severity != "note"
        and any(abs(line - place) <= NEAR for line in lines for place in places(one))
    ]
    hit = next((one for one in near if one.check in row["checks"]), None)  # type: ignore[operator]
    if hit is not None:
        return True, f"{hit.check} {hit.severity} {hit.where.line}"
    return False, "nearby: " + (", ".join(sorted({f"{one.check} {one.severity}" for one in near})) or "nothing")


def recall(folder: Path, only: str) -> None:
    counts: Counter[tuple[str, bool]] = Counter()
    for row in tomllib.loads(TABLE.read_text())["hazard"]:
        repository = clone(folder, row["repo"])
        if only not in f"{row['repo']} {row['commit']}" or repository is None:
            continue
        was_found, how = found(row, repository)
        counts[row.get("set", "first"), was_found] += 1
        print(f"{'found ' if was_found else 'MISSED'} {row['repo']} {row['commit']}: {row['what']} ({how})", flush=True)
    for one in sorted({name for name, _ in counts}):
        print(f"{one} set: {counts[one, True]} of {counts[one, True] + counts[one, False]} found")


def errors(folder: Path, asked: str, on: str) -> None:
    repository, _, under = asked.partition(":")
    path = clone(folder, repository)
    if path is None:
        raise SystemExit(f"{repository}: no clone in {folder}")
    judged = [one for one in findings(path, "HEAD", tuple(under.split(",")), on) if one.severity == "error"]
    for one in judged:
        print(f"{one.check}\t{one.where.file}:{one.where.line}\t{one.evidence[:140]}")
    print(f"{len(judged)} errors: {dict(Counter(one.check for one in judged))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="folder with a clone of each repository, as owner+name")
    parser.add_argument("--only", default="", help="rows whose repository or commit has this")
    parser.add_argument("--errors", default="", metavar="OWNER/NAME:FOLDERS", help="errors in a tree as it is now")
    parser.add_argument("--on", default="mi300x")
    asked = parser.parse_args()
    if asked.errors:
        errors(asked.clones, asked.errors, asked.on)
    else:
        recall(asked.clones, asked.only)


if __name__ == "__main__":
    main()
