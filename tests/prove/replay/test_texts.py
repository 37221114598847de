"""Prompts of somebody's own texts: as long as asked by the engine's count, and the file says whose they are."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.conftest import Command
from tests.prove.bench.vllm_like import by_bytes, vllm_like

from crosstie.core.errors import BadData, BadInput
from crosstie.prove.replay.texts import pieces_of, read_texts

SENTENCES = [f'def part_{n}(x):\n    """Says “{n}”."""\n    return [x + {n}] * {n}\n' for n in range(60)]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "deep").mkdir(parents=True)
    for n in range(6):
        (folder / "deep" / f"part{n}.py").write_text("\n".join(SENTENCES[n * 10 : n * 10 + 10]))
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    return folder


def lines(file: Path, *entries: Any) -> Path:
    file.write_text("\n".join(json.dumps(one) for one in entries) + "\n")
    return file


def test_pieces_are_the_text() -> None:
    for text in ("", "  a b\n\n  c", "x" * 1000 + " y", "one two\tthree\n", "   "):
        assert "".join(pieces_of(text)) == text


def test_texts_of_a_folder_of_requests_and_of_chats(documents: Path, tmp_path: Path) -> None:
    found = read_texts(documents)
    assert (found.kind, len(found.texts), found.source) == ("documents", 6, "code")
    asked = lines(
        tmp_path / "trace.jsonl",
        {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]},
        {"custom_id": "2", "body": {"prompt": "Once upon a time"}},
        {"request": {"messages": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]}},
    )
    assert read_texts(asked).texts == ("Be brief.\n\nWhy?", "Once upon a time", "In parts")
    assert read_texts(asked).kind == "requests"
    chats = tmp_path / "sharegpt.json"
    chats.write_text(json.dumps([{"id": "1", "conversations": [{"from": "human", "value": "Hello"}]}]))
    assert (read_texts(chats).kind, read_texts(chats).texts) == ("chats", ("Hello",))


def test_what_has_no_text_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        read_texts(tmp_path / "gone")
    with pytest.raises(BadData, match="entry 2"):
        read_texts(lines(tmp_path / "one.jsonl", {"prompt": "x"}, {"model": "m"}))
    (tmp_path / "two.jsonl").write_text('{"prompt": "x"}\n{')
    with pytest.raises(BadData, match="line 2"):
        read_texts(tmp_path / "two.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="has no text"):
        read_texts(tmp_path / "empty")


@pytest.mark.parametrize("tokenizes", [True, False])
def test_prompts_are_of_the_texts_and_as_long_as_asked(
    crosstie: Command, documents: Path, tmp_path: Path, tokenizes: bool
) -> None:
    file = tmp_path / "run.json"
    with vllm_like(tokenizes=tokenizes, **({} if tokenizes else {"count": by_bytes})) as engine:
        got = crosstie(
            "bench", engine.url, "--prompts", str(documents), "--input", "300", "--output", "2", "--concurrency", "2",
            "--requests", "12", "--warmup", "0", "--accelerator", "h200", "-o", str(file),
        )  # fmt: skip
        assert got.status == 0, got.err
        measured = list(zip(engine.prompts, engine.texts, strict=True))[4:]
    found = json.loads(file.read_text())
    assert found["prompts"] == read_texts(documents).told
    assert "prompts of code: documents, 6 of them" in got.out
    assert fmean(tokens for tokens, _ in measured) == pytest.approx(300, rel=0.02)
    for _, text in measured:
        first, _, rest = text.partition("\n")
        assert first.startswith("Run ")
        assert rest[:20] in "".join(SENTENCES).replace(")\n", ")\n\n") + "\n".join(SENTENCES)
    # All of a run begin alike, and no two go on alike.
    assert len({text.partition("\n")[0] for _, text in measured}) == 1
    assert len({text for _, text in measured}) == len(measured)


def test_filler_is_called_so_and_other_texts_are_not_gone_on_with(
    crosstie: Command, documents: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    with vllm_like() as engine:
        asked = [
            "bench",
            f"one={engine.url}",
            "--input",
            "60",
            "--output",
            "2",
            "--concurrency",
            "1",
            "--requests",
            "3",
        ]
        assert crosstie(*asked, "-o", str(file)).status == 0
        assert json.loads(file.read_text())["prompts"] == {"kind": "filler"}
        got = crosstie(*asked, "-o", str(file), "--resume", "--prompts", str(documents))
    assert got.status == 2
    assert "prompts_sha256" in got.err
