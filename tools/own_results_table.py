"""Writes the table of our own measurements that the shipped calibration learns from, out of the files of `bench`.

    python tools/own_results_table.py > src/crosstie/catalog/data/measured/h200-vllm-2026-11.csv

Left out: arrivals by the clock, conversations, and whatever lies in a folder `beside`; and speculation, whose random
weights keep every draft.
"""

import csv
import sys
from pathlib import Path

from crosstie.prove.calibration.results import read_results

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "h200-vllm-0.24",
    "h200-vllm-0.24-small",
    "h200-vllm-0.24-14b",
    "h200-vllm-0.24-mixture",
    "h200-vllm-0.24-3b",
)
COLUMNS = (
    "source_id", "source_ref", "publisher", "date", "trust", "accelerator", "num_accelerators", "model", "model_config",
    "precision", "engine", "engine_version", "tp", "input_len", "output_len", "concurrency", "num_prompts", "arrivals",
    "scenario", "metric", "unit", "value", "notes",
)  # fmt: skip
# By kind and statistic: the column `metric`, its unit, and what a value in SI is multiplied by.
METRICS = {
    **{(kind, at): (f"{kind}_ms_{at}", "ms", 1e3) for kind in ("ttft", "tpot") for at in ("mean", "p50", "p99")},
    ("throughput", "mean"): ("output_tokens_per_s_total", "tok/s", 1.0),
    ("power", "mean"): ("gpu_power_w_avg", "W", 1.0),
    ("energy", "mean"): ("joules_per_output_token", "J/tok", 1.0),
}
OF_ALL = {
    "source_id": "crosstie_h200_vllm", "publisher": "Crosstie", "trust": "A", "scenario": "closed loop",
    "num_accelerators": "1", "notes": "random weights; own measurement",
}  # fmt: skip


def main() -> None:
    table = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    table.writeheader()
    for folder in FOLDERS:
        for file in sorted((ROOT / "examples" / "results" / folder).glob("*-*.json")):
            for point in read_results(file).points:
                if point["arrivals"] != "steady" or point["spec_decode"]:
                    continue
                said = {name: point[name] for name in COLUMNS} | OF_ALL | {"source_ref": str(file.relative_to(ROOT))}
                for row in point.rows:
                    named = METRICS.get((row.metric.kind, row.metric.statistic))
                    if named:
                        metric, unit, factor = named
                        value = f"{row.value * factor:.6g}"
                        table.writerow(said | {"metric": metric, "unit": unit, "value": value})


if __name__ == "__main__":
    main()
