"""Endpoints asked and judged, on a model of forty words: every way of forcing, every fault, every refusal."""

import asyncio
from typing import Any

import pytest
from tests.prove.parity.fake_engine import Engine, served

from crosstie.core.errors import BadInput
from crosstie.prove.parity.endpoint import WAYS, Asking, Party, Passes, Way, ask_all, cuts
from crosstie.prove.parity.prompts import Prompt, read_prompts
from crosstie.prove.parity.verdict import Gauge, Limits, Parity, interval, judged

TEN = read_prompts().taken(10, None)
# A long prompt is most of the work of ten, and says what the others say.
PROMPTS = tuple(one for one in TEN if one.kind != "long")
FIRST_OF_THE_WAYS = [WAYS[0], *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])]
TOOL = next(one for one in PROMPTS if one.kind == "tool")
JSON = next(one for one in PROMPTS if one.kind == "json")


def asked(a: Engine, b: Engine, prompts: tuple[Prompt, ...] = PROMPTS, **how: Any) -> Passes:
    asking = Asking(tokens=how.pop("tokens", 10), positions=6, **how.pop("asking", {}))
    with served(a), served(b):
        return asyncio.run(ask_all(Party(url=a.url), [Party(url=b.url)], prompts, asking, **how))[0]


def verdict(a: Engine, b: Engine, **how: Any) -> Parity:
    return judged("A", "B", asked(a, b, **how))


def gauge(found: Parity, name: str) -> Gauge:
    (one,) = [one for one in found.gauges if one.name == name]
    return one


@pytest.mark.parametrize("way", WAYS)
def test_the_same_is_the_same_in_every_way(way: Way) -> None:
    found = verdict(Engine(), Engine(), way=way)
    assert (found.verdict, found.way) == ("same", way)
    assert found.positions >= 5 * len(PROMPTS)
    assert gauge(found, "forced KL").high == pytest.approx(0, abs=1e-9)
    assert found.first_divergence.equal == len(PROMPTS)
    assert found.causes == ()


@pytest.mark.parametrize("way", FIRST_OF_THE_WAYS)
def test_a_factor_of_two_is_found_in_every_way(way: Way) -> None:
    found = verdict(Engine(), Engine(sharp=2.0), way=way)
    assert found.verdict == "differs"
    assert gauge(found, "forced KL").low > 0.1
    assert "the weights" in found.causes[-1]


@pytest.mark.parametrize("way", FIRST_OF_THE_WAYS)
def test_the_token_that_stands_there_is_not_taken_for_one_of_the_likeliest(way: Way) -> None:
    passes = asked(Engine(), Engine(), way=way)
    assert min(min(step.top.values()) for one in passes.first for step in one.forced) > -14


def test_weights_that_were_never_loaded_are_not_called_the_same() -> None:
    """vLLM's dummy weights on an H200 in BF16 and FP8: a KL of 1e-17, and a verdict of `same` that meant nothing."""
    found = verdict(Engine(sharp=1e-4), Engine(sharp=1e-4))
    assert found.verdict == "unsure"
    assert any("equally likely" in note for note in found.notes)


def test_a_little_noise_is_still_the_same_and_a_tighter_limit_says_so() -> None:
    passes = asked(Engine(), Engine(sharp=1.01))
    assert judged("A", "B", passes).verdict == "same"
    assert judged("A", "B", passes, Limits(kl=1e-9)).verdict == "differs"


def test_the_best_way_that_both_have_is_taken() -> None:
    assert asked(Engine(), Engine(ways=("echo", "steps"))).way == "echo"
    assert asked(Engine(ways=("prompt_logprobs", "steps")), Engine(ways=("echo", "steps"))).way == "steps"
    assert asked(Engine(), Engine(ways=())).way is None
    with pytest.raises(BadInput, match=r"--way echo: http.* has prompt_logprobs, steps"):
        asked(Engine(), Engine(ways=("prompt_logprobs", "steps")), way="echo")


def test_without_completions_chats_alone_are_compared_and_that_is_said() -> None:
    found = verdict(Engine(), Engine(ways=()))
    assert found.verdict == "same"
    assert any("not teacher-forced" in note for note in found.notes)
    assert verdict(Engine(), Engine(ways=(), sharp=2.0)).verdict == "differs"


def test_without_log_probabilities_answers_are_compared() -> None:
    silent: dict[str, Any] = {"ways": (), "chat_logprobs": False}
    found = verdict(Engine(), Engine(**silent))
    assert found.verdict == "same"
    assert any("word by word" in note for note in found.notes)
    assert verdict(Engine(), Engine(sharp=-1.0, **silent)).verdict == "differs"


def test_a_wrong_template_is_told_from_wrong_weights() -> None:
    found = verdict(Engine(), Engine(template="### {} ###"))
    assert found.verdict == "differs"
    assert gauge(found, "forced KL").says == "same"
    assert gauge(found, "chat KL").says == "differs"
    assert any("the chat template" in cause for cause in found.causes)
    assert not any("weights" in cause for cause in found.causes)


@pytest.mark.parametrize("way", FIRST_OF_THE_WAYS)
def test_another_tokenizer_is_told_as_that(way: Way) -> None:
    found = verdict(Engine(), Engine(piece=r"\s*\S{1,2}"), way=way)
    assert found.verdict == "differs"
    assert found.causes[0].startswith("the tokenizer: ")
    assert not any("weights" in cause for cause in found.causes)


def test_places_that_only_one_lists_are_no_other_tokenizer() -> None:
    passes = asked(Engine(), Engine(sharp=2.0), way="steps")
    for one in passes.other:
        one.forced = one.forced[1:]
    assert judged("A", "B", passes).causes[0].startswith("the weights")


@pytest.mark.slow
def test_late_positions_that_differ_are_told_as_that() -> None:
    prompts = tuple(one for one in read_prompts().prompts if one.kind == "long" and one.language != "zh")
    found = verdict(Engine(), Engine(sharp=2.0, right_until=60), prompts=prompts, way="prompt_logprobs")
    assert found.verdict == "differs"
    assert any("RoPE scaling" in cause for cause in found.causes)
    assert found.by_position[0].kl < 0.02 < found.by_position[-1].kl


@pytest.mark.slow
def test_groups_are_by_position_length_and_language() -> None:
    found = verdict(Engine(), Engine(), prompts=TEN)
    assert {one.name for one in found.by_language} == {one.language for one in TEN}
    assert [one.name for one in found.by_position][:2] == ["0-63", "64-255"]
    assert sum(one.prompts for one in found.by_length) == len(TEN)
    assert found.first_divergence.by_token == ()
    apart = verdict(Engine(), Engine(sharp=-1.0)).first_divergence
    assert [(part.name, part.floor, part.answers) for part in apart.by_token] == [("0-7", 0, len(PROMPTS))]


def test_a_is_asked_twice_and_otherwise_the_second_time() -> None:
    a, b = Engine(), Engine()
    asked(a, b, concurrency=2)
    chats = [body["messages"][0]["content"] for path, body in a.asked if path.endswith("chat/completions")][1:]
    texts = [one.text for one in PROMPTS]
    assert sorted(chats) == sorted(texts * 2)
    assert b.most_at_once <= 2


def test_what_a_says_is_what_both_are_forced_through() -> None:
    a, b = Engine(), Engine(sharp=3.0)
    passes = asked(a, b, way="prompt_logprobs")
    forced = [body["prompt"] for path, body in b.asked if not path.endswith("chat/completions")]
    assert f"{PROMPTS[0].text}\n\n{passes.first[0].answer}" in forced


def test_noise_of_a_widens_what_is_allowed() -> None:
    """A says something else every time it is asked, as an engine does whose batching matters."""
    passes = asked(Engine(), Engine(sharp=1.3))
    noisy = Passes(
        a_model="m", b_model="m", way=passes.way, top=20, concurrency=4, first=passes.first, again=passes.other,
        other=passes.other,
    )  # fmt: skip
    plain, held = judged("A", "B", passes), judged("A", "B", noisy)
    assert gauge(plain, "forced KL").says == "differs"
    assert gauge(held, "forced KL").allowed == pytest.approx(2 * gauge(held, "forced KL").floor)
    assert any("above the limit against itself" in note for note in held.notes)
    # An A that far from itself proves nothing.
    assert judged("A", "B", noisy, Limits(kl=1e-6)).verdict != "same"


CALL = {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Lisbon"}'}}], "content": None}
OBJECT = {"content": '{"name": "Ilse", "street": "Harbour Lane", "city": "Whitby"}'}


def answering(**more: Any) -> Engine:
    return Engine(said={TOOL.text[:20]: CALL, JSON.text[:20]: OBJECT} | more.pop("said", {}), **more)


@pytest.mark.parametrize(
    ("prompt", "name", "bad"),
    [
        (TOOL, "invalid tool calls", {"content": "<tool>weather(Lisbon)"}),
        (JSON, "invalid JSON", {"content": '{"name": "Ilse", '}),
        (PROMPTS[0], "repetition", {"content": "it boils and " * 9}),
        (PROMPTS[0], "garbage", {"content": "\ufffd\ufffd the \ufffd\ufffd"}),
        (PROMPTS[0], "empty answers", {"content": ""}),
    ],
)
def test_answers_that_are_no_answers_count_against_b(prompt: Prompt, name: str, bad: dict[str, Any]) -> None:
    good, broken = answering(), answering(said={prompt.text[:20]: bad})
    found = verdict(good, broken, prompts=(prompt,))
    one = gauge(found, name)
    assert (one.a_rate, one.b_rate, one.says) == (0.0, 1.0, "differs")
    assert gauge(verdict(good, good, prompts=(prompt,)), name).says == "same"
    # What A does as badly is not held against B.
    assert gauge(verdict(broken, broken, prompts=(prompt,)), name).says == "same"


def test_what_a_does_not_answer_is_left_out_and_what_b_does_not_is_a_difference() -> None:
    short = PROMPTS[0].text[:12]
    left = verdict(Engine(refuses=short), Engine())
    assert left.verdict == "same"
    assert left.left_out[0].startswith("en-kettle: /chat/completions: status 400")
    assert left.prompts == len(PROMPTS) - 1
    missing = verdict(Engine(), Engine(refuses=short))
    assert missing.verdict == "differs"
    assert "too long" in missing.unanswered[0]


@pytest.mark.slow
def test_fewer_log_probabilities_where_so_many_are_refused() -> None:
    assert asked(Engine(), Engine(most_top=5)).top == 5
    assert asked(Engine(), Engine()).top == 20


def test_an_engine_that_has_too_much_to_do_is_asked_again() -> None:
    busy = Engine(busy=2)
    found = verdict(busy, Engine(), concurrency=1, prompts=PROMPTS[:2])
    assert (found.left_out, busy.busy) == ((), 0)


def test_a_server_of_several_models_wants_a_name() -> None:
    with pytest.raises(BadInput, match="serves one, two: say which by --model"):
        asked(Engine(models=("one", "two")), Engine())


def test_nobody_there_is_one_line() -> None:
    with served(Engine()) as there:
        pass
    with pytest.raises(BadInput, match=there.url):
        asyncio.run(ask_all(Party(url=there.url), [Party(url=there.url)], PROMPTS, Asking()))


def test_a_key_is_sent_to_whom_it_belongs() -> None:
    with served(Engine(key="secret-a")) as a, served(Engine(key="secret-b")) as b:
        one, other = Party(url=a.url, api_key="secret-a"), Party(url=b.url, api_key="secret-b")
        asyncio.run(ask_all(one, [other], PROMPTS[:1], Asking(tokens=2)))
        with pytest.raises(BadInput, match="status 401"):
            asyncio.run(ask_all(one, [one, Party(url=b.url, api_key="secret-a")], PROMPTS[:1], Asking(tokens=2)))


def test_cuts_are_before_words_or_between_signs() -> None:
    text = "one two three four five six seven"
    assert [text[at : at + 1] for at in cuts(text, 3)] == [" ", " ", ""]
    assert cuts("短い文を切ってください", 3)[-1] == 11
    assert cuts("word", 5) == [4]


def test_an_interval_is_over_prompts() -> None:
    assert interval([(1.0, 1.0)] * 4) == (1.0, 1.0, 1.0)
    value, low, high = interval([(0.0, 1.0)] * 5 + [(1.0, 1.0)] * 5)
    assert (value, low < 0.3, high > 0.7) == (0.5, True, True)
    # One prompt with many places is still one prompt.
    value, low, high = interval([(0.0, 1.0), (100.0, 100.0)])
    assert (low, high) == (0.0, 1.0)
