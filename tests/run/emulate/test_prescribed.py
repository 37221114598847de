"""What requests prescribe of an answer: tools that have to be called, JSON schemas, prompts said back, logprobs. By
OpenAI's own client, so that what it and its users check holds."""

import json
import math
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI
from pydantic import BaseModel, Field
from tests.run.emulate.running import CHAT, SMALL, chat, emulated_beside, emulating

from crosstie.core.errors import BadInput
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.schemas import example

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}


class Step(BaseModel):
    explanation: str
    weight: float = Field(gt=0, le=1)


class Node(BaseModel):
    name: str
    children: list["Node"]
    parent: "Node | None" = None


class Solution(BaseModel):
    steps: list[Step] = Field(min_length=2, max_length=3)
    kind: Literal["exact", "rounded"]
    tree: Node
    note: str | None
    scores: dict[str, int]
    count: int = Field(ge=3, multiple_of=4)


SCHEMAS: list[Any] = [
    Solution.model_json_schema(),
    Node.model_json_schema(),
    WEATHER["function"]["parameters"],  # type: ignore[index]
    {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}, "id": {"format": "uuid"}}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"const": "x"}, {"type": "number"}], "items": False},
    {"type": ["null", "string"], "minLength": 12, "maxLength": 14},
    {"oneOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
     "$defs": {"b": {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}}},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"type": "integer", "maximum": -7},
    {"type": "object", "required": ["unsaid"]},
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_value_is_what_its_schema_asks_for(schema: Any) -> None:
    value = json.loads(json.dumps(example(schema)))
    Draft202012Validator(schema).validate(value)
    assert example(schema) == value


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "string", "pattern": "^a+$"}, "regular expressions"),
        ({"$ref": "#/$defs/none"}, "names nothing"),
        ({"$ref": "https://example.com/schema"}, "names nothing"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "without end"),
        ({"type": "thing"}, "no type 'thing'"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.7}, "no integer"),
        (False, "is an object"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_and_not_answered_wrongly(schema: Any, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        example(schema)


def test_openais_client_gets_the_tool_call_and_the_format_that_it_asked_for() -> None:
    with emulated_beside(speed=50.0) as made:
        client = OpenAI(base_url=made.fleet.pools[0].backends[0], api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "How warm is it in Oslo?"}]
        tools: Any = [TIME, WEATHER]

        def create(**more: Any) -> Any:
            return client.chat.completions.create(model=SMALL, messages=messages, **more)

        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        choice = create(tools=tools, tool_choice=named).choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "get_weather")
        Draft202012Validator(WEATHER["function"]["parameters"]).validate(json.loads(call.function.arguments))  # type: ignore[index]
        required = create(tools=tools, tool_choice="required").choices[0]
        assert [(one.function.name, one.function.arguments) for one in required.message.tool_calls] == [
            ("get_time", "{}")
        ]
        for said in ("auto", "none"):
            plain = create(tools=tools, tool_choice=said, max_tokens=5).choices[0]
            assert plain.message.tool_calls is None
            assert plain.message.content.startswith("This answer")
        pieces = list(create(tools=tools, tool_choice=named, stream=True))
        deltas = [piece.choices[0].delta.tool_calls[0] for piece in pieces if piece.choices[0].delta.tool_calls]
        assert deltas[0].function.name == "get_weather"
        assert deltas[0].id.startswith("call_emulated")
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        cut = create(tools=tools, tool_choice=named, max_tokens=2).choices[0]
        assert (cut.finish_reason, cut.message.tool_calls[0].function.arguments) == (
            "length",
            call.function.arguments[:8],
        )

        parsed = client.chat.completions.parse(model=SMALL, messages=messages, response_format=Solution)
        assert isinstance(parsed.choices[0].message.parsed, Solution)
        with client.chat.completions.stream(model=SMALL, messages=messages, response_format=Solution) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
        loose = create(response_format={"type": "json_object"})
        assert isinstance(json.loads(loose.choices[0].message.content), dict)
        assert loose.usage.completion_tokens == -(-len(loose.choices[0].message.content) // 4)
        answered = client.responses.parse(model=SMALL, input="How warm?", text_format=Solution)
        assert answered.output_parsed == parsed.choices[0].message.parsed


def test_logprobs_are_of_every_token_and_of_no_more_chances_than_there_are() -> None:
    with emulated_beside(speed=50.0) as made:
        client = OpenAI(base_url=made.fleet.pools[0].backends[0], api_key="none", max_retries=0)
        asked: Any = {"model": SMALL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30,
                      "logprobs": True, "top_logprobs": 4, "extra_body": {"ignore_eos": True}}  # fmt: skip
        whole = client.chat.completions.create(**asked).choices[0]
        told = whole.logprobs.content
        assert "".join(one.token for one in told) == whole.message.content
        assert len(told) == 30
        for one in told:
            assert [one.top_logprobs[0].token, one.top_logprobs[0].logprob] == [one.token, one.logprob]
            assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0
            assert bytes(one.bytes).decode() == one.token
        streamed = client.chat.completions.create(**asked, stream=True)
        pieces = [one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
        assert pieces == told


def test_a_prompt_is_said_back_with_its_logprobs_as_evaluations_ask() -> None:
    with emulated_beside(speed=50.0) as made:
        client = OpenAI(base_url=made.fleet.pools[0].backends[0], api_key="none", max_retries=0)
        prompt = 'Grüße: "to" be\nor'
        for limit in (0, 1, 3):
            asked: Any = {"model": SMALL, "prompt": prompt, "max_tokens": limit, "echo": True, "logprobs": 1}
            choice = client.completions.create(**asked).choices[0]
            assert choice.text.startswith(prompt)
            assert len(choice.text) == len(prompt) + 4 * limit
            told = choice.logprobs
            assert len(told.tokens) == -(-len(prompt.encode()) // 4) + limit
            assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
            assert told.token_logprobs[0] is None
            assert all(value <= 0.0 for value in told.token_logprobs[1:])
        streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
        assert streamed == choice.text
        numbers: Any = client.completions.create(model=SMALL, prompt=[5, 6, 7], max_tokens=1, echo=True, logprobs=1)
        assert len(numbers.choices[0].logprobs.tokens) == 4
        plain: Any = client.completions.create(model=SMALL, prompt=prompt, max_tokens=2, logprobs=0)
        told = plain.choices[0].logprobs
        assert (len(told.tokens), told.top_logprobs) == (2, None)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tool_choice": "required"}, "`tools` must be set"),
        ({"tool_choice": {"function": {"name": "x"}}, "tools": [TIME]}, "does not match any"),
        ({"top_logprobs": 2}, "`logprobs` must be set"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20"),
        ({"response_format": {"type": "json_schema"}}, "needs its schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "x"}}}}, "pattern"),
    ],
)
def test_what_cannot_be_answered_so_is_a_400_that_says_why(body: dict[str, Any], says: str) -> None:
    async def scenario() -> None:
        async with emulating() as (_, client):
            answer = await client.post(CHAT, chat("hi", **body))
            assert answer.status == 400
            assert says in json.loads(answer.body)["error"]["message"]

    run_on_loop(scenario())


def test_the_client_raises_as_it_does_at_a_real_engine() -> None:
    with emulated_beside(speed=50.0) as made:
        client = OpenAI(base_url=made.fleet.pools[0].backends[0], api_key="none", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(
                model=SMALL, messages=[{"role": "user", "content": "hi"}], tool_choice="required"
            )
