"""Headers as the safetensors library writes them, and every way in which one can be wrong."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load, save_file

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.headers import LONGEST_HEADER, encode_header, read_header

ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


def raw_file(folder: Path, header: Any, data: bytes = b"abcd", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return file


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "none": np.zeros((0, 4), np.float16),
        "scalar": np.array(7, np.int64),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    header = read_header(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert header.metadata == {"format": "np"}
    for name, array in arrays.items():
        info = header.tensors[name]
        assert (info.shape, info.nbytes, info.elements) == (array.shape, array.nbytes, array.size)
        assert raw[info.offset : info.offset + info.nbytes] == array.tobytes()


@given(st.lists(st.tuples(st.sampled_from(["F32", "U8", "F16"]), st.lists(st.integers(0, 3), max_size=3)), max_size=6))
def test_what_is_encoded_is_what_the_library_reads(entries: list[tuple[str, list[int]]]) -> None:
    width = {"F32": 4, "U8": 1, "F16": 2}
    sizes = [int(np.prod(shape, dtype=int)) * width[dtype] for dtype, shape in entries]
    named = [
        (f"tensor {i} ü", dtype, shape, size)
        for i, ((dtype, shape), size) in enumerate(zip(entries, sizes, strict=True))
    ]
    head = encode_header(named, {"by": "ours"})
    assert len(head) % 8 == 0
    loaded = load(head + bytes(sum(sizes)))
    assert {name: list(array.shape) for name, array in loaded.items()} == {name: shape for name, _, shape, _ in named}


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"[1]", b"", "header: must hold one JSON object"),
        (b"{nope", b"", "header: not valid JSON"),
        (b'{"\xff": 1}', b"", "header: not UTF-8"),
        (b"[" * 100_000, b"", "header: nested too deeply"),
        (b'{"a": {}, "a": {}}', b"", "'a' stands there twice"),
        (b'{"__metadata__": {"x": 1}}', b"", "__metadata__: must be an object of strings"),
        ({"a": 1}, b"", "a: must have dtype, shape and data_offsets"),
        ({"a": {**ENTRY, "more": 1}}, b"abcd", "a: must have dtype, shape and data_offsets, and nothing else"),
        ({"a": {**ENTRY, "dtype": "F8_E3M4"}}, b"abcd", "a: unknown dtype 'F8_E3M4'"),
        ({"a": {**ENTRY, "shape": [-4]}}, b"abcd", "a: shape must be"),
        ({"a": {**ENTRY, "shape": [4.0]}}, b"abcd", "a: shape must be"),
        ({"a": {**ENTRY, "shape": [True] * 4}}, b"abcd", "a: shape must be"),
        ({"a": {**ENTRY, "shape": [2**62] * 1000}}, b"abcd", "a: shape must be"),
        ({"a": {**ENTRY, "shape": [5]}}, b"abcd", "a: U8 of shape [5] takes 5 bytes, its offsets 4"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"ab", "a: F4 of shape [3] takes 1.5 bytes"),
        ({"a": {**ENTRY, "data_offsets": [4, 0]}}, b"abcd", "a: data_offsets must be"),
        ({"a": {**ENTRY, "data_offsets": [0, 4, 8]}}, b"abcd", "a: data_offsets must be"),
        ({"a": ENTRY}, b"abc", "a: ends 1 bytes after the file does: the file is cut short"),
        ({"a": ENTRY}, b"abcde", "1 bytes follow the last tensor"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}}, b"abcdef", "b: begins 2 bytes before 'a' ends: they overlap"),
        ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [5, 9]}}, b"abcdefghi", "b: begins 1 bytes after 'a' ends: a hole"),
        ({"a": {**ENTRY, "data_offsets": [1, 5]}}, b"abcde", "a: begins 1 bytes after the header ends: a hole"),
    ],
)  # fmt: skip
def test_a_wrong_header_is_refused_by_name(tmp_path: Path, header: Any, data: bytes, said: str) -> None:
    with pytest.raises(BadData) as error:
        read_header(raw_file(tmp_path, header, data))
    assert said in str(error.value)
    assert "model.safetensors" in str(error.value)


def test_a_header_of_two_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="says that it is 2,000,000,000 bytes long; the limit is 100,000,000"):
        read_header(raw_file(tmp_path, {"a": ENTRY}, length=2_000_000_000))
    # The same in a file that really is as long, mostly a hole of the file system.
    file = raw_file(tmp_path, {"a": ENTRY}, length=LONGEST_HEADER + 1)
    with file.open("r+b") as opened:
        opened.truncate(2_100_000_000)
    with pytest.raises(BadData, match="the limit is"):
        read_header(file)


def test_a_pointer_in_place_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(BadData, match="a pointer of Git LFS"):
        read_header(file)


def test_files_that_are_not_there_or_too_short(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no such file"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(BadData, match="a symbolic link that leads nowhere"):
        read_header(tmp_path / "link.safetensors")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    with pytest.raises(BadData, match="too short to have a header"):
        read_header(tmp_path / "short.safetensors")
    with pytest.raises(BadData, match="header: 50 bytes long in a file of 11: the file is cut short"):
        read_header(raw_file(tmp_path, b"{}", b"x", length=50))
    os.mkfifo(tmp_path / "pipe.safetensors")
    for other in (tmp_path, tmp_path / "pipe.safetensors"):
        with pytest.raises(BadData, match="not a file"):
            read_header(other)


@pytest.mark.parametrize("text", [r'{"a\ud800": ENTRY}', r'{"a": ENTRY, "__metadata__": {"by": "\uDFFF"}}'])
def test_half_a_character_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadData, match="half a character"):
        read_header(raw_file(tmp_path, text.replace("ENTRY", json.dumps(ENTRY)).encode()))
    whole = read_header(raw_file(tmp_path, rb'{"a\ud83d\ude00": %s}' % json.dumps(ENTRY).encode()))
    assert set(whole.tensors) == {"a\N{GRINNING FACE}"}


def test_a_shape_beyond_all_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="takes far more bytes, its offsets 4"):
        read_header(raw_file(tmp_path, {"a": {**ENTRY, "shape": [2**62] * 64}}))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_is_a_header(tmp_path: Path, data: st.DataObject) -> None:
    header = {"a": ENTRY, "none": {"dtype": "F4", "shape": [0, 2**62], "data_offsets": [4, 4]}, "__metadata__": {}}
    text = json.dumps(header).encode()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 20, len(text))))
    pieces = (
        b"[",
        b"{",
        b"9" * 5000,
        b"1e999",
        rb'"\ud800"',
        b"[4611686018427387904,4611686018427387904]",
        b"null",
        b"4",
    )
    put = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from(pieces)))
    file = raw_file(tmp_path, text[:start] + put + text[stop:])
    try:
        found = read_header(file)
    except BadData:
        return
    encode_header([(name, info.dtype, info.shape, info.nbytes) for name, info in found.tensors.items()], found.metadata)
