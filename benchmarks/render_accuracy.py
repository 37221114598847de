"""Makes the tables of docs/accuracy.md anew from the shipped calibration and measurements.

python benchmarks/render_accuracy.py          (make accuracy)
"""

from pathlib import Path

from crosstie.catalog.library import Catalog
from crosstie.catalog.writing import write_text
from crosstie.prove.calibration.report import fill, tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "accuracy.md"
PEER = ROOT / "benchmarks" / "results" / "aiconfigurator-0.12-predictions.csv"

if __name__ == "__main__":
    write_text(PAGE, fill(PAGE.read_text(encoding="utf-8"), tables(Catalog([]), PEER)))
    print(f"{PAGE.relative_to(ROOT)} rendered")
