"""Loops, garbage, JSON and tool calls are told from their opposites."""

import pytest

from crosstie.prove.parity.prompts import OfferedTool, Prompt
from crosstie.prove.parity.samples import Sample, ToolCall, calls_a_tool_rightly, is_garbage, is_wanted_json, loops

WEATHER = OfferedTool(
    name="weather",
    description="The weather",
    properties={"city": {"type": "string"}, "unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer"}},
    required=("city",),
)
ASKED = Prompt(id="t", language="en", kind="tool", text="The weather in Rome?", tools=(WEATHER,), wants=("name", "age"))


@pytest.mark.parametrize(
    ("name", "arguments", "right"),
    [
        ("weather", '{"city": "Rome"}', True),
        ("weather", '{"city": "Rome", "unit": "kelvin", "days": 2}', True),
        ("weather", '{"city": "Rome", "days": true}', False),
        ("weather", '{"city": "Rome", "days": "2"}', False),
        ("weather", '{"city": "Rome", "unit": "rankine"}', False),
        ("weather", '{"town": "Rome"}', False),
        ("weather", "{}", False),
        ("weather", '{"city": "Rome"', False),
        ("climate", '{"city": "Rome"}', False),
    ],
)
def test_a_tool_call_names_a_tool_and_gives_what_it_takes(name: str, arguments: str, right: bool) -> None:
    assert calls_a_tool_rightly(Sample(prompt=ASKED, calls=(ToolCall(name, arguments),))) is right


def test_no_call_is_no_valid_call() -> None:
    assert not calls_a_tool_rightly(Sample(prompt=ASKED, answer="It is sunny."))


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('```json\n{"name": "Ada", "age": 36, "more": []}\n```', True),
        ('{"name": "Ada"}', False),
        ('Here it is: {"name": "Ada", "age": 36}', False),
        ('{"name": "Ada", "age": 36', False),
        ("[1, 2]", False),
    ],
)
def test_json_is_an_object_with_the_keys(answer: str, wanted: bool) -> None:
    assert is_wanted_json(Sample(prompt=ASKED, answer=answer)) is wanted


@pytest.mark.parametrize(
    ("text", "looping"),
    [
        ("The river is wide. " * 6, True),
        ("At first it went well, and then " + "the the " * 12, True),
        ("!" * 40, True),
        ("好的" * 20, True),
        ("The river is wide, the bridge is long, and the town lies beyond.", False),
        ("no no no", False),
        ("1. bread\n2. milk\n3. salt\n4. oil\n5. rice", False),
        ("", False),
    ],
)
def test_a_loop_ends_the_text_for_half_of_it_or_more(text: str, looping: bool) -> None:
    assert loops(text) is looping


@pytest.mark.parametrize(
    ("text", "prompt", "garbage"),
    [
        ("The tide rises twice a day.", "Why are there tides?", False),
        ("潮汐主要是由月亮的引力引起的，太阳也有一定影响，所以每天有两次涨潮。", "为什么会有潮汐？", False),
        ("駅のホームに傘を忘れてしまいました。届いていないでしょうか。", "丁寧な文を書いてください。", False),
        ("The answer \ufffd\ufffd\ufffd is \ufffd", "Why are there tides?", True),
        ("ابجد هوز حطي كلمن سعفص قرشت ثخذ", "Why are there tides?", True),
        ("x\x01\x02\x03y", "Why?", True),
        ("", "Why?", False),
    ],
)
def test_garbage_is_broken_signs_or_strange_scripts(text: str, prompt: str, garbage: bool) -> None:
    assert is_garbage(text, prompt) is garbage
