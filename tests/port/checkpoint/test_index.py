"""Folders with an index, without one, and those that cannot be trusted."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.port.checkpoint.samples import FP8, deepseek_block, fp8_per_tensor, write_model, write_shard

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.index import INDEX, open_checkpoint


def change_index(folder: Path, tensor: str, shard: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][tensor] = shard
    (folder / INDEX).write_text(json.dumps(index))


def test_a_folder_is_one_set_of_tensors(tmp_path: Path) -> None:
    tensors = deepseek_block()
    checkpoint = open_checkpoint(write_model(tmp_path, tensors, FP8, shards=3))
    assert checkpoint.index == tmp_path / INDEX
    assert list(checkpoint.headers) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, array in tensors.items():
        assert checkpoint.read(name) == array.tobytes()
        assert checkpoint.read(name, 5) == array.tobytes()[:5]
        assert b"".join(checkpoint.chunks(name, 1000)) == array.tobytes()
    assert checkpoint.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("shards", [1, 2])
def test_an_index_is_not_needed(tmp_path: Path, shards: int) -> None:
    folder = write_model(tmp_path, fp8_per_tensor(), FP8, shards=shards)
    (folder / INDEX).unlink(missing_ok=True)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.index is None
    assert checkpoint.tensors.keys() == fp8_per_tensor().keys()


def test_links_as_the_hugging_face_cache_has_them_are_followed(tmp_path: Path) -> None:
    blobs = write_model(tmp_path / "blobs", fp8_per_tensor(), FP8)
    snapshot = tmp_path / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert open_checkpoint(snapshot).tensors.keys() == fp8_per_tensor().keys()


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("../model-00001-of-00002.safetensors", "leaves the model's folder"),
        ("/etc/model.safetensors", "leaves the model's folder"),
        ("sub/model.safetensors", "leaves the model's folder"),
        ("..\\model.safetensors", "leaves the model's folder"),
        ("..safetensors", "leaves the model's folder"),
        ("passwd", "must name a .safetensors file"),
        (7, "must name a .safetensors file"),
        ("model-00009-of-00002.safetensors", "missing: model.safetensors.index.json names it"),
        ("x" * 300 + ".safetensors", "missing: model.safetensors.index.json names it"),
        ("model-00002-of-00002.safetensors", "has no such tensor"),
    ],
)
def test_an_index_that_names_what_is_not_there_or_lies_elsewhere(tmp_path: Path, shard: object, said: str) -> None:
    folder = write_model(tmp_path, fp8_per_tensor(), FP8)
    change_index(folder, "model.embed_tokens.weight", shard)
    with pytest.raises(BadData) as error:
        open_checkpoint(folder)
    assert said in str(error.value)


def test_an_index_and_shards_that_disagree(tmp_path: Path) -> None:
    folder = write_model(tmp_path, fp8_per_tensor(), FP8)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadData, match=r"model-00002-of-00002.safetensors: model.norm.weight: not in model"):
        open_checkpoint(folder)


def test_a_tensor_that_is_in_two_shards(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.safetensors", {"twice": np.zeros(3, np.float32)})
    with pytest.raises(BadData, match=r"b.safetensors: twice: is in a.safetensors as well"):
        open_checkpoint(tmp_path)
    folder = write_model(tmp_path / "model", {**fp8_per_tensor(), "extra": np.zeros(3, np.float32)}, FP8)
    write_shard(folder / "model-00001-of-00002.safetensors", {"extra": np.zeros(3, np.float32)})
    with pytest.raises(BadData):
        open_checkpoint(folder)


def test_a_part_of_a_model_without_an_index(tmp_path: Path) -> None:
    folder = write_model(tmp_path, deepseek_block(), FP8, shards=3)
    (folder / INDEX).unlink()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(BadData, match="2 of 3 such shards are there"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"weight_map": {}}', "weight_map: must be an object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    folder = write_model(tmp_path, fp8_per_tensor(), FP8)
    (folder / INDEX).write_text(text)
    with pytest.raises(BadData, match=said):
        open_checkpoint(folder)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"no \*.safetensors file in it"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadData, match="not a model's folder"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / INDEX).symlink_to("gone")
    with pytest.raises(BadData, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_another_index_counts_where_the_usual_one_is_missing(tmp_path: Path) -> None:
    folder = write_model(tmp_path, fp8_per_tensor(), FP8)
    (folder / INDEX).rename(folder / "consolidated.safetensors.index.json")
    assert open_checkpoint(folder).index == folder / "consolidated.safetensors.index.json"
