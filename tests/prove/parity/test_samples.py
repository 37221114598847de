"""The distance of two lists of log-probabilities, and where two answers part."""

import math

import numpy as np
import pytest

from crosstie.prove.parity.prompts import Prompt
from crosstie.prove.parity.samples import Sample, SampledToken, Top, least_kl, paired

PROMPT = Prompt(id="one", language="en", kind="chat", text="Say something.")


def logs(**probabilities: float) -> Top:
    return {token: math.log(p) for token, p in probabilities.items()}


def test_a_list_is_no_distance_from_itself() -> None:
    assert least_kl(logs(a=0.5, b=0.3), logs(a=0.5, b=0.3)) == pytest.approx(0, abs=1e-12)


def test_whole_lists_give_the_kl_of_the_textbook() -> None:
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert least_kl(logs(a=0.5, b=0.5), logs(a=0.25, b=0.75)) == pytest.approx(expected)


def test_what_neither_lists_is_one_outcome_more() -> None:
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert least_kl(logs(a=0.5), logs(a=0.8)) == pytest.approx(expected)


def test_a_token_that_b_does_not_list_can_have_no_more_than_its_least() -> None:
    # B lists nothing below 0.01: a token that A gives 0.9 has 0.01 there at most.
    found = least_kl(logs(a=0.9, b=0.05), logs(c=0.98, d=0.01))
    assert found == pytest.approx(0.95 * math.log(0.95 / 0.02) + 0.05 * math.log(0.05 / 0.98))
    assert found > 3


@pytest.mark.parametrize("seed", range(40))
def test_the_lists_never_claim_more_than_the_whole_vocabularies(seed: int) -> None:
    random = np.random.default_rng(seed)
    p, q = (random.dirichlet(np.full(60, 0.2)) + 1e-9 for _ in range(2))
    if seed % 2:
        q = p * np.exp(random.normal(0, 0.3, 60))
    p, q = p / p.sum(), q / q.sum()
    for k in (1, 5, 20, 60):
        tops = [{f"t{i}": float(np.log(one[i])) for i in np.argsort(-one)[:k]} for one in (p, q)]
        whole = float(np.sum(p * np.log(p / q)))
        found = least_kl(*tops)
        assert 0 <= found <= whole + 1e-9
        if k == 60:
            assert found == pytest.approx(whole, abs=1e-6)


def answered(*tokens: str, **tops: float) -> Sample:
    steps = tuple(SampledToken(i, i, token, logs(**(tops or {token.strip(): 0.9}))) for i, token in enumerate(tokens))
    return Sample(prompt=PROMPT, answer="".join(tokens), steps=steps)


def test_answers_part_at_the_first_other_token_and_nothing_is_compared_behind_it() -> None:
    pair = paired(answered(" a", " b", " c", " d"), answered(" a", " b", " x", " d"))
    assert pair.parts_at == 2
    assert [one.position for one in pair.greedy] == [0, 1, 2]
    assert [one.agrees for one in pair.greedy] == [True, True, False]


def test_a_near_tie_has_a_small_margin() -> None:
    tie = paired(answered(" a", a=0.5), answered(" b", a=0.5))
    assert tie.margin is not None
    clear = Sample(prompt=PROMPT, answer=" a", steps=(SampledToken(0, 0, "a", logs(a=0.9, b=0.05)),))
    other = Sample(prompt=PROMPT, answer=" b", steps=(SampledToken(0, 0, "b", logs(b=0.9, a=0.05)),))
    assert paired(clear, other).margin == pytest.approx(math.log(0.9 / 0.05))


def test_where_tokens_are_left_out_of_the_list_nothing_is_said_of_the_place_where_answers_part() -> None:
    one, other = answered("a", "a", a=0.9, c=0.05), answered("a", "c", a=0.9, c=0.05)
    assert paired(one, other).is_clear
    other.output_tokens = 6
    pair = paired(one, other)
    assert (pair.parts_at, pair.margin, len(pair.greedy)) == (1, None, 1)


def test_an_answer_that_stops_earlier_parts_there() -> None:
    assert paired(answered(" a", " b"), answered(" a")).parts_at == 1
    assert paired(answered(" a", " b"), answered(" a", " b")).parts_at is None


def test_without_log_probabilities_words_are_compared() -> None:
    one, other = (Sample(prompt=PROMPT, answer=text) for text in ("red green blue", "red green grey"))
    assert paired(one, other).parts_at == 2
    assert paired(one, other).greedy == ()


def test_forced_places_are_those_that_both_have() -> None:
    one = Sample(prompt=PROMPT, forced=(SampledToken(4, 1, "", logs(a=0.9)), SampledToken(9, 2, "", logs(a=0.9))))
    other = Sample(prompt=PROMPT, forced=(SampledToken(9, 2, "", logs(b=0.9)),))
    (point,) = paired(one, other).forced
    assert (point.position, point.agrees) == (2, False)
