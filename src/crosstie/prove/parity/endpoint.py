"""One OpenAI-compatible endpoint: its model, greedy chats, and what it thinks of a text that it is forced through.

Teacher forcing, best way first: `prompt_logprobs` of /v1/completions (vLLM), its `echo` with `logprobs` (vLLM, SGLang),
or `steps`: one-token completions after prefixes of the text, which every server can that has completions with logprobs
(llama.cpp). Both endpoints are asked the same way.

All prompts put to an endpoint once are a pass. A is asked twice, the second time in another order and with more at
once, since batching alone changes what engines compute: what A differs from itself by is the noise floor.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec

from crosstie.core.emulated import FINGERPRINT
from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, Progress, no_progress
from crosstie.prove.parity.prompts import Prompt
from crosstie.prove.parity.samples import Sample, SampledToken, ToolCall, Top
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import ask

Way = Literal["prompt_logprobs", "echo", "steps"]
WAYS: tuple[Way, ...] = get_args(Way)
# Trial text: more than one token for any tokenizer.
_TRIAL = "The train to the coast leaves"
_MOST_ANSWER = 256 * 2**20
_MOST_SAID = 200
# A text is first cut after so many characters: before them there is little to tell models apart by.
_FIRST_CUT = 8
_CJK = 0x2E80
# Before a request is sent again.
_WAITS_S = (0.2, 1.0, 4.0)
# The second pass of A has so many times as many requests at once.
TIMES_AS_MANY = 4
T = TypeVar("T")


class Rejected(Exception):
    """The endpoint answered, but not with what was asked."""


class _Busy(Rejected):
    """It may answer later."""


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """How both are asked. `body`: more keys of every request."""

    top: int = 20
    tokens: int = 64
    positions: int = 12
    timeout_s: float = 300.0
    body: dict[str, Any] = {}


class ParityEndpoint:
    """Must be made, used and closed in one event loop."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, asking: Asking | None = None,
        origin: Origin | None = None,
    ):  # fmt: skip
        """`origin`: whose connections it uses, and does not close; None: its own."""
        at = Address(url)
        self.url, self.model, self.asking = at.url, model or "", asking or Asking()
        # The API may be given with its /v1 or without.
        self._base = at.base if at.base.endswith("/v1") else f"{at.base}/v1"
        self._is_own = origin is None
        self.origin = Origin(asyncio.get_running_loop(), at) if origin is None else origin
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise BadInput(f"the key for {url} has signs that no header can carry")
        self._key = api_key
        self.top = self.asking.top
        self.chat_logprobs = True
        self.emulated = False

    def close(self) -> None:
        if self._is_own:
            self.origin.close()

    # Requests

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = await ask(
            self.origin, method, self._base + path, key=self._key, body=body and body | self.asking.body,
            timeout_s=self.asking.timeout_s, most_bytes=_MOST_ANSWER,
        )  # fmt: skip
        said_object = answer.said
        if answer.status != 200 or not isinstance(said_object, dict):
            said = " ".join(answer.body.decode("utf-8", "replace").split())
            kind = _Busy if answer.status in (429, 503) else Rejected
            raise kind(f"{path}: status {answer.status}: {said[:_MOST_SAID]}")
        self.emulated |= said_object.get("system_fingerprint") == FINGERPRINT
        return said_object

    async def begin(self) -> tuple[Way, ...]:
        """Finds its model and what it can; the ways in which it can be forced, best first. Raises BadInput."""
        try:
            if not self.model:
                self.model = await self._only_model()
            await self.learn_logprobs()
            return await self._ways()
        except (Rejected, OSError, ValueError) as error:
            raise BadInput(f"{self.url}: {error}") from None

    async def _only_model(self) -> str:
        listed = (await self._asked("GET", "/models")).get("data")
        names = [str(row.get("id")) for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
        if len(names) != 1:
            raise Rejected(f"serves {', '.join(names) or 'no model that it names'}: say which by --model")
        return names[0]

    async def learn_logprobs(self) -> None:
        """Fewer log-probabilities where so many are too many, and none where it gives none."""
        for top in (self.top, 5, 0):
            self.top, self.chat_logprobs = top or self.top, top > 0
            try:
                trial = await self._asked("POST", "/chat/completions", self._chat([_user(_TRIAL)], 1))
            except Rejected:
                if not top:
                    raise
                continue
            if not top or _chat_steps(trial, top):
                return

    async def _ways(self) -> tuple[Way, ...]:
        ways: list[Way] = []
        for way in WAYS:
            try:
                steps = await self._forced(_TRIAL, way, [len(_TRIAL)])
            except Rejected:
                continue
            if len(steps) >= (1 if way == "steps" else 2):
                ways.append(way)
        return tuple(ways)

    # Chats

    def _chat(self, messages: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 0, "seed": 1}
        return body | ({"logprobs": True, "top_logprobs": self.top} if self.chat_logprobs else {})

    async def sample(self, prompt: Prompt) -> Sample:
        """Its greedy answer; a failure is part of the sample."""
        tools = {"tools": [tool.offered for tool in prompt.tools]} if prompt.tools else {}
        return await self.answer(prompt, {"messages": [_user(prompt.text)], **tools})

    async def answer(self, prompt: Prompt, asked: dict[str, Any]) -> Sample:
        """The same to a chat in its own words; `prompt` says what is expected of it."""
        body = asked | self._chat(asked["messages"], self.asking.tokens)
        try:
            answer = await self._patiently("/chat/completions", body)
            choice = answer["choices"][0]
            message = choice["message"]
            words = [message.get("reasoning_content") or message.get("reasoning"), message.get("content")]
            used = answer.get("usage") or {}
            return Sample(
                prompt=prompt,
                answer="\n".join(str(word) for word in words if word),
                calls=tuple(_call(call) for call in message.get("tool_calls") or ()),
                finish=str(choice.get("finish_reason")),
                prompt_tokens=int(used.get("prompt_tokens") or 0),
                output_tokens=int(used.get("completion_tokens") or 0),
                steps=_chat_steps(answer, self.top) if self.chat_logprobs else (),
            )
        except (Rejected, OSError) as error:
            return Sample(prompt=prompt, error=str(error))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return Sample(prompt=prompt, error=f"/chat/completions: not OpenAI's form: {error!r}")

    async def _patiently(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Again, where a connection broke or an engine had too much to do: a few times."""
        for wait_s in _WAITS_S:
            try:
                return await self._asked("POST", path, body)
            except (OSError, _Busy):
                await asyncio.sleep(wait_s)
        return await self._asked("POST", path, body)

    # Teacher forcing

    async def force(self, text: str, way: Way) -> tuple[SampledToken, ...]:
        return await self._forced(text, way, cuts(text, self.asking.positions))

    async def _forced(self, text: str, way: Way, cut_at: list[int]) -> tuple[SampledToken, ...]:
        body: dict[str, Any] = {
            "model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0, "seed": 1,
        }  # fmt: skip
        try:
            if way == "prompt_logprobs":
                answer = await self._patiently("/completions", body | {"prompt_logprobs": self.top})
                return _prompt_steps(answer["choices"][0].get("prompt_logprobs"), self.top)
            if way == "echo":
                answer = await self._patiently("/completions", body | {"echo": True, "logprobs": self.top})
                return _echo_steps(answer["choices"][0].get("logprobs"), self.top)
            steps = []
            for at in cut_at:
                # In order: each prefix begins with the one before, which caches keep.
                answer = await self._patiently("/completions", body | {"prompt": text[:at], "logprobs": self.top})
                position = int((answer.get("usage") or {}).get("prompt_tokens") or at)
                if top := _first_top(answer["choices"][0].get("logprobs"), self.top):
                    steps.append(SampledToken(at, position, "", top))
            return tuple(steps)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise Rejected(f"/completions: not OpenAI's form: {error!r}") from None


def cuts(text: str, most: int) -> list[int]:
    """Where a text is cut for `steps`: before a space, or between signs of scripts without them, evenly spread."""
    may = [i for i in range(min(_FIRST_CUT, len(text)), len(text)) if _may_cut(text, i)]
    may.append(len(text))
    if len(may) <= most:
        return may
    return sorted({may[round((i + 1) * len(may) / most) - 1] for i in range(most)})


def _may_cut(text: str, at: int) -> bool:
    before, after = text[at - 1], text[at]
    return (after == " " and not before.isspace()) or (ord(before) >= _CJK and ord(after) >= _CJK)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _call(raw: dict[str, Any]) -> ToolCall:
    said = raw["function"]
    given = said.get("arguments")
    return ToolCall(str(said["name"]), given if isinstance(given, str) else json.dumps(given))


def _kept(pairs: list[tuple[str, float]], most: int) -> Top:
    """The likeliest: engines add the token that stands there, however unlikely, which would falsify what the least
    listed one says of those that are not listed."""
    best = sorted(((token, float(p)) for token, p in pairs if p is not None), key=lambda pair: -pair[1])
    return {token: max(p, -100.0) for token, p in best[:most]}


def _chat_steps(answer: dict[str, Any], most: int) -> tuple[SampledToken, ...]:
    said = (answer["choices"][0].get("logprobs") or {}).get("content") or ()
    steps = []
    for i, token in enumerate(said):
        top = _kept([(other["token"], other["logprob"]) for other in token.get("top_logprobs") or ()], most)
        if not top:
            return ()
        steps.append(SampledToken(i, i, token["token"], top))
    return tuple(steps)


def _prompt_steps(listed: Any, most: int) -> tuple[SampledToken, ...]:
    """vLLM's: for each token of the prompt but the first, by id: logprob, rank and text."""
    steps, at = [], 0
    for i, token in enumerate(listed or ()):
        if not token:
            continue
        top = _kept([(number, said["logprob"]) for number, said in token.items()], most)
        # The token that stands there comes first.
        actual = next(iter(token.values()))
        steps.append(SampledToken(at, i, str(actual.get("decoded_token")), top))
        at += len(str(actual.get("decoded_token") or ""))
    return tuple(steps)


def _echo_steps(listed: Any, most: int) -> tuple[SampledToken, ...]:
    """By their text, of which two tokens may have the same: so the one that stands there, if it is the least likely,
    may be one too many although there are not."""
    listed = listed or {}
    tokens, tops = listed.get("tokens") or (), listed.get("top_logprobs") or ()
    offsets = listed.get("text_offset") or range(len(tokens))

    def others(top: dict[str, Any], actual: str) -> list[tuple[str, float]]:
        known = {token: p for token, p in top.items() if p is not None}
        least = min(known, key=lambda token: known[token], default=None)
        return [pair for pair in known.items() if pair[0] != least or least != actual]

    return tuple(
        SampledToken(int(at), i, str(token), _kept(others(top, str(token)), most))
        for i, (token, top, at) in enumerate(zip(tokens, tops, offsets, strict=False))
        if top
    )


def _first_top(listed: Any, most: int) -> Top:
    """Of a completion of one token: OpenAI's lists, or llama.cpp's, which are as a chat has them."""
    if not listed:
        return {}
    if content := listed.get("content"):
        return _kept([(entry["token"], entry["logprob"]) for entry in content[0].get("top_logprobs") or ()], most)
    tops: Any = listed.get("top_logprobs") or ({},)
    return _kept(list((tops[0] or {}).items()), most)


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
