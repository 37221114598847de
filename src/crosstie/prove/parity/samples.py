"""What an endpoint said to one prompt, how far two of them are from each other, and what an answer is as an answer: a
valid tool call, valid JSON, a loop, or garbage.

**The distance.** Engines give the log-probabilities of their k likeliest tokens, not of all. KL(A||B) is therefore the
least that two such lists allow: tokens that both list are compared as they are; those that A alone lists are one
outcome, of which B can have no more than as many times its least listed probability; all else is one outcome more. By
the data-processing inequality that is never above the KL of the whole vocabularies. Nothing is invented for the tail.
"""

import json
import math
import re
import unicodedata
from typing import Any

import msgspec

from crosstie.prove.parity.prompts import OfferedTool, Prompt

Top = dict[str, float]
_LEAST = 1e-12
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


class SampledToken(msgspec.Struct, frozen=True):
    """One place: tokens before it, the likeliest tokens there with their log-probabilities, and the one that stands
    there. `at` tells it from others of the same text: characters before it."""

    at: int
    position: int
    token: str
    top: Top


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Sample(msgspec.Struct, kw_only=True):
    """`answer` is greedy. `steps` are its tokens, empty where the engine gives no log-probabilities."""

    prompt: Prompt
    answer: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: tuple[SampledToken, ...] = ()
    forced: tuple[SampledToken, ...] = ()
    # Empty: it was answered.
    error: str = ""

    @property
    def lists_all(self) -> bool:
        """llama.cpp leaves out tokens that are parts of a sign, so that one token more may come before a place. The
        last one, which ends an answer, is listed by some."""
        return len(self.steps) >= self.output_tokens - 1


class ComparedToken(msgspec.Struct, frozen=True):
    """A place that both have seen with the same text before it."""

    position: int
    kl: float
    agrees: bool


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two samples of one prompt. `parts_at`: tokens (words, without log-probabilities) that both answers begin with;
    None: they are equal to the end."""

    a: Sample
    b: Sample
    forced: tuple[ComparedToken, ...]
    greedy: tuple[ComparedToken, ...]
    parts_at: int | None
    # How much likelier A found its own token than B's where they part, in nats; None: not known.
    margin: float | None

    @property
    def is_clear(self) -> bool:
        """They part at no near tie: A found its own token more than twice as likely as B's."""
        return self.margin is not None and self.margin > math.log(2)


def least_kl(a: Top, b: Top) -> float:
    """The least KL(A||B), in nats, that two lists of log-probabilities allow."""
    shared = a.keys() & b.keys()
    p, q = {t: math.exp(v) for t, v in a.items()}, {t: math.exp(v) for t, v in b.items()}
    kl = math.fsum(p[t] * (a[t] - b[t]) for t in shared)
    # What is left of each outside the shared tokens; rounding may leave less than nothing.
    left_p = max(1.0 - math.fsum(p[t] for t in shared), 0.0)
    left_q = max(1.0 - math.fsum(q[t] for t in shared), 0.0)
    alone = [t for t in a if t not in shared]
    p_alone = min(math.fsum(p[t] for t in alone), left_p)
    if left_p > _LEAST:
        most = min(len(alone) * min(q.values(), default=0.0), left_q)
        q_alone = min(most, left_q * p_alone / left_p)
        kl += _term(p_alone, q_alone) + _term(left_p - p_alone, left_q - q_alone)
    return max(kl, 0.0)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, _LEAST)) if p > _LEAST else 0.0


def likeliest(top: Top) -> str:
    """Of equals the first by name, so that a tie is broken alike on both sides."""
    return min(top, key=lambda token: (-top[token], token))


def _point(a: SampledToken, b: SampledToken) -> ComparedToken:
    return ComparedToken(a.position, least_kl(a.top, b.top), likeliest(a.top) == likeliest(b.top))


def paired(a: Sample, b: Sample) -> Pair:
    others = {step.at: step for step in b.forced}
    forced = tuple(_point(step, others[step.at]) for step in a.forced if step.at in others)
    if a.steps and b.steps:
        said = [step.token for step in a.steps], [step.token for step in b.steps]
    else:
        said = _words(a), _words(b)
    common = next((i for i, (x, y) in enumerate(zip(*said, strict=False)) if x != y), min(map(len, said)))
    # What was said counts, not what was listed of it.
    parts_at = None if _words(a) == _words(b) else common
    # The place where they part has the same text before it too, if no token was left out; what comes after has not.
    seen = parts_at is not None and a.lists_all and b.lists_all
    greedy = tuple(_point(x, y) for x, y in list(zip(a.steps, b.steps, strict=False))[: common + seen])
    margin = None
    if seen and parts_at is not None and parts_at < min(len(a.steps), len(b.steps)):
        top = a.steps[parts_at].top
        # What is not listed is no likelier than the least that is.
        margin = max(top.values()) - top.get(b.steps[parts_at].token, min(top.values()))
    return Pair(a=a, b=b, forced=forced, greedy=greedy, parts_at=parts_at, margin=margin)


def _words(sample: Sample) -> list[str]:
    calls = [word for call in sample.calls for word in (call.name, *call.arguments.split())]
    return [*sample.answer.split(), *calls]


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
