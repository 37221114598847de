"""One step, against sums done by hand at rates of one."""

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact
from crosstie.core.model import Scan
from crosstie.perf.hardware import Hardware, compute_format
from crosstie.perf.step import all_reduce_s, distinct_share, keys_read, keys_sum, read_limit, shape, step


def perfect(deployment: Deployment) -> Deployment:
    """The same deployment with kernels that reach every peak and cost nothing to start."""
    e = deployment.efficiency

    def full(fact: Fact) -> Fact:
        return msgspec.structs.replace(fact, value=1.0)

    def free(fact: Fact) -> Fact:
        return msgspec.structs.replace(fact, value=0.0)

    best = msgspec.structs.replace(
        e, compute={k: full(v) for k, v in e.compute.items()}, weights={k: full(v) for k, v in e.weights.items()},
        attention=full(e.attention), cache=full(e.cache), elementwise=full(e.elementwise), kernel=free(e.kernel),
        collective=free(e.collective), link=full(e.link),
    )  # fmt: skip
    return msgspec.structs.replace(deployment, efficiency=best)


def hardware(catalog: Catalog, model: str, accelerator: str, precision: str = "native", **split: int) -> Hardware:
    one = catalog.deployment(catalog.model(model), catalog.accelerator(accelerator), Parallelism(**split), precision)
    return Hardware([perfect(one)])


def test_the_ideal_single_stream_step_reads_every_weight_and_the_cache_once(catalog: Catalog) -> None:
    model, h200 = catalog.model("llama-3.1-8b"), catalog.accelerator("h200")
    cost = step(hardware(catalog, "llama-3.1-8b", "h200"), shape(1, 4096))
    read = model.active_parameters - sum(layer.count * 2 * 4096 for layer in model.layers) - 4096
    expected = (2 * read + model.cache_bytes(4096)) / h200.memory_bytes_per_s
    assert float(cost.ideal_s[0, 0]) == pytest.approx(expected, rel=1e-9)
    assert expected < float(cost.gpu_s[0, 0]) < 1.01 * expected


def test_the_ideal_prefill_step_is_two_flops_a_weight_and_causal_attention(catalog: Catalog) -> None:
    model, h200 = catalog.model("qwen3-32b"), catalog.accelerator("h200")
    cost = step(hardware(catalog, "qwen3-32b", "h200"), shape(prefill_tokens=8192))
    products = sum(layer.count * t.parameters for layer in model.layers for t in layer.tensors if t.kernel)
    flop = 2 * 8192 * products + 64 * 4 * 64 * 128 * 8192**2 / 2
    # The head runs for one token alone, and is bound by its bytes.
    head = 2 * 151936 * 5120 / h200.memory_bytes_per_s
    assert float(cost.ideal_s[0, 0]) == pytest.approx(flop / h200.dense["bf16"].si + head, rel=1e-9)


def test_chunks_add_up_to_the_whole_prompt_in_attention(catalog: Catalog) -> None:
    scan = catalog.model("qwen3-32b").layers[0].scans[0]
    whole = float(keys_sum(scan, np.inf, np.array(8192.0)))
    parts = sum(
        float(keys_sum(scan, np.inf, np.array(e)) - keys_sum(scan, np.inf, np.array(e - 2048.0)))
        for e in (2048.0, 4096.0, 6144.0, 8192.0)
    )
    assert parts == pytest.approx(whole)


def test_windows_and_selections_limit_what_is_read(catalog: Catalog) -> None:
    window = catalog.model("gpt-oss-120b").layers[0].scans[0]
    assert read_limit(window) == 128
    assert float(keys_read(window, 128, np.array(50.0))) == 50
    assert float(keys_read(window, 128, np.array(5000.0))) == 128
    # Positions 0 to 128 see a triangle, the rest 128 each.
    assert float(keys_sum(window, 128, np.array(1128.0))) == pytest.approx(128**2 / 2 + 1000 * 128)
    sparse = catalog.model("deepseek-v3.2").layers[0].scans[0]
    assert read_limit(sparse) == 2048
    selected = next(s for layer in catalog.model("deepseek-v4-flash").layers for s in layer.scans if s.top_rows)
    assert read_limit(selected) == 512 * 4
    assert float(keys_read(selected, 2048, np.array(1e6))) == 512
    chunked = next(s for layer in catalog.model("llama-4-scout").layers for s in layer.scans if s.window)
    assert float(keys_read(chunked, 8192, np.array(1e5))) == 4096


def test_a_scan_reads_no_more_than_it_keeps() -> None:
    scan = Scan(
        name="s", row_bytes_16bit=2, row_bytes_8bit=1, decode_flop=1, prefill_flop=1, window=10, top_rows=4, stride=2
    )
    assert read_limit(scan) == 8
    assert scan.row_bytes(2.0) == 2
    assert scan.row_bytes(1.0) == 1


@pytest.mark.parametrize(("tokens", "share"), [(1, 8 / 128), (10, 1 - (1 - 8 / 128) ** 10), (10_000, 1.0)])
def test_distinct_experts(tokens: float, share: float) -> None:
    assert float(distinct_share(8 / 128, np.array(float(tokens)))) == pytest.approx(share)


def test_one_token_reads_its_experts_only(catalog: Catalog) -> None:
    model, h200 = catalog.model("qwen3-30b-a3b"), catalog.accelerator("h200")
    cost = step(hardware(catalog, "qwen3-30b-a3b", "h200"), shape(1, 1))
    assert float(cost.ideal_s[0, 0]) == pytest.approx(2 * model.active_parameters / h200.memory_bytes_per_s, rel=1e-3)
    full = step(hardware(catalog, "qwen3-30b-a3b", "h200"), shape(2000, 1))
    everything = 2 * (model.parameters - model.vocabulary * model.hidden) / h200.memory_bytes_per_s
    assert float(full.ideal_s[0, 0]) > everything


def test_absorbed_decode_works_in_the_latent_space(catalog: Catalog) -> None:
    scan = catalog.model("deepseek-v3").layers[0].scans[0]
    assert scan.row_bytes_16bit == 1152
    assert scan.decode_flop == 2 * 128 * (576 + 512)
    assert scan.prefill_flop == 2 * 128 * (192 + 128)


def test_a_mesh_gives_two_gpus_one_link_and_a_switch_all(catalog: Catalog) -> None:
    message, ranks = np.array([[100e6]]), np.array([[2.0]])
    mesh = float(all_reduce_s(hardware(catalog, "llama-3.1-70b", "mi300x", tp=2), message, ranks)[0, 0])
    switch = float(all_reduce_s(hardware(catalog, "llama-3.1-70b", "h200", tp=2), message, ranks)[0, 0])
    assert mesh == pytest.approx(100e6 / 64e9)
    assert switch == pytest.approx(100e6 / 450e9)
    eight = np.array([[8.0]])
    whole = float(all_reduce_s(hardware(catalog, "llama-3.1-70b", "mi300x", tp=8), message, eight)[0, 0])
    assert whole == pytest.approx(1.75 * 100e6 / 448e9)


def test_one_gpu_does_not_communicate(catalog: Catalog) -> None:
    assert float(step(hardware(catalog, "llama-3.1-8b", "h200"), shape(8, 100)).interconnect_s[0, 0]) == 0


def test_stages_hand_over_through_the_network_beyond_the_domain(catalog: Catalog) -> None:
    inside = step(hardware(catalog, "llama-3.1-70b", "h200", tp=4, pp=2), shape(prefill_tokens=8192)).interconnect_s
    outside = step(hardware(catalog, "llama-3.1-70b", "h200", tp=8, pp=2), shape(prefill_tokens=8192)).interconnect_s
    reduce = step(hardware(catalog, "llama-3.1-70b", "h200", tp=8), shape(prefill_tokens=8192)).interconnect_s
    assert float(outside[0, 0] - reduce[0, 0]) == pytest.approx(8192 * 8192 * 2 / 8 / 50e9)
    assert inside.shape == outside.shape


def test_missing_formats_are_emulated(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-70b")

    def runs(accelerator: str, precision: str) -> str:
        one = catalog.deployment(model, catalog.accelerator(accelerator), precision=precision)
        return compute_format(one, one.precision["mlp"].main)

    assert runs("b200", "nvfp4") == runs("b200", "mxfp4") == runs("mi355x", "mxfp4") == "fp4"
    assert runs("mi355x", "nvfp4") == runs("mi300x", "mxfp4") == runs("h200", "nvfp4") == "bf16"
    assert runs("mi300x", "fp8") == "fp8"
    assert runs("a100-80gb", "fp8") == "bf16"
    # Where the engine writes the weights out first, four bits cost more than sixteen.
    written, plain = (
        float(step(hardware(catalog, "llama-3.1-70b", "mi300x", p), shape(1, 128)).gpu_s[0, 0])
        for p in ("mxfp4", "bf16")
    )
    assert written > 2 * plain
    fused = float(step(hardware(catalog, "llama-3.1-70b", "h200", "mxfp4"), shape(1, 128)).gpu_s[0, 0])
    assert fused < 0.4 * plain


def test_the_fastest_way_is_taken_where_there_are_several(catalog: Catalog) -> None:
    """B300 kept INT8 units that are slower than its BF16 ones; H200's are faster."""
    model = catalog.model("llama-3.1-8b")
    for name, wanted in (("b300", "fp16"), ("h200", "int8")):
        one = catalog.deployment(model, catalog.accelerator(name), precision="q4_k_m", stack="llama.cpp")
        assert compute_format(one, one.precision["mlp"].main) == wanted


def test_an_empty_step_costs_the_host_alone(catalog: Catalog) -> None:
    cost = step(hardware(catalog, "deepseek-v3", "h200", dp=8, ep=8), shape())
    assert float(cost.gpu_s[0, 0]) == 0
    assert float(cost.host_s[0, 0]) == pytest.approx(2e-3)


def test_overlap_hides_the_shorter_of_host_and_gpu(catalog: Catalog) -> None:
    hidden = step(hardware(catalog, "llama-3.1-8b", "b200"), shape(1, 128))
    assert float(hidden.total_s[0, 0]) == max(float(hidden.gpu_s[0, 0]), float(hidden.host_s[0, 0]))
    one = catalog.deployment(
        catalog.model("llama-3.1-8b"), catalog.accelerator("rtx-4090"), precision="q4_k_m", stack="llama.cpp"
    )
    added = step(Hardware([one]), shape(1, 128))
    assert float(added.total_s[0, 0]) == pytest.approx(float(added.gpu_s[0, 0] + added.host_s[0, 0]))


def test_deployments_of_different_models_do_not_mix(catalog: Catalog) -> None:
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"))
    other = catalog.deployment(catalog.model("qwen3-8b"), catalog.accelerator("h200"))
    with pytest.raises(BadInput, match="must share model"):
        Hardware([one, other])
    with pytest.raises(BadInput, match="no deployment"):
        Hardware([])


@pytest.mark.parametrize(
    ("model", "speculation"), [("llama-3.1-8b", None), ("deepseek-v3.2", None), ("deepseek-r1", "mtp:3")]
)
def test_what_a_step_does_adds_up_to_what_it_takes(catalog: Catalog, model: str, speculation: str | None) -> None:
    """Products, attention and bookkeeping are all of the GPU's time but the links', and so is their ideal."""
    found = catalog.model(model)
    drafts = catalog.speculation(found, speculation) if speculation else None
    one = catalog.deployment(found, catalog.accelerator("h200"), Parallelism(tp=8), speculation=drafts)
    cost = step(Hardware([one]), shape([1.0, 64.0], 4096.0, [0.0, 512.0]))
    assert set(cost.parts_s) == {"products", "attention", "bookkeeping"}
    np.testing.assert_allclose(sum(cost.parts_s.values()), cost.compute_s + cost.memory_s, rtol=1e-6)
    np.testing.assert_allclose(sum(cost.ideal_parts_s.values()), cost.ideal_s, rtol=1e-9)
