"""What an endpoint says of itself before it is loaded: its model, its engine and release, whether it is emulated; and
how many tokens each word of our text has, so that prompts are as long as asked.

Tokenizers split text at its spaces first, so that the tokens of a text are the sum of those of its words. Where one
does not, what the engine counts of the first prompts says so, and lengths are made of bytes instead.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from crosstie.catalog.library import Catalog
from crosstie.catalog.models import text_config
from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.emulated import FINGERPRINT
from crosstie.core.errors import BadData, BadInput, UnknownName
from crosstie.core.model import Model
from crosstie.prove.replay.prompts import Word, vocabulary
from crosstie.prove.replay.texts import PromptTexts
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import Answer, ask
from crosstie.wire.loops import run_on_loop

# By what `owned_by` says in /v1/models.
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_FIRST_S = 120.0
_AT_A_TIME = 16
# A word stands between two that are always there.
_BETWEEN = ("In the", " the")

Found = TypeVar("Found")
Counts = Callable[[Sequence[str]], Awaitable[list[int] | None]]


@dataclass(frozen=True)
class BenchEndpoint:
    """One side of a benchmark. `name` is what tables call it; `conditions` are columns of results that are known."""

    name: str
    url: str
    # As requests name it.
    model: str
    emulated: bool = False
    # The longest that it takes, in tokens; None where it does not say.
    longest: int | None = None
    conditions: Mapping[str, str] = field(default_factory=dict)


def named(text: str) -> tuple[str, str]:
    """NAME=URL, or a URL that is its own name."""
    name, sign, url = text.partition("=")
    if not sign or "/" in name or ":" in name:
        name, url = "", text
    return name or Address(url).authority.decode(), url


def described(
    text: str, model: str | None, api_key: str | None, chat: bool, given: Mapping[str, str], catalog: Catalog, *,
    tried: bool = True,
) -> BenchEndpoint:  # fmt: skip
    """Raises BadInput where it does not answer, or has no such model. What is given wins over what it says. `model`:
    as requests name it, or the folder of the one that is served. `tried`: by a first request."""
    name, url = named(text)
    return run_on_loop(_described(name, url, model, api_key, chat, given, catalog, tried))


async def _described(
    name: str, url: str, model: str | None, api_key: str | None, chat: bool, given: Mapping[str, str], catalog: Catalog,
    tried: bool,
) -> BenchEndpoint:  # fmt: skip
    address = Address(url)
    origin = Origin(asyncio.get_running_loop(), address)

    async def asked(path: str, body: dict[str, Any] | None = None, timeout_s: float = 5.0) -> Answer | None:
        method = "GET" if body is None else "POST"
        try:
            return await ask(origin, method, address.root + path, key=api_key, body=body, timeout_s=timeout_s)
        except OSError as error:
            if path == "/v1/models":
                raise BadInput(f"{url}: {error}") from None
            return None

    try:
        listed = _record(await asked("/v1/models")).get("data")
        models = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        folder = None if model in [entry.get("id") for entry in models] else _folder(model)
        model = _only(url, models) if folder or not model else model
        own: dict[str, Any] = next((entry for entry in models if entry.get("id") == model), {})
        # An engine that has just started may take long over its first request.
        first = await asked(*_tried(model, chat), timeout_s=_FIRST_S) if tried else None
        if tried and (first is None or first.status != 200):
            said = (
                "no answer" if first is None else f"status {first.status}: {first.body[:200].decode(errors='replace')}"
            )
            raise BadInput(f"{url}: a first request for {model} failed: {said}")
        server = _record(await asked("/get_server_info"))
        version = _record(await asked("/version"))
    finally:
        origin.close()
    conditions = _model(catalog, model, str(own.get("root") or ""), folder)
    engine = _ENGINES.get(str(own.get("owned_by", "")))
    if engine:
        conditions["engine"] = engine
    release = server.get("version") or version.get("version")
    if isinstance(release, str) and release != FINGERPRINT:
        conditions["engine_version"] = release
    if isinstance(server.get("tp_size"), int):
        conditions["tp"] = str(server["tp_size"])
    emulates = own.get("emulates")
    if isinstance(emulates, dict):
        conditions |= {key: value for key, value in emulates.items() if isinstance(value, str)}
    conditions |= {key: value for key, value in given.items() if value}
    emulated = own.get("owned_by") == FINGERPRINT or (first is not None and FINGERPRINT.encode() in first.body)
    longest = own.get("max_model_len")
    return BenchEndpoint(name, url, model, emulated, longest if isinstance(longest, int) else None, conditions)


def _folder(name: str | None) -> Path | None:
    """Where a name is a folder of this machine with a config.json in it."""
    path = Path(name).expanduser() if name else None
    return path if path and (path / "config.json").is_file() else None


def _model(catalog: Catalog, served: str, root: str, folder: Path | None) -> dict[str, str]:
    """Columns that say which model it is. The structure decides where it can be read, and a name of the catalog stands
    for it only if that has the same; else the first name that the catalog knows. A server's path says nothing
    elsewhere."""
    names = list(dict.fromkeys(filter(None, (root, served, root.rstrip("/").rpartition("/")[2]))))
    known = [name for name in names if _is_known(catalog, name)]
    folder = folder or _folder(root)
    if folder is not None:
        with suppress(BadData):
            config, own = text_config(folder), catalog.model(folder.absolute())
            same = [name for name in known if _structure(catalog.model(name)) == _structure(own)]
            return {"model": same[0]} if same else {"model": config.name, "model_config": config.text}
    plain = [name for name in names if not name.startswith((".", "/", "~"))]
    return {"model": (known or plain or names)[0]}


def _is_known(catalog: Catalog, name: str) -> bool:
    if name.startswith((".", "/", "~")) or name.endswith((".json", ".toml")):
        return False
    try:
        # A folder of this machine may have that name, too.
        return catalog.model(name).id in catalog.models
    except UnknownName:
        return False


def _structure(model: Model) -> Model:
    """What is left of a model without its names."""
    nameless = replace(model, id="", name="", aliases=(), source="", date="", licence="", notes=(), file="")
    return replace(nameless, architecture="", max_context=0)


def _tried(model: str, chat: bool) -> tuple[str, dict[str, Any]]:
    if chat:
        message = {"role": "user", "content": "Good morning."}
        return "/v1/chat/completions", {"model": model, "max_tokens": 1, "messages": [message]}
    return "/v1/completions", {"model": model, "max_tokens": 1, "prompt": "Good morning."}


def _only(url: str, models: list[dict[str, Any]]) -> str:
    names = [str(model.get("id")) for model in models]
    if len(names) != 1:
        raise BadInput(f"{url}: serves {', '.join(names[:8]) or 'no model that it names'}; say which with --model")
    return names[0]


def _record(answer: Answer | None) -> dict[str, Any]:
    return answer.record if answer else {}


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
