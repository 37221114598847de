"""Verification as what it is: more queries, the same cache, more experts; and drafts that must be paid for."""

import msgspec
import numpy as np
import pytest

from crosstie.catalog.drafters import drafter_of
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.speculation import Method, Speculation, by_position, constant_acceptance
from crosstie.perf.estimate import estimate
from crosstie.perf.hardware import Hardware
from crosstie.perf.memory import memory_plan
from crosstie.perf.steady_state import steady_state
from crosstie.perf.step import StepCost, gpu_s, shape, step, step_s

CATALOG = Catalog([])


def speculating(one: Deployment, acceptance: tuple[float, ...], method: Method = "mtp") -> Deployment:
    found = Speculation(
        method=method, acceptance=acceptance, drafter=drafter_of(one.model, method), text="coding", range=(1.0, 2.0),
        basis="assumed", source="a test", date="2026-11-16",
    )  # fmt: skip
    return msgspec.structs.replace(one, speculation=found)


def deployment(
    model: str, accelerator: str = "h200", split: Parallelism | None = None, precision: str | None = None
) -> Deployment:
    return CATALOG.deployment(CATALOG.model(model), CATALOG.accelerator(accelerator), split, precision)


R1 = deployment("deepseek-r1", split=Parallelism(tp=8))
LLAMA = deployment("llama-3.1-8b")


def test_lengths_by_depth_become_acceptance_by_position() -> None:
    found = by_position((1.79, 2.27, 2.49, 2.54))
    assert found == pytest.approx((0.79, 0.48 / 0.79, 0.22 / 0.48, 0.05 / 0.22))
    one = speculating(R1, found).speculation
    assert one is not None
    assert one.acceptance_length == pytest.approx(2.54)
    assert one.keeping(0.8).acceptance_length == pytest.approx(1 + 0.8 * 1.54)
    # A noisy curve that falls keeps nothing there.
    assert by_position((1.9, 1.85, 2.0))[1] == 0.0


def test_one_rate_for_every_position_gives_the_length_it_was_made_from() -> None:
    one = speculating(R1, constant_acceptance(2.65, 7)).speculation
    assert one is not None
    assert one.acceptance_length == pytest.approx(2.65)
    with pytest.raises(BadInput, match="3 drafts give 1 to 4"):
        constant_acceptance(4.5, 3)


@pytest.mark.parametrize("acceptance", [(1.2,), (0.9, -0.1), ()])
def test_an_acceptance_that_is_no_share_is_refused(acceptance: tuple[float, ...]) -> None:
    with pytest.raises(BadInput, match="speculation mtp"):
        speculating(R1, acceptance)


def test_who_drafts_must_be_there() -> None:
    with pytest.raises(BadInput, match=r"llama-3.1-8b has no prediction layer"):
        drafter_of(LLAMA.model, "mtp")
    with pytest.raises(BadInput, match="is not named"):
        drafter_of(LLAMA.model, "draft")
    large = CATALOG.model("llama-3.3-70b")
    assert drafter_of(large, "draft", LLAMA.model) is LLAMA.model
    with pytest.raises(BadInput, match=r"no smaller than llama-3.1-8b"):
        drafter_of(LLAMA.model, "draft", large)
    with pytest.raises(BadInput, match=r"151,936 tokens and llama-3.3-70b 128,256"):
        drafter_of(large, "draft", CATALOG.model("qwen3-8b"))


def test_attention_of_a_verifying_step_reads_the_cache_once() -> None:
    """At a context that dwarfs the weights, three queries more cost next to nothing but their arithmetic."""
    n, context = 16, 100_000
    off, on = Hardware([LLAMA]), Hardware([speculating(LLAMA, (0.0,) * 3, "ngram")])
    added = step(on, shape(n, context)).ideal_s - step(off, shape(n, context)).ideal_s
    assert float(added[0, 0]) < 0.02 * float(step(off, shape(n, context)).ideal_s[0, 0])


def test_a_verifying_step_reads_more_experts_until_it_reads_all() -> None:
    """57 to 163 of 256 experts at 8 sequences, 252 to 256 at 128."""
    off, on = Hardware([R1]), Hardware([speculating(R1, (0.0,) * 3, "ngram")])
    few, many = (
        float((step(on, shape(n, 1024)).memory_s / step(off, shape(n, 1024)).memory_s)[0, 0]) for n in (8, 128)
    )
    assert few > 1.5
    assert many < 1.15


def test_verifying_costs_what_as_many_sequences_with_the_same_cache_would() -> None:
    """All but attention sees tokens only: 4 x 8 queries of one-token contexts are 32 sequences."""
    off, on = Hardware([LLAMA]), Hardware([speculating(LLAMA, (0.0,) * 3, "ngram")])
    assert float(step(on, shape(8, 1)).gpu_s[0, 0]) == pytest.approx(float(step(off, shape(32, 1)).gpu_s[0, 0]), 1e-3)


def test_drafts_are_paid_for_pass_by_pass() -> None:
    """An n-gram drafts for nothing but the host; every further pass of a layer costs the same."""

    def cost(method: Method) -> StepCost:
        return step(Hardware([speculating(R1, (0.0,) * 3, method)]), shape(16, 2048))

    assert float(cost("mtp").gpu_s[0, 0]) > float(cost("ngram").gpu_s[0, 0])
    bookkeeping = 16 * float(Hardware([speculating(R1, (0.0,) * 3)]).host_verify_s[0, 0])
    three, one = (float(cost(method).draft_host_s[0, 0]) - bookkeeping for method in ("mtp", "dspark"))
    assert three == pytest.approx(3 * one)


def test_deployments_with_and_without_speculation_are_evaluated_together() -> None:
    rows = [R1, speculating(R1, (0.9, 0.8, 0.7)), speculating(R1, (0.9,), "eagle3")]
    at = shape(np.array([1.0, 32.0, 256.0]), 2048)
    together = step_s(Hardware(rows), at)
    for row, one in zip(together, rows, strict=True):
        assert row == pytest.approx(step_s(Hardware([one]), at)[0], rel=1e-12)


def test_the_drafter_takes_memory_of_its_own() -> None:
    on = speculating(R1, (0.8,))
    drafter = on.speculation and on.speculation.drafter
    assert drafter is not None
    added = memory_plan(on).weight_bytes - memory_plan(R1).weight_bytes
    # One layer of experts in 8 bits over eight GPUs; embedding and head are the model's own.
    assert added == pytest.approx(11.6e9 / 8, rel=0.1)
    with_head = speculating(LLAMA, (0.8,), "eagle3")
    assert memory_plan(with_head).weight_bytes > memory_plan(LLAMA).weight_bytes


def test_tokens_come_by_acceptance_length() -> None:
    """The same steps, 2.3 tokens of each: TPOT is per token that a client gets."""
    off, on = speculating(R1, (0.0,) * 3), speculating(R1, (0.7, 0.6, 0.5))
    length = 1 + 0.7 + 0.42 + 0.21
    slow, fast = (steady_state(Hardware([one]), 1, 1024, 1025) for one in (off, on))
    assert float(slow.tpot_s[0, 0] / fast.tpot_s[0, 0]) == pytest.approx(length, rel=0.02)
    assert float(slow.ttft_s[0, 0]) == pytest.approx(float(fast.ttft_s[0, 0]), rel=0.02)


def test_it_pays_for_few_and_not_for_many() -> None:
    """Where weights are streamed, verification is nearly free; where arithmetic binds, every draft is paid for."""
    dense = deployment("llama-3.3-70b", split=Parallelism(tp=4), precision="fp8")
    on = speculating(dense, (0.5, 0.4, 0.3), "eagle3")

    def gain(clients: int) -> float:
        slow, fast = (estimate(d, concurrency=clients, input_tokens=100, output_tokens=1000) for d in (dense, on))
        return fast.output_tokens_per_s / slow.output_tokens_per_s

    assert gain(1) > 1.3
    assert gain(900) < 1.0


def test_where_a_token_goes_adds_up_to_what_it_costs() -> None:
    on = speculating(R1, (0.8, 0.7, 0.6))
    found = estimate(on, concurrency=64, input_tokens=1000, output_tokens=1000)
    spent = sum(found.gpu_s_per_token.values())
    assert spent == pytest.approx(8 / found.output_tokens_per_s, rel=0.15)


def test_verifying_is_corrected_beyond_the_plain_step() -> None:
    """What measured steps with drafts say is of the further tokens, of drafts and of the host between steps."""
    machine = Hardware([speculating(R1, (0.5,) * 3)])
    at, plain = shape(64, 2048), gpu_s(Hardware([R1]), shape(64, 2048))

    def spent(**factors: float) -> float:
        machine.correct({name: np.array([[factors.get(name, 1.0)]]) for name in CONSTANTS})
        return float(step_s(machine, at)[0, 0])

    usual, free = spent(), spent(verify=0.0)
    assert spent(verify=3.0) - free == pytest.approx(3 * (usual - free))
    assert usual - free > 0
    assert spent(verify=0.0, draft=0.0, host_draft=0.0, host_verify=0.0) >= float(plain[0, 0]) * (1 - 1e-9)
    assert spent(host_verify=2.0) - usual == pytest.approx(64 * 10e-6, rel=0.05)
    assert spent(draft=2.0) > usual
