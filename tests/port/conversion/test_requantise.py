"""FP8 and MXFP4 weights under other scales: the same values in float64, or a refusal, or the error as it is.

Everything is dequantised here once more, by ml_dtypes and numpy's `repeat`, without the tables of the conversion.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import codes, dressed, floats, write_model

from crosstie.cli.main import crosstie
from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.formats import MARK, read_scheme
from crosstie.port.checkpoint.fp8 import Dialect, encode
from crosstie.port.checkpoint.index import INDEX, Checkpoint, open_checkpoint
from crosstie_port.checkpoint import matrix as matrices
from crosstie_port.checkpoint.convert import ConversionReport, convert
from crosstie_port.checkpoint.output import OutputFolder
from crosstie_port.checkpoint.requantisation import Granularity

Values = NDArray[np.float64]
UP = "model.layers.0.mlp.up_proj"
GATE = "model.layers.0.mlp.gate_proj"
QUARK_MXFP4 = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
    },
}
V4 = {**samples.BLOCK_FP8, "scale_fmt": "ue8m0"}
_STORED: dict[str, Any] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "BF16": ml_dtypes.bfloat16,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": ml_dtypes.float8_e8m0fnu, "F16": np.float16, "F32": np.float32,
}  # fmt: skip


def stored(checkpoint: Checkpoint, name: str) -> Values:
    info = checkpoint[name]
    found: NDArray[Any] = np.frombuffer(checkpoint.read(name), _STORED[info.dtype])
    return found.astype(np.float64).reshape(info.shape)


def fp4(checkpoint: Checkpoint, name: str) -> Values:
    """The lower half of each byte first."""
    packed = np.frombuffer(checkpoint.read(name), np.uint8)
    halves = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(-1)
    found: Values = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return found.reshape(checkpoint[name].shape[0], -1)


def times(raw: Values, scales: Values, block: tuple[int, int]) -> Values:
    grid = scales.reshape(-(-raw.shape[0] // block[0]), -(-raw.shape[1] // block[1]))
    spread = np.repeat(np.repeat(grid, block[0], axis=0), block[1], axis=1)
    return raw * spread[: raw.shape[0], : raw.shape[1]]


def after(folder: Path, module: str, block: tuple[int, int], scale: str = "weight_scale") -> Values:
    made = open_checkpoint(folder)
    raw = stored(made, f"{module}.weight")
    assert np.isfinite(raw).all()
    return times(raw, stored(made, f"{module}.{scale}"), block)


def mxfp4(shape: tuple[int, int], lowest: int = 118, highest: int = 127, seed: int = 0) -> samples.Tensors:
    """A weight with scales of so many powers of two."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(lowest, highest, size=(shape[0], shape[1] // 32), endpoint=True).astype(np.uint8)
    packed = rng.integers(0, 256, size=(shape[0], shape[1] // 2)).astype(np.uint8)
    return {f"{UP}.weight": packed, f"{UP}.weight_scale": scales}


def block_fp8(scales: Any, dialect: str = "e4m3fn") -> samples.Tensors:
    """200 rows and 256 columns: the second row of blocks is short."""
    grid = np.asarray(scales, np.float32).reshape(2, 2)
    return dressed({f"{UP}.weight": codes((200, 256), 3, dialect), f"{UP}.weight_scale_inv": grid})


def blocks_of(to: Granularity, shape: tuple[int, int]) -> tuple[int, int]:
    return {"fp8-tensor": shape, "fp8-channel": (1, shape[1]), "fp8-block": (128, 128)}[to]


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
def test_the_nearest_code_is_that_of_ml_dtypes(dialect: Dialect) -> None:
    like = getattr(ml_dtypes, f"float8_{dialect}")
    table = np.arange(256, dtype=np.uint8).view(like).astype(np.float64)
    finite = np.unique(table[np.isfinite(table)])
    middles = (finite[1:] + finite[:-1]) / 2
    drawn = np.random.default_rng(0).uniform(finite[0], finite[-1], 20_000)
    # In float32, which ml_dtypes rounds to first.
    near = [np.nextafter(middles.astype(np.float32), np.float32(to)).astype(np.float64) for to in (9e9, -9e9)]
    some = np.concatenate([finite, middles, *near, drawn, drawn / 1e3])
    np.testing.assert_array_equal(
        encode(some, dialect).view(like).astype(np.float64), some.astype(like).astype(np.float64)
    )
    assert not np.isnan(encode(np.array([-0.0, -1e-9]), dialect).view(like).astype(np.float64)).any()
    np.testing.assert_array_equal(
        encode(np.array([1e9, -1e9]), dialect).view(like).astype(np.float64), [finite[-1], finite[0]]
    )


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("to", ["fp8-block", "fp8-channel"])
def test_one_scale_repeats_and_the_bytes_stay(tmp_path: Path, to: Granularity, dialect: Dialect) -> None:
    body = dressed({f"{UP}.weight": codes((200, 256), 1, dialect), f"{UP}.weight_scale": floats((), 2)})
    source = write_model(tmp_path / "model", body, samples.FP8)
    found = convert(source, tmp_path / "out", to)
    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert new.read(f"{UP}.weight") == old.read(f"{UP}.weight")
    assert new[f"{UP}.weight"].dtype == old[f"{UP}.weight"].dtype
    name = "weight_scale_inv" if to == "fp8-block" else "weight_scale"
    assert new[f"{UP}.{name}"].shape == {"fp8-block": (2, 2), "fp8-channel": (200, 1)}[to]
    want = times(stored(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale"), (200, 256))
    np.testing.assert_array_equal(after(tmp_path / "out", UP, blocks_of(to, (200, 256)), name), want)
    assert (found.to, found.new_scheme) == (dialect, to)
    assert found.converted is not None
    assert found.converted.costs == {}
    for tensor in ("model.embed_tokens.weight", "model.norm.weight"):
        assert new.read(tensor) == old.read(tensor)


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
def test_blocks_with_the_same_scale_become_one_tensor(tmp_path: Path, dialect: Dialect) -> None:
    source = write_model(tmp_path / "model", block_fp8([0.3] * 4, dialect), samples.BLOCK_FP8)
    convert(source, tmp_path / "out", "fp8-tensor")
    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert new.read(f"{UP}.weight") == old.read(f"{UP}.weight")
    np.testing.assert_array_equal(stored(new, f"{UP}.weight_scale"), np.array([0.3], np.float32))
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "weight_block_size" not in said
    assert (said["quant_method"], said["activation_scheme"]) == ("fp8", "dynamic")
    # And back.
    convert(tmp_path / "out", tmp_path / "back", "fp8-block")
    back = open_checkpoint(tmp_path / "back")
    assert {name: back.read(name) for name in back.tensors} == {name: old.read(name) for name in old.tensors}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"] == samples.BLOCK_FP8


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
def test_powers_of_two_are_exact_while_no_code_falls_out(tmp_path: Path, dialect: Dialect) -> None:
    body = block_fp8([0.75, 0.375, 1.5, 0.1875], dialect)
    # No more than 15 in steps of 1/8 (half of that in e4m3fnuz): eight times less is still there.
    body[f"{UP}.weight"] = np.round(np.random.default_rng(0).uniform(-15, 15, (200, 256))).astype(
        body[f"{UP}.weight"].dtype
    )
    source = write_model(tmp_path / "model", body, samples.BLOCK_FP8)
    found = convert(source, tmp_path / "out", "fp8-tensor")
    assert found.converted is not None
    assert found.converted.costs == {}
    old = open_checkpoint(source)
    want = times(stored(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale_inv"), (128, 128))
    np.testing.assert_array_equal(after(tmp_path / "out", UP, (200, 256)), want)


@pytest.mark.parametrize("dialect", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("scales", [[0.75, 0.375, 1.5, 0.1875], [0.3, 0.4, 0.5, 0.6]])
def test_what_is_not_exact_is_refused_and_with_the_flag_reported(
    tmp_path: Path, dialect: Dialect, scales: list[float]
) -> None:
    source = write_model(tmp_path / "model", block_fp8(scales, dialect), samples.BLOCK_FP8)
    with pytest.raises(BadData, match=r"up_proj.weight: not exact as fp8-tensor: .* values change.*RMS.*--inexact"):
        convert(source, tmp_path / "out", "fp8-tensor")
    assert not (tmp_path / "out").exists()
    found = convert(source, tmp_path / "out", "fp8-tensor", inexact=True)
    old = open_checkpoint(source)
    want = times(stored(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale_inv"), (128, 128))
    got = after(tmp_path / "out", UP, (200, 256))
    assert found.converted is not None
    (cost,) = found.converted.costs.values()
    there = want != 0
    wrong = np.abs(got - want)
    assert (got[~there] == 0).all()
    assert cost.changed == np.count_nonzero(wrong)
    assert cost.max_relative == pytest.approx((wrong[there] / np.abs(want[there])).max())
    assert cost.rms_relative == pytest.approx(np.sqrt((wrong**2).sum() / (want**2).sum()))
    # Three bits behind the point: half of the last one is at most a sixteenth.
    assert 0 < cost.rms_relative < 1 / 16
    # A second run of the same reports the same.
    again = convert(source, tmp_path / "out", "fp8-tensor", inexact=True)
    assert again.converted is not None
    assert again.converted.codes is None
    assert again.converted.costs == found.converted.costs


@pytest.mark.parametrize("to", ["fp8-block", "fp8-channel", "fp8-tensor"])
def test_mxfp4_becomes_fp8_exactly_within_fourteen_powers_of_two(tmp_path: Path, to: Granularity) -> None:
    body = dressed(mxfp4((200, 256), 113, 127))
    source = write_model(tmp_path / "model", body, QUARK_MXFP4)
    found = convert(source, tmp_path / "out", to)
    assert found.converted is not None
    assert found.converted.costs == {}
    old = open_checkpoint(source)
    want = times(fp4(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale"), (1, 32))
    np.testing.assert_array_equal(after(tmp_path / "out", UP, blocks_of(to, (200, 256))), want)
    scheme = read_scheme(open_checkpoint(tmp_path / "out"))
    assert (scheme.method, scheme.scheme, scheme.dialect, scheme.problems) == ("compressed-tensors", to, "e4m3fn", ())
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = said["config_groups"].values()
    assert group["weights"]["strategy"] == to.removeprefix("fp8-")
    assert group["input_activations"]["dynamic"] is True
    assert said["ignore"] == []


def test_mxfp4_with_scales_further_apart_costs_its_smallest_values(tmp_path: Path) -> None:
    body = dressed(mxfp4((128, 256), 100, 127))
    source = write_model(tmp_path / "model", body, QUARK_MXFP4)
    with pytest.raises(BadData, match="not exact as fp8-block"):
        convert(source, tmp_path / "out", "fp8-block")
    found = convert(source, tmp_path / "out", "fp8-block", inexact=True)
    old = open_checkpoint(source)
    want = times(fp4(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale"), (1, 32))
    got = after(tmp_path / "out", UP, (128, 128))
    assert found.converted is not None
    cost = found.converted.costs[f"{UP}.weight"]
    assert cost.max_relative == 1.0
    assert cost.rms_relative == pytest.approx(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))
    assert cost.rms_relative < 1e-3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(
    rows=st.integers(2, 9),
    groups=st.integers(1, 5),
    spread=st.integers(0, 20),
    seed=st.integers(0, 99),
    to=st.sampled_from(["fp8-tensor", "fp8-channel", "fp8-block"]),
)
def test_any_mxfp4_keeps_its_values_or_the_error_is_as_reported(
    tmp_path_factory: pytest.TempPathFactory, rows: int, groups: int, spread: int, seed: int, to: Granularity
) -> None:
    folder = tmp_path_factory.mktemp("any")
    shape = (rows, 32 * groups)
    source = write_model(folder / "model", dressed(mxfp4(shape, 120 - spread, 120, seed)), QUARK_MXFP4)
    found = convert(source, folder / "out", to, inexact=True)
    old = open_checkpoint(source)
    want = times(fp4(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale"), (1, 32))
    got = after(folder / "out", UP, blocks_of(to, shape))
    assert found.converted is not None
    changed = sum(cost.changed for cost in found.converted.costs.values())
    assert changed == np.count_nonzero(got != want)
    if spread <= 14:
        assert changed == 0


def test_deepseek_v4_has_fp8_experts_beside_its_fp8(tmp_path: Path) -> None:
    body = samples.deepseek_v4()
    expert = "layers.0.ffn.experts.0.w1"
    body[f"{expert}.scale"] = np.full((64, 4), 120, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    source = write_model(tmp_path / "model", body, V4)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "expert_dtype": "fp4"}))
    convert(source, tmp_path / "out", "fp8-block")
    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    want = times(fp4(old, f"{expert}.weight"), stored(old, f"{expert}.scale"), (1, 32))
    np.testing.assert_array_equal(after(tmp_path / "out", expert, (128, 128), "scale"), want)
    # What was by block already keeps its bytes; its scales are what they were, as floats.
    assert new.read("layers.0.attn.wq_a.weight") == old.read("layers.0.attn.wq_a.weight")
    np.testing.assert_array_equal(stored(new, "layers.0.attn.wq_a.scale"), stored(old, "layers.0.attn.wq_a.scale"))
    assert {new["layers.0.attn.wq_a.scale"].dtype, new[f"{expert}.scale"].dtype} == {"F32"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["expert_dtype"], config["quantization_config"]) == ("fp8", V4)
    with pytest.raises(BadInput, match="by block alone"):
        convert(source, tmp_path / "other", "fp8-channel")


def test_packed_weights_of_compressed_tensors_get_the_usual_name(tmp_path: Path) -> None:
    made = mxfp4((64, 64))
    body = dressed({f"{UP}.weight_packed": made[f"{UP}.weight"], f"{UP}.weight_scale": made[f"{UP}.weight_scale"]})
    quantisation = {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}},
    }  # fmt: skip
    source = write_model(tmp_path / "model", body, quantisation)
    convert(source, tmp_path / "out", "fp8-channel")
    old = open_checkpoint(source)
    want = times(fp4(old, f"{UP}.weight_packed"), stored(old, f"{UP}.weight_scale"), (1, 32))
    np.testing.assert_array_equal(after(tmp_path / "out", UP, (1, 64)), want)


def test_static_scales_of_inputs_stay_by_tensor_alone(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    inputs = "model.layers.0.self_attn.k_proj.input_scale"
    found = convert(source, tmp_path / "channel", "fp8-channel")
    said = json.loads((tmp_path / "channel" / "config.json").read_text())["quantization_config"]
    activations = said["config_groups"]["group_0"]["input_activations"]
    assert (activations["strategy"], activations["dynamic"]) == ("token", True)
    assert said["kv_cache_scheme"]["num_bits"] == 8
    assert list(found.kept) == [inputs]
    assert not (tmp_path / "channel" / "hf_quant_config.json").exists()
    found = convert(source, tmp_path / "block", "fp8-block")
    assert list(found.kept) == [inputs]
    assert inputs not in open_checkpoint(tmp_path / "block").tensors
    said = json.loads((tmp_path / "block" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["weights"]["block_structure"] == [128, 128]
    # By channel with static inputs, which some have, to one scale: the inputs stay.
    module = inputs.removesuffix(".input_scale")
    body = {**samples.modelopt_fp8(), f"{module}.weight_scale": np.full((64, 1), 0.5, np.float32)}
    tensor = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**tensor, "strategy": "channel"}, "input_activations": tensor}
    mixed = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    source = write_model(tmp_path / "static", body, {**mixed, "kv_cache_scheme": tensor})
    convert(source, tmp_path / "tensor", "fp8-tensor")
    said = json.loads((tmp_path / "tensor" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    assert open_checkpoint(tmp_path / "tensor").read(inputs) == open_checkpoint(source).read(inputs)


def test_a_converted_dialect_stays_marked(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    convert(source, tmp_path / "fnuz", "e4m3fnuz")
    convert(tmp_path / "fnuz", tmp_path / "out", "fp8-channel")
    scheme = read_scheme(open_checkpoint(tmp_path / "out"))
    assert (scheme.dialect, scheme.converted, scheme.quantisation[MARK]) == ("e4m3fnuz", True, "e4m3fnuz")
    old = open_checkpoint(source)
    name = "model.layers.0.self_attn.k_proj"
    want = times(stored(old, f"{name}.weight"), stored(old, f"{name}.weight_scale"), (64, 128))
    np.testing.assert_array_equal(after(tmp_path / "out", name, (1, 128)), want)


def test_scales_in_another_shard_move_to_their_weight_and_the_index_knows(tmp_path: Path) -> None:
    body = block_fp8([0.3] * 4)
    source = write_model(tmp_path / "model", body, samples.BLOCK_FP8, shards=len(body))
    convert(source, tmp_path / "out", "fp8-tensor")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    made = open_checkpoint(tmp_path / "out")
    assert index["weight_map"][f"{UP}.weight"] == index["weight_map"][f"{UP}.weight_scale"]
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in made.tensors.values())


@pytest.mark.slow
def test_torch_and_safetensors_read_what_is_written(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    # 3 x 32 bytes of codes: scales behind them would lie across their length if they were written as they come.
    body = {**dressed(mxfp4((3, 32))), "model.odd": np.ones(3, np.uint8)}
    source = write_model(tmp_path / "model", body, QUARK_MXFP4, shards=1)
    convert(source, tmp_path / "out", "fp8-channel")
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read[f"{UP}.weight"].dtype == torch.float8_e4m3fn
    got = read[f"{UP}.weight"].double() * read[f"{UP}.weight_scale"].double()
    old = open_checkpoint(source)
    want = times(fp4(old, f"{UP}.weight"), stored(old, f"{UP}.weight_scale"), (1, 32))
    np.testing.assert_array_equal(got.numpy(), want)


def test_cells_of_several_slabs_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", block_fp8([0.3, 0.4, 0.5, 0.6]), samples.BLOCK_FP8)
    whole = convert(source, tmp_path / "whole", "fp8-tensor", inexact=True)
    monkeypatch.setattr(matrices, "_SLAB", 7 * 256)
    monkeypatch.setattr(matrices, "_RATIOS", 2)
    parts = convert(source, tmp_path / "parts", "fp8-tensor", inexact=True)
    assert open_checkpoint(tmp_path / "whole").read(f"{UP}.weight") == open_checkpoint(tmp_path / "parts").read(
        f"{UP}.weight"
    )
    assert whole.converted is not None
    assert parts.converted is not None
    one, other = whole.converted.costs[f"{UP}.weight"], parts.converted.costs[f"{UP}.weight"]
    assert (one.changed, one.max_relative) == (other.changed, other.max_relative)
    assert one.rms_relative == pytest.approx(other.rms_relative)


def damaged(change: Any) -> samples.Tensors:
    body = block_fp8([0.3] * 4)
    change(body)
    return body


def nan(body: samples.Tensors) -> None:
    body[f"{UP}.weight"].view(np.uint8)[3, 4] = 0x7F


def scale(value: float) -> Any:
    def change(body: samples.Tensors) -> None:
        body[f"{UP}.weight_scale_inv"][1, 0] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nan, "up_proj.weight: 1 weights are NaN"),
        (scale(0), "weight_scale_inv: 1 scales are not positive"),
        (scale(-1), "weight_scale_inv: 1 scales are not positive"),
        (scale(np.inf), "weight_scale_inv: 1 scales are not finite"),
        (lambda body: body.pop(f"{UP}.weight_scale_inv"), "without a scale"),
        (lambda body: body.update({f"{UP}.weight_scale_inv": floats((4, 3))}), "a grid of"),
    ],
)
def test_corrupt_fp8_is_refused_and_nothing_is_left(tmp_path: Path, change: Any, said: str) -> None:
    source = write_model(tmp_path / "model", damaged(change), samples.BLOCK_FP8)
    with pytest.raises(BadData, match=said):
        convert(source, tmp_path / "out", "fp8-tensor", inexact=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        (np.full((64, 2), 255, np.uint8), "weight_scale: 128 scales are not finite"),
        (np.full((64, 3), 120, np.uint8), r"scales of shape \[64, 3\]: which part of \[64, 64\]"),
    ],
)
def test_corrupt_mxfp4_is_refused(tmp_path: Path, scales: Any, said: str) -> None:
    body = dressed({**mxfp4((64, 64)), f"{UP}.weight_scale": scales})
    with pytest.raises(BadData, match=said):
        convert(write_model(tmp_path / "model", body, QUARK_MXFP4), tmp_path / "out", "fp8-block")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "quantisation", "said"),
    [
        (samples.gpt_oss, {"quant_method": "mxfp4"}, "no loader was found that reads stacked experts"),
        (samples.modelopt_mixed, {**samples.MODELOPT, "quant_algo": "MIXED_PRECISION"}, "nvfp4: only FP8 and MXFP4"),
        (samples.deepseek_block, samples.BLOCK_FP8, "its weights are fp8-block already"),
    ],
)
def test_what_does_not_become_fp8_by_block(tmp_path: Path, make: Any, quantisation: Any, said: str) -> None:
    with pytest.raises((BadData, BadInput), match=said):
        convert(write_model(tmp_path / "model", make(), quantisation), tmp_path / "out", "fp8-block")
    assert not (tmp_path / "out").exists()


def test_a_fused_matrix_with_a_scale_for_each_part_is_not_guessed_at(tmp_path: Path) -> None:
    fused = "model.layers.0.self_attn.qkv_proj"
    body = dressed({f"{fused}.weight": codes((96, 64)), f"{fused}.weight_scale": floats((3,))})
    source = write_model(tmp_path / "model", body, samples.FP8)
    with pytest.raises(BadData, match="which part of"):
        convert(source, tmp_path / "out", "fp8-block")


def test_interrupted_it_goes_on_and_remembers_what_it_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        **block_fp8([0.3, 0.4, 0.5, 0.6]),
        f"{GATE}.weight": codes((128, 128)),
        f"{GATE}.weight_scale_inv": floats((1, 1)),
    }
    source = write_model(tmp_path / "model", body, samples.BLOCK_FP8, shards=2)
    whole = convert(source, tmp_path / "whole", "fp8-tensor", inexact=True)

    def seal_once(output: OutputFolder, *rest: Any, real: Any = OutputFolder.seal) -> None:
        if output.has_finished:
            raise OSError(5, "Input/output error")
        real(output, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "seal", seal_once)
        with pytest.raises(BadInput, match="run it again"):
            convert(source, tmp_path / "out", "fp8-tensor", inexact=True)
    found = convert(source, tmp_path / "out", "fp8-tensor", inexact=True)
    assert found.converted is not None
    assert whole.converted is not None
    assert found.converted.resumed == 1
    assert found.converted.costs == whole.converted.costs


def test_bytes_that_did_not_reach_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def careless(descriptor: int, data: memoryview, offset: int, real: Any = os.pwrite) -> int:
        spoilt = bytearray(data)
        spoilt[len(spoilt) // 2] ^= 1
        count: int = real(descriptor, spoilt, offset)
        return count

    source = write_model(tmp_path / "model", block_fp8([0.3] * 4), samples.BLOCK_FP8)
    monkeypatch.setattr(os, "pwrite", careless)
    with pytest.raises(BadData, match="the bytes read back are not those that belong there"):
        convert(source, tmp_path / "out", "fp8-tensor")


def command(*arguments: object) -> Any:
    return CliRunner().invoke(crosstie, ["convert", *map(str, arguments)])


def test_the_command_says_what_it_costs(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", block_fp8([0.3, 0.4, 0.5, 0.6]), samples.BLOCK_FP8)
    refused = command(source, "-o", tmp_path / "out", "--to", "fp8-tensor")
    assert isinstance(refused.exception, BadData)
    dry = command(source, "-o", tmp_path / "out", "--to", "fp8-tensor", "--dry-run")
    assert "would be converted to fp8, fp8-tensor" in " ".join(dry.output.split())
    done = command(source, "-o", tmp_path / "out", "--to", "fp8-tensor", "--inexact")
    assert done.exit_code == 0
    said = " ".join(done.output.split())
    assert "1 of 1 weights are not exact, dequantised in float64; relative errors:" in said
    assert f"{UP}.weight: max 1, RMS 0.0" in said
    exact = command(tmp_path / "out", "-o", tmp_path / "back", "--to", "fp8-block")
    assert "exact: every weight, dequantised in float64, is what it was" in " ".join(exact.output.split())


def test_the_report_has_every_weight(tmp_path: Path) -> None:
    body = dressed({})
    for layer in range(12):
        name = f"model.layers.{layer}.mlp.up_proj"
        body |= {f"{name}.weight": codes((128, 256), layer), f"{name}.weight_scale_inv": floats((1, 2), layer)}
    source = write_model(tmp_path / "model", body, samples.BLOCK_FP8)
    answer = command(source, "-o", tmp_path / "out", "--to", "fp8-tensor", "--inexact")
    assert "and 2 with less; --json has them all" in " ".join(answer.output.split())
    said = json.loads(command(source, "-o", tmp_path / "out", "--to", "fp8-tensor", "--inexact", "--json").output)
    assert len(said["converted"]["costs"]) == 12
    assert {"changed", "max_relative", "rms_relative", "values"} == said["converted"]["costs"][f"{UP}.weight"].keys()
    assert isinstance(convert(source, tmp_path / "out", "fp8-tensor", inexact=True), ConversionReport)


@pytest.mark.parametrize(
    ("to", "option", "said"),
    [
        ("e4m3fnuz", "inexact", "inexact goes with fp8-tensor"),
        ("compressed-tensors", "inexact", "inexact goes with"),
        ("fp8-block", "keep_kv_scales", "keep_kv_scales goes with e4m3fn and e4m3fnuz, not with fp8-block"),
        ("compressed-tensors", "even_if_normalised", "even_if_normalised goes with"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(tmp_path: Path, to: Any, option: str, said: str) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    with pytest.raises(BadInput, match=said):
        convert(source, tmp_path / "out", to, **{option: True})  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
