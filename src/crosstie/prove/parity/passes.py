"""All prompts put to an endpoint once: a pass. A is asked twice, the second time in another order and with more at
once, since batching alone changes what engines compute: what A differs from itself by is the noise floor."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, Progress, no_progress
from crosstie.prove.parity.endpoint import WAYS, Asking, ParityEndpoint, Rejected, Way
from crosstie.prove.parity.prompts import Prompt
from crosstie.prove.parity.samples import Sample

# The second pass of A has so many times as many requests at once.
TIMES_AS_MANY = 4
T = TypeVar("T")


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: its address, the name of its model (None: the only one that it serves), and its key."""

    url: str
    model: str | None = None
    api_key: str | None = None


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """A asked twice and B once. `way`: how they were forced; None: no way is offered by all."""

    a_model: str
    b_model: str
    way: Way | None
    top: int
    concurrency: int
    first: tuple[Sample, ...]
    again: tuple[Sample, ...]
    other: tuple[Sample, ...]
    # Whether A or B has no model behind it.
    emulated: bool = False

    def __repr__(self) -> str:
        # asyncio.run has its result written out when it gives back the signal handler: thousands of numbers.
        return f"Passes({self.a_model!r}, {self.b_model!r})"


async def ask_all(
    a: Party, others: Sequence[Party], prompts: Sequence[Prompt], asking: Asking, *, concurrency: int = 4,
    way: Way | None = None, on_progress: OnProgress = no_progress,
) -> list[Passes]:  # fmt: skip
    """A beside each of the others. Raises BadInput where one of them cannot be asked at all."""
    ends = [ParityEndpoint(side.url, model=side.model, api_key=side.api_key, asking=asking) for side in (a, *others)]
    try:
        offered = [await end.begin() for end in ends]
        chosen = _common(ends, offered, way)
        # What one of them lists fewer of, the others are not asked for more of.
        top = min(endpoint.top for endpoint in ends)
        for end in ends:
            end.top = top
        # Every prompt is a chat and a text, in every pass.
        progress = Progress(on_progress, "asking", 2 * (1 + len(ends)) * len(prompts))
        first = await _pass(ends[0], prompts, chosen, concurrency, progress, None)
        texts = [f"{sample.prompt.text}\n\n{sample.answer}" for sample in first]
        again = await _pass(ends[0], prompts, chosen, TIMES_AS_MANY * concurrency, progress, texts, backwards=True)
        return [
            Passes(
                a_model=ends[0].model, b_model=end.model, way=chosen, top=top, concurrency=concurrency, first=first,
                again=again, other=await _pass(end, prompts, chosen, concurrency, progress, texts),
                emulated=ends[0].emulated or end.emulated,
            )
            for end in ends[1:]
        ]  # fmt: skip
    finally:
        for end in ends:
            end.close()


def _common(ends: list[ParityEndpoint], offered: list[tuple[Way, ...]], wanted: Way | None) -> Way | None:
    both = [way for way in WAYS if all(way in ways for ways in offered)]
    if wanted is None:
        return both[0] if both else None
    for end, ways in zip(ends, offered, strict=True):
        if wanted not in ways:
            raise BadInput(f"--way {wanted}: {end.url} has {', '.join(ways) or 'none'}")
    return wanted


async def _pass(
    end: ParityEndpoint, prompts: Sequence[Prompt], way: Way | None, at_once: int, progress: Progress,
    texts: list[str] | None, *, backwards: bool = False,
) -> tuple[Sample, ...]:  # fmt: skip
    """`texts`: what to force it through, by prompt; None: each prompt and its own answer to it."""
    numbers = range(len(prompts))
    order = list(reversed(numbers)) if backwards else list(numbers)

    async def chat(number: int) -> Sample:
        return await end.sample(prompts[number])

    samples = dict(zip(order, await _each(order, chat, at_once, progress), strict=True))

    async def force(number: int) -> None:
        sample = samples[number]
        if way is None or sample.error:
            return
        text = f"{sample.prompt.text}\n\n{sample.answer}" if texts is None else texts[number]
        try:
            sample.forced = await end.force(text, way)
        except (Rejected, OSError) as error:
            sample.error = str(error)

    await _each(order, force, at_once, progress)
    return tuple(samples[number] for number in numbers)


async def _each(numbers: list[int], do: Callable[[int], Awaitable[T]], at_once: int, progress: Progress) -> list[T]:
    room = asyncio.Semaphore(at_once)

    async def one(number: int) -> T:
        async with room:
            done = await do(number)
        progress.add(1)
        return done

    return list(await asyncio.gather(*(one(number) for number in numbers)))
