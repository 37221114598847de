"""The beginnings of prompts that an engine has computed before, by blocks; the least recently used go first.

A block's key stands for all that lies before it, so equal text behind different beginnings is different blocks. Within
a prompt the end is older than the beginning, since it is no use alone. Answers take room as prompts do.

What requests run with cannot go, and is there once for all of them. Only the memory that they leave keeps other
blocks: an engine that is full of running requests has none (seen on a real vLLM: docs/notes/measurements.md).
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
        # Of blocks that may go; and what running requests take of the capacity, as the engine counts it.
        self.held_tokens = 0
        self.running_tokens = 0
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()
        # Blocks that requests run with: their tokens, and how many do.
        self._in_use: dict[Hashable, tuple[int, int]] = {}
        # Keys of those that went, for who wants to be told; None: nobody does.
        self.dropped: list[Hashable] | None = None

    def __len__(self) -> int:
        return len(self._blocks) + len(self._in_use)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._blocks or key in self._in_use

    def look_up(self, keys: Sequence[Hashable], tokens: int) -> int:
        """How many of a prompt's tokens need not be computed; the last always is."""
        whole = self.find(keys, tokens)
        self.queries += tokens
        self.hits += whole
        return whole

    def find(self, keys: Sequence[Hashable], tokens: int) -> int:
        """As `look_up`, of a prompt that was counted before."""
        blocks, in_use, size, known, found = self._blocks, self._in_use, self.block_tokens, 0, 0
        for key in keys:
            held = blocks.get(key) or in_use.get(key, (0, 0))[0]
            if not held:
                break
            known += 1
            found += held
            if held < size:
                # What follows in the prompt was not yet there when this block was computed.
                break
        for key in reversed(keys[:known]):
            if key in blocks:
                blocks.move_to_end(key)
        return min(found, tokens - 1) // self.engine_block * self.engine_block

    def shared(self, keys: Sequence[Hashable]) -> int:
        """Of the first blocks of a prompt, those that requests run with."""
        for place, key in enumerate(keys):
            if key not in self._in_use:
                return place
        return len(keys)

    def use(self, keys: Sequence[Hashable], first: int, tokens: int) -> int:
        """A request runs with the blocks of so many tokens, from the first named on: those that were there, and those
        that it has computed. How many of them others run with."""
        blocks, in_use, size, shared = self._blocks, self._in_use, self.block_tokens, 0
        for place in range(first, min(len(keys), -(-tokens // size))):
            key = keys[place]
            held, users = in_use.get(key, (0, 0))
            shared += users > 0
            there = blocks.pop(key, 0)
            self.held_tokens -= there
            in_use[key] = max(held, there, min(tokens - place * size, size)), users + 1
        return shared

    def stop_using(self, keys: Sequence[Hashable]) -> int:
        """The request has ended; how many of its blocks others run with."""
        blocks, in_use, shared = self._blocks, self._in_use, 0
        for key in reversed(keys):
            held, users = in_use[key]
            if users > 1:
                in_use[key] = held, users - 1
                shared += 1
            else:
                del in_use[key]
                blocks[key] = held
                self.held_tokens += held
        return shared

    def running(self, tokens: int) -> None:
        """What running requests take now: the rest keeps what it can."""
        self.running_tokens = tokens
        self._trim()

    def keep(self, keys: Sequence[Hashable], tokens: int) -> None:
        """A text of so many tokens has been computed; its last block may be shorter than the others."""
        blocks, in_use, size = self._blocks, self._in_use, self.block_tokens
        for place in range(min(len(keys), -(-tokens // size)) - 1, -1, -1):
            key, held = keys[place], min(tokens - place * size, size)
            if key in in_use:
                was, users = in_use[key]
                in_use[key] = max(held, was), users
                continue
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
        blocks, room = self._blocks, self.capacity_tokens - self.running_tokens
        while self.held_tokens > room and blocks:
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
        first = found // self.cache.block_tokens
        before = first * self.cache.block_tokens
        return max(before + self.cache.find(keys[first:], tokens - before) - found, 0)

    def load(self, tokens: int, now: float) -> float:
        """When so many tokens have come that are asked for now."""
        self.loaded_tokens += tokens
        self._free_at = max(self._free_at, now) + tokens * self.load_s_per_token
        return self._free_at + self.latency_s
