"""Verdicts against those of a real H200: a fixed sample of the cases in truth/h200.csv, all of its sets and verdicts."""

import pytest
from tests.port.capture.known_truth import Truth, truths, verdict_here

pytestmark = pytest.mark.slow

# Cases whose verdict differs from the GPU's, and why. All are in the sample.
KNOWN = {
    "paged_write_trash_slot": ("ok", "two rows write one slot: which one wins is chance on the GPU"),
    "latent_cache_absorbed": ("ok", "the replay differs by rounding alone on the GPU"),
    "jagged_from_offsets": ("unknown", "nested tensors are not followed"),
    "exact_type_demanded": ("unknown", "a stand-in tensor is a subclass"),
    "form_subclass_of_tensor": ("unknown", "a stand-in tensor cannot become another subclass"),
    "form_jacobian": ("unknown", "torch.func's reverse mode is not followed"),
    "loaded_onto_device": ("refused", "torch.load cannot put storages on the stand-in"),
    # The GPU's truth compares outputs alone; the function's state differs after these replays.
    "streams_side_waits_for_nobody": ("stale", "kept state is written on a stream outside the graph"),
    "streams_default_used_inside": ("stale", "kept state is written on a stream outside the graph"),
    "threads_launch_and_write": ("stale", "kept state is written in a thread outside the graph"),
}
# Every n-th case of a verdict: the rarer the verdict, the more of them.
STEPS = {"ok": 18, "error": 9, "stale": 4}


def sample() -> list[Truth]:
    """Without those that have a test of their own."""
    known = [truth for truth in truths() if truth.group not in ("models", "shared")]
    chosen = [t for verdict, step in STEPS.items() for t in [k for k in known if k.verdict == verdict][::step]]
    return [*chosen, *(t for t in known if t.case in KNOWN and t not in chosen)]


@pytest.mark.parametrize("truth", sample(), ids=lambda truth: truth.case)
@pytest.mark.filterwarnings("ignore")
def test_verdict_is_the_gpus(truth: Truth) -> None:
    verdict, why = verdict_here(truth)
    expected = KNOWN[truth.case][0] if truth.case in KNOWN else truth.verdict
    assert verdict == expected, why


def test_the_sample_covers_sets_and_verdicts() -> None:
    found = {(truth.group, truth.verdict) for truth in sample()}
    assert found == {(group, verdict) for group in ("cases", "cases2", "cases3", "cases4") for verdict in STEPS}
    assert 110 <= len(sample()) <= 150
    assert all(KNOWN[truth.case][0] != truth.verdict for truth in sample() if truth.case in KNOWN)
