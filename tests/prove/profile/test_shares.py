"""Where time goes: on hand-made events, and on traces of an H200 (make_traces.py, 2026-11-16)."""

from pathlib import Path

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie_port.profile.roofline import deployment_of, roofline
from crosstie_port.profile.shares import BETWEEN, GAPS, Profile, profile
from crosstie_port.profile.sorting import HOST
from crosstie_port.profile.trace import GpuEvent, ProfilerTrace, StepMark, read_trace

DATA = Path(__file__).with_name("data")
GEMM, NCCL, SORT = "nvjet_sm90_tst_128x32", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "radixSortKVInPlace<2>"


def event(name: str, start: float, end: float, launched: float | None = None, device: str = "0") -> GpuEvent:
    return GpuEvent(name=name, start_s=start, end_s=end, launched_s=launched, device=device)


def told(*events: GpuEvent, **options: int) -> Profile:
    return profile(ProfilerTrace(file="x", made_by="hand", events=list(events)), **options)  # type: ignore[arg-type]


def spent(found: Profile) -> dict[str, float]:
    return {one.sort: one.seconds for one in found.shares}


def test_a_gap_is_the_host_s_as_far_as_its_call_came_late() -> None:
    found = told(event(GEMM, 0.0, 1.0, 0.0), event(GEMM, 3.0, 4.0, 2.5), event(GEMM, 4.5, 5.0, 3.0))
    assert spent(found) == pytest.approx({"matrix products": 2.5, HOST: 1.5, BETWEEN: 1.0})
    assert found.step_s == pytest.approx(5.0)


def test_without_the_host_s_calls_a_gap_is_a_gap() -> None:
    assert spent(told(event(GEMM, 0.0, 1.0), event(GEMM, 3.0, 4.0)))[GAPS] == pytest.approx(2.0)


def test_a_collective_behind_a_product_costs_nothing() -> None:
    found = told(event(GEMM, 0.0, 2.0), event(NCCL, 1.0, 3.0))
    assert spent(found) == pytest.approx({"matrix products": 2.0, "collectives": 1.0})
    assert found.hidden_collectives_s == pytest.approx(1.0)


def test_shares_add_up_to_the_step() -> None:
    events = [
        event(name, i * 1.0, i + 0.4 + 0.3 * (i % 3), i - 0.2)
        for i, name in enumerate([GEMM, SORT, NCCL, "what", GEMM, SORT])
    ]
    found = told(*events, steps=2)
    assert sum(one.fraction for one in found.shares) == pytest.approx(1.0)
    assert sum(one.seconds for one in found.shares) == pytest.approx(found.step_s)
    assert [one.name for one in found.unknown] == ["what"]
    assert any("1 kernel not known by name" in sentence and "what" in sentence for sentence in found.verdict)


def test_the_busiest_device_is_told_and_the_others_counted() -> None:
    found = told(event(GEMM, 0.0, 1.0), event(SORT, 0.0, 3.0, device="1"))
    assert (found.device, found.others) == ("1", 1)
    with pytest.raises(BadInput, match="nothing ran on device 7; there are 0"):
        profile(ProfilerTrace(file="x", made_by="hand", events=[event(GEMM, 0.0, 1.0)]), device="7")
    with pytest.raises(BadInput, match="--steps 0"):
        told(event(GEMM, 0.0, 1.0), steps=0)


def of_h200(name: str) -> Profile:
    return profile(read_trace(DATA / f"h200-{name}.json.gz"))


def largest(found: Profile) -> str:
    return found.verdict[0]


def test_a_step_that_is_launched_kernel_by_kernel_waits_for_the_host() -> None:
    found = of_h200("dense")
    assert (found.steps, found.launches, found.unknown) == (1, 484, [])
    assert "gaps: the host launches late" in largest(found)


def test_the_same_step_as_a_graph_does_not() -> None:
    eager, graph = of_h200("dense"), of_h200("graph")
    # Two marks: a step goes from one's beginning to the next one's.
    assert graph.steps == 1
    assert graph.launches == eager.launches
    assert spent(graph)["matrix products"] == pytest.approx(spent(eager)["matrix products"], rel=0.02)
    assert spent(graph)[HOST] < 0.25 * spent(eager)[HOST]


def test_sparse_attention_by_general_kernels_is_told_as_bookkeeping() -> None:
    found = of_h200("index")
    assert largest(found).startswith("largest recoverable share: bookkeeping")
    assert any("this step spends its time in bookkeeping" in sentence for sentence in found.verdict)
    assert list(found.bookkeeping)[:2] == ["sorting", "gathers"]
    # A dense step is not.
    assert not any("spends its time in bookkeeping" in sentence for sentence in of_h200("graph").verdict)


def test_the_roofline_stands_beside_it(catalog: Catalog) -> None:
    """Llama-3.1-8B's shapes on an H200: each class within a third of what the model predicts, none below the roofline."""
    where = deployment_of(catalog, "llama-3.1-8b", "h200", tp=1, precision="bf16", kv="bf16", stack=None)
    beside = roofline(where, batch=32, context=2048)
    found = profile(read_trace(DATA / "h200-graph.json.gz"), roofline=beside)
    for one in found.shares:
        if one.sort in ("matrix products", "attention"):
            assert one.predicted_s is not None
            assert one.roofline_s is not None
            assert one.seconds == pytest.approx(one.predicted_s, rel=0.33)
            assert one.roofline_s < min(one.seconds, one.predicted_s)
    # The model's one sum for what stands between is shared out.
    expected = {one.sort: one.predicted_s or 0.0 for one in found.shares}
    both = expected["norms and activations"] + expected["bookkeeping"]
    assert both == pytest.approx(beside.predicted_s["norms and activations"])
    assert sum(beside.predicted_s.values()) == pytest.approx(beside.step_s, rel=1e-6)
    index = profile(read_trace(DATA / "h200-index.json.gz"), roofline=beside)
    assert "attention" not in {one.sort for one in index.shares}
    assert any("no kernel is attention by its name" in sentence for sentence in index.verdict)


def test_a_roofline_needs_a_step(catalog: Catalog) -> None:
    where = deployment_of(catalog, "llama-3.1-8b", "h200", tp=1, precision="bf16", kv="bf16", stack=None)
    for wrong in ({"batch": 0, "context": 5}, {"batch": -1, "context": 5}, {"batch": 1, "context": 10**9}):
        with pytest.raises(BadInput):
            roofline(where, **wrong)
    with pytest.raises(BadInput, match="a trace is of one accelerator"):
        deployment_of(catalog, "llama-3.1-8b", "h200,mi300x", tp=1, precision="bf16", kv="bf16", stack=None)


def marked(*events: GpuEvent, marks: list[StepMark]) -> Profile:
    return profile(ProfilerTrace(file="x", made_by="hand", events=list(events), marks=marks))


def test_what_the_gpu_still_had_to_do_is_not_of_the_marked_steps() -> None:
    behind, first, second = event(GEMM, 0.0, 5.0, 0.0), event(GEMM, 5.0, 6.0, 1.0), event(GEMM, 7.0, 8.0, 2.0)
    marks = [StepMark(start_s=5.0, end_s=6.0, device="0"), StepMark(start_s=7.0, end_s=8.0, device="0")]
    found = marked(behind, first, second, marks=marks)
    assert found.steps == 1
    assert found.step_s == pytest.approx(2.0)
    assert sum(one.seconds for one in found.shares) == pytest.approx(2.0)


def test_steps_that_only_the_host_marks_are_what_it_launched() -> None:
    behind, first, second = event(GEMM, 0.0, 5.0, 0.5), event(GEMM, 5.0, 6.5, 1.0), event(GEMM, 6.5, 8.0, 2.0)
    marks = [StepMark(start_s=0.9, end_s=1.5), StepMark(start_s=1.9, end_s=2.5)]
    found = marked(behind, first, second, marks=marks)
    assert found.steps == 1
    assert found.step_s == pytest.approx(1.5)


def test_steps_of_vllm_are_told_by_what_they_carry() -> None:
    """vLLM 0.24.0 with Qwen3-8B's shape on an H200, 32 clients: five steps of a trace (2026-11-18)."""
    found = of_h200("vllm")
    assert found.steps == 5
    assert sum(one.seconds for one in found.shares) == pytest.approx(found.step_s)
    phases = {one.name: one for one in found.phases}
    assert (phases["decode"].steps, phases["with prompts"].steps) == (4, 1)
    assert phases["with prompts"].prompt_tokens == 1050
    # By the GPU's own annotations: 6.1 ms of a decode step and 23.6 ms of the one with a prompt, then sampling and copies.
    assert phases["decode"].busy_s == pytest.approx(6.3e-3, rel=0.05)
    assert phases["with prompts"].busy_s == pytest.approx(24.0e-3, rel=0.05)
    assert any("with_stack" in sentence for sentence in found.verdict)
    assert not any("with_stack" in sentence for sentence in of_h200("dense").verdict)
