"""How often the capture checker agrees with a real GPU: its verdicts beside those of tests/port/capture/truth/h200.csv.

    python benchmarks/capture_accuracy.py                   # all sets, about a quarter of a second a case
    python benchmarks/capture_accuracy.py cases2 models     # some of them

Prints the cases whose verdicts differ, and a table by set and verdict. `capture_truth.py` takes the truth.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.port.capture.known_truth import truths, verdict_here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = truths()
    parser.add_argument("sets", nargs="*", choices=[*sorted({truth.group for truth in known}), []], metavar="SET")
    parser.add_argument("--only", nargs="+", metavar="CASE")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    begun = time.monotonic()
    right: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    for truth in known:
        if (asked.sets and truth.group not in asked.sets) or (asked.only and truth.case not in asked.only):
            continue
        verdict, why = verdict_here(truth)
        (right if verdict == truth.verdict else wrong)[truth.group, truth.verdict] += 1
        if verdict != truth.verdict:
            print(f"{truth.group}/{truth.case}: {truth.verdict} on the GPU, {verdict} here ({why})", flush=True)
    print(f"{'set':8} {'on the GPU':12} {'right':>6} {'wrong':>6}")
    for group, verdict in sorted({*right, *wrong}):
        print(f"{group:8} {verdict:12} {right[group, verdict]:6} {wrong[group, verdict]:6}")
    print(f"{'all':8} {'':12} {right.total():6} {wrong.total():6}   {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
