"""Blocks of prompts by their bytes, for the cache of prompt beginnings. A block's key covers all that lies before it.
Keys are Python's own hashes and differ from run to run."""

from crosstie.sim.prefix_cache import ENGINE_BLOCK, PrefixCache
from crosstie_gateway.emulate.kv_events import KvPublisher
from crosstie_gateway.emulate.tokens import BYTES_PER_TOKEN

# 64 tokens. Engines keep 16 to a block; four times as many hashes would buy a hit 24 tokens longer on average.
BLOCK_BYTES = 256
# For prompts cut into tokens, with ids of four bytes each: an engine's block.
ID_BLOCK_BYTES = ENGINE_BLOCK * 4


def block_keys(text: bytes, after: int = 0, size: int = BLOCK_BYTES) -> list[int]:
    """Keys of a text's whole blocks, which follow the block with the key `after`."""
    keys, key = [], after
    for start in range(0, len(text) - size + 1, size):
        key = hash((key, text[start : start + size]))
        keys.append(key)
    return keys


class TellingCache:
    """A cache of prefixes whose owner may tell others of it."""

    def __init__(self, capacity_tokens: float, block_bytes: int, publisher: KvPublisher | None):
        self.block_bytes, self._publisher = block_bytes, publisher
        self.blocks = PrefixCache(capacity_tokens, block_bytes // BYTES_PER_TOKEN, ENGINE_BLOCK)
        if publisher is not None:
            self.blocks.dropped = []
        # By session, blocks that it refers to; and those that were closed, which none opens again.
        self.sessions: dict[str, dict[int, None]] = {}
        self._closed: set[str] = set()

    def refer(self, session: str, keys: list[int]) -> None:
        """What no session refers to goes first, as with SGLang's --enable-session-radix-cache."""
        if session not in self._closed:
            self.sessions.setdefault(session, {}).update(dict.fromkeys(keys))

    def close_session(self, session: str) -> None:
        self._closed.add(session)
        self.sessions.pop(session, None)

    def keep(self, keys: list[int], text: bytes) -> None:
        """Keeps a text's blocks, and publishes what was stored and dropped."""
        blocks, publisher, size = self.blocks, self._publisher, self.block_bytes
        known = next((place for place, key in enumerate(keys) if key not in blocks), len(keys)) if publisher else 0
        for held in self.sessions.values():
            blocks.touch(list(held))
        blocks.keep(keys, len(keys) * blocks.block_tokens)
        if publisher is None:
            return
        if known < len(keys):
            after = keys[known - 1] if known else None
            publisher.stored(keys[known:], after, text[known * size : len(keys) * size], blocks.block_tokens)
        if blocks.dropped:
            publisher.removed([key for key in blocks.dropped if isinstance(key, int)])
            blocks.dropped.clear()
