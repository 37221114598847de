"""The bundled prompts cover what they should; a user's own file is refused with its key."""

from pathlib import Path

import pytest

from crosstie.core.errors import BadData
from crosstie.prove.parity.prompts import read_prompts


def test_the_bundled_prompts_have_many_languages_all_kinds_and_lengths() -> None:
    prompts = read_prompts().prompts
    assert len({one.language for one in prompts}) >= 10
    assert {one.kind for one in prompts} == {"chat", "code", "json", "tool", "long"}
    assert min(len(one.text) for one in prompts) < 100
    assert max(len(one.text) for one in prompts) > 3000
    assert all(one.tools for one in prompts if one.kind == "tool")
    assert all(one.wants for one in prompts if one.kind == "json")


def test_a_few_of_them_are_varied_already() -> None:
    assert len({one.kind for one in read_prompts().taken(8, None)}) >= 4


def test_long_prompts_are_made_as_long_as_asked_and_begin_differently() -> None:
    made = read_prompts().taken(1, 2000)[1:]
    assert len(made) == 4
    assert all(8000 <= len(one.text) < 10000 for one in made)
    assert len({one.text[:60] for one in made}) == 4


PROMPT = '[[prompt]]\nid = "a"\nlanguage = "en"\nkind = "chat"\ntext = "Say\\nit."\n'


def test_a_file_of_ones_own_may_have_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(PROMPT)
    assert read_prompts(file).taken(None, None)[0].text == "Say\nit."
    assert len(read_prompts(file).taken(None, 500)) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "prompt: there must be one"),
        (PROMPT + PROMPT, "'a' is there twice"),
        (PROMPT.replace("chat", "song"), r"prompt\[0\].kind"),
        (PROMPT.replace('text = "Say\\nit."', ""), r"prompt\[0\].text: missing"),
        (PROMPT.replace("text", "words"), r"prompt\[0\]"),
        (PROMPT + 'documents = ["x"]', r"prompt\[0\].documents: 'x' is not in the file"),
        (PROMPT + 'tools = ["x"]', r"prompt\[0\].tools: 'x' is not in the file"),
        ("[[prompts]]", "prompts: unknown key"),
    ],
)
def test_slips_are_named(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(BadData, match=says):
        read_prompts(file)
