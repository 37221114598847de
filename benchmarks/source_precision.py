"""How many errors of `crosstie preflight source` on trees that run on AMD are false, by samples judged by hand.

    python benchmarks/source_precision.py                                       # counts of results/source_precision.csv
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

from source_recall import clone, findings

TABLE = Path(__file__).parent / "results" / "source_precision.csv"


def counted() -> None:
    with TABLE.open() as rows:
        judged = Counter((row["sample"], row["judged"]) for row in csv.DictReader(rows))
    for sample in sorted({one for one, _ in judged}):
        false = judged[sample, "false"]
        print(f"sample {sample}: {false} false of {false + judged[sample, 'right']}")


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
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=18)
    asked = parser.parse_args()
    if asked.clones is None:
        counted()
    else:
        drawn(asked.clones, asked.projects, asked.count, asked.seed)


if __name__ == "__main__":
    main()
