"""Steps beside TraceLens' own figures, on its traces of AMD and NVIDIA GPUs (tracelens.py reduces them)."""

import gzip
import json

import pytest
from tests.prove.profile.tracelens import REDUCED, Reference, ratios, references

from crosstie_port.profile.shares import profile
from crosstie_port.profile.trace import read_trace

HERE = [reference for reference in references() if reference.reduced]


@pytest.mark.parametrize("reference", HERE, ids=lambda reference: reference.reduced)
def test_a_step_takes_what_tracelens_says(reference: Reference) -> None:
    found = profile(read_trace(REDUCED / reference.reduced))
    # The one with three steps is 0.8% longer: ours goes from a step's beginning to the next one's, so two of the three.
    for ratio in ratios(found, reference).values():
        assert ratio == pytest.approx(1.0, abs=0.01 if reference.steps > 1 else 0.001)
    assert found.unknown == []
    assert sum(one.seconds for one in found.shares) == pytest.approx(found.step_s)


def test_the_table_has_every_trace_once() -> None:
    every = [reference.trace for reference in references()]
    assert len(set(every)) == len(every) == 40
    assert {path.name for path in REDUCED.glob("*.gz")} == {reference.reduced for reference in HERE}


def test_rocprofv3_on_an_mi350x() -> None:
    """500 kernels of a training run: busy time as the union of what ran, by hand."""
    file = REDUCED / "mi350x-rocprofv3.json.gz"
    run = json.loads(gzip.decompress(file.read_bytes()))["rocprofiler-sdk-tool"][0]
    busy = end = 0
    for one in run["buffer_records"]["kernel_dispatch"]:
        busy += max(one["end_timestamp"] - max(one["start_timestamp"], end), 0)
        end = max(end, one["end_timestamp"])
    found = profile(read_trace(file))
    assert (found.made_by, found.launches) == ("rocprofv3", 500)
    assert found.busy_s == pytest.approx(busy * 1e-9, rel=1e-3)
