"""Prompts: of the right length, of words, alike where a trace says so and nowhere else."""

import json
from pathlib import Path

import pytest
from tests.prove.bench.vllm_like import TEMPLATE_TOKENS, by_bytes, by_words, vllm_like
from tests.run.emulate.running import CATALOG
from tests.tokens import written

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.prove.bench.bench import Settings, bench
from crosstie.prove.bench.endpoint import described, words_by_file
from crosstie.prove.bench.loads import BenchLengths, BenchLoad
from crosstie.prove.replay.prompts import Sizing, Word, Wording, corpus, text, vocabulary
from crosstie.prove.replay.traffic import TimedRequest


def test_the_text_is_plain_sentences_that_json_need_not_escape() -> None:
    words = corpus().decode("ascii")
    assert json.dumps(words) == f'"{words}"'
    assert len(words) > 500_000
    assert words.count(". ") > 10_000
    assert "  " not in words


@pytest.mark.parametrize("tokens", [1, 7, 100, 5000, 600_000])
@pytest.mark.parametrize("blocks", [(), (3,), (3, 4)])
def test_a_prompt_has_the_bytes_of_its_tokens(tokens: int, blocks: tuple[int, ...]) -> None:
    sizing = Sizing(4.5, 0.0)
    assert len(text(TimedRequest(0.0, tokens, 1, None, blocks), 5, 1, sizing)) == sizing.size(tokens)


def test_prompts_share_what_the_trace_says_and_nothing_else() -> None:
    sizing = Sizing(5.0)
    first, second = (text(TimedRequest(0.0, 1500, 1, None, (1, 2, last)), 7, 9, sizing) for last in (3, 4))
    assert first[: 2 * sizing.block_bytes] == second[: 2 * sizing.block_bytes]
    assert first[2 * sizing.block_bytes :][:20] != second[2 * sizing.block_bytes :][:20]
    alone, other = (text(TimedRequest(0.0, 100, 1), number, 9, sizing) for number in (7, 8))
    assert alone[:20] != other[:20]


def test_another_run_has_other_text() -> None:
    """Or a cache would answer for it."""
    asked = TimedRequest(0.0, 1500, 1, None, (1, 2))
    assert text(asked, 7, 1, Sizing())[:16] != text(asked, 7, 2, Sizing())[:16]


def test_lengths_are_learnt_from_what_was_counted() -> None:
    learnt = Sizing().learnt([400, 800, 1600], [10 + 400 // 5, 10 + 800 // 5, 10 + 1600 // 5])
    assert learnt.bytes_per_token == pytest.approx(5.0)
    assert learnt.overhead == pytest.approx(10.0)
    assert learnt.size(110) == 500
    # A template gives no tokens back, one size says nothing, and nonsense is not learnt.
    assert Sizing().learnt([400, 800], [90, 190]).overhead == 0.0
    assert Sizing().learnt([400, 400], [90, 90]) == Sizing()
    assert Sizing().learnt([400, 800], [90, 90]) == Sizing()


def test_a_body_is_a_request_that_any_server_reads() -> None:
    asked = TimedRequest(0.0, 50, 8)
    chat = json.loads(Wording("m", more=(("temperature", 0),)).body(asked, 1))
    assert (chat["model"], chat["max_tokens"], chat["ignore_eos"], chat["temperature"]) == ("m", 8, True, 0)
    assert chat["stream_options"] == {"include_usage": True}
    assert len(chat["messages"][0]["content"]) == 200
    plain = json.loads(Wording("m", chat=False, ignore_eos=False).body(asked, 1))
    assert len(plain["prompt"]) == 200
    assert "ignore_eos" not in plain


def counted_words() -> tuple[Word, ...]:
    return tuple((word, by_words(" " + word.decode())) for word in vocabulary())


@pytest.mark.parametrize("tokens", [1, 2, 7, 100, 1537, 5000, 600_000])
@pytest.mark.parametrize("blocks", [(), (3,), (3, 4)])
def test_a_prompt_of_words_has_just_its_tokens(tokens: int, blocks: tuple[int, ...]) -> None:
    sizing = Sizing(overhead=1.0).with_words(counted_words(), "us")
    for number in (1, 2, 3):
        made = text(TimedRequest(0.0, tokens, 1, None, blocks), number, 9, sizing).decode("ascii")
        assert by_words(made) == tokens


def test_prompts_of_words_share_what_the_trace_says_and_nothing_else() -> None:
    sizing = Sizing(overhead=1.0).with_words(counted_words(), "us")
    first, second = (text(TimedRequest(0.0, 1500, 1, None, (1, 2, last)), 7, 9, sizing) for last in (3, 4))
    alike = next(at for at in range(len(first)) if first[at] != second[at])
    assert by_words(first[:alike].decode().rpartition(" ")[0]) == 1 + 2 * 512
    many = {text(TimedRequest(0.0, 100, 1), number, salt, sizing)[:60] for number in range(1000) for salt in (1, 2)}
    assert len(many) == 2000


def test_words_add_up_with_byte_pairs(tmp_path: Path) -> None:
    reader = Tokenizer(written(tmp_path))
    sizing = Sizing().with_words(words_by_file(reader), "us")
    overheads = {
        len(reader.encode(text(TimedRequest(0.0, tokens, 1), tokens, 5, sizing).decode())) - tokens
        for tokens in (20, 333, 2000)
    }
    assert len(overheads) == 1


@pytest.mark.parametrize(
    ("count", "tokenizes", "exact"), [(by_words, True, True), (by_words, False, False), (by_bytes, True, False)]
)
def test_prompts_are_as_long_as_asked_by_the_engine_s_own_count(count: object, tokenizes: bool, exact: bool) -> None:
    """Of an engine that counts; without it, or where words do not add up, about so long, and the result says so."""
    with vllm_like(count=count, tokenizes=tokenizes) as engine:
        one = described(engine.url, None, None, True, {}, CATALOG)
        asked = Settings(lengths=BenchLengths(300, 4, shortest=0.2), requests=12, warm_up=0)
        (found,) = bench([one], [BenchLoad(clients=3)], asked).measured
    (point,) = found.points
    counted = sorted(engine.prompts[-12:])
    assert len(set(counted)) > 3
    assert bool(found.sizing.words) == exact
    if exact:
        assert found.sizing.template_tokens == TEMPLATE_TOKENS
        assert found.sizing.counted_by == "the engine's /tokenize"
        assert point.input_tokens == point.asked_input_tokens
    else:
        assert found.sizing.counted_by == "what the engine counted of four prompts"
        assert point.input_tokens == pytest.approx(point.asked_input_tokens, rel=0.1)
