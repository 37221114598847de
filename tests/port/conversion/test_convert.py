"""Conversions of every format: the same values in float64, everything else bit for bit, or a refusal that leaves nothing."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from tests.needs import one_in
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import CONVERTIBLE, codes, dressed, floats, write_model

from crosstie.core.errors import BadData, BadInput
from crosstie.port.checkpoint.formats import KV_MARK, MARK, read_scheme
from crosstie.port.checkpoint.fp8 import Codes, Dialect, Recoder
from crosstie.port.checkpoint.index import INDEX, Checkpoint, open_checkpoint
from crosstie_port.checkpoint import convert as converting, shard as sharding
from crosstie_port.checkpoint.conversion import Conversion, plan_conversion
from crosstie_port.checkpoint.convert import Converted, run_conversion
from crosstie_port.checkpoint.output import JOURNAL

WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE = "model.layers.0.mlp.up_proj.weight_scale"
K_PROJ = "model.layers.0.self_attn.k_proj"
_ORACLES: dict[str, Any] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": ml_dtypes.float8_e8m0fnu, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip


_LARGEST = {"F32": float(np.finfo(np.float32).max), "F16": 65504.0, "BF16": (2 - 2**-7) * 2.0**127}


def values(checkpoint: Checkpoint, name: str) -> NDArray[np.float64]:
    """As ml_dtypes reads the bytes, in float64."""
    info = checkpoint[name]
    stored: NDArray[Any] = np.frombuffer(checkpoint.read(name), _ORACLES[info.dtype]).reshape(info.shape)
    return stored.astype(np.float64)


def dequantised(checkpoint: Checkpoint, weight: str, scale: str) -> NDArray[np.float64]:
    """Every weight times its own scale."""
    raw, scales = values(checkpoint, weight), values(checkpoint, scale)
    if scales.ndim == 4:
        scales = scales[:, 0, :, 0]
    if scales.ndim == 1 and scales.size > 1:
        scales = scales.reshape(-1, *[1] * (raw.ndim - 1))
    for axis in range(scales.ndim if scales.size > 1 else 0):
        # A block's scale stands for each row and column of it; 128 where the last block is short.
        side, blocks = raw.shape[axis], scales.shape[axis]
        if blocks > 1:
            length = side // blocks if side % blocks == 0 else 128
            scales = np.repeat(scales, length, axis=axis).take(range(side), axis=axis)
    return raw * scales


def run(source: Path, out: Path, to: Dialect = "e4m3fnuz", **options: bool) -> tuple[Conversion, Converted]:
    plan = plan_conversion(open_checkpoint(source), to, **{"even_if_normalised": True, **options})
    return plan, run_conversion(plan, out, jobs=1)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_progress_counts_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    make, quantisation, *_ = CONVERTIBLE[next(iter(CONVERTIBLE))]
    checkpoint = open_checkpoint(write_model(tmp_path / "model", make(), quantisation))
    seen: list[tuple[int, int, str]] = []
    plan = plan_conversion(checkpoint, "e4m3fnuz", even_if_normalised=True)
    run_conversion(plan, tmp_path / "out", jobs=1, on_progress=lambda *now: seen.append(now))
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    assert seen[-1] == (total, total, "converting")


@pytest.mark.parametrize("name", one_in(3, CONVERTIBLE))
def test_every_format_keeps_its_values_there_and_back(tmp_path: Path, name: str) -> None:
    make, quantisation, recoded, rescaled = CONVERTIBLE[name]
    source = write_model(tmp_path / "model", make(), quantisation)
    before = contents(source)
    plan, done = run(source, tmp_path / "fnuz")
    assert (set(plan.recoded), set(plan.rescaled)) == (recoded, rescaled)

    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "fnuz")
    for weight in read_scheme(old).fp8_weights:
        (scale,) = weight.scales
        there = dequantised(new, weight.name, scale)
        assert np.isfinite(there).all()
        np.testing.assert_array_equal(dequantised(old, weight.name, scale), there)
        assert new[weight.name].dtype == "F8_E4M3FNUZ"
    for tensor in rescaled:
        np.testing.assert_array_equal(2 * values(old, tensor), values(new, tensor))
        assert new[tensor].dtype == old[tensor].dtype
    for tensor in old.tensors.keys() - recoded - rescaled:
        assert (new[tensor].dtype, new.read(tensor)) == (old[tensor].dtype, old.read(tensor))
    raw = b"".join(old.read(tensor) for tensor in recoded)
    assert done.codes == Codes(total=len(raw), sign_only=raw.count(b"\x80"))
    assert raw.count(b"\x80") > 0
    assert contents(source) == before

    run(tmp_path / "fnuz", tmp_path / "back", "e4m3fn")
    back = open_checkpoint(tmp_path / "back")
    for tensor in old.tensors:
        unsigned = old.read(tensor).replace(b"\x80", b"\x00") if tensor in recoded else old.read(tensor)
        assert (back[tensor].dtype, back.read(tensor)) == (old[tensor].dtype, unsigned)
    assert json.loads(before["config.json"]) == json.loads((tmp_path / "back" / "config.json").read_text())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(data=st.data(), rows=st.integers(2, 9), columns=st.integers(1, 9), dtype=st.sampled_from(["F32", "F16", "BF16"]))
def test_any_codes_and_any_scales_keep_their_values_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, columns: int, dtype: str
) -> None:
    raw = data.draw(st.binary(min_size=rows * columns, max_size=rows * columns))
    width = 4 if dtype == "F32" else 2
    scale_raw = data.draw(st.binary(min_size=width * rows, max_size=width * rows))
    weight = np.frombuffer(raw, np.uint8).reshape(rows, columns).view(ml_dtypes.float8_e4m3fn)
    scale = np.frombuffer(scale_raw, _ORACLES[dtype]).reshape(rows, 1)
    folder = tmp_path_factory.mktemp("any")
    write_model(folder / "model", dressed({WEIGHT: weight, SCALE: scale}), samples.COMPRESSED)
    with np.errstate(invalid="ignore"):
        wide = scale.astype(np.float64)
    exact = bool(((wide > 0) & (2 * wide <= _LARGEST[dtype])).all())
    possible = exact and not any(code & 0x7F == 0x7F for code in raw)
    try:
        run(folder / "model", folder / "out")
    except BadData:
        assert not possible
        assert not (folder / "out").exists()
        return
    assert possible
    old, new = open_checkpoint(folder / "model"), open_checkpoint(folder / "out")
    np.testing.assert_array_equal(dequantised(old, WEIGHT, SCALE), dequantised(new, WEIGHT, SCALE))


def test_the_safetensors_library_takes_what_is_written(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "model", samples.modelopt_mixed(), {**samples.MODELOPT, "quant_algo": "MIXED_PRECISION"}, shards=1
    )
    run(source, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as opened:
        assert set(opened.keys()) == samples.modelopt_mixed().keys()
        assert opened.metadata() == {"format": "pt", MARK: "e4m3fnuz"}
        dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    assert dtypes["model.layers.0.self_attn.k_proj.weight"] == "F8_E4M3FNUZ"
    assert dtypes["model.layers.0.mlp.up_proj.weight_scale"] == "F8_E4M3"


@pytest.mark.slow
def test_torch_reads_the_same_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT, shards=1)
    run(source, tmp_path / "out")
    old, new = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert new[name].dtype == torch.float8_e4m3fnuz
    before, after = (read[name].double() * read[f"{name}_scale"].double() for read in (old, new))
    assert torch.equal(before, after)


def test_all_other_files_come_along_and_other_weights_do_not(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (source / "figures").mkdir()
    (source / "figures" / "a.txt").write_text("picture")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("ref")
    for name in ("consolidated.safetensors", "pytorch_model-00001.bin", "model.gguf", "original.pth"):
        (source / name).write_bytes(b"weights")
    _, done = run(source, tmp_path / "out")
    made = contents(tmp_path / "out")
    assert done.left_out == ["consolidated.safetensors", "model.gguf", "original.pth", "pytorch_model-00001.bin"]
    assert made.keys() == {
        "config.json", "hf_quant_config.json", "tokenizer.json", INDEX, "figures/a.txt",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert made["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    assert made[INDEX] == (source / INDEX).read_bytes()
    assert json.loads(made["hf_quant_config.json"])["quantization"][MARK] == "e4m3fnuz"
    assert json.loads(made["config.json"])["quantization_config"][MARK] == "e4m3fnuz"


def test_a_format_that_is_spelt_out_in_the_config_is_kept_true(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.deepseek_block(), {**samples.BLOCK_FP8, "fmt": "float8_e4m3fn"})
    run(source, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["fmt"] == "float8_e4m3fnuz"
    run(tmp_path / "out", tmp_path / "back", "e4m3fn")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["fmt"] == "float8_e4m3fn"


def test_applied_twice_it_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    with pytest.raises(BadInput, match="its FP8 weights are e4m3fn already: applied twice"):
        run(source, tmp_path / "same", "e4m3fn")
    run(source, tmp_path / "out")
    with pytest.raises(BadInput, match="are e4m3fnuz already, converted by crosstie"):
        run(tmp_path / "out", tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    "name", ["fp8", "deepseek", "compressed-tensors", "quark", "fbgemm", "modelopt-block", "modelopt-mxfp8"]
)
def test_what_an_engine_would_convert_again_is_refused_unless_told(tmp_path: Path, name: str) -> None:
    make, quantisation, _, _ = CONVERTIBLE[name]
    source = write_model(tmp_path / "model", make(), quantisation)
    with pytest.raises(BadInput, match=r"gfx942.*--even-if-normalised"):
        plan_conversion(open_checkpoint(source), "e4m3fnuz")
    run(source, tmp_path / "out")
    # Back to what the engines expect needs no flag.
    plan_conversion(open_checkpoint(tmp_path / "out"), "e4m3fn")


def test_a_method_whose_loader_nobody_has_read_is_refused_unless_told(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.fp8_per_tensor(), {"quant_method": "of-its-own"})
    with pytest.raises(BadInput, match="no loader of this method was read"):
        plan_conversion(open_checkpoint(source), "e4m3fnuz")
    run(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["modelopt", "modelopt-llama4", "modelopt-mixed"])
def test_what_no_engine_converts_needs_no_flag(tmp_path: Path, name: str) -> None:
    make, quantisation, _, _ = CONVERTIBLE[name]
    plan_conversion(open_checkpoint(write_model(tmp_path, make(), quantisation)), "e4m3fnuz")


@pytest.mark.parametrize(
    ("make", "quantisation", "said"),
    [
        (samples.modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "block scales of NVFP4"),
        (samples.gpt_oss, {"quant_method": "mxfp4"}, r"no weight is stored in E4M3 \(mxfp4\)"),
    ],
)
def test_nothing_to_convert(tmp_path: Path, make: Any, quantisation: Any, said: str) -> None:
    with pytest.raises(BadInput, match=f"nothing to convert: .*{said}"):
        run(write_model(tmp_path / "model", make(), quantisation), tmp_path / "out")


def test_kv_scales_can_be_left_alone_and_are_on_the_way_back(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    key = "model.layers.0.self_attn.k_proj.k_scale"
    plan, _ = run(source, tmp_path / "out", keep_kv_scales=True)
    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert key in plan.kept
    assert new.read(key) == old.read(key)
    assert new.headers["model-00001-of-00002.safetensors"].metadata[KV_MARK] == "e4m3fn"
    run(tmp_path / "out", tmp_path / "back", "e4m3fn")
    assert open_checkpoint(tmp_path / "back").read(key) == old.read(key)


def test_scales_of_a_cache_that_is_not_fp8_stay(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "model", samples.modelopt_fp8(), {**samples.MODELOPT, "kv_cache_quant_algo": "INT8"}
    )
    plan, _ = run(source, tmp_path / "out")
    assert plan.kept["model.layers.0.self_attn.k_proj.k_scale"] == "the KV cache is int8, not FP8"


def test_a_learnt_vector_with_the_name_of_a_kv_scale_is_not_taken_for_one(tmp_path: Path) -> None:
    tensors = {**samples.fp8_per_tensor(), "model.layers.0.self_attn.q_scale": floats((128,))}
    with pytest.raises(BadData, match=r"q_scale: is it a KV scale\? \[128\]"):
        run(write_model(tmp_path / "model", tensors, samples.FP8), tmp_path / "out")


def test_static_activations_of_mxfp4_layers_follow_the_dialect(tmp_path: Path) -> None:
    tensors = {
        **samples.quark_fp8(),
        "model.layers.0.mlp.up_proj.weight": samples.exponents((64, 64)),
        "model.layers.0.mlp.up_proj.weight_scale": samples.exponents((64, 4)),
        "model.layers.0.mlp.up_proj.input_scale": floats(()),
    }
    plan, _ = run(write_model(tmp_path / "model", tensors, samples.QUARK), tmp_path / "out")
    assert "model.layers.0.mlp.up_proj.input_scale" in plan.rescaled
    assert "model.layers.0.mlp.up_proj.weight_scale" not in plan.rescaled


def corrupt_truncated(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-3])


def corrupt_offsets(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[8,'))


def corrupt_overlap(folder: Path) -> None:
    # The second tensor begins where the first does, and both keep their length.
    raw = (folder / "model-00001-of-00002.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    begin, end = header[names[1]]["data_offsets"]
    header[names[1]]["data_offsets"] = [begin - 16, end - 16]
    text = json.dumps(header).encode()
    (folder / "model-00001-of-00002.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + raw[8 + length :]
    )


def corrupt_header(folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes((2_000_000_000).to_bytes(8, "little") + shard.read_bytes()[8:])


def corrupt_index(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("model-00001", "../model-00001"))


def corrupt_scale(folder: Path) -> None:
    write_model(
        folder,
        {name: array for name, array in samples.modelopt_fp8().items() if not name.endswith("weight_scale")},
        samples.MODELOPT,
    )


def corrupt_nan(folder: Path) -> None:
    broken = samples.modelopt_fp8()
    broken["model.layers.0.self_attn.k_proj.weight"].view(np.uint8)[3, 4] = 0xFF
    write_model(folder, broken, samples.MODELOPT)


def with_scale(name: str, scale: Any) -> Any:
    def corrupt(folder: Path) -> None:
        write_model(
            folder, {**samples.modelopt_fp8(), f"{K_PROJ}.{name}": np.asarray(scale, np.float32)}, samples.MODELOPT
        )

    return corrupt


@pytest.mark.parametrize(
    ("corrupt", "said"),
    [
        (corrupt_truncated, "model.norm.weight: ends 3 bytes after the file does: the file is cut short"),
        (corrupt_offsets, "model.embed_tokens.weight: BF16 of shape .* bytes, its offsets"),
        (corrupt_overlap, "they overlap"),
        (corrupt_header, "says that it is 2,000,000,000 bytes long"),
        (corrupt_index, "leaves the model's folder"),
        (corrupt_scale, "k_proj.weight: F8_E4M3 without a scale"),
        (corrupt_nan, "k_proj.weight: 1 weights are NaN"),
        (with_scale("weight_scale", np.inf), "k_proj.weight_scale: 1 scales are not finite numbers"),
        (with_scale("weight_scale", 0.0), "k_proj.weight_scale: 1 scales are not positive, such as 0"),
        (with_scale("weight_scale", -0.5), "k_proj.weight_scale: 1 scales are not positive, such as -0.5"),
        (with_scale("input_scale", 0.0), "k_proj.input_scale: 1 scales are not positive, such as 0"),
        (with_scale("k_scale", -1.0), "k_proj.k_scale: 1 scales are not positive, such as -1"),
        (with_scale("weight_scale", [0.5] * 5), "k_proj.weight_scale: 5 scales for .*k_proj.weight, which has one"),
        (with_scale("input_scale", [0.5] * 3), "k_proj.input_scale: 3 scales for .*k_proj.weight, which has one"),
        (with_scale("weight_scale", _LARGEST["F32"]), "1 scales, such as 3.40282e.38, have no exact double in F32"),
    ],
)
def test_a_corrupted_checkpoint_is_named_and_nothing_is_written(tmp_path: Path, corrupt: Any, said: str) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    corrupt(source)
    with pytest.raises(BadData, match=said):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("code", "said"), [(0x80, "NaN"), (0x7F, r"\+-240.*no exact conversion exists")])
def test_what_fnuz_has_and_fn_has_not_is_refused(tmp_path: Path, code: int, said: str) -> None:
    weight = codes((8, 8), dialect="e4m3fnuz")
    weight.view(np.uint8)[0, 0] = code
    source = write_model(tmp_path / "model", dressed({WEIGHT: weight, SCALE: floats(())}), samples.FP8)
    with pytest.raises(BadData, match=f"up_proj.weight: 1 weights are .*{said}"):
        run(source, tmp_path / "out", "e4m3fn")
    assert not (tmp_path / "out").exists()


def test_exponents_at_their_ends_are_refused(tmp_path: Path) -> None:
    for exponent, to, dialect in ((254, "e4m3fnuz", "e4m3fn"), (255, "e4m3fnuz", "e4m3fn"), (0, "e4m3fn", "e4m3fnuz")):
        scale = np.full((8, 1), exponent, np.uint8)
        tensors = dressed({WEIGHT: codes((8, 32), dialect=dialect), SCALE: scale})
        source = write_model(tmp_path / f"model{exponent}", tensors, {**samples.MODELOPT, "quant_algo": "MXFP8"})
        with pytest.raises(BadData, match=r"up_proj.weight_scale: 8 scales"):
            run(source, tmp_path / "out", to)  # type: ignore[arg-type]


def test_scales_longer_than_a_window_and_a_shard_without_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "WINDOW_BYTES", 1 << 10)
    tensors = dressed(
        {
            "odd": np.ones(3, np.uint8),
            WEIGHT: codes((1500, 8)),
            SCALE: floats((1500, 1)),
            "none": np.ones((0, 3), np.float32),
        }
    )
    source = write_model(tmp_path / "model", tensors, samples.COMPRESSED, shards=len(tensors))
    run(source, tmp_path / "out")
    old, new = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    np.testing.assert_array_equal(dequantised(old, WEIGHT, SCALE), dequantised(new, WEIGHT, SCALE))
    assert new["none"].shape == (0, 3)


def test_several_processes_make_the_same_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "_WORTH_PROCESSES", 1)
    source = write_model(tmp_path / "model", samples.deepseek_block(), samples.BLOCK_FP8, shards=3)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz", even_if_normalised=True)
    one, two = (run_conversion(plan, tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert one.codes == two.codes


def apart(source: Path, file: Path) -> Codes:
    """Its shards, each in a process of its own."""
    codes = Codes()
    for shard in plan_conversion(open_checkpoint(source), "e4m3fnuz").shards:
        file.write_bytes(shard.head + bytes(shard.size - len(shard.head)))
        task = sharding.ShardTask(shard=shard, to="e4m3fnuz", file=file, only_compared=False, flushes=False)
        codes += task.run_apart(lambda count: None)
    return codes


def test_what_goes_wrong_in_a_process_is_told_by_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    assert apart(source, tmp_path / "made").total > 0
    corrupt_nan(source)
    with pytest.raises(BadData, match=r"k_proj.weight: 1 weights are NaN"):
        apart(source, tmp_path / "made")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BadInput, match="a converting process ended with status 1; run it again"):
        apart(source, tmp_path / "made")


def test_a_fault_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    corrupt_nan(source)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
    with pytest.raises(BadData, match=r"k_proj.weight: 1 weights are NaN"):
        run_conversion(plan, tmp_path / "out", jobs=2)
    assert not (tmp_path / "out").exists()
    for shard in source.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(BadInput, match="No such file or directory"):
        run_conversion(plan, tmp_path / "out", jobs=2)


def test_a_source_that_became_shorter_is_told(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
    corrupt_truncated(source)
    with pytest.raises(BadData, match=r"model-00002-of-00002.safetensors: became shorter while it was read"):
        run_conversion(plan, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("out", ["model", "model/inside", "."])
def test_a_folder_that_is_the_source_or_holds_it_is_refused(tmp_path: Path, out: str) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="lies in"):
        run(source, tmp_path / out)
    assert contents(tmp_path) == before
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(BadInput, match="lies in the model's own folder"):
        run(source, tmp_path / "link")


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (tmp_path / "out").mkdir()
    # A hard link to the source would be the source's bytes under another name.
    os.link(source / "model-00001-of-00002.safetensors", tmp_path / "out" / "model-00001-of-00002.safetensors")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="not empty"):
        run(source, tmp_path / "out")
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="not a folder"):
        run(source, tmp_path / "file")
    assert contents(tmp_path) == {**before, "file": b"x"}


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInput, match="file/out: Not a directory"):
        run(source, tmp_path / "file" / "out")


def test_a_full_disk_is_said_and_a_rerun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
    written = 0

    def full(descriptor: int, data: bytes, offset: int, real: Any = os.pwrite) -> int:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        count: int = real(descriptor, data, offset)
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(BadInput, match="the disk is full; make room and run it again"):
            run_conversion(plan, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out" / "config.json").exists()
    assert run_conversion(plan, tmp_path / "out", jobs=1).resumed == 1
    assert (tmp_path / "out" / "config.json").exists()


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    monkeypatch.setattr(converting, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(BadInput, match=r"GB are to be written and .* are free"):
        run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bytes_that_did_not_reach_the_disk_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)

    def careless(descriptor: int, data: memoryview, offset: int, real: Any = os.pwrite) -> int:
        spoilt = bytearray(data)
        spoilt[len(spoilt) // 2] ^= 1
        count: int = real(descriptor, spoilt, offset)
        return count

    monkeypatch.setattr(os, "pwrite", careless)
    with pytest.raises(BadData, match="the bytes read back are not those that belong there"):
        run(source, tmp_path / "out")


def test_a_numpy_that_miscounts_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It is looked at once in a process.
    sharding._prove.cache_clear()
    monkeypatch.setattr(Recoder, "recode", lambda self, source, out: np.copyto(out, source))
    with pytest.raises(AssertionError, match="FP8 codes do not keep their values"):
        run(write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT), tmp_path / "out")


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
    os.utime(source / "model-00002-of-00002.safetensors", ns=(1, 1))
    with pytest.raises(BadData, match="was changed while it was converted"):
        run_conversion(plan, tmp_path / "out", jobs=1)


def test_threads_take_items_when_they_need_them() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number + 1

    def fails_at_five(number: int) -> int:
        if number == 5:
            raise BadInput("five")
        return number

    with pytest.raises(BadInput, match="five"):
        sharding.in_threads([fails_at_five] * 2, numbers())
    assert len(taken) < 100
    assert sorted(sharding.in_threads([abs] * 2, numbers())) == list(range(1, 101))


def test_a_leftover_journal_in_the_source_is_not_copied(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (source / JOURNAL).write_text("{}")
    run(source, tmp_path / "out")
    assert not (tmp_path / "out" / JOURNAL).exists()


def test_a_config_with_half_a_character_comes_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "by": "\ud800"}))
    run(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["by"] == "\ud800"


def test_a_grid_that_the_block_size_does_not_make_is_refused(tmp_path: Path) -> None:
    def model(name: str, grid: tuple[int, int]) -> Path:
        body = dressed({WEIGHT: codes((256, 384)), f"{WEIGHT}_scale_inv": floats(grid)})
        return write_model(tmp_path / name, body, samples.BLOCK_FP8)

    plan_conversion(open_checkpoint(model("right", (2, 3))), "e4m3fnuz", even_if_normalised=True)
    with pytest.raises(BadData, match=r"weight_scale_inv: a grid of \[4, 3\]"):
        plan_conversion(open_checkpoint(model("wrong", (4, 3))), "e4m3fnuz", even_if_normalised=True)


def test_modelopt_becomes_compressed_tensors_with_the_same_bytes(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    found = converting.convert(source, tmp_path / "out", "compressed-tensors")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert {name: before.read(name) for name in before.tensors} == {name: after.read(name) for name in after.tensors}
    scheme = read_scheme(after)
    assert (scheme.method, scheme.problems, scheme.weights) == ("compressed-tensors", (), read_scheme(before).weights)
    assert (found.format, found.recoded, found.rescaled) == ("compressed-tensors", [], [])
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["input_activations"]["dynamic"] is False
    assert said["kv_cache_scheme"]["num_bits"] == 8
    quantised = {weight.name.removesuffix(".weight") for weight in scheme.fp8_weights}
    assert quantised.isdisjoint(said["ignore"])
    # What compressed-tensors is read as, engines convert themselves.
    with pytest.raises(BadInput, match="compressed-tensors with fp8-tensor weights: vLLM and SGLang convert it"):
        plan_conversion(after, "e4m3fnuz")


@pytest.mark.parametrize("name", ["modelopt-mixed", "deepseek", "compressed-tensors"])
def test_only_modelopts_fp8_by_tensor_becomes_compressed_tensors(tmp_path: Path, name: str) -> None:
    make, quantisation, *_ = CONVERTIBLE[name]
    source = write_model(tmp_path / "model", make(), quantisation)
    with pytest.raises((BadInput, BadData), match="becomes compressed-tensors"):
        converting.convert(source, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_static_fp8_without_the_scale_of_its_input_does_not(tmp_path: Path) -> None:
    tensors = {name: array for name, array in samples.modelopt_fp8().items() if name != f"{K_PROJ}.input_scale"}
    source = write_model(tmp_path / "model", tensors, samples.MODELOPT)
    with pytest.raises(BadData, match="static FP8 without an input_scale"):
        converting.convert(source, tmp_path / "out", "compressed-tensors")


def test_scales_of_stacked_experts(tmp_path: Path) -> None:
    """Fused gate and up of all experts in one tensor: a scale an expert, or one for each half."""
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for shape in ((4,), (4, 1, 1), (4, 2), (4, 3, 1), (4, 128), (5,), (2,), (4, 4)):
        source, out = tmp_path / f"in{shape}", tmp_path / f"out{shape}"
        tensors = {name: samples.codes((4, 128, 128)), f"{name}_scale": samples.floats(shape)}
        samples.write_model(source, tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"})
        if shape in ((4,), (4, 1, 1), (4, 2)):
            assert converting.convert(source, out, "e4m3fnuz", even_if_normalised=True).recoded == [name]
        else:
            with pytest.raises(BadData, match="scale"):
                converting.convert(source, out, "e4m3fnuz", even_if_normalised=True)


def test_stacked_experts_are_not_repackaged(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}.weight": samples.codes((4, 128, 128)), f"{name}.weight_scale": samples.floats((4,)),
        f"{name}.input_scale": samples.floats((4,), 1),
    }  # fmt: skip
    samples.write_model(tmp_path / "in", tensors, {"quant_method": "modelopt", "quant_algo": "FP8"})
    with pytest.raises(BadData, match="stacked experts: no loader was found"):
        converting.convert(tmp_path / "in", tmp_path / "out", "compressed-tensors")
