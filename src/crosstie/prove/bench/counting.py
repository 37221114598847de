"""How many tokens each word of our text has, by the engine's own tokenizer, so that prompts are as long as asked.

Tokenizers split text at its spaces first, so that the tokens of a text are the sum of those of its words. Where one
does not, what the engine counts of the first prompts says so, and lengths are made of bytes instead.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.prove.bench.endpoint import BenchEndpoint
from crosstie.prove.bench.prompts import Word, vocabulary
from crosstie.run.wire.address import Address
from crosstie.run.wire.client import Headers, Origin
from crosstie.run.wire.fetch import fetch
from crosstie.run.wire.loops import run_on_loop

_AT_A_TIME = 16
# A word stands between two that are always there.
_BETWEEN = ("In the", " the")

Counts = Callable[[Sequence[str]], Awaitable[list[int] | None]]


def words_by_engine(endpoint: BenchEndpoint, api_key: str | None) -> tuple[Word, ...]:
    """Asks /tokenize for every word; nothing where there is none, or where it does not count."""
    return run_on_loop(_asked(endpoint, api_key))


def words_by_file(tokenizer: Tokenizer) -> tuple[Word, ...]:
    async def count(texts: Sequence[str]) -> list[int] | None:
        return [len(tokenizer.encode(text)) for text in texts]

    return run_on_loop(_words(count))


async def _asked(endpoint: BenchEndpoint, api_key: str | None) -> tuple[Word, ...]:
    address = Address(endpoint.url)
    origin = Origin(asyncio.get_running_loop(), address)
    headers: Headers = [(b"content-type", b"application/json")]
    if api_key:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    room = asyncio.Semaphore(_AT_A_TIME)

    async def one(body: dict[str, object]) -> int | None:
        async with room:
            try:
                answer = await fetch(
                    origin, "POST", address.root + "/tokenize", headers=headers, body=json.dumps(body).encode()
                )
                return _count(json.loads(answer.body)) if answer.status == 200 else None
            except (OSError, ValueError, RecursionError):
                return None

    # vLLM's and SGLang's words for it, and llama.cpp's.
    forms = ({"model": endpoint.model}, "prompt"), ({"add_special": True}, "content")
    try:
        for fixed, key in forms:

            async def count(texts: Sequence[str], fixed: Any = fixed, key: str = key) -> list[int] | None:
                first = await one({**fixed, key: texts[0]})
                if first is None:
                    return None
                found = await asyncio.gather(*(one({**fixed, key: text}) for text in texts[1:]))
                rest = [each for each in found if each is not None]
                return [first, *rest] if len(rest) == len(found) else None

            words = await _words(count)
            if words:
                return words
    finally:
        origin.close()
    return ()


def _count(answer: Any) -> int | None:
    """Of a text that is not empty."""
    if not isinstance(answer, dict):
        return None
    count = answer.get("count")
    if isinstance(count, int):
        return count or None
    tokens = answer.get("tokens")
    return len(tokens) or None if isinstance(tokens, list) else None


async def _words(count: Counts) -> tuple[Word, ...]:
    words = vocabulary()
    before, after = _BETWEEN
    texts = [before + after, *(f"{before} {word.decode('ascii')}{after}" for word in words)]
    found = await count(texts)
    if found is None:
        return ()
    costs = [each - found[0] for each in found[1:]]
    # Words that fill up to a length exactly must be among them.
    return tuple(zip(words, costs, strict=True)) if min(costs) == 1 else ()
