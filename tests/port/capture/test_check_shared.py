"""The 27 functions that came with the issue that asked for the checker, with the verdict of a real H200."""

import pytest
from tests.needs import one_in
from tests.port.capture.cases import shared
from tests.port.capture.known_truth import truths

from crosstie_port.capture.check import check

TRUTH = {truth.case: truth.verdict for truth in truths() if truth.group == "shared"}


def test_every_function_has_its_truth() -> None:
    assert TRUTH.keys() == shared.CASES.keys()


@pytest.mark.parametrize("name", one_in(3, TRUTH))
def test_verdict_is_the_gpus(name: str) -> None:
    result = check(shared.CASES[name], shared.inputs, state=shared.State)
    assert result.verdict == TRUTH[name]
    code = shared.CASES[name].__code__
    for hazard in result.hazards:
        assert (hazard.file, hazard.function) == (code.co_filename, name)
        assert hazard.line is not None
        assert hazard.line >= code.co_firstlineno
        assert hazard.remedy
