"""Prompts of words: English sentences of our own making, cut to a length in tokens, alike where a trace says so.

No two runs share a text, or the second would be served from a cache; within one, blocks that a trace numbers alike are
alike. How long a token is is the tokenizer's own business: where it says how many tokens each word has, prompts are put
together from words to just the length asked for; else bytes a token are learnt from what the engine counted of the
first prompts.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from operator import sub
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from crosstie.catalog.reading import read_toml
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.prove.replay.texts import PromptTexts
from crosstie.prove.replay.traffic import TimedRequest

_FILE = Path(__file__).parent / "data" / "sentences.toml"
_SENTENCES = 16_000
# Prompts of counted words begin so: whether a tokenizer sees a space before a first word does not matter then.
_FIRST = b"In"
# Words that tell one text from all others.
_NAME_WORDS = 8
# Of the line that all prompts of a run begin with; what it has more or less is the template's then.
LINE_TOKENS = 8
# Text has four to five bytes a token; emulated replicas count four.
USUAL_BYTES = 4.0


@cache
def corpus() -> bytes:
    """About 1.3 MB of plain ASCII that JSON need not escape; the same everywhere."""
    draw = random.Random(20261116)
    parts = list(read_toml(_FILE).values())
    sentences = []
    for _ in range(_SENTENCES):
        who, does, what, where, then = (draw.choice(some) for some in parts)
        words = [who, does, what, where] if draw.random() < 0.5 else [who, does, what, where + ",", then]
        sentences.append(" ".join(words).capitalize() + ". ")
    return "".join(sentences).encode("ascii")


@cache
def vocabulary() -> tuple[bytes, ...]:
    """Every word of the text once, with the comma or full stop that follows it."""
    return tuple(sorted(set(corpus().split())))


# A word of the text, and its tokens.
Word = tuple[bytes, int]


class _Places(NamedTuple):
    """Where words of the text begin, how many tokens there are before each, and those that are one token."""

    begins: list[int]
    tokens: list[int]
    ones: list[bytes]


@lru_cache(maxsize=8)
def _places(words: tuple[Word, ...]) -> _Places:
    costs = dict(words)
    begins, tokens, at, so_far = [0], [0], 0, 0
    for word in corpus().split():
        at += len(word) + 1
        so_far += costs[word]
        begins.append(at)
        tokens.append(so_far)
    return _Places(begins, tokens, [word for word, cost in words if cost == 1])


class Sizing(NamedTuple):
    """Tokens of a prompt are `overhead` (its template's) and one for each so many bytes of its text."""

    bytes_per_token: float = USUAL_BYTES
    overhead: float = 0.0
    # Tokens of every word: lengths are then exact, and `overhead` has the first word's.
    words: tuple[Word, ...] = ()
    # What counts the lengths, in words.
    counted_by: str = "guess"
    # What prompts are cut from; None: words of our own.
    texts: PromptTexts | None = None

    def size(self, tokens: int) -> int:
        return max(round((tokens - self.overhead) * self.bytes_per_token), 1)

    @property
    def template_tokens(self) -> float:
        """Tokens around a text; the first word, which is always the same, is taken for one."""
        return self.overhead - bool(self.words)

    @property
    def block_bytes(self) -> int:
        return round(BLOCK_TOKENS * self.bytes_per_token)

    def learnt(self, sizes: Sequence[int], tokens: Sequence[int]) -> "Sizing":
        """By what was counted of texts of these sizes; as it was where they say nothing."""
        if len(set(sizes)) < 2:
            return self
        slope, overhead = (float(number) for number in np.polyfit(sizes, tokens, 1))
        if not 1 / 16 <= slope <= 2.0:
            return self
        if overhead < 0.0:
            # A template takes tokens and gives none.
            slope, overhead = sum(tokens) / sum(sizes), 0.0
        by = "what the engine counted of four prompts"
        return self._replace(bytes_per_token=1.0 / slope, overhead=overhead, counted_by=by)

    def with_words(self, words: tuple[Word, ...], counted_by: str) -> "Sizing":
        places = _places(words)
        return Sizing(places.begins[-1] / places.tokens[-1], self.overhead, words, counted_by)

    def settled(self, sizes: Sequence[int], asked: Sequence[int], tokens: Sequence[int]) -> "Sizing":
        """By what was counted of first prompts: their template, if words add up; else as if no words were known."""
        if self.texts is not None and self.texts.tokens:
            return self._replace(overhead=self.overhead + median(map(sub, tokens, asked)))
        around = {counted - length for counted, length in zip(tokens, asked, strict=True)}
        if self.words and len(around) == 1:
            return self._replace(overhead=self.overhead + around.pop())
        return self._replace(words=(), overhead=0.0).learnt(sizes, tokens)


class Wording(NamedTuple):
    """What all requests of a run have in common."""

    model: str
    sizing: Sizing = Sizing()
    # Of the run: its texts are like no other's.
    salt: int = 0
    chat: bool = True
    # Answers of just the length asked for: no end of text ends them.
    ignore_eos: bool = True
    # Fields of every request besides, as JSON has them.
    more: tuple[tuple[str, object], ...] = ()

    def body(self, request: TimedRequest, number: int) -> bytes:
        keys = msgspec.json.encode(self._keys(request.output_tokens))[:-1]
        before, after = (b'"messages":[{"role":"user","content":"', b'"}]}') if self.chat else (b'"prompt":"', b'"}')
        return b"%b,%b%b%b" % (keys, before, text(request, number, self.salt, self.sizing), after)

    def conversation(self, messages: Sequence[Mapping[str, str]], output_tokens: int) -> bytes:
        return msgspec.json.encode({**self._keys(output_tokens), "messages": messages})

    def _keys(self, output_tokens: int) -> dict[str, object]:
        fields: dict[str, object] = {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": output_tokens,
        }  # fmt: skip
        return fields | ({"ignore_eos": True} if self.ignore_eos else {}) | dict(self.more)


def text(request: TimedRequest, number: int, salt: int, sizing: Sizing) -> bytes:
    """Of the request's length, as JSON has it: its blocks, where it has any, then words of its own."""
    if sizing.texts is not None:
        return msgspec.json.encode(cut_text(request, number, salt, sizing))[1:-1]
    if sizing.words:
        return _exact(request, number, salt, sizing)
    size = sizing.size(request.input_tokens)
    pieces = [_words(b"Chapter %x-%x. " % (block, salt), block, sizing.block_bytes) for block in request.blocks]
    whole = b"".join(pieces)
    if len(whole) < size:
        whole += _words(b"Request %x-%x. " % (number, salt), number, size - len(whole))
    return whole[:size]


def cut_text(request: TimedRequest, number: int, salt: int, sizing: Sizing) -> str:
    """From somebody's texts: where blocks are alike, so is what stands for them."""
    texts = sizing.texts
    assert texts is not None
    unit = 1.0 if texts.tokens else sizing.bytes_per_token
    # Another one in every run, so that the first request of each has another text.
    number += salt % len(texts.texts)
    left = (request.input_tokens - sizing.overhead) * unit
    blocks = [f"Run {salt:08x}.\n"]
    left -= LINE_TOKENS if texts.tokens else len(blocks[0])
    for block in request.blocks:
        blocks.append(texts.cut(block, min(left, BLOCK_TOKENS * unit)))
        left -= BLOCK_TOKENS * unit
    return "".join([*blocks, texts.cut(number, left)])


def _words(name: bytes, number: int, size: int) -> bytes:
    """A name, which is like no other, and whole words from somewhere in the text."""
    all_of_it = corpus()
    # Odd steps through the text: neighbours begin far apart.
    begin = all_of_it.index(b" ", number * 7_368_787 % (len(all_of_it) - 100)) + 1
    prompt = name + all_of_it[begin : begin + size - len(name)]
    while len(prompt) < size:
        prompt += all_of_it[: size - len(prompt)]
    return prompt[:size]


def _exact(request: TimedRequest, number: int, salt: int, sizing: Sizing) -> bytes:
    places, left = _places(sizing.words), round(request.input_tokens - sizing.overhead)
    pieces = [_FIRST]
    for block in request.blocks:
        pieces += _counted(b"block", block, salt, min(left, BLOCK_TOKENS), places)
        left -= min(left, BLOCK_TOKENS)
    return b" ".join([*pieces, *_counted(b"request", number, salt, left, places)])


def _counted(kind: bytes, number: int, salt: int, tokens: int, places: _Places) -> list[bytes]:
    """A name in words, which is like no other, and words from somewhere in the text: so many tokens."""
    if tokens <= 0:
        return []
    drawn = int.from_bytes(blake2b(b"%b %d %d" % (kind, number, salt), digest_size=16).digest())
    pieces = []
    for _ in range(min(tokens, _NAME_WORDS)):
        drawn, at = divmod(drawn, len(places.ones))
        pieces.append(places.ones[at])
    left, begin = tokens - len(pieces), drawn % (len(places.begins) - 1)
    while left:
        before = places.tokens[begin]
        end = bisect_right(places.tokens, before + left) - 1
        if end > begin:
            pieces.append(corpus()[places.begins[begin] : places.begins[end] - 1])
            left -= places.tokens[end] - before
        if end < len(places.begins) - 1:
            # The next word is longer than what is left.
            pieces += places.ones[:1] * left
            return pieces
        begin = 0
    return pieces
