"""One service on more and more GPUs: its layouts, its efficiency, and what MLPerf's submitters published of theirs."""

import csv
import gzip
import json
from collections import defaultdict

import numpy as np
import pytest
from tests.conftest import Command
from tests.present import present

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.decide.compare.scaling import FOUR_FIFTHS, SEVERAL_MACHINES, Scaling, scaling
from crosstie.decide.compare.scorecard import Load


def scaled(catalog: Catalog, model: str, names: str, gpus: list[int], load: Load) -> list[Scaling]:
    on = [catalog.accelerator(name) for name in names.split()]
    return scaling(catalog, catalog.model(model), on, gpus, load, kv_format="fp8")


def published() -> list[float]:
    """Tokens a second a GPU on 16 and more over those on four or eight, the best of each round and scenario."""
    rates: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
    with gzip.open(SHIPPED / "measured" / "results.csv.gz", "rt") as lines:
        for row in csv.DictReader(lines):
            if row["source_id"].startswith("mlperf") and row["metric"] == "output_tokens_per_s_total":
                of = rates[row["source_id"], row["accelerator"], row["model"], row["scenario"]]
                gpus = float(row["num_accelerators"])
                of[gpus] = max(of.get(gpus, 0.0), float(row["value"]) / gpus)
    found = []
    for of in rates.values():
        one = max((rate for gpus, rate in of.items() if 4 <= gpus <= 8), default=None)
        found += [rate / one for gpus, rate in of.items() if one and gpus >= 16]
    return found


def test_what_several_machines_keep_is_what_was_published() -> None:
    kept = published()
    assert len(kept) >= 25
    assert float(np.median(kept)) == pytest.approx(SEVERAL_MACHINES, abs=0.01)
    assert np.percentile(kept, (10, 90)) == pytest.approx(FOUR_FIFTHS, abs=0.015)


def test_replicas_of_a_dense_model_scale_as_submissions_did(catalog: Catalog) -> None:
    """Llama-2-70B on 8 to 88 MI355X and on 8 and 16 H200: within what four fifths of the submissions keep."""
    low, high = np.percentile(published(), (10, 90))
    for one in scaled(catalog, "llama-2-70b", "h200 mi355x", [8, 16, 88], Load(512, 300, 280)):
        assert one.sizes[0].efficiency == 1.0
        for size in one.sizes[1:]:
            assert low <= present(size.efficiency) <= high


def test_a_rack_spreads_experts_where_nodes_keep_to_themselves(uncalibrated: Catalog) -> None:
    rack, node = scaled(uncalibrated, "deepseek-r1", "gb200 b200", [8, 32], Load(512, 1000, 1000))
    wide, narrow = rack.sizes[1].deployment, node.sizes[1].deployment
    assert wide
    assert narrow
    assert wide.parallelism.ep == 32
    assert present(rack.sizes[1].efficiency) > 1.05 > present(node.sizes[1].efficiency)


def test_a_size_that_holds_nothing_says_so(catalog: Catalog) -> None:
    (one,) = scaled(catalog, "llama-3.1-405b", "h200", [1, 8], Load(16, 1000, 1000))
    assert one.sizes[0].problem == "1 h200 cannot hold llama-3.1-405b"
    assert one.sizes[1].deployment
    assert one.sizes[1].efficiency is None


@pytest.mark.slow
def test_the_command_prints_a_size_a_line(crosstie: Command) -> None:
    asked = ("compare", "deepseek-r1", "--on", "gb200,mi355x", "--gpus", "8,16", "--kv", "fp8")
    got = crosstie(*asked)
    assert got.status == 0
    assert got.out.count("100%") == 2
    found = json.loads(crosstie(*asked, "--json").out)["scaling"]
    assert [size["gpus"] for size in found[0]["sizes"]] == [8, 16]
    assert found[0]["sizes"][0]["efficiency"] == 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gpus", "8,x"), "such as 8,16,32"),
        (("--gpus", "0,8"), "at least 1"),
        (("--gpus", ""), "at least 1"),
        (("--gpus", "16,8"), "the smallest first"),
        (("--gpus", "8", "--tp", "8"), "leave --tp"),
        (("--gpus", "8", "--sweep"), "stands alone"),
        (("--gpus", "1"), "cannot hold llama-3.1-405b"),
    ],
)
def test_what_cannot_be_scaled_is_told_in_a_line(crosstie: Command, options: tuple[str, ...], says: str) -> None:
    got = crosstie("compare", "llama-3.1-405b", "--on", "h200", *options)
    assert (got.status, got.out) == (2, "")
    assert got.err.count("\n") == 1
    assert says in got.err
