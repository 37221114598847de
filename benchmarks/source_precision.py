"""How many errors of `crosstie preflight source` on trees that run on AMD are false, by samples judged by hand.

    python benchmarks/source_precision.py                                       # counts of results/source_precision.csv
    python benchmarks/source_precision.py clones --again                        # what today's rules make of those rows
    python benchmarks/source_precision.py clones kokkos/kokkos:core/src ...     # draws a sample to judge: 60, seed 18

Each sample was drawn from projects that nobody had looked at while the rules were written, with the rules as they were
then; what it showed was mended before the next one, so a draw today gives other rows. "right": as it stands, the line
would not compile or run on ROCm, also where the project has not ported that part at all. "false": a build for ROCm
leaves it out or gets it right. HIPIFY's findings are among them; clang's are not. Whole
trees, not drawn: of sample 8 tiny-cuda-nn, of sample 9 all but SGLang, and samples 12 to 15, which are without HIPIFY's
findings. Of sample 13 five further trees (SIRIUS, MFEM, stdgpu, COSMA, SUNDIALS) had no error.
"""

import argparse
import csv
import random
from collections import Counter
from pathlib import Path

from source_recall import NEAR, clone, findings, places

TABLE = Path(__file__).parent / "results" / "source_precision.csv"
# From gravest to gone, as columns.
KEPT = {"error": "error", "unknown": "unknown", "slow": "less", "setting": "less", "note": "less", "": "gone"}
COLUMNS = tuple(dict.fromkeys(KEPT.values()))


def judged_rows() -> list[dict[str, str]]:
    with TABLE.open() as rows:
        return list(csv.DictReader(rows))


def counted() -> None:
    rows = judged_rows()
    for key in ("sample", "check"):
        judged = Counter((row[key], row["judged"]) for row in rows)
        for one in sorted({name for name, _ in judged}, key=lambda name: (len(name), name)):
            false = judged[one, "false"]
            print(f"{key} {one}: {false} false of {false + judged[one, 'right']}")


def again(folder: Path) -> None:
    """Each judged error is looked for at its place in its tree, whole: by check, what it is now."""
    rows = judged_rows()
    with_hipify = {(row["repository"], row["commit"]) for row in rows if row["check"].startswith("hipify")}
    now: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        tree = row["repository"], row["commit"]
        path = clone(folder, row["repository"])
        if path is None:
            now["not there", row["judged"], ""] += 1
            continue
        near = [
            one.severity
            for one in findings(path, row["commit"], (), "mi300x,rx-7900-xtx", hipify=tree in with_hipify)
            if (one.check, one.where.file) == (row["check"], row["file"])
            and any(abs(int(row["line"] or 0) - place) <= NEAR for place in places(one))
        ]
        gravest = next((severity for severity in KEPT if severity in near), "")
        for name in (row["check"], "all"):
            now[name, row["judged"], KEPT[gravest]] += 1
    print(f"{'':24}" + "".join(f"{f'{judged} {kept}':>15}" for judged in ("right", "false") for kept in COLUMNS))
    for name in sorted({check for check, _, _ in now} - {"not there"}):
        figures = (now[name, judged, kept] for judged in ("right", "false") for kept in COLUMNS)
        print(f"{name:24}" + "".join(f"{figure:>15}" for figure in figures))
    print(f"no clone: {now['not there', 'right', '']} right, {now['not there', 'false', '']} false")


def drawn(folder: Path, projects: list[str], count: int, seed: int) -> None:
    rows = []
    for asked in projects:
        repository, _, under = asked.partition(":")
        path = clone(folder, repository)
        if path is None:
            raise SystemExit(f"{repository}: no clone in {folder}")
        for one in findings(path, "HEAD", tuple(under.split(",")), "mi300x", hipify=True):
            if one.severity == "error":
                rows.append((repository, one.check, one.where.file, one.where.line or 0, one.evidence[:140]))
    rows.sort()
    print(f"{len(rows)} errors")
    for row in sorted(random.Random(seed).sample(rows, min(count, len(rows)))):
        print("\t".join(map(str, row)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, nargs="?", help="folder with a clone of each repository, as owner+name")
    parser.add_argument("projects", nargs="*", metavar="OWNER/NAME:FOLDERS")
    parser.add_argument("--again", action="store_true", help="what today's rules make of the judged errors")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=18)
    asked = parser.parse_args()
    if asked.clones is None:
        counted()
    elif asked.again:
        again(asked.clones)
    else:
        drawn(asked.clones, asked.projects, asked.count, asked.seed)


if __name__ == "__main__":
    main()
