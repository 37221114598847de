"""How many tokens each word of our text has, by the engine's own tokenizer, so that prompts are as long as asked.

Tokenizers split text at its spaces first, so that the tokens of a text are the sum of those of its words. Where one
does not, what the engine counts of the first prompts says so, and lengths are made of bytes instead.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.prove.bench.endpoint import BenchEndpoint
from crosstie.prove.replay.prompts import Word, vocabulary
from crosstie.prove.replay.texts import PromptTexts
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import ask
from crosstie.wire.loops import run_on_loop

_AT_A_TIME = 16
# A word stands between two that are always there.
_BETWEEN = ("In the", " the")

Found = TypeVar("Found")
Counts = Callable[[Sequence[str]], Awaitable[list[int] | None]]


def words_by_engine(endpoint: BenchEndpoint, api_key: str | None) -> tuple[Word, ...]:
    """Asks /tokenize for every word; nothing where there is none, or where it does not count."""
    return run_on_loop(_asked(endpoint, api_key, _words)) or ()


def texts_by_engine(endpoint: BenchEndpoint, api_key: str | None, texts: PromptTexts) -> PromptTexts:
    """With the tokens of their pieces by /tokenize; as they are where there is none."""
    tokens = run_on_loop(_asked(endpoint, api_key, lambda count: _pieces(count, texts)))
    return texts.counted(tokens) if tokens else texts


def words_by_file(tokenizer: Tokenizer) -> tuple[Word, ...]:
    return run_on_loop(_words(_by_file(tokenizer)))


def texts_by_file(tokenizer: Tokenizer, texts: PromptTexts) -> PromptTexts:
    return texts.counted(run_on_loop(_pieces(_by_file(tokenizer), texts)))


def _by_file(tokenizer: Tokenizer) -> Counts:
    async def count(texts: Sequence[str]) -> list[int] | None:
        return [len(tokenizer.encode(text)) for text in texts]

    return count


async def _asked(
    endpoint: BenchEndpoint, api_key: str | None, use: Callable[[Counts], Awaitable[Found]]
) -> Found | None:
    """What `use` makes of the engine's own count, the first of its forms that gives anything."""
    address = Address(endpoint.url)
    origin = Origin(asyncio.get_running_loop(), address)
    room = asyncio.Semaphore(_AT_A_TIME)

    async def one(body: dict[str, object]) -> int | None:
        async with room:
            try:
                answer = await ask(origin, "POST", address.root + "/tokenize", key=api_key, body=body)
            except OSError:
                return None
            return _count(answer.record)

    # vLLM's and SGLang's words for it, and llama.cpp's.
    forms = ({"model": endpoint.model}, "prompt"), ({"add_special": True}, "content")
    try:
        for fixed, key in forms:

            async def count(texts: Sequence[str], fixed: Any = fixed, key: str = key) -> list[int] | None:
                first = await one({**fixed, key: texts[0]})
                if first is None:
                    return None
                counts = await asyncio.gather(*(one({**fixed, key: text}) for text in texts[1:]))
                rest = [each for each in counts if each is not None]
                return [first, *rest] if len(rest) == len(counts) else None

            if used := await use(count):
                return used
    finally:
        origin.close()
    return None


def _count(answer: dict[str, Any]) -> int | None:
    """Of a text that is not empty."""
    count = answer.get("count")
    if isinstance(count, int):
        return count or None
    tokens = answer.get("tokens")
    return len(tokens) or None if isinstance(tokens, list) else None


async def _words(count: Counts) -> tuple[Word, ...]:
    words = vocabulary()
    costs = await _costs(count, [f" {word.decode('ascii')}" for word in words])
    # Words that fill up to a length exactly must be among them.
    return tuple(zip(words, costs, strict=True)) if costs and min(costs) == 1 else ()


async def _pieces(count: Counts, texts: PromptTexts) -> dict[str, int]:
    pieces = sorted(texts.pieces)
    costs = await _costs(count, pieces)
    # White space alone may join what stands around it.
    return {piece: max(cost, 1) for piece, cost in zip(pieces, costs, strict=True)} if costs else {}


async def _costs(count: Counts, pieces: Sequence[str]) -> list[int]:
    """What each piece adds between two words; nothing where nobody counts."""
    before, after = _BETWEEN
    tokens = await count([before + after, *(before + piece + after for piece in pieces)])
    return [each - tokens[0] for each in tokens[1:]] if tokens else []
