"""A client's request as the router's question: whose model, which class, how long, how fast, how urgent.

Hints come in headers: x-crosstie-class, -ttft-ms, -tpot-ms, -priority (low, normal, high), -pool, -session,
-pause-ms (until its next turn) and -last-turn (true).
"""

from math import inf
from typing import Final
from zlib import crc32

from crosstie.core.errors import BadInput, UnknownModel
from crosstie.route.ask import Ask
from crosstie.route.lengths import TOKENS_PER_ATTACHMENT, Lengths
from crosstie.route.live import LiveFleet
from crosstie.route.prefix import prefix_hashes
from crosstie_gateway.gateway.body import Attached, RequestBody
from crosstie_gateway.gateway.interfaces import CountedPrompt
from crosstie_gateway.gateway.roads import WORDLESS
from crosstie_gateway.wire.request import Request

HINTS: Final = frozenset(
    b"x-crosstie-" + name
    for name in (b"class", b"ttft-ms", b"tpot-ms", b"priority", b"pool", b"session", b"pause-ms", b"last-turn")
)
# Below that there is nothing to keep, and everybody's latency is divided by it.
_LEAST_MS: Final = 1e-3
_MOST_MS: Final = 1e9
# Above all numbers of keys and subjects.
_ADAPTER_AT: Final = 52
PRIORITIES: Final = {"low": 0, "normal": 1, "high": 2}
# Found without a look at the module that has them.
_WORDLESS: Final = WORDLESS


def makes_text(path: str) -> bool:
    return path not in _WORDLESS


def _attached_tokens(lengths: Lengths, model: str, attached: Attached) -> float:
    """Pictures by the model's own rule where their size is known, and what else there is at what is usual."""
    known = sum(lengths.image_tokens(model, width, height) for width, height in attached.sizes)
    unknown = (attached.images - len(attached.sizes)) * lengths.image_tokens(model)
    return known + unknown + (attached.number - attached.images) * TOKENS_PER_ATTACHMENT


def ask_of(
    live: LiveFleet, names: dict[str, str], request: Request, asked: RequestBody, key_id: int = 0,
    prompt: CountedPrompt | None = None,
) -> Ask:  # fmt: skip
    """`names`: of models, by what clients call them. `key_id`: whose prefixes and sessions it may meet again; 0:
    everybody's. `prompt`: as its engine reads it, where that is known."""
    if asked.model is None:
        raise BadInput("the body names no model")
    model = names.get(asked.model)
    if model is None:
        raise UnknownModel(f"no pool serves '{asked.model}'; there are {', '.join(sorted(names))}")
    adapter = asked.model if live.adapters and asked.model in live.adapters else None
    # What an adapter has computed is of no use to another.
    salt = key_id if adapter is None else crc32(adapter.encode()) << _ADAPTER_AT | key_id
    headers = request.headers
    head = request.head
    hinted = head.hinted if head is not None else None
    if hinted is None:
        hinted = not headers.keys().isdisjoint(HINTS)
        if head is not None:
            head.hinted = hinted
    lengths = live.lengths
    # The one count or estimate there is: routes, rates and budgets go by it.
    attached = asked.attached
    text_bytes = max(asked.prompt_bytes - attached.size, 0)
    tokens = float(asked.token_ids or 0)
    if prompt is not None:
        tokens = float(prompt.tokens.count)
    elif text_bytes or not tokens:
        tokens += lengths.input_tokens(model, text_bytes)
    if attached.number and prompt is None:
        tokens += _attached_tokens(lengths, model, attached)
    most_output = asked.most_output if makes_text(request.path) else 1
    name = _hint(headers, b"class") if hinted else None
    if name is not None and name not in live.classes:
        raise BadInput(f"x-crosstie-class: '{name}' is no class of this fleet; there are {', '.join(live.classes)}")
    if name is None:
        served = live.unnamed.of(model, tokens)
        name = None if served is None else served.name
    ttft_s, tpot_s = (None, None) if name is None else live.targets[name]
    ask = Ask(
        model=model,
        class_name=name,
        input_tokens=tokens,
        output_tokens=lengths.expected_output(name, model, most_output),
        most_output=most_output,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        modalities=attached.kinds,
        prefix=prefix_hashes(request.body, asked.prompt_at, salt),
        session=asked.session,
        prompt_bytes=text_bytes if asked.all_read and asked.token_ids is None else 0,
        streams=asked.stream,
        copies=asked.copies,
        prompts=asked.prompts,
    )
    ask.cache_tenant = key_id
    if prompt is not None:
        ask.counted, ask.tokens = True, prompt.tokens if prompt.is_plain and adapter is None else None
    ask.adapter = adapter
    if hinted:
        _take_hints(live, headers, ask)
    if key_id and ask.session is not None:
        # Nobody's conversation is another's by the same name.
        ask.session = f"{key_id} {ask.session}"
    return ask


def _take_hints(live: LiveFleet, headers: dict[bytes, bytes], ask: Ask) -> None:
    ttft, tpot = _milliseconds(headers, b"ttft-ms"), _milliseconds(headers, b"tpot-ms")
    ask.ttft_s = ask.ttft_s if ttft is None else ttft
    ask.tpot_s = ask.tpot_s if tpot is None else tpot
    priority = _hint(headers, b"priority")
    if priority is not None:
        if priority not in PRIORITIES:
            raise BadInput(f"x-crosstie-priority: '{priority}' is not one of {', '.join(PRIORITIES)}")
        ask.priority = PRIORITIES[priority]
    ask.pin = _hint(headers, b"pool")
    pools = {pool.pool.name for pool in live.pools}
    if ask.pin is not None and ask.pin not in pools:
        raise BadInput(f"x-crosstie-pool: '{ask.pin}' is no pool of this fleet; there are {', '.join(sorted(pools))}")
    ask.session = _hint(headers, b"session") or ask.session
    last = _hint(headers, b"last-turn")
    if last is not None and last not in ("true", "false"):
        raise BadInput(f"x-crosstie-last-turn: '{last}' is not one of true, false")
    ask.pause_s = inf if last == "true" else _milliseconds(headers, b"pause-ms")


def _hint(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(b"x-crosstie-" + name)
    return None if value is None else value.decode("latin-1").strip()


def hinted_ttft_s(request: Request) -> float | None:
    """What the client itself says that its first token may take; its class's target does not count."""
    return _milliseconds(request.headers, b"ttft-ms")


def _milliseconds(headers: dict[bytes, bytes], name: bytes) -> float | None:
    said = _hint(headers, name)
    if said is None:
        return None
    try:
        value = float(said)
    except ValueError:
        value = 0.0
    if not _LEAST_MS <= value < _MOST_MS:
        bounds = f"from {_LEAST_MS:g} to below {_MOST_MS:g}"
        raise BadInput(f"x-crosstie-{name.decode()}: '{said}' is no number of milliseconds {bounds}")
    return value / 1e3
