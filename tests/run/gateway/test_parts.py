"""The gateway's parts by themselves: what it reads of a body, its breaker, engines' metrics, how answers are relayed."""

import json
from base64 import b64encode

import pytest
from hypothesis import given, strategies as st

from crosstie.catalog.vision import image_rule
from crosstie.core.errors import BadInput
from crosstie.route.lengths import Lengths
from crosstie_gateway.gateway.asks import _attached_tokens
from crosstie_gateway.gateway.backend import IN_A_ROW, Breaker, engine_load
from crosstie_gateway.gateway.body import Attached, read_body, usage_of, with_model, with_usage_requested
from crosstie_gateway.gateway.transcript import DONE, is_done
from crosstie_gateway.wire.outline import Outline


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_what_is_read_of_a_body() -> None:
    said = body(stream=True, max_tokens=9, user="u", tools=[{"x": 1}], unknown={"deep": [1]})
    asked = read_body(said)
    assert (asked.model, asked.stream, asked.most_output, asked.session) == ("m", True, 9, "u")
    assert asked.options_absent
    assert not asked.wants_usage
    assert asked.prompt_bytes == len(b'[{"x": 1}][{"role": "user", "content": "hi"}]')
    assert said[asked.prompt_at :].startswith(b'"messages": [{"role"')
    assert read_body(body(max_tokens=5, max_completion_tokens=7)).most_output == 7
    assert read_body(body(stream_options={"include_usage": True})).wants_usage
    assert not read_body(body(stream_options=None)).options_absent


@pytest.mark.parametrize("said", [b"", b"{", b"[1]", b'"text"', b'{"model": 3}', b"\xff\xfe{}"])
def test_a_body_that_is_none(said: bytes) -> None:
    with pytest.raises(BadInput):
        read_body(said)


def test_a_field_of_another_kind_is_read_as_engines_do_or_refused_by_its_name() -> None:
    assert [read_body(body(max_tokens=said)).most_output for said in ("16", 16.0, "16.0", 16)] == [16] * 4
    assert [read_body(body(stream=said)).stream for said in (1, "true", "False", 0)] == [True, True, False, False]
    assert read_body(body(user=7)).session is None
    for name, wrong in (("max_tokens", "many"), ("stream", "yes"), ("n", 1.5), ("stream_options", "x")):
        with pytest.raises(BadInput, match=name):
            read_body(body(**{name: wrong}))


def test_token_ids_are_counted_and_text_is_not_taken_for_them() -> None:
    assert read_body(json.dumps({"model": "m", "prompt": [5] * 77}).encode()).token_ids == 77
    assert read_body(json.dumps({"model": "m", "prompt": [[5, 6], [7]]}).encode()).token_ids == 3
    assert read_body(json.dumps({"model": "m", "prompt": ["1, 2", "3"]}).encode()).token_ids is None
    assert read_body(body()).token_ids is None


def picture(width: int, height: int, more: int) -> str:
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return "data:image/png;base64," + b64encode(head + bytes(more)).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x\n" * 300_000}], "user": "u" * 900, "stream": True, "n": 3},
        {"prompt": ["é" * 3000] * 99, "max_tokens": "7", "prompt_cache_key": 'k"' * 900},
        {"tools": [{"function": "y" * 300_000}], "input": [[5, 6], [7]], "model": "m" * 600},
        {"metadata": {"not": "read" * 100_000}, "messages": [{"role": "user", "content": "hi"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": picture(1024, 768, 200_000)}},
                        {"type": "image_url", "image_url": {"url": picture(64, 32, 10)}},
                        {"type": "text", "text": "z" * 9000},
                    ],
                }
            ]
        },
    ],
)
@pytest.mark.parametrize("piece", [700, 65_536, 300_000])
def test_a_long_body_is_read_by_its_outline_as_it_would_be_whole(fields: dict[str, object], piece: int) -> None:
    said = json.dumps({"model": "m", **fields}).encode()
    outline = Outline(10**6, 10**6)
    for at in range(0, len(said), piece):
        assert outline.feed(said[at : at + piece])
    assert len(outline.text) < len(said) / 4
    whole, outlined = read_body(said), read_body(said, outline)
    names = [name for name in dir(whole) if not name.startswith("_") and not callable(getattr(whole, name))]
    assert len(names) > 12
    assert {name: getattr(outlined, name) for name in names} == {name: getattr(whole, name) for name in names}


LONG = "x" * 400_000


@pytest.mark.parametrize(
    "field",
    [
        "tools", "functions", "instructions", "documents", "response_format", "system", "suffix", "input", "prompt",
        "chat_template", "chat_template_kwargs", "text", "structured_outputs", "guided_json", "query", "json_schema",
    ],
)  # fmt: skip
@pytest.mark.parametrize("odd", [{}, {"max_tokens": "7"}], ids=["plain", "odd"])
def test_whatever_a_model_may_be_given_to_read_is_measured(field: str, odd: dict[str, object]) -> None:
    for value in (LONG, [{"type": "x", "description": LONG}], {"deep": {"deeper": LONG}}):
        assert read_body(body(**{field: value}, **odd)).prompt_bytes > len(LONG)


@pytest.mark.parametrize(
    "field", ["tool_calls", "reasoning_content", "function_call", "name", "role", "refusal", "any"]
)
def test_all_of_a_message_is_measured(field: str) -> None:
    for value in (LONG, [{"id": "1", "function": {"name": "f", "arguments": LONG}}]):
        message = {"role": "assistant", "content": None, field: value}
        assert read_body(body(messages=[message])).prompt_bytes > len(LONG)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", 1), (["one"], 1), (["one", "two"], 2), (["a, \"b\"", "c\\", "\\\"", "[", ""], 5), ([1, 2, 3], 1),
        ([[1, 2], [3], [4, 5]], 3), ([], 1), (["x\\"] * 50, 50),
    ],
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 3])
def test_prompts_beside_each_other_and_answers_to_each_multiply(prompt: object, prompts: int, indent: int) -> None:
    def said(**fields: object) -> bytes:
        return json.dumps({"model": "m", **fields}, indent=indent).encode()

    asked = read_body(said(prompt=prompt, n=3))
    assert (asked.prompts, asked.copies) == (prompts, 3 * prompts)
    assert read_body(said(prompt=prompt, n=2, best_of=5)).copies == 5 * prompts
    # Of embeddings, and of the turns of a conversation, nothing is made for each.
    assert read_body(said(input=prompt)).copies == 1
    assert read_body(said(input=[{"role": "user", "content": "one"}] * 4)).prompts == 1


def test_text_in_the_shape_of_a_picture_is_text() -> None:
    url = "data:image/png;base64," + LONG
    for part in (
        {"type": "text", "text": url},
        {"type": "text", "text": 'see "url": "' + url},
        {"type": "file", "file": {"file_data": "data:text/plain;base64," + LONG}},
    ):
        for beside in ([], [{"type": "image_url", "image_url": {"url": "https://x/cat.png"}}]):
            asked = read_body(body(messages=[{"role": "user", "content": [part, *beside]}]))
            assert asked.prompt_bytes - asked.attached.size > len(LONG)
            assert asked.attached.number == len(beside)
    # A tool that takes pictures is no picture.
    assert not read_body(body(tools=[{"parameters": {"image_url": {"type": "string"}}}])).attached.number
    # Whoever leaves out the type of a part has as many.
    links = [{"image_url": {"url": f"https://x/{at}.png"}} for at in range(10)]
    assert read_body(body(messages=[{"role": "user", "content": links}])).attached.images == 10


def test_pictures_are_seen_and_their_bytes_are_no_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000}}
    asked = read_body(
        body(messages=[{"role": "user", "content": [{"type": "text", "text": "what?"}, picture, picture]}])
    )
    assert asked.attached.kinds == {"image"}
    assert asked.attached.number == asked.attached.images == 2
    assert asked.attached.sizes == (), "zeros are no picture"
    assert asked.prompt_bytes - asked.attached.size < 400
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert read_body(body(messages=[{"role": "user", "content": [sound]}])).attached.kinds == {"audio"}


def test_pictures_that_come_along_say_their_size() -> None:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (1024).to_bytes(4, "big") + (768).to_bytes(4, "big") + bytes(9000)
    url = "data:image/png;base64," + b64encode(header).decode()
    given = [{"type": "image_url", "image_url": {"url": where}} for where in (url, "https://x/cat.png", url)]
    attached = read_body(body(messages=[{"role": "user", "content": given}])).attached
    assert (attached.images, attached.sizes) == (3, ((1024, 768), (1024, 768)))


def test_a_picture_is_counted_by_the_rule_of_the_model() -> None:
    lengths = Lengths()
    attached = Attached(4, 5000, frozenset(("image", "audio")), 3, ((1024, 768), (64, 64)))
    assert _attached_tokens(lengths, "m", attached) == 4000
    rule = image_rule("qwen3-vl-32b")
    assert rule is not None
    lengths.images["m"] = rule
    assert _attached_tokens(lengths, "m", attached) == 770 + 66 + 1000 + 1000
    assert _attached_tokens(lengths, "other", attached) == 4000


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=5), st.booleans())
def test_what_the_gateway_changes_changes_nothing_else(fields: dict[str, object], spaced: bool) -> None:
    fields = {**fields, "model": "mine"}
    fields.pop("stream_options", None)
    said = json.dumps(fields, indent=2 if spaced else None).encode()
    assert json.loads(with_model(said, "theirs")) == {**fields, "model": "theirs"}
    wished = with_usage_requested(said, True)
    assert json.loads(wished) == {**fields, "stream_options": {"include_usage": True}}
    # Byte for byte: nothing but the wish is new.
    assert wished.endswith(said[said.index(b"{") + 1 :])


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"other": 1}])
def test_a_wish_is_added_to_what_the_client_said_of_its_stream(options: dict[str, object] | None) -> None:
    said = body(stream=True, stream_options=options)
    wished = json.loads(with_usage_requested(said, read_body(said).options_absent))
    assert wished["stream_options"] == {**(options or {}), "include_usage": True}


def test_an_empty_object_can_be_wished_for_too() -> None:
    assert json.loads(with_usage_requested(b" { } ", True)) == {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}', (3, 4, 0)),
        (b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', (3, 4, 0)),
        (b'{"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 4}}}', (3, 4, 0)),
        (b'{"usage": {"prompt_tokens": 3, "total_tokens": 3}}', (3, 0, 0)),
        (
            b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}',
            (3, 4, 2),
        ),
        (
            b'{"usage": {"input_tokens": 3, "output_tokens": 4, "input_tokens_details": {"cached_tokens": 9}}}',
            (3, 4, 3),
        ),
        (b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": "two"}}}', (3, 0, 0)),
        (b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": 7}}', (3, 0, 0)),
        (b'{"usage": null}', None),
        (b'{"usage": {"prompt_tokens": "three"}}', None),
        (b"not json", None),
    ],
)
def test_usage_as_engines_write_it(answer: bytes, usage: tuple[int, int, int] | None) -> None:
    assert usage_of(answer) == usage


def test_a_breaker_opens_after_faults_in_a_row_and_lets_one_try_again() -> None:
    breaker = Breaker()
    opened = [breaker.failed(0.0) for _ in range(IN_A_ROW)]
    assert opened == [False] * (IN_A_ROW - 1) + [True]
    assert not breaker.check(0.5)
    assert breaker.check(1.0)
    assert breaker.state == "trying"
    assert breaker.failed(1.0)
    # Twice as long the second time.
    assert not breaker.check(2.5)
    assert breaker.check(3.0)
    breaker.succeeded()
    assert breaker.state == "closed"


def test_a_breaker_opens_when_every_other_request_fails_and_not_for_one_in_four() -> None:
    bad, fair = Breaker(), Breaker()
    for i in range(40):
        for breaker, every in ((bad, 2), (fair, 4)):
            if i % every == 0:
                breaker.failed(0.0)
            else:
                breaker.succeeded()
    assert bad.state == "open"
    assert fair.state == "closed"


def test_the_load_that_engines_report() -> None:
    vllm = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1
"""
    load = engine_load(vllm)
    assert load is not None
    assert load[:2] == (5.0, 4.0)
    assert load.kv_used_fraction == pytest.approx(0.3)
    assert engine_load(b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n") == (1.0, 2.0, None)
    assert engine_load(b'sglang:num_running_reqs{x="y"} 7\nsglang:num_queue_reqs 1\nsglang:token_usage 0.25\n') == (
        7.0,
        1.0,
        0.25,
    )
    assert engine_load(b"nothing_known 1\n") is None


@given(st.lists(st.sampled_from([b"data: ", b"data:", b"[DONE]", b"\n", b"\r\n", b" ", b"{}", b"dat"]), max_size=12))
def test_the_last_word_is_found_where_its_pattern_finds_it(said: list[bytes]) -> None:
    events = b"".join(said)
    assert is_done(events) == (DONE.search(events) is not None)
