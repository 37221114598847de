"""`crosstie convert` as a user meets it."""

import json
from pathlib import Path

from click.testing import CliRunner, Result
from tests.conftest import Command
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import write_model
from tests.port.conversion.test_convert import contents, corrupt_truncated

from crosstie.cli.main import crosstie as commands


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["convert", *map(str, arguments)])


def test_it_says_what_was_done(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "model", samples.modelopt_mixed(), {**samples.MODELOPT, "quant_algo": "MIXED_PRECISION"}
    )
    answer = invoke(source, "-o", tmp_path / "out", "--to", "e4m3fnuz")
    assert answer.exit_code == 0
    # Lines fold where the width ends, and the folder's name is as long as it is.
    said = " ".join(answer.output.split())
    assert "modelopt, fp8-tensor, e4m3fn; converted to e4m3fnuz" in said
    assert "1 weights recoded, 4 scales doubled, 6 tensors as they were" in said
    assert "1 left alone: block scales of NVFP4 weights" in said
    assert "were 0x80, minus zero" in said
    assert "all of it read back and compared" in said
    again = invoke(source, "-o", tmp_path / "out", "--to", "e4m3fnuz")
    assert again.exit_code == 0
    assert "nothing was left to do: an earlier run has finished it" in " ".join(again.output.split())


def test_convert_as_json_has_its_keys(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    answer = json.loads(invoke(source, "-o", tmp_path / "out", "--to", "e4m3fnuz", "--json").output)
    assert (answer["from"], answer["to"], answer["method"], answer["shards"]) == ("e4m3fn", "e4m3fnuz", "modelopt", 2)
    assert answer["recoded"] == ["model.layers.0.self_attn.k_proj.weight"]
    assert answer["converted"]["codes"]["total"] == 64 * 128
    assert answer["converted"]["resumed"] == 0


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    before = contents(tmp_path)
    answer = invoke(source, "-o", tmp_path / "out", "--to", "e4m3fnuz", "--dry-run")
    assert "would be converted to e4m3fnuz" in answer.output
    said = json.loads(invoke(source, "-o", tmp_path / "out", "--to", "e4m3fnuz", "--dry-run", "--json").output)
    assert said["converted"] is None
    assert contents(tmp_path) == before


def test_a_refusal_is_one_line_and_status_2(crosstie: Command, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.deepseek_block(), samples.BLOCK_FP8)
    asked = ("convert", str(source), "-o", str(tmp_path / "out"), "--to", "e4m3fnuz")
    refused = crosstie(*asked)
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "fp8 with fp8-block weights: vLLM and SGLang convert it themselves" in refused.err
    corrupt_truncated(source)
    broken = crosstie(*asked, "--even-if-normalised")
    assert (broken.status, broken.err.count("\n")) == (2, 1)
    assert "cut short" in broken.err
    assert not (tmp_path / "out").exists()


def test_another_format_changes_the_config_alone(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    answer = invoke(source, "-o", tmp_path / "out", "--to", "compressed-tensors")
    assert answer.exit_code == 0
    said = " ".join(answer.output.split())
    assert "modelopt, fp8-tensor, e4m3fn; converted to compressed-tensors" in said
    assert "the config alone changes" in said
    assert "0x80" not in said
