"""What each format's tensors are taken for, and where a checkpoint contradicts itself or leaves a question open."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import CONVERTIBLE, Tensors, bf16, codes, dressed, exponents, floats, write_model

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.formats import MARK, Scheme, read_scheme
from crosstie.port.checkpoint.index import open_checkpoint
from crosstie.port.checkpoint.roles import is_kv_scale, scale_scheme

WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def scheme_of(folder: Path, tensors: Tensors, quantisation: Any) -> Scheme:
    return read_scheme(open_checkpoint(write_model(folder, tensors, quantisation)))


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_each_format_is_understood_whole(tmp_path: Path, name: str) -> None:
    make, quantisation, recoded, rescaled = CONVERTIBLE[name]
    found = scheme_of(tmp_path, make(), quantisation)
    assert found.problems == ()
    assert {weight.name for weight in found.fp8_weights} == recoded
    beside = {scale for weight in found.fp8_weights for scale in (*weight.scales, *weight.inputs)}
    assert beside | set(found.kv_scales) == rescaled
    assert (found.dialect, found.converted) == ("e4m3fn", False)


@pytest.mark.parametrize(
    ("name", "method", "linear", "moe"),
    [
        ("fp8", "fp8", ("fp8-tensor", "static", "float"), None),
        ("deepseek", "fp8", ("fp8-block", "dynamic", "float"), ("fp8-block", "dynamic", "float")),
        ("deepseek-v4", "fp8", ("fp8-block", "dynamic", "ue8m0"), ("mxfp4", "dynamic", "ue8m0")),
        ("compressed-tensors", "compressed-tensors", ("fp8-channel", "dynamic", "float"), None),
        ("modelopt", "modelopt", ("fp8-tensor", "static", "float"), None),
        ("modelopt-llama4", "modelopt", None, ("fp8-tensor", "static", "float")),
        ("modelopt-mxfp8", "modelopt", ("mxfp8", "dynamic", "ue8m0"), None),
        ("modelopt-block", "modelopt", ("fp8-block", "dynamic", "float"), None),
        ("quark", "quark", ("fp8-tensor", "static", "float"), None),
        ("fbgemm", "fbgemm_fp8", ("fp8-channel", "dynamic", "float"), None),
    ],
)
def test_the_words_for_each_format(tmp_path: Path, name: str, method: str, linear: Any, moe: Any) -> None:
    make, quantisation, _, _ = CONVERTIBLE[name]
    found = scheme_of(tmp_path, make(), quantisation)
    parts = {part: (each.scheme, each.activations, each.scales) for part, (each, *_) in found.parts.items()}
    assert found.method == method
    assert parts == {part: said for part, said in (("linear", linear), ("moe", moe)) if said is not None}


@pytest.mark.parametrize(
    ("tensors", "quantisation", "method", "scheme"),
    [
        (dressed({WEIGHT: bf16((4, 8))}), None, "none", "bf16"),
        (dressed({WEIGHT: np.ones((4, 8), np.float16)}), None, "none", "fp16"),
        (samples.modelopt_nvfp4(), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", "nvfp4"),
        (samples.gpt_oss(), {"quant_method": "mxfp4"}, "mxfp4", "mxfp4"),
        (
            dressed({WEIGHT: exponents((8, 16)), SCALE: exponents((8, 1))}),
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "quark", "mxfp4",
        ),
        (
            dressed({f"{WEIGHT}_packed": exponents((8, 16)), SCALE: codes((8, 2)), f"{WEIGHT}_global_scale": floats((1,))}),
            {"quant_method": "compressed-tensors"}, "compressed-tensors", "nvfp4",
        ),
        (dressed({"m.qweight": np.ones((8, 8), np.int32), "m.scales": floats((1, 8))}), {"quant_method": "awq", "bits": 4}, "awq", "int4"),
        (dressed({"m.qweight": np.ones((8, 8), np.int32), "m.scales": floats((1, 8))}), {"quant_method": "gptq", "bits": 8}, "gptq", "int8"),
        (dressed({WEIGHT: np.ones((8, 8), np.int8), SCALE: floats((8, 1))}), {"quant_method": "compressed-tensors"}, "compressed-tensors", "int8"),
        (dressed({WEIGHT: exponents((64, 1)), f"{WEIGHT}.absmax": floats((1,))}), {"quant_method": "bitsandbytes"}, "bitsandbytes", "bnb4"),
        (dressed({WEIGHT: bf16((4, 8))}), {"quant_method": "something"}, "other", "bf16"),
    ],
)  # fmt: skip
def test_formats_with_nothing_to_convert(
    tmp_path: Path, tensors: Tensors, quantisation: Any, method: str, scheme: str
) -> None:
    found = scheme_of(tmp_path, tensors, quantisation)
    assert (found.method, found.scheme, found.problems) == (method, scheme, ())
    assert list(found.fp8_weights) == []


@pytest.mark.parametrize(
    ("tensors", "quantisation", "key", "said"),
    [
        (dressed({WEIGHT: codes((8, 8))}), samples.FP8, WEIGHT, "F8_E4M3 without a scale"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(()), f"{SCALE}_inv": floats(())}), samples.FP8, WEIGHT, "several scales"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: np.ones((), np.int32)}), samples.FP8, WEIGHT, "is I32, which no format"),
        (dressed({WEIGHT: codes((256, 8)), SCALE: floats((200, 8))}), samples.FP8, WEIGHT, "of shape [200, 8] does not fit [256, 8]"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(()), f"{SCALE}_2": floats(())}), samples.FP8, f"{SCALE}_2", "a second scale"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(()), f"{WEIGHT}_zero_point": floats(())}), samples.FP8, f"{WEIGHT}_zero_point", "and not known"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(()), "model.layers.0.mlp.up_proj.output_scale": floats(())}), samples.FP8, "model.layers.0.mlp.up_proj.output_scale", "and not known"),
        (dressed({SCALE: codes((8, 8))}), samples.MODELOPT, SCALE, "named like a scale, without packed weights"),
        (dressed({WEIGHT: codes((8, 8)).view(ml_dtypes.float8_e5m2), SCALE: floats(())}), samples.FP8, WEIGHT, "F8_E5M2"),
        (dressed({WEIGHT: bf16((8, 8))}), samples.FP8, "quantization_config", "says fp8, but no tensor is quantised"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(())}), None, "quantization_config", "missing, but tensors are stored as fp8-tensor"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(())}), {**samples.MODELOPT, "quant_algo": "NVFP4"}, "quantization_config", "says modelopt NVFP4, but tensors are stored as fp8-tensor"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(())}), samples.BLOCK_FP8, "quantization_config.weight_block_size", "says blocks"),
        (dressed({WEIGHT: codes((8, 8), dialect="e4m3fnuz"), SCALE: floats(())}), {**samples.FP8, "fmt": "float8_e4m3fn"}, "quantization_config.fmt", "says e4m3fn, but the headers say e4m3fnuz"),
        (dressed({WEIGHT: codes((8, 8)), SCALE: floats(())}), {**samples.FP8, MARK: "e4m3fnuz"}, MARK, "marked as e4m3fnuz, but the headers say e4m3fn"),
        (dressed({WEIGHT: bf16((8, 8))}), {"quant_method": "awq", MARK: "e4m3fnuz"}, MARK, "the headers say nothing in E4M3"),
        (
            dressed({WEIGHT: codes((8, 8)), SCALE: floats(()), "a.weight": codes((8, 8), dialect="e4m3fnuz"), "a.weight_scale": floats(())}),
            samples.FP8, "quantization_config", "some weights are stored as F8_E4M3, others as F8_E4M3FNUZ",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_named(tmp_path: Path, tensors: Tensors, quantisation: Any, key: str, said: str) -> None:
    problems = scheme_of(tmp_path, tensors, quantisation).problems
    assert [problem.key for problem in problems] == [key]
    assert said in problems[0].reason


@pytest.mark.parametrize(
    ("weight", "scale", "exponents", "scheme"),
    [
        ((64, 128), (), False, "fp8-tensor"),
        ((64, 128), (1,), False, "fp8-tensor"),
        ((64, 128), (3,), False, "fp8-tensor"),
        ((8, 64, 128), (8,), False, "fp8-tensor"),
        ((8, 64, 128), (8, 2), False, "fp8-tensor"),
        ((8, 64, 128), (8, 1, 1), False, "fp8-tensor"),
        ((64, 128), (64,), False, "fp8-channel"),
        ((64, 128), (64, 1), False, "fp8-channel"),
        ((8, 64, 128), (8, 64, 1), False, "fp8-channel"),
        ((8, 128, 64), (8, 1, 64), False, "fp8-channel"),
        ((32, 3, 14, 14), (32, 1, 1, 1), False, "fp8-channel"),
        ((576, 7168), (5, 56), False, "fp8-block"),
        ((128, 16384), (1, 128), False, "fp8-block"),
        ((256, 7168, 2048), (256, 56, 16), False, "fp8-block"),
        ((256, 256), (2, 1, 2, 1), False, "fp8-block"),
        ((64, 256), (64, 2), False, "fp8-block"),
        ((576, 7168), (5, 56), True, "fp8-block"),
        ((64, 128), (64, 4), True, "mxfp8"),
        ((8, 64, 128), (8, 64, 4), True, "mxfp8"),
        ((64, 128), (63,), False, None),
        ((64, 128), (65, 1), False, None),
        ((64, 128), (0,), False, None),
        ((128,), (), False, None),
        ((8, 64, 128), (7, 1, 1), False, None),
    ],
)
def test_the_shape_of_a_scale_says_what_it_covers(
    weight: tuple[int, ...], scale: tuple[int, ...], exponents: bool, scheme: str | None
) -> None:
    assert scale_scheme(weight, scale, exponents=exponents) == scheme


def test_one_block_is_told_from_one_tensor_by_the_config(tmp_path: Path) -> None:
    tensors = dressed({WEIGHT: codes((128, 100)), f"{SCALE}_inv": floats((1, 1))})
    assert scheme_of(tmp_path / "block", tensors, samples.BLOCK_FP8).parts["linear"][0].scheme == "fp8-block"
    assert scheme_of(tmp_path / "tensor", tensors, samples.FP8).parts["linear"][0].scheme == "fp8-tensor"
    compressed = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 8, "block_structure": [128, 128]}}},
    }
    assert scheme_of(tmp_path / "compressed", tensors, compressed).parts["linear"][0].scheme == "fp8-block"


def test_which_names_are_scales_of_the_cache() -> None:
    yes = ["model.layers.0.self_attn.k_scale", "a.attn.v_scale", "a.self_attn.q_scale", "a.prob_scale", "a.kv_scale",
           "a.self_attn.k_proj.k_scale", "a.k_proj.output_scale", "a.self_attn.prob_output_scale",
           "a.self_attn.k_cache.scale", "a.self_attn.q.scale", "a.attention.k_fake_quantizer.qscale_act"]  # fmt: skip
    no = ["a.k_proj.weight_scale", "a.logit_scale", "a.mlp.output_scale", "a.task_scale", "layer_scale", "a.scale"]
    assert [name for name in yes + no if is_kv_scale(name)] == yes


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="quantization_config: must be an object"):
        scheme_of(tmp_path, samples.fp8_per_tensor(), None) and read_scheme_of_list(tmp_path)


def read_scheme_of_list(folder: Path) -> Scheme:
    (folder / "config.json").write_text('{"quantization_config": []}')
    return read_scheme(open_checkpoint(folder))


def test_modelopts_own_file_and_nested_configs_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, samples.modelopt_fp8(), None)
    (folder / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}'
    )
    found = read_scheme(open_checkpoint(folder))
    assert (found.method, found.kv_format, found.problems) == ("modelopt", "fp8", ())
    (folder / "hf_quant_config.json").unlink()
    (folder / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "quark"}}}')
    assert read_scheme(open_checkpoint(folder)).method == "quark"


@pytest.mark.parametrize(
    "name",
    [
        "kv_cache_scale",
        "key_scale",
        "q_bmm_scale",
        "attn.p_scale",
        "k_scales",
        "o_proj.output_scale",
        "k_cache_scale_inv",
    ],
)
def test_what_may_be_a_scale_of_the_cache_is_asked_about(tmp_path: Path, name: str) -> None:
    named = f"model.layers.0.self_attn.{name}"
    found = scheme_of(tmp_path, {**samples.modelopt_fp8(), named: floats(())}, samples.MODELOPT)
    assert [(problem.key, problem.reason) for problem in found.problems] == [
        (named, "like a scale of the KV cache, and not known")
    ]


def test_what_models_learn_is_no_scale_of_the_cache(tmp_path: Path) -> None:
    learnt = (
        "self_attn.per_dim_scale",
        "self_attn.q_norm.scale",
        "self_attn.logit_scale",
        "router.scale",
        "mlp.k_scales",
    )
    tensors = {**samples.modelopt_fp8(), **{f"model.layers.0.{name}": floats((4,)) for name in learnt}}
    assert scheme_of(tmp_path / "fp8", tensors, samples.MODELOPT).problems == ()
    # Without FP8 weights there is nothing that could be converted wrongly.
    plain = dressed({"model.layers.0.self_attn.key_scale": floats(())})
    assert scheme_of(tmp_path / "plain", plain, None).problems == ()


def test_static_activations_as_mistral_spells_them(tmp_path: Path) -> None:
    scale = SCALE + "_inv"
    tensors = dressed(
        {WEIGHT: codes((64, 128)), scale: floats(()), WEIGHT.replace("weight", "activation_scale"): floats(())}
    )
    found = scheme_of(tmp_path, tensors, {**samples.FP8, "activation_scheme": "static", "weight_block_size": None})
    assert found.problems == ()
    assert [weight.inputs for weight in found.fp8_weights] == [("model.layers.0.mlp.up_proj.activation_scale",)]


@pytest.mark.parametrize(("said", "meant"), [("FP8", "fp8"), ("fp8_e4m3", "fp8"), ("NVFP4", "nvfp4")])
def test_what_the_cache_is_said_to_be(tmp_path: Path, said: str, meant: str) -> None:
    found = scheme_of(tmp_path, samples.modelopt_fp8(), {**samples.MODELOPT, "kv_cache_quant_algo": said})
    assert found.kv_format == meant
