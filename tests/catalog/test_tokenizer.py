"""Tokenizers from a model's own files: what they read as transformers does, and what they leave to engines."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tokens import SPECIAL, TEMPLATE, written

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.errors import BadData, BadInput

USER = {"role": "user", "content": "What is a fleet?"}
LONG = {"role": "system", "content": "You answer briefly. " * 60}
FLEET = """format = 1
name = "two"
policy = "prefix"

[[pool]]
name = "one"
model = "m"
{keys}
backends = ["http://a:8000/v1", "http://b:8000/v1"]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model"))


def body(**given: Any) -> bytes:
    return json.dumps({"model": "m", **given}).encode()


def ids(words: Tokenizer, **given: Any) -> list[int]:
    found = words.read(body(**given))
    assert found is not None
    return found[0]


def by_hand(file: Path, text: str) -> list[int]:
    import tokenizers

    found: list[int] = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    return found


@pytest.mark.transformers
def test_a_chat_is_read_as_transformers_reads_it(file: Path) -> None:
    import transformers

    theirs: Any = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=SPECIAL[0])
    theirs.chat_template = TEMPLATE
    words = Tokenizer(file)
    for messages in ([USER], [LONG, USER], [LONG, USER, {"role": "assistant", "content": "Ships. " * 80}, USER]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        expected = expected["input_ids"] if not isinstance(expected, list) else expected
        assert ids(words, messages=messages) == list(expected)
        # From what was kept of it, too.
        assert ids(words, messages=messages) == list(expected)


def test_pieces_that_were_read_before_are_not_read_again(file: Path) -> None:
    words = Tokenizer(file)
    first = ids(words, messages=[LONG, USER])
    kept = dict(words._kept)
    assert any("briefly" in text for text in kept)
    again = ids(words, messages=[LONG, {"role": "user", "content": "And a pool?"}])
    assert again[: len(first) - 20] == first[: len(first) - 20]
    assert dict(words._kept) == kept


def test_what_is_kept_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosstie.catalog.tokenizer._KEPT", 2000)
    words = Tokenizer(file)
    for number in range(9):
        ids(words, messages=[{"role": "user", "content": f"{number} " * 300}])
    assert 0 < sum(map(len, words._kept)) == words._kept_size <= 2000


def test_a_completion_is_read_with_the_tokens_that_its_tokenizer_adds(file: Path) -> None:
    words = Tokenizer(file)
    plain = by_hand(file, "Once upon a time")
    assert ids(words, prompt="Once upon a time", add_special_tokens=False) == plain
    assert ids(words, prompt="Once upon a time") == [0, *plain]
    assert ids(words, prompt=["Once upon a time"]) == [0, *plain]
    assert ids(words, prompt=[5, 6, 7]) == ids(words, prompt=[[5, 6, 7]]) == [5, 6, 7]


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]},
        {"messages": [USER], "chat_template": "{{ messages }}"},
        {"messages": [USER, {"role": "assistant", "content": "A"}], "continue_final_message": True},
        {"messages": [USER], "truncate_prompt_tokens": 5},
        {"messages": "nothing"},
        {"messages": [7]},
        {"prompt": ["one", "two"]},
        {"prompt": [-1]},
        {"prompt": {}},
        {"input": "to be embedded"},
        {"messages": [{"role": "forbidden", "content": "x"}]},
    ],
)
def test_what_engines_may_read_otherwise_is_left_to_them(file: Path, given: dict[str, Any]) -> None:
    assert Tokenizer(file).read(body(**given)) is None


def test_of_two_prompts_the_one_counts_that_the_path_means(file: Path) -> None:
    words = Tokenizer(file)
    both = body(messages=[USER], prompt="Once upon a time " * 9)
    assert words.read(both, "/v1/completions") == words.read(body(prompt="Once upon a time " * 9))
    assert words.read(both, "/v1/chat/completions") is None
    assert words.read(both) is None


def test_what_is_no_json_is_left_to_others(file: Path) -> None:
    assert Tokenizer(file).read(b"{") is None
    assert Tokenizer(file).read(b"[]") is None


def test_a_salted_prompt_is_counted_and_its_blocks_are_its_own(file: Path) -> None:
    found = Tokenizer(file).read(body(messages=[USER], cache_salt="s"))
    assert found is not None
    assert found[1] is False


def test_texts_in_parts_are_one_text(file: Path) -> None:
    words = Tokenizer(file)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a fleet?"}]
    one = {"role": "user", "content": "What is\na fleet?"}
    assert ids(words, messages=[{"role": "user", "content": parts}]) == ids(words, messages=[one])


def test_a_template_that_takes_parts_is_given_them(file: Path, tmp_path: Path) -> None:
    template = tmp_path / "parts.jinja"
    template.write_text("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}")
    words = Tokenizer(file, template)
    assert words.render({"messages": [USER]}) == "[What is a fleet?]"
    asks = tmp_path / "asks.jinja"
    asks.write_text("{% for m in messages %}{% if 'x' in m.content %}x{% else %}{{ m.content }}{% endif %}{% endfor %}")
    assert Tokenizer(file, asks).render({"messages": [USER]}) == "What is a fleet?"


def test_calls_of_tools_reach_a_template_as_objects(file: Path, tmp_path: Path) -> None:
    template = tmp_path / "calls.jinja"
    template.write_text("{{ messages[0].tool_calls[0].function.arguments.city }} {{ tools | tojson }}")
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    given = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"name": "<t>"}]}
    assert Tokenizer(file, template).render(given) == 'Köln [{"name": "<t>"}]'


def test_files_that_are_none_are_refused_in_a_line(tmp_path: Path, file: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"tokenizer\.json: is no tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(BadData, match="nowhere: cannot be read: No such file"):
        Tokenizer(tmp_path / "nowhere")
    (tmp_path / "bad.jinja").write_text("{% for %}")
    with pytest.raises(BadInput, match=r"bad\.jinja: is no chat template"):
        Tokenizer(file, tmp_path / "bad.jinja")


def test_a_missing_library_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("crosstie.catalog.tokenizer.import_module", missing)
    with pytest.raises(BadInput, match=r"\.\[tokenizer\]"):
        Tokenizer(file)


def test_the_keys_of_a_fleet_are_written_as_they_were_read(tmp_path: Path) -> None:
    keys = 'tokenizer = "words/tokenizer.json"\nkv_events = "tcp://{host}:5557"\nkv_replay = ["tcp://a:1", "tcp://b:2"]'
    (tmp_path / "fleet.toml").write_text(FLEET.replace("{keys}", keys + '\nkv_topic = "kv"'))
    found = read_fleet(Catalog(), tmp_path / "fleet.toml")
    (pool,) = found.pools
    assert pool.tokenizer == str(tmp_path / "words" / "tokenizer.json")
    assert (pool.kv_events, pool.kv_topic) == (("tcp://{host}:5557",), "kv")
    assert pool.kv_replay == ("tcp://a:1", "tcp://b:2")
    (tmp_path / "again.toml").write_text(fleet_text(found))
    assert read_fleet(Catalog(), tmp_path / "again.toml") == found


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('chat_template = "t.jinja"', "pool[0].chat_template: is of no use without tokenizer"),
        ('kv_events = "tcp://{host}:5557"', "pool[0].kv_events: is of no use without tokenizer"),
        ('tokenizer = "t"\nkv_topic = "kv"', "pool[0].kv_topic: is of no use without kv_events"),
        ('tokenizer = "t"\nkv_events = "tcp://a:5557"', "pool[0].kv_events: one address for 2 backends"),
        ('tokenizer = "t"\nkv_events = ["tcp://a:1", "tcp://b:2", "tcp://c:3"]', "3 addresses for 2 backends"),
        ('tokenizer = "t"\nkv_events = []', "pool[0].kv_events: is empty"),
        ('tokenizer = "t"\nkv_events = "{host}:5557"', "is no address such as tcp://{host}:5557"),
        ('tokenizer = "t"\nkv_events = "tcp://{host}:0"', "is no address such as"),
        ('tokenizer = "t"\nkv_events = "tcp://{host}"', "is no address such as"),
        ("tokenizer = 7", "pool[0].tokenizer"),
    ],
)
def test_what_is_wrong_with_them_is_said_with_file_and_key(tmp_path: Path, keys: str, said: str) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.replace("{keys}", keys))
    with pytest.raises(BadData) as refused:
        read_fleet(Catalog(), tmp_path / "fleet.toml")
    assert str(refused.value).startswith(f"{tmp_path / 'fleet.toml'}: pool[0].")
    assert said in str(refused.value)
