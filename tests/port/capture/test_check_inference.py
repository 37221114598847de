"""In inference mode PyTorch does not take composed operations apart before the stand-in sees them: verdicts of an H200."""

import pytest
from tests.port.capture.cases4 import inference
from tests.port.capture.known_truth import Truth, truths, verdict_here


@pytest.mark.parametrize("truth", [t for t in truths() if t.case in inference.CASES], ids=lambda truth: truth.case)
@pytest.mark.filterwarnings("ignore")
def test_verdict_in_inference_mode_is_the_gpus(truth: Truth) -> None:
    verdict, why = verdict_here(truth)
    assert verdict == truth.verdict, why


def test_every_case_has_its_truth() -> None:
    assert {truth.case for truth in truths() if truth.group == "cases4"} >= inference.CASES.keys()
