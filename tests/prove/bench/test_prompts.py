"""Prompts: of the right length, of words, alike where a trace says so and nowhere else."""

import json

import pytest

from crosstie.prove.bench.prompts import Sizing, Wording, corpus, text
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
