"""`crosstie diff` as a user runs it."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

DATA = Path(__file__).with_name("data")
A, B, BROKEN = (str(DATA / f"{name}.npz") for name in ("cpu-bfloat16", "h200-bfloat16", "h200-bfloat16-halved"))


def test_the_same_up_to_rounding(crosstie: Command) -> None:
    got = crosstie("diff", A, B)
    assert got.status == 0
    assert got.out.startswith("the same up to rounding: 58 modules\n")
    assert "B: NVIDIA H200, sm_90, CUDA 13.0, PyTorch 2.11.0+cu130, Small" in got.out


def test_the_first_module_and_its_cause(crosstie: Command) -> None:
    got = crosstie("diff", A, BROKEN, "-v")
    assert got.status == 1
    assert got.out.startswith("diverges at layers.2.mlp.down_proj (Linear), output 0\n")
    assert "likely   half of what it should be, as with the other FP8 dialect" in got.out
    assert "layers.2.mlp.gate_proj" in got.out


def test_json_has_every_step(crosstie: Command) -> None:
    got = json.loads(crosstie("diff", A, BROKEN, "--json").out)
    assert (got["verdict"], got["first"]["step"]["module"]) == ("diverges", "layers.2.mlp.down_proj")
    assert got["first"]["causes"][0]["signature"] == "factor-2"
    assert got["steps"][-1]["error"] > got["steps"][-1]["allowed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([A], "diff compares two recordings"),
        ([A, B, "--model", "x"], "diff compares two recordings"),
        ([A, "nowhere.npz"], "nowhere.npz: no such file"),
        ([A, str(DATA / "h200-float32.npz"), "--record", "x.npz"], "--record OUT goes with --model DIR"),
        (["--record", "x.npz"], "--record OUT goes with --model DIR"),
        (["--record", "x.npz", "--model", "nowhere"], "nowhere: no config.json there"),
        (["--record", "no/where.npz", "--model", str(DATA)], "no/where.npz: there is no folder no"),
    ],
)
def test_a_wrong_question_is_one_line(crosstie: Command, arguments: list[str], said: str) -> None:
    got = crosstie("diff", *arguments)
    assert (got.status, got.out) == (2, "")
    assert said in got.err
    assert got.err.count("\n") == 1


@pytest.mark.transformers
def test_a_directory_is_recorded_and_a_fault_in_its_weights_named(crosstie: Command, tmp_path: Path) -> None:
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=2.0, initializer_range=0.3,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    model.save_pretrained(tmp_path / "sound")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 2.0
    model.save_pretrained(tmp_path / "broken")
    config.final_logit_softcapping = None
    (tmp_path / "uncapped").mkdir()
    for file in (tmp_path / "sound").iterdir():
        (tmp_path / "uncapped" / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "uncapped" / "config.json").read_text())
    (tmp_path / "uncapped" / "config.json").write_text(json.dumps(settings | {"final_logit_softcapping": None}))
    for name in ("sound", "broken", "uncapped"):
        got = crosstie(
            "diff", "--record", str(tmp_path / f"{name}.npz"), "--model", str(tmp_path / name), "--tokens", "12"
        )
        assert got.status == 0, got.err
        assert "modules on 12 tokens written to" in got.out
    found = json.loads(crosstie("diff", str(tmp_path / "sound.npz"), str(tmp_path / "broken.npz"), "--json").out)
    assert found["first"]["step"]["module"] == "model.layers.1.mlp.up_proj"
    assert found["first"]["causes"][0]["signature"] == "factor-2"
    found = json.loads(crosstie("diff", str(tmp_path / "sound.npz"), str(tmp_path / "uncapped.npz"), "--json").out)
    # The cap is in the model's own code, after its head.
    assert found["first"]["step"]["module"] == ""
    assert found["first"]["causes"][0]["signature"] == "softcap"
    assert "at 2" in found["first"]["causes"][0]["what"]
    assert crosstie("diff", str(tmp_path / "sound.npz"), str(tmp_path / "sound.npz")).out.startswith("the same bits")
