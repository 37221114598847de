"""In inference mode PyTorch does not take composed operations apart before the stand-in sees them: verdicts of an H200."""

import pytest
from tests.needs import one_in
from tests.port.capture.cases4 import inference
from tests.port.capture.known_truth import truths, verdict_here

TRUTHS = {truth.case: truth for truth in truths() if truth.case in inference.CASES}


@pytest.mark.parametrize("case", one_in(4, TRUTHS))
@pytest.mark.filterwarnings("ignore")
def test_verdict_in_inference_mode_is_the_gpus(case: str) -> None:
    verdict, why = verdict_here(TRUTHS[case])
    assert verdict == TRUTHS[case].verdict, why


def test_every_case_has_its_truth() -> None:
    assert {truth.case for truth in truths() if truth.group == "cases4"} >= inference.CASES.keys()
