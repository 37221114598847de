"""Experts over racks and nodes: the all-to-all as measured, copies of popular experts, halves that hide each other."""

import csv

import numpy as np
import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Hardware
from crosstie.perf.memory import memory_plan
from crosstie.perf.steady_state import steady_state
from crosstie.perf.step import _exchanges, shape, step, step_s


def wide(catalog: Catalog, accelerator: str, ranks: int, tp: int = 1) -> Deployment:
    split = Parallelism(tp=tp, dp=ranks // tp, ep=ranks)
    return catalog.deployment(catalog.model("deepseek-r1"), catalog.accelerator(accelerator), split, kv_format="fp8")


def measured() -> list[dict[str, str]]:
    with (SHIPPED / "measured" / "all_to_all.csv").open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['accelerator']} EP{row['ranks']}")
def test_an_exchange_takes_what_was_measured(uncalibrated: Catalog, row: dict[str, str]) -> None:
    """Out and back; between nodes and over racks within a quarter, within a node as all engines were fitted."""
    hardware = Hardware([wide(uncalibrated, row["accelerator"], int(row["ranks"]))])
    one_layer = hardware.work._replace(layers=1, expert_layers=1)
    seconds = float(_exchanges(hardware, one_layer, np.array([float(row["tokens"])]))[0, 0])
    taken = (float(row["dispatch_us"]) + float(row["combine_us"])) * 1e-6
    assert seconds == pytest.approx(taken, rel=0.25 if int(row["ranks"]) > 8 else 0.4)


def test_beyond_a_node_only_experts_spread(uncalibrated: Catalog) -> None:
    assert wide(uncalibrated, "b200", 32).parallelism.gpus == 32
    assert wide(uncalibrated, "b200", 32, tp=4).parallelism.gpus == 32
    for split in (Parallelism(tp=16), Parallelism(dp=16, ep=8), Parallelism(tp=16, dp=2, ep=32)):
        with pytest.raises(BadInput, match="exceed the 8 that fast links join on b200"):
            uncalibrated.deployment(uncalibrated.model("deepseek-r1"), uncalibrated.accelerator("b200"), split)


def test_a_rack_may_hold_copies_of_experts_that_do_not_divide(uncalibrated: Catalog) -> None:
    """256 experts in 288 places of 72 GPUs, and never more groups than experts."""
    split = wide(uncalibrated, "gb200", 72).parallelism
    assert split.expert_places(256) == 4
    assert Parallelism(dp=32, ep=32).expert_places(256) == 9
    assert Parallelism(dp=8, ep=8).expert_places(256) == 32
    with pytest.raises(BadInput, match="does not divide the 256 experts"):
        uncalibrated.deployment(
            uncalibrated.model("deepseek-r1"), uncalibrated.accelerator("gb200"), Parallelism(dp=6, ep=6)
        )


def test_copies_take_memory(uncalibrated: Catalog) -> None:
    narrow, broad = (memory_plan(wide(uncalibrated, "gb200", n)).weight_bytes for n in (8, 32))
    experts = 256 * 58 * 3 * 7168 * 2048
    # 32 of 256 experts on each of 8 GPUs; 9 on each of 32.
    assert narrow - broad == pytest.approx(experts * (32 - 9) / 256, rel=0.02)


def test_more_ranks_of_a_rack_carry_more_for_each_gpu_when_weights_bind(uncalibrated: Catalog) -> None:
    """The weights of fewer experts are read by each GPU, and a rack's links bear the exchange."""
    rates = [
        float(
            steady_state(Hardware([wide(uncalibrated, "gb200", n)]), 64 * n, 1000, 1000).output_tokens_per_s[0, 0]
        ) / n
        for n in (8, 32)
    ]  # fmt: skip
    assert rates[1] > 1.2 * rates[0]


def test_leaving_the_node_costs_more_than_staying_in_a_rack(uncalibrated: Catalog) -> None:
    at = shape(32 * 64, 2048)
    rack, nodes = (step(Hardware([wide(uncalibrated, name, 32)]), at) for name in ("gb200", "b200"))
    assert float(nodes.interconnect_s[0, 0]) > 1.5 * float(rack.interconnect_s[0, 0])


def test_halves_of_a_batch_hide_each_other_where_that_is_quicker(uncalibrated: Catalog) -> None:
    """Never slower than one after the other, and at large batches well under it."""
    hardware = Hardware([wide(uncalibrated, "h100-sxm", 32)])
    for sequences, least in ((32, 0.0), (32 * 256, 0.15)):
        at = shape(float(sequences), 2048)
        cost = step(hardware, at)
        tokens = np.array([sequences / 32.0])
        alone = float(cost.compute_s[0, 0] + cost.memory_s[0, 0])
        exchanged = 58 * float(_exchanges(hardware, hardware.work._replace(layers=1, expert_layers=1), tokens)[0, 0])
        assert float(cost.gpu_s[0, 0]) <= alone + exchanged + 1e-9
        assert float(cost.interconnect_s[0, 0]) <= (1.0 - least) * exchanged + 1e-9


def test_the_quick_sum_is_that_of_the_whole_account(uncalibrated: Catalog) -> None:
    hardware = Hardware([wide(uncalibrated, "b200", 16), wide(uncalibrated, "b200", 8)])
    at = shape(np.array([1.0, 64.0, 4096.0]), 1024, 2048.0, 0.0, 512.0)
    assert step_s(hardware, at) == pytest.approx(step(hardware, at).total_s)
