"""What an answer is as an answer, whatever it says: a valid tool call, valid JSON, a loop, or garbage."""

import json
import re
import unicodedata
from typing import Any

from crosstie.prove.parity.prompts import OfferedTool
from crosstie.prove.parity.samples import Sample

# A unit that follows itself so often is a loop.
_TIMES = 4
_LONGEST_UNIT = 120
_LEAST_LOOP = 24
# Of letters in scripts that the prompt does not have, and of signs that no text has.
_MOST_STRANGE = 0.3
_MOST_BROKEN = 0.02
_LEAST_LETTERS = 20
_FENCE = re.compile(r"^```[a-z]*\s*(.*?)\s*```$", re.DOTALL)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
}  # fmt: skip


def calls_a_tool_rightly(sample: Sample) -> bool:
    """Calls one of the tools that were offered, with all that it requires, each of its type."""
    tools = {tool.name: tool for tool in sample.prompt.tools}
    return bool(sample.calls) and all(
        call.name in tools and _fits(tools[call.name], call.arguments) for call in sample.calls
    )


def _fits(tool: OfferedTool, arguments: str) -> bool:
    given = _parsed(arguments)
    if not isinstance(given, dict) or not set(tool.required) <= given.keys() <= tool.properties.keys():
        return False
    return all(_is(value, tool.properties[key]) for key, value in given.items())


def _is(value: Any, schema: dict[str, Any]) -> bool:
    kind = schema.get("type", "")
    typed = isinstance(value, _TYPES.get(kind, object)) and not (isinstance(value, bool) and kind != "boolean")
    return typed and value in schema.get("enum", [value])


def is_wanted_json(sample: Sample) -> bool:
    """An object with the keys that were asked for; a code fence around it is forgiven."""
    said = sample.answer.strip()
    fenced = _FENCE.match(said)
    parsed = _parsed(fenced[1] if fenced else said)
    return isinstance(parsed, dict) and set(sample.prompt.wants) <= parsed.keys()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def loops(text: str) -> bool:
    """Ends in a unit that follows itself four times or more, for half of the text or more."""
    end = text.rstrip()
    for size in range(1, min(_LONGEST_UNIT, len(end) // _TIMES) + 1):
        unit, times = end[-size:], 1
        while end[-size * (times + 1) : len(end) - size * times] == unit:
            times += 1
        if times >= _TIMES and size * times >= max(_LEAST_LOOP, len(end) // 2) and unit.strip():
            return True
    return False


def is_garbage(text: str, prompt: str) -> bool:
    """Broken signs, or mostly letters of scripts that the prompt has none of and Latin is not."""
    if not text.strip():
        return False
    broken = sum(c == "\ufffd" or (unicodedata.category(c) in ("Cc", "Co", "Cn") and c not in "\n\t\r") for c in text)
    if broken > max(1, _MOST_BROKEN * len(text)):
        return True
    known = {_script(c) for c in prompt if c.isalpha()} | {"LATIN"}
    letters = [c for c in text if c.isalpha()]
    strange = sum(_script(c) not in known for c in letters)
    return len(letters) >= _LEAST_LETTERS and strange > _MOST_STRANGE * len(letters)


def _script(letter: str) -> str:
    script = unicodedata.name(letter, "?").split(" ")[0]
    # Japanese is written in three.
    return "CJK" if script in ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA") else script
