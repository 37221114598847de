"""Sizes worked by hand or published by others, for models and shapes of every kind."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.perf.fit import fit
from crosstie.perf.memory import weight_bytes
from crosstie.perf.steady_state import single_stream_ceiling

# Element counts of the published checkpoints without their draft (MTP) layers and vision towers.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-70b": 68_976_648_192,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "minimax-m2.5": 228_689_764_864,
    "falcon-40b": 41_835_970_560,
    # As transformers 5.22 builds them from these configs.
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "laguna-xs.2": 33_442_617_088,
    "ministral-3-14b": 13_506_073_600,
    # With the 64 corrections of the router in each of 46 layers, which transformers keeps as buffers.
    "glm-4.7-flash": 29_943_390_976 + 46 * 64,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exact(catalog: Catalog, name: str) -> None:
    assert catalog.model(name).parameters == PARAMETERS[name]


# Published in rounded form: total and active, in billions.
ROUNDED = {
    "deepseek-v3": (671, 37), "deepseek-v3.2": (671, 37), "deepseek-v4-flash": (284, 13), "deepseek-v4-pro": (1573, 49),
    "glm-5": (744, 40), "kimi-k2": (1026, 32), "kimi-k3": (2780, 104), "gemma-4-26b-a4b": (25.2, 3.8),
    "gpt-oss-120b": (116.8, 5.1), "gpt-oss-20b": (20.9, 3.6), "qwen3.5-397b-a17b": (397, 17), "llama-4-maverick": (400, 17),
    "minimax-m2.5": (229, 10), "glm-5.2": (744, 40), "minimax-m2": (229, 10), "qwen3-vl-235b-a22b": (235, 22),
    "ring-2.5-1t": (1012, 63),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDED)
def test_total_and_active_parameters(catalog: Catalog, name: str) -> None:
    model, (total, active) = catalog.model(name), ROUNDED[name]
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=0.06)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("minimax-m3", 428),
        ("glm-4.7", 355),
        ("qwen3-next-80b-a3b", 80),
        ("glm-5.1", 744),
        ("qwen3-coder-next", 80),
        ("gemma-4-31b", 31),
    ],
)
def test_total_parameters_of_models_named_by_them(catalog: Catalog, name: str, billions: float) -> None:
    """Some count a draft layer or a vision tower in."""
    assert catalog.model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 11.61),
        ("deepseek-v3.2", 11.62),
        ("glm-5", 9.95),
        ("qwen3.5-397b-a17b", 6.60),
        ("deepseek-v4-flash", 6.61),
        ("llama-3.1-8b", 0),
    ],
)
def test_draft_layers_are_known_and_not_counted(catalog: Catalog, name: str, billions: float) -> None:
    assert catalog.model(name).draft_parameters / 1e9 == pytest.approx(billions, rel=0.005)


# Bytes of GGUF files on the Hugging Face hub; the rest of a file is its tokenizer and metadata.
GGUF_FILES = {
    ("llama-3.1-8b", "q4_k_m"): 4_920_739_232,
    ("llama-3.1-70b", "q4_k_m"): 42_520_398_400,
    ("mixtral-8x7b", "q4_k_m"): 28_446_410_624,
    ("mixtral-8x7b", "q5_k_m"): 33_227_523_968,
    ("qwen3-8b", "q4_k_m"): 5_027_784_512,
    ("qwen3-30b-a3b", "q4_k_m"): 18_556_686_912,
    ("qwen3-32b", "q4_k_m"): 19_762_150_048,
}


@pytest.mark.parametrize(("name", "precision"), GGUF_FILES)
def test_weights_are_as_large_as_published_gguf_files(catalog: Catalog, name: str, precision: str) -> None:
    model = catalog.model(name)
    assert weight_bytes(model, catalog.precision(model, precision)) == pytest.approx(
        GGUF_FILES[name, precision], rel=0.002
    )


# Checkpoints in the format they are published in, in GB.
CHECKPOINTS = {"kimi-k3": 1560, "kimi-k2.5": 594, "gpt-oss-120b": 65.3, "gpt-oss-20b": 13.8, "deepseek-v4-flash": 156}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_native_checkpoints(catalog: Catalog, name: str) -> None:
    model = catalog.model(name)
    assert weight_bytes(model, catalog.precision(model)) / 1e9 == pytest.approx(CHECKPOINTS[name], rel=0.005)


def test_seventy_billion_in_bf16(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-70b")
    assert weight_bytes(model, catalog.precision(model, "bf16")) / 1e9 == pytest.approx(141.1, abs=0.05)
    assert model.cache_bytes(1) == 320 * 1024
    assert model.cache_bytes(1, 1.0) == 160 * 1024


def test_single_stream_ceilings(catalog: Catalog) -> None:
    for name, ceiling in (("mi300x", 37.9), ("h100-sxm", 23.9)):
        rate = single_stream_ceiling(140e9, catalog.accelerator(name).memory_bytes_per_s)
        assert rate == pytest.approx(ceiling, abs=0.05)


# KV bytes per token by hand: layers x 2 x KV heads x head dim x 2, or the latent row.
CACHE = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2, "llama-3.1-405b": 126 * 2 * 8 * 128 * 2, "qwen3-32b": 64 * 2 * 8 * 128 * 2,
    "falcon-40b": 60 * 2 * 8 * 64 * 2, "deepseek-v3": 61 * 576 * 2, "kimi-k2": 61 * 576 * 2, "mixtral-8x7b": 32 * 2 * 8 * 128 * 2,
    "minimax-m2.5": 62 * 2 * 8 * 128 * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CACHE)
def test_kv_bytes_per_token(catalog: Catalog, name: str) -> None:
    assert catalog.model(name).cache_bytes(1000) == 1000 * CACHE[name]


def test_caches_that_are_not_a_product(catalog: Catalog) -> None:
    v4, v32, k3 = (catalog.model(n) for n in ("deepseek-v4-flash", "deepseek-v3.2", "kimi-k3"))
    # vLLM's rows: 584 bytes for a compressed entry, 132 for an index entry.
    assert (v4.cache_bytes(2e6, 1.0) - v4.cache_bytes(1e6, 1.0)) / 1e6 == pytest.approx(3850, abs=1)
    assert v32.cache_bytes(1000, 1.0) == 1000 * 61 * (656 + 132)
    assert k3.cache_bytes(0) == pytest.approx(434.1e6 + 15.3e6, rel=1e-3)
    pro = catalog.model("deepseek-v4-pro")
    all_wide = sum(
        layer.count * s.row_bytes_16bit / s.stride
        for layer in pro.layers
        for s in layer.scans
        if s.name.startswith("compressed")
    )
    assert all_wide * 2**20 / 2**30 == pytest.approx(7.5 + 0.242, rel=0.01)


def test_gemma_keeps_windows_in_five_of_six_layers(catalog: Catalog) -> None:
    gemma = catalog.model("gemma-3-27b")
    assert [layer.count for layer in gemma.layers] == [52, 10]
    assert gemma.cache_bytes(32768) == (10 * 32768 + 52 * 1024) * 2 * 16 * 128 * 2


def test_fit_reports_the_same(catalog: Catalog) -> None:
    result = fit(catalog, catalog.model("llama-3.1-405b"), [], context=4096, precisions=["bf16", "fp8"])
    wide, narrow = result.sizes
    assert wide.weight_bytes == 2 * 405_853_388_800
    # Embedding and head stay in 16 bits: 2 x 128,256 x 16,384 weights, and the norms.
    outer = 2 * 128256 * 16384 + (126 * 2 + 1) * 16384
    assert narrow.weight_bytes == pytest.approx(405_853_388_800 + outer)
    assert wide.kv_bytes_per_token == 516_096
