"""Batches of KV events, as vLLM and SGLang publish them, taken over into what is known of a replica's cache.

Both write msgpack of msgspec's records, as arrays or maps by version. Read in vllm-project/vllm@0181ea3,
`vllm/distributed/kv_events.py`, and sgl-project/sglang@006d053, `python/sglang/srt/disaggregation/kv_events.py`.
"""

from time import sleep
from typing import Any

import msgspec

from crosstie.route.held import HeldBlocks

_STORED = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("block_hashes", "medium", "group_idx")
# Where a cache is that answers at once; what was moved elsewhere has to be fetched first.
_HERE = (None, "GPU")
# No engine's blocks have more tokens.
_MOST_TOKENS = 4096
# Blocks that are taken over in one go; in between, others have their turn.
_AT_ONCE = 256
# An event of half a million tokens; what is longer would keep others waiting while it is decoded.
_MOST_EVENT_BYTES = 2 * 2**20


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: msgspec.Raw
    events: list[msgspec.Raw]


class _MapBatch(msgspec.Struct):
    events: list[msgspec.Raw]


_decode = msgspec.msgpack.Decoder().decode
_decode_array = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_map = msgspec.msgpack.Decoder(_MapBatch).decode


class BadBatch(Exception):
    """What came is no batch of events."""


def take(held: HeldBlocks, payload: bytes) -> None:
    """Raises BadBatch."""
    try:
        # Arrays by their first byte, of msgpack's.
        is_array = 0x90 <= payload[0] <= 0x9F or payload[0] in (0xDC, 0xDD)
        for event in (_decode_array(payload) if is_array else _decode_map(payload)).events:
            if len(event) > _MOST_EVENT_BYTES:
                raise ValueError("an event that is too long")
            _take(held, _decode(event))
            # One at a time: in between, others have their turn.
            sleep(0)
    except Exception as error:  # noqa: BLE001 (whatever somebody publishes: it must not end who reads it)
        raise BadBatch(str(error)) from None


def _named(event: Any) -> tuple[str, dict[str, Any]]:
    """The kind of an event, and its fields by name."""
    if isinstance(event, dict):
        return str(event.get("type")), event
    if not isinstance(event, list) or not event:
        raise TypeError("an event is neither a list nor a map")
    kind, names = str(event[0]), {"BlockStored": _STORED, "BlockRemoved": _REMOVED}.get(str(event[0]), ())
    return kind, dict(zip(names, event[1:], strict=False))


def _take(held: HeldBlocks, event: Any) -> None:
    kind, fields = _named(event)
    if kind == "AllBlocksCleared":
        held.forget(complete=True)
        return
    if kind not in ("BlockStored", "BlockRemoved") or fields.get("medium") not in _HERE:
        # Of a kind that came later than this, or of another memory.
        return
    hashes, group = fields["block_hashes"], fields.get("group_idx") or 0
    if not isinstance(hashes, list) or not all(isinstance(block, int | bytes) for block in hashes):
        raise TypeError("hashes of blocks that are none")
    if kind == "BlockRemoved":
        for start in range(0, len(hashes), _AT_ONCE):
            held.drop([(group, block) for block in hashes[start : start + _AT_ONCE]])
        return
    if fields.get("lora_id") is not None or fields.get("lora_name") is not None or not _whole(fields):
        return
    _store(held, fields, hashes, group)


def _whole(fields: dict[str, Any]) -> bool:
    """Whether its group of layers attends to the whole prompt; other groups drop blocks earlier."""
    kind = fields.get("kv_cache_spec_kind")
    whole = kind is None or (isinstance(kind, str) and ("full" in kind or "mla" in kind) and "sliding" not in kind)
    return whole and fields.get("kv_cache_spec_sliding_window") is None


def _store(held: HeldBlocks, fields: dict[str, Any], hashes: list[Any], group: int) -> None:
    ids, size, parent = fields["token_ids"], fields["block_size"], fields.get("parent_block_hash")
    if type(size) is not int or not 1 <= size <= _MOST_TOKENS or not isinstance(ids, list):
        raise ValueError("a size of blocks, or tokens, that are none")
    if len(ids) < len(hashes) * size:
        raise ValueError("fewer tokens than blocks")
    names = [(group, block) for block in hashes[: _plain(fields.get("extra_keys"), len(hashes))]]
    after = None if parent is None else (group, parent)
    for start in range(0, len(names), _AT_ONCE):
        end = min(start + _AT_ONCE, len(names))
        held.store(names[start:end], after, ids[start * size : end * size], size)
        after = names[end - 1]


def _plain(extra_keys: Any, blocks: int) -> int:
    """How many blocks come before the first with extra keys, such as a picture or a salt."""
    if not isinstance(extra_keys, list):
        return blocks
    return next((index for index, extra in enumerate(extra_keys[:blocks]) if extra), blocks)
