"""Which beginning of a prompt a replica has computed before: blocks of bytes, the least recently used go first.

A block's key covers all that lies before it, so equal blocks behind different beginnings are different blocks. Keys
are Python's own hashes: they differ from run to run, and what is found does not.
"""

from collections import OrderedDict

from crosstie.run.emulate.tokens import BYTES_PER_TOKEN

# 64 tokens. Engines keep 16 to a block; four times as many hashes would buy a hit 24 tokens longer on average.
BLOCK_BYTES = 256
BLOCK_TOKENS = BLOCK_BYTES // BYTES_PER_TOKEN


def block_keys(text: bytes, after: int = 0) -> list[int]:
    """Those of the whole blocks of a text that follows the block of the key `after`."""
    found, key = [], after
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        key = hash((key, text[start : start + BLOCK_BYTES]))
        found.append(key)
    return found


class PrefixCache:
    """`queries` and `hits` count tokens, as vLLM counts them."""

    def __init__(self, capacity_tokens: float):
        self.capacity_blocks = max(int(capacity_tokens) // BLOCK_TOKENS, 0)
        self.queries = self.hits = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def look_up(self, keys: list[int], tokens: int) -> int:
        """How many of a prompt's tokens need not be computed."""
        blocks, known = self._blocks, 0
        for key in keys:
            if key not in blocks:
                break
            known += 1
        for key in reversed(keys[:known]):
            blocks.move_to_end(key)
        hit = min(known * BLOCK_TOKENS, tokens)
        self.queries += tokens
        self.hits += hit
        return hit

    def keep(self, keys: list[int]) -> None:
        """These have been computed. Later blocks of a prompt go before earlier ones, without which they are no use."""
        blocks = self._blocks
        for key in reversed(keys):
            blocks[key] = None
            blocks.move_to_end(key)
        while len(blocks) > self.capacity_blocks:
            blocks.popitem(last=False)
