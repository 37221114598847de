"""Checkpoints broken on purpose are never ready, and whole ones never broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import Tensors
from tests.port.preflight import tiny

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding
from crosstie.port.preflight.engine import engine_from
from crosstie.port.preflight.model import ModelOptions, check_model
from crosstie.port.preflight.stored import read_stored

LAYER = "model.layers.0"
COMPRESSED_BY_TENSOR = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    }},
}  # fmt: skip


def write(folder: Path, tensors: Tensors, config: dict[str, Any], quantisation: dict[str, Any] | None = None) -> Path:
    samples.write_model(folder, tensors, quantisation)
    whole = {**config, **({"quantization_config": quantisation} if quantisation else {})}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def told(catalog: Catalog, folder: Path, on: str = "h200") -> tuple[str, list[Finding]]:
    question = ModelOptions(engine=engine_from("vllm"))
    found = check_model(catalog, read_stored(catalog, str(folder)), [catalog.accelerator(on)], question)
    return found.verdicts[on], [one for one in found.findings if one.check == "tensors"]


def without(*endings: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: array for name, array in tensors.items() if not name.endswith(endings)}


def with_bias(tensors: Tensors) -> Tensors:
    return {**tensors, f"{LAYER}.self_attn.q_proj.bias": samples.bf16((tiny.HEADS * tiny.DIM,))}


def other_grid(tensors: Tensors) -> Tensors:
    return {**tensors, f"{LAYER}.mlp.up_proj.weight_scale_inv": samples.floats((4, 8))}


def same(tensors: Tensors) -> Tensors:
    return tensors


BROKEN: list[tuple[str, dict[str, Any], Callable[[Tensors], Tensors], str]] = [
    ("bf16", {"hidden_size": 1024, "head_dim": 128}, same, "embed_tokens.weight"),
    ("bf16", {"num_key_value_heads": 4}, same, "k_proj.weight"),
    ("bf16", {"num_attention_heads": 8}, same, "q_proj.weight"),
    ("bf16", {"intermediate_size": 512}, same, "down_proj.weight"),
    ("bf16", {"vocab_size": 128}, same, "embed_tokens.weight"),
    ("bf16", {"num_hidden_layers": 2}, same, "layers.1"),
    ("bf16", {}, without("q_proj.weight"), "q_proj"),
    ("bf16", {}, without("up_proj.weight"), "mlp.gate_proj and mlp.up_proj"),
    ("bf16", {}, without("lm_head.weight"), "lm_head.weight"),
    ("bf16", {}, without("embed_tokens.weight"), "embed_tokens"),
    ("bf16", {}, without("input_layernorm.weight"), "norm"),
    ("bf16", {}, without("model.norm.weight"), "model.norm"),
    ("bf16", {}, with_bias, "q_proj.bias"),
    ("bf16", {"attention_bias": True}, same, "q_proj.bias"),
    ("fp8", {"num_key_value_heads": 4}, same, "k_proj.weight"),
    ("nvfp4", {"num_key_value_heads": 4}, same, "k_proj.weight"),
    ("fp8-static", {}, without("input_scale"), "weight"),
    ("modelopt", {}, without("input_scale"), "weight"),
    ("fp8-block", {}, other_grid, "up_proj.weight_scale_inv"),
    ("moe-bf16", {"num_experts": 8}, same, "experts"),
    ("moe-bf16", {"moe_intermediate_size": 128}, same, "experts"),
    ("moe-bf16", {}, without("experts.3.down_proj.weight"), "down_proj"),
    ("moe-bf16", {}, without("mlp.gate.weight"), "mlp.gate"),
    ("moe-bf16", {}, without("q_norm.weight"), "norm"),
    ("gpt-oss", {"intermediate_size": 128}, same, "experts.down_proj_blocks"),
    ("gpt-oss", {}, without("sinks"), "norm"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "changed", "broken", "named"),
    [pytest.param(*one, marks=[pytest.mark.slow] if at % 2 else []) for at, one in enumerate(BROKEN)],
)
def test_a_broken_checkpoint_will_not_run_and_the_tensor_is_named(
    catalog: Catalog, tmp_path: Path, model: str, changed: dict[str, Any], broken: Callable[[Tensors], Tensors], named: str
) -> None:  # fmt: skip
    config, tensors, quantisation = tiny.MODELS[model]
    verdict, findings = told(catalog, write(tmp_path / "model", broken(tensors()), {**config, **changed}, quantisation))
    assert verdict == "will not run"
    assert any(named in one.where.name for one in findings), findings
    assert all(one.severity == "error" and one.remedy and one.evidence for one in findings)


def test_channel_scales_where_the_config_says_tensor(catalog: Catalog, tmp_path: Path) -> None:
    cases: list[tuple[tiny.Stored, dict[str, Any]]] = [
        (tiny.by_channel, samples.FP8), (tiny.by_channel, COMPRESSED_BY_TENSOR), (tiny.by_tensor, samples.COMPRESSED),
    ]  # fmt: skip
    for number, (stored, quantisation) in enumerate(cases):
        verdict, findings = told(catalog, write(tmp_path / str(number), tiny.dense(stored), tiny.LLAMA, quantisation))
        assert verdict == "will not run"
        assert any("weight_scale" in one.where.name for one in findings)


def fused(tensors: Tensors) -> Tensors:
    """As Phi-3 writes them: one tensor for what goes into one product."""
    made = dict(tensors)
    for whole, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
        home = whole.partition(".")[0]
        names = [f"{LAYER}.{home}.{part}_proj.weight" for part in parts]
        made[f"{LAYER}.{whole}.weight"] = np.concatenate([made.pop(name) for name in names])
    return made


def beside(tensors: Tensors) -> Tensors:
    """Buffers, layers that draft, and a tower: nothing of it is the language model's."""
    return {
        **tensors,
        f"{LAYER}.self_attn.rotary_emb.inv_freq": samples.floats((64,)),
        "model.layers.1.eh_proj.weight": samples.bf16((tiny.HIDDEN, 2 * tiny.HIDDEN)),
        "model.layers.1.embed_tokens.weight": samples.bf16((tiny.VOCAB, tiny.HIDDEN)),
        "mtp.layers.0.self_attn.q_proj.weight": samples.bf16((8, 8)),
        "visual.blocks.0.attn.qkv.weight": samples.bf16((48, 16)),
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": samples.bf16((48, 16)),
        "visual.head.weight": samples.bf16((48, 16)),
    }


def renamed(tensors: Tensors) -> Tensors:
    """As a language model inside of a multimodal one."""
    return {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}


def stacked(tensors: Tensors) -> Tensors:
    made = {name: array for name, array in tensors.items() if ".experts." not in name}
    ups = [
        np.concatenate([tensors[f"{LAYER}.mlp.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(4)
    ]
    downs = [tensors[f"{LAYER}.mlp.experts.{e}.down_proj.weight"] for e in range(4)]
    return {
        **made,
        f"{LAYER}.mlp.experts.gate_up_proj": np.stack(ups),
        f"{LAYER}.mlp.experts.down_proj": np.stack(downs),
    }


@pytest.mark.parametrize(
    ("model", "changed", "same_model"),
    [
        *((name, {}, same) for name in tiny.MODELS),
        ("bf16", {}, fused),
        ("bf16", {}, beside),
        ("bf16", {}, renamed),
        ("bf16", {"tie_word_embeddings": True}, without("lm_head.weight")),
        # Some keep the head although it is the embedding.
        ("bf16", {"tie_word_embeddings": True}, same),
        ("moe-bf16", {}, stacked),
        ("gpt-oss", {"tie_word_embeddings": True}, without("lm_head.weight")),
    ],
)
def test_a_whole_checkpoint_is_never_called_broken(
    catalog: Catalog, tmp_path: Path, model: str, changed: dict[str, Any], same_model: Callable[[Tensors], Tensors]
) -> None:
    config, tensors, quantisation = tiny.MODELS[model]
    folder = write(tmp_path, same_model(tensors()), {**config, **changed}, quantisation)
    assert told(catalog, folder)[1] == []


def packed(method: str) -> Callable[[str, tuple[int, int]], Tensors]:
    """4 bits, eight to a word: along the inputs (GPTQ) or the outputs (AWQ); as GPTQ does, with biases of zeros."""

    def stored(name: str, shape: tuple[int, int]) -> Tensors:
        rows, cols = shape
        words = (cols // 8, rows) if method == "gptq" else (cols, rows // 8)
        return {
            f"{name}.qweight": np.ones(words, np.int32), f"{name}.scales": samples.floats((cols // 128, rows)),
            f"{name}.qzeros": np.ones((cols // 128, rows // 8), np.int32), f"{name}.bias": samples.bf16((rows,)),
            f"{name}.g_idx": np.ones((cols,), np.int32),
        }  # fmt: skip

    return stored


def nf4(name: str, shape: tuple[int, int]) -> Tensors:
    rows, cols = shape
    return {
        f"{name}.weight": samples.exponents((rows * cols // 2, 1)),
        f"{name}.weight.absmax": samples.floats((rows * cols // 64,)),
        f"{name}.weight.quant_map": samples.floats((16,)),
        f"{name}.weight.quant_state.bitsandbytes__nf4": samples.exponents((80,)),
    }


INTEGERS: dict[str, tuple[Callable[[str, tuple[int, int]], Tensors], dict[str, Any]]] = {
    "gptq": (packed("gptq"), {"quant_method": "gptq", "bits": 4, "group_size": 128}),
    "awq": (packed("awq"), {"quant_method": "awq", "bits": 4, "group_size": 128}),
    "bitsandbytes": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


def test_what_a_quantiser_nobody_read_writes_is_not_called_broken(catalog: Catalog, tmp_path: Path) -> None:
    def odd(name: str, shape: tuple[int, int]) -> Tensors:
        return {f"{name}.W_q": samples.exponents((shape[0] * shape[1] // 2,)), f"{name}.meta": samples.floats((3,))}

    sparse = {**samples.COMPRESSED, "format": "sparse-24-bitmask"}
    said: list[dict[str, Any]] = [{"quant_method": "hqq"}, sparse]
    for number, quantisation in enumerate(said):
        tensors = {**tiny.dense(odd), **tiny.by_channel(f"{LAYER}.self_attn.q_proj", (512, 512))}
        verdict, findings = told(catalog, write(tmp_path / str(number), tensors, tiny.LLAMA, quantisation))
        # The first is none of vLLM's, which is said elsewhere.
        wanted = ("not known", ["unknown"]) if number else ("will not run", [])
        assert (verdict, [one.severity for one in findings]) == wanted


def test_bounds_of_activations_are_no_tensors_too_many(catalog: Catalog, tmp_path: Path) -> None:
    """As Llama-3.1-405B-FP8 has them."""
    bounds = {f"{name}.input_scale_ub": samples.floats((1,)) for name in tiny.MATRICES}
    folder = write(tmp_path, {**tiny.dense(tiny.by_channel), **bounds}, tiny.LLAMA, samples.FBGEMM)
    assert told(catalog, folder)[1] == []


@pytest.mark.parametrize("method", INTEGERS)
def test_packed_weights_are_held_against_the_config_too(catalog: Catalog, tmp_path: Path, method: str) -> None:
    stored, quantisation = INTEGERS[method]
    assert told(catalog, write(tmp_path / "whole", tiny.dense(stored), tiny.LLAMA, quantisation))[1] == []
    other = {**tiny.LLAMA, "num_key_value_heads": 4}
    verdict, findings = told(catalog, write(tmp_path / "other", tiny.dense(stored), other, quantisation))
    assert verdict == "will not run"
    assert any("k_proj" in one.where.name for one in findings)


DBRX: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 1,
    "vocab_size": 64, "max_seq_len": 64, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


def dbrx() -> Tensors:
    """As databricks/dbrx-instruct names them: experts one under the other."""
    block = "transformer.blocks.0"
    shapes = {
        "transformer.wte.weight": (64, 64), "transformer.norm_f.weight": (64,), "lm_head.weight": (64, 64),
        f"{block}.norm_attn_norm.attn.Wqkv.weight": (128, 64), f"{block}.norm_attn_norm.attn.out_proj.weight": (64, 64),
        f"{block}.norm_attn_norm.norm_1.weight": (64,), f"{block}.norm_attn_norm.norm_2.weight": (64,),
        f"{block}.ffn.router.layer.weight": (4, 64),
        **{f"{block}.ffn.experts.mlp.{name}": (4 * 32, 64) for name in ("w1", "v1", "w2")},
    }  # fmt: skip
    return {name: samples.bf16(shape) for name, shape in shapes.items()}


def test_families_that_transformers_cannot_build(catalog: Catalog, tmp_path: Path) -> None:
    assert told(catalog, write(tmp_path / "dbrx", dbrx(), DBRX))[1] == []
    other = {**DBRX, "ffn_config": {**DBRX["ffn_config"], "moe_num_experts": 8}}
    assert any("experts" in one.where.name for one in told(catalog, write(tmp_path / "other", dbrx(), other))[1])


def test_names_that_are_not_known_are_not_checked_and_not_ready(catalog: Catalog, tmp_path: Path) -> None:
    """Of a family that nobody counted, what differs is not known; what agrees is as good as any."""
    novel = {**tiny.LLAMA, "model_type": "novel"}
    assert told(catalog, write(tmp_path / "alike", tiny.dense(tiny.plain), novel)) == ("ready", [])
    odd = {name.replace("q_proj", "query_maker"): array for name, array in tiny.dense(tiny.plain).items()}
    verdict, (finding,) = told(catalog, write(tmp_path / "odd", odd, novel))
    assert (verdict, finding.severity) == ("not known", "unknown")
    assert "not checked" in finding.what


def test_layers_beyond_those_of_the_config(catalog: Catalog, tmp_path: Path) -> None:
    more = {**tiny.dense(tiny.plain), "model.layers.1.self_attn.q_proj.weight": samples.bf16((512, 512))}
    verdict, found = told(catalog, write(tmp_path, more, tiny.LLAMA))
    assert verdict == "will not run"
    assert "expected 1 layers, found tensors of layer 1" in found[0].what
    drafting = {**tiny.LLAMA, "num_nextn_predict_layers": 1}
    assert not [one for one in told(catalog, write(tmp_path, more, drafting))[1] if "layers, found" in one.what]


def test_modules_that_the_quantisation_config_leaves_alone(catalog: Catalog, tmp_path: Path) -> None:
    up = f"{LAYER}.mlp.up_proj"
    fp8 = tiny.dense(tiny.by_block)
    mixed = {name: array for name, array in fp8.items() if not name.startswith(up)} | tiny.plain(up, (1024, 512))
    kept = {**samples.BLOCK_FP8, "modules_to_not_convert": [up]}
    for tensors, said, verdict in (
        (fp8, samples.BLOCK_FP8, "ready"),
        (mixed, kept, "ready"),
        (fp8, kept, "will not run"),
        (mixed, samples.BLOCK_FP8, "will not run"),
    ):
        assert told(catalog, write(tmp_path, tensors, tiny.LLAMA, said))[0] == verdict


def test_a_block_size_that_is_none(catalog: Catalog, tmp_path: Path) -> None:
    odd = {**samples.BLOCK_FP8, "weight_block_size": "128"}
    assert told(catalog, write(tmp_path, tiny.dense(tiny.by_block), tiny.LLAMA, odd))[0] == "not known"


def test_deepseek_v4_whose_experts_are_nvfp4(catalog: Catalog, tmp_path: Path) -> None:
    """ModelOpt keeps quant_method fp8 and expert_dtype fp4, and names NVFP4 beside them."""
    raw = dict(read_stored(catalog, "deepseek-v4-flash").config.outer)
    for algorithm, scheme in ((None, "mxfp4"), ("NVFP4", "nvfp4")):
        quantisation = {**raw["quantization_config"], "moe_quant_algo": algorithm}
        (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": quantisation}))
        assert read_stored(catalog, str(tmp_path)).experts[0].scheme == scheme
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "quantization_config": {**quantisation, "moe_quant_algo": "X"}})
    )
    assert read_stored(catalog, str(tmp_path)).unread is not None
