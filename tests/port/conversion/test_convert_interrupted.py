"""Killed at any point, a conversion goes on where it was; two at once do not get into each other's way."""

import errno
import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.port.checkpoint import samples
from tests.port.checkpoint.samples import write_model
from tests.port.conversion.test_convert import contents

from crosstie.core.errors import BadInput
from crosstie.port.checkpoint.index import open_checkpoint
from crosstie_port.checkpoint.conversion import plan_conversion
from crosstie_port.checkpoint.convert import Converted, run_conversion
from crosstie_port.checkpoint.output import JOURNAL, OutputFolder
from crosstie_port.checkpoint.shard import ShardPlan

SCRIPT = Path(__file__).with_name("killed.py")


def killed(source: Path, out: Path, call: int, jobs: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(source), str(out), str(call), str(jobs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def go_on(source: Path, out: Path) -> Converted:
    return run_conversion(plan_conversion(open_checkpoint(source), "e4m3fnuz"), out, jobs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("jobs", "points"), [(1, 16), (2, 6)])
def test_killed_at_random_points_a_rerun_completes(tmp_path: Path, jobs: int, points: int) -> None:
    source = write_model(
        tmp_path / "model", samples.modelopt_mixed(), {**samples.MODELOPT, "quant_algo": "MIXED_PRECISION"}, shards=4
    )
    before = contents(source)
    whole = killed(source, tmp_path / "whole", 0, jobs)
    wanted = contents(tmp_path / "whole")
    calls = int(whole.stdout)
    for call in sorted(random.Random(jobs).sample(range(1, calls + 1), points)):
        out = tmp_path / f"out{call}"
        assert killed(source, out, call, jobs).returncode == -signal.SIGKILL
        # Nobody could take what is there for a model, unless all of it was there and the journal was to go.
        if (out / "config.json").exists():
            assert wanted.items() <= contents(out).items()
        journal = out / JOURNAL
        finished = len(json.loads(journal.read_text())["finished"]) if journal.exists() else 0
        done = go_on(source, out)
        # By the very last call it had finished, and the rerun has nothing to do.
        assert done.resumed == (finished if done.codes is not None else done.shards)
        assert contents(out) == wanted
    assert contents(source) == before


def half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder in which the first of two shards is finished."""
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    go_on(source, tmp_path / "whole")

    def seal_once(output: OutputFolder, shard: ShardPlan, *found: Any, real: Any = OutputFolder.seal) -> None:
        if output.has_finished:
            raise OSError(errno.EIO, "Input/output error")
        real(output, shard, *found)

    with monkeypatch.context() as patched:
        patched.setattr(OutputFolder, "seal", seal_once)
        with pytest.raises(BadInput, match="Input/output error; run it again"):
            go_on(source, tmp_path / "out")
    return source, tmp_path / "out"


def test_what_a_rerun_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    wanted = contents(tmp_path / "whole")
    copy = tmp_path / "copy"

    def again(name: str) -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(out, copy)
        return copy / name

    shard = "model-00001-of-00002.safetensors"
    assert go_on(source, again("")).resumed == 1
    # Cut short, touched, or gone: it is made again.
    file = again(shard)
    file.write_bytes(file.read_bytes()[:-1])
    assert go_on(source, copy).resumed == 0
    file = again(shard)
    file.write_bytes(bytes(file.stat().st_size))
    assert go_on(source, copy).resumed == 0
    again(shard).unlink()
    assert go_on(source, copy).resumed == 0
    # Not flushed, and the machine has restarted since.
    journal = again(JOURNAL)
    said = json.loads(journal.read_text())
    said["finished"][shard]["boot"] = "another"
    journal.write_text(json.dumps(said))
    assert go_on(source, copy).resumed == 0
    assert contents(copy) == wanted
    # Flushed, and restarted.
    journal = again(JOURNAL)
    said["finished"][shard]["boot"] = ""
    journal.write_text(json.dumps(said))
    assert go_on(source, copy).resumed == 1
    assert contents(copy) == wanted


def test_a_journal_of_something_else_or_damaged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    before = contents(out)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz", keep_kv_scales=True)
    with pytest.raises(BadInput, match="unfinished conversion of another model or of other options"):
        run_conversion(plan, out, jobs=1)
    assert contents(out) == before
    (out / JOURNAL).write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        go_on(source, out)


def test_a_rerun_of_what_is_finished_has_nothing_to_do(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    go_on(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    done = go_on(source, tmp_path / "out")
    assert (done.resumed, done.codes) == (2, None)
    assert contents(tmp_path / "out") == before
    # The same files with one shard cut short, or of another conversion, are not that.
    with pytest.raises(BadInput, match="not empty"):
        run_conversion(
            plan_conversion(open_checkpoint(source), "e4m3fnuz", keep_kv_scales=True), tmp_path / "out", jobs=1
        )
    shard = tmp_path / "out" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(BadInput, match="not empty"):
        go_on(source, tmp_path / "out")


def test_two_at_once_are_kept_apart(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
    with (
        OutputFolder(tmp_path / "out", plan, flush=False).opened(),
        pytest.raises(BadInput, match="another conversion is writing"),
    ):
        run_conversion(plan, tmp_path / "out", jobs=1)
    run_conversion(plan, tmp_path / "out", jobs=1, sync=True)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("kind", ["weight", "scale", "other"])
def test_a_source_that_has_changed_since_is_not_called_finished(tmp_path: Path, kind: str) -> None:
    tensors = samples.modelopt_fp8()
    source = write_model(tmp_path / "model", tensors, samples.MODELOPT)
    go_on(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    # Other numbers under the same header.
    name = {"weight": "k_proj.weight", "scale": "k_proj.weight_scale", "other": "norm.weight"}[kind]
    changed = next(array for tensor, array in tensors.items() if tensor.endswith(name))
    changed.reshape(-1).view("u1")[0] ^= 1
    write_model(source, tensors, samples.MODELOPT)
    with pytest.raises(BadInput, match=r"not of this model as it is now .* delete it to start again"):
        go_on(source, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_finished_shard_that_was_damaged_is_not_called_finished(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", samples.modelopt_fp8(), samples.MODELOPT)
    go_on(source, tmp_path / "out")
    shard = tmp_path / "out" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(BadInput, match="the bytes read back are not those that belong there"):
        go_on(source, tmp_path / "out")


def test_what_a_killed_run_has_left_does_not_take_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = half_done(tmp_path, monkeypatch)
    left = out / "model-00002-of-00002.safetensors.part"
    assert left.exists()
    there: list[bool] = []

    def usage(folder: Path, real: Any = shutil.disk_usage) -> Any:
        there.append(left.exists())
        return real(folder)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    go_on(source, out)
    assert there == [False]
