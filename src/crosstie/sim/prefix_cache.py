"""The beginnings of prompts that an engine has computed before, by blocks; the least recently used go first.

A block's key stands for all that lies before it, so equal text behind different beginnings is different blocks. Within
a prompt the end is older than the beginning, since it is no use alone. Answers take room as prompts do.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

# Tokens of vLLM's blocks, of which only whole ones are found again.
ENGINE_BLOCK = 16


class PrefixCache:
    """`queries` and `hits` count prompt tokens, as vLLM does. Of each prompt whole blocks of the engine are found."""

    def __init__(self, capacity_tokens: float, block_tokens: int, engine_block: int = ENGINE_BLOCK):
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self.engine_block = engine_block
        self.queries = self.hits = 0
        self.held_tokens = 0
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()
        # Keys of those that went, for who wants to be told; None: nobody does.
        self.dropped: list[Hashable] | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks

    def look_up(self, keys: Sequence[Hashable], tokens: int) -> int:
        """How many of a prompt's tokens need not be computed; the last always is."""
        blocks, size, known, found = self._blocks, self.block_tokens, 0, 0
        for key in keys:
            held = blocks.get(key)
            if held is None:
                break
            known += 1
            found += held
            if held < size:
                # What follows in the prompt was not yet there when this block was computed.
                break
        for key in reversed(keys[:known]):
            blocks.move_to_end(key)
        whole = min(found, tokens - 1) // self.engine_block * self.engine_block
        self.queries += tokens
        self.hits += whole
        return whole

    def keep(self, keys: Sequence[Hashable], tokens: int) -> None:
        """A text of so many tokens has been computed; its last block may be shorter than the others."""
        blocks, size = self._blocks, self.block_tokens
        for place in range(min(len(keys), -(-tokens // size)) - 1, -1, -1):
            key, held = keys[place], min(tokens - place * size, size)
            self.held_tokens += held - blocks.pop(key, 0)
            blocks[key] = held
        self._trim()

    def touch(self, keys: Sequence[Hashable]) -> None:
        """As if these had just been used, the end before the beginning."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def keep_answer(self, tokens: int) -> None:
        """One that nobody will ask for by a key, and which takes its room all the same."""
        self._blocks[object()] = tokens
        self.held_tokens += tokens
        self._trim()

    def _trim(self) -> None:
        blocks = self._blocks
        while self.held_tokens > self.capacity_tokens and blocks:
            key, held = blocks.popitem(last=False)
            self.held_tokens -= held
            if self.dropped is not None:
                self.dropped.append(key)


class TierCache:
    """Memory beside the GPU's, to which everything is written as it is computed, and which keeps it longer.

    One link brings it back, for one request after the other. `cache` may be one of several replicas.
    """

    def __init__(self, name: str, cache: PrefixCache, load_s_per_token: float, latency_s: float):
        self.name = name
        self.cache = cache
        self.load_s_per_token = load_s_per_token
        self.latency_s = latency_s
        self.loaded_tokens = 0
        self._free_at = 0.0

    def beyond(self, found: int, keys: Sequence[Hashable], tokens: int) -> int:
        """How many more of a prompt's tokens it has than what is asked before it, where so many were found."""
        return max(self.cache.look_up(keys, tokens) - found, 0)

    def load(self, tokens: int, now: float) -> float:
        """When so many tokens have come that are asked for now."""
        self.loaded_tokens += tokens
        self._free_at = max(self._free_at, now) + tokens * self.load_s_per_token
        return self._free_at + self.latency_s
