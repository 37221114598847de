"""How the cheapest fleet changes as the price of one accelerator moves."""

from pathlib import Path

import msgspec

import crosstie

catalog = crosstie.Catalog()
workload = crosstie.read_workload(catalog, Path(__file__).parents[1] / "workloads" / "helpdesk.toml")
for usd_per_hour in (1.0, 1.5, 2.5):
    prices = msgspec.structs.replace(workload.prices, usd_per_gpu_hour={"mi300x": usd_per_hour})
    plan = crosstie.plan(msgspec.structs.replace(workload, prices=prices), catalog=catalog)
    assert plan.fleet is not None
    gpus = ", ".join(f"{count} {name}" for name, count in plan.fleet.gpus.items())
    print(f"mi300x at ${usd_per_hour:.2f}: {gpus}, ${plan.fleet.usd_per_hour:.2f} an hour")
