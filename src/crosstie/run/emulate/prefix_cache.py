"""Blocks of prompts by their bytes, for the cache of the beginnings that a replica has computed before.

A block's key covers all that lies before it. Keys are Python's own hashes: they differ from run to run, and what is
found does not.
"""

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
