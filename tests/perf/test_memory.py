"""Where the bytes go, worked by hand for small cases."""

import msgspec
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.perf.fit import Fit, fit, smallest_layout
from crosstie.perf.memory import gpu_cache_bytes_per_sequence, gpu_weight_bytes, memory_plan, weight_bytes
from crosstie.port.preflight.memory import placement_on


def deploy(
    catalog: Catalog, model: str, accelerator: str, precision: str = "native", kv: str = "bf16", **split: int
) -> Deployment:
    return catalog.deployment(
        catalog.model(model), catalog.accelerator(accelerator), Parallelism(**split), precision, kv
    )


def test_the_engine_keeps_a_share_and_a_reserve(catalog: Catalog) -> None:
    one = deploy(catalog, "llama-3.1-70b", "mi300x")
    plan = memory_plan(one)
    memory = one.accelerator.memory_bytes
    assert plan.weight_bytes == pytest.approx(141_107_412_992)
    assert plan.cache_bytes == pytest.approx(0.9 * memory - 3 * 2**30 - 141_107_412_992)
    assert plan.capacity_bytes == pytest.approx(plan.engine_bytes + plan.weight_bytes + plan.cache_bytes)


def test_tensor_parallelism_divides_what_it_can(catalog: Catalog) -> None:
    whole = gpu_weight_bytes(deploy(catalog, "llama-3.1-70b", "h200"))
    eighth = gpu_weight_bytes(deploy(catalog, "llama-3.1-70b", "h200", tp=8))
    norms = 2 * (80 * 2 + 1) * 8192
    assert eighth == pytest.approx((whole - norms) / 8 + norms)


def test_kv_heads_are_kept_twice_beyond_their_number(catalog: Catalog) -> None:
    # Qwen3-30B has four KV heads: eight ranks keep each of them twice.
    four = gpu_cache_bytes_per_sequence(deploy(catalog, "qwen3-30b-a3b", "h200", tp=4), 1000)
    eight = gpu_cache_bytes_per_sequence(deploy(catalog, "qwen3-30b-a3b", "h200", tp=8), 1000)
    assert four == eight


def test_the_latent_cache_is_kept_by_every_rank_but_shared_out_over_replicas(catalog: Catalog) -> None:
    one = gpu_cache_bytes_per_sequence(deploy(catalog, "deepseek-v3", "h200", tp=8), 1000)
    assert float(one) == pytest.approx(1000 * 61 * 576 * 2)
    ranks = fit(catalog, catalog.model("deepseek-v3"), [catalog.accelerator("h200")], context=8192,
                layouts=[Parallelism(tp=8), Parallelism(dp=8, ep=8)])  # fmt: skip
    tp, dp = ranks.placements
    assert dp.sequences > 5 * tp.sequences
    assert dp.plan.weight_bytes > tp.plan.weight_bytes


def test_pipeline_stages_share_out_layers(catalog: Catalog) -> None:
    one, two = (
        gpu_cache_bytes_per_sequence(deploy(catalog, "llama-3.1-70b", "h100-sxm", tp=8, pp=n), 1000) for n in (1, 2)
    )
    assert float(two) == pytest.approx(float(one) / 2)
    # 126 layers over four stages: the fullest has 32.
    four = gpu_cache_bytes_per_sequence(deploy(catalog, "llama-3.1-405b", "h100-sxm", tp=8, pp=4), 1000)
    whole = gpu_cache_bytes_per_sequence(deploy(catalog, "llama-3.1-405b", "h100-sxm", tp=8), 1000)
    assert float(four) == pytest.approx(float(whole) * 32 / 126)


def test_windows_stop_growing_and_states_do_not_grow(catalog: Catalog) -> None:
    oss, hybrid = catalog.model("gpt-oss-120b"), catalog.model("qwen3.5-397b-a17b")
    assert oss.cache_bytes(10_000) == pytest.approx(18 * 2048 * 10_000 + 18 * 2048 * 128)
    assert hybrid.cache_bytes(2) - hybrid.cache_bytes(1) == pytest.approx(15 * 2 * 2 * 256 * 2)
    assert hybrid.cache_bytes(0) == pytest.approx(45 * (64 * 128 * 128 * 4 + 12288 * 3 * 2))


def fewest(result: Fit) -> dict[tuple[str, str], int]:
    return {
        (p.deployment.accelerator.id, p.deployment.precision.id): p.deployment.parallelism.gpus
        for p in result.placements
        if p.fewest and p.fits
    }


def test_the_fewest_gpus(catalog: Catalog) -> None:
    three = [catalog.accelerator(name) for name in ("mi300x", "h200", "h100-sxm")]
    seventy = fewest(fit(catalog, catalog.model("llama-3.1-70b"), three, context=8192))
    assert seventy == {("mi300x", "bf16"): 1, ("h200", "bf16"): 2, ("h100-sxm", "bf16"): 4}
    big = fewest(fit(catalog, catalog.model("llama-3.1-405b"), three, context=8192, precisions=["bf16", "fp8"]))
    assert big[("mi300x", "bf16")] == big[("h200", "bf16")] == 8
    assert big[("h100-sxm", "bf16")] == 16
    assert (big[("mi300x", "fp8")], big[("h200", "fp8")], big[("h100-sxm", "fp8")]) == (4, 4, 8)
    mixtral = fewest(fit(catalog, catalog.model("mixtral-8x7b"), three, context=8192))
    assert mixtral == {("mi300x", "bf16"): 1, ("h200", "bf16"): 1, ("h100-sxm", "bf16"): 2}
    deepseek = fewest(fit(catalog, catalog.model("deepseek-v3"), three, context=8192))
    assert (
        deepseek[("mi300x", "fp8-block")],
        deepseek[("h200", "fp8-block")],
        deepseek[("h100-sxm", "fp8-block")],
    ) == (4, 8, 16)


def test_a_gguf_on_a_desktop_card(catalog: Catalog) -> None:
    card = [catalog.accelerator("rx-7900-xtx")]
    small = fit(catalog, catalog.model("llama-3.1-8b"), card, context=8192, precisions=["q4_k_m"], stack="llama.cpp")
    assert small.placements[0].fewest
    assert small.placements[0].deployment.parallelism.gpus == 1
    assert small.sizes[0].weight_bytes == pytest.approx(4_912_898_304, rel=1e-6)
    large = fit(catalog, catalog.model("llama-3.1-70b"), card, context=8192, precisions=["q4_k_m"], stack="llama.cpp")
    assert not any(p.fits for p in large.placements if p.deployment.parallelism.gpus == 1)


def test_what_does_not_fit_says_so(catalog: Catalog) -> None:
    result = fit(catalog, catalog.model("kimi-k3"), [catalog.accelerator("rtx-4090")], context=8192)
    assert [p.fits for p in result.placements] == [False]
    assert smallest_layout(catalog, catalog.model("kimi-k3"), catalog.accelerator("rtx-4090"), context=8192) is None


def test_a_context_beyond_the_model_is_refused(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="beyond the 40960"):
        fit(catalog, catalog.model("qwen3-8b"), [], context=40961)
    with pytest.raises(BadInput, match="at least 1"):
        fit(catalog, catalog.model("qwen3-8b"), [], context=0)


def test_bytes_by_format_add_up_to_the_weights(catalog: Catalog) -> None:
    model = catalog.model("gpt-oss-120b")
    result = fit(catalog, model, [], context=8192)
    assert set(result.sizes[0].weight_bytes_by_format) == {"mxfp4-a8", "bf16"}
    assert result.sizes[0].weight_bytes == pytest.approx(weight_bytes(model, catalog.precision(model)))


def test_weights_are_remembered_by_what_the_precision_says(catalog: Catalog) -> None:
    """Two precisions of one name, as after a change of a format, are not taken for one another."""
    model, h200 = catalog.model("llama-3.1-8b"), catalog.accelerator("h200")
    plain = catalog.deployment(model, h200, precision="bf16")
    eight = catalog.deployment(model, h200, precision="fp8")
    renamed = msgspec.structs.replace(eight, precision=msgspec.structs.replace(eight.precision, id=plain.precision.id))
    assert gpu_weight_bytes(plain) == pytest.approx(weight_bytes(model, plain.precision))
    assert gpu_weight_bytes(renamed) == gpu_weight_bytes(eight)
    assert gpu_weight_bytes(plain) > 1.5 * gpu_weight_bytes(renamed)


def test_fit_compare_and_preflight_mean_the_same_by_fits(catalog: Catalog) -> None:
    """The fewest GPUs that surely hold one sequence: two H100 hold 70B in BF16 only if the engine keeps little."""
    for name, context in (("llama-3.1-70b", 8192), ("deepseek-r1", 8192), ("kimi-k2", 8192), ("mixtral-8x22b", 4096)):
        model = catalog.model(name)
        for part in ("mi300x", "h100-sxm", "h200", "b200"):
            on = catalog.accelerator(part)
            shown = fit(catalog, model, [on], context=context, stack="vllm").placements
            (fewest,) = {p.deployment.parallelism.gpus for p in shown if p.fewest}
            chosen = smallest_layout(catalog, model, on, context=context, stack="vllm")
            judged = placement_on(
                catalog, model, on, context=context, precision="native", kv="bf16", stack="vllm", tp=None
            )
            assert chosen is not None
            assert judged is not None
            assert chosen.deployment.parallelism.gpus == judged.deployment.parallelism.gpus == fewest
