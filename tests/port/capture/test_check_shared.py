"""The 27 functions with the verdict of a real H200."""

import csv
from pathlib import Path

import pytest
from tests.needs import one_in
from tests.port.capture import shared_cases

from crosstie_port.capture.check import check

with (Path(__file__).parent / "shared_truth.csv").open() as rows:
    TRUTH = {row["case"]: row["verdict"] for row in csv.DictReader(rows)}


def test_every_function_has_its_truth() -> None:
    assert TRUTH.keys() == shared_cases.CASES.keys()


@pytest.mark.parametrize("name", one_in(3, TRUTH))
def test_verdict_is_the_gpus(name: str) -> None:
    result = check(shared_cases.CASES[name], shared_cases.inputs, state=shared_cases.State)
    assert result.verdict == TRUTH[name]
    lines = shared_cases.CASES[name].__code__
    for hazard in result.hazards:
        assert hazard.file == shared_cases.__file__
        assert hazard.function == name
        assert hazard.line is not None
        assert hazard.line > lines.co_firstlineno
        assert hazard.remedy
