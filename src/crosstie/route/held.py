"""What a replica holds of prompts by its engine's own word: blocks of tokens, told as they are stored and dropped.

A block's key here stands for its tokens and all before them, and is the same for a prompt and for what an engine tells;
the engine's own hashes only name blocks. Keys are Python's hashes, which differ from process to process, so that nobody
can choose tokens that are taken for others.
"""

from array import array
from collections.abc import Hashable, Sequence
from typing import Final

from crosstie.route.prefix import Prefixes

# Blocks that are kept of one replica: sixteen million tokens of vLLM's usual blocks. What is told beyond is not known.
MOST_BLOCKS: Final = 1_000_000


def block_keys(ids: bytes, block_tokens: int, after: int = 0) -> list[int]:
    """Those of the whole blocks of ids, four bytes each, that follow the block of the key `after`."""
    found: list[int] = []
    key, size = after, 4 * block_tokens
    for start in range(0, len(ids) - size + 1, size):
        key = hash((key, ids[start : start + size]))
        found.append(key)
    return found


class PromptTokens:
    """A prompt by its tokens."""

    def __init__(self, ids: Sequence[int]):
        self.count = len(ids)
        self._ids = array("I", ids).tobytes()
        self._keys: dict[tuple[int, int], tuple[int, ...]] = {}

    def keys(self, block_tokens: int, tenant: int = 0) -> tuple[int, ...]:
        """Those of its blocks; `tenant`: such as nobody else's are."""
        found = self._keys.get((block_tokens, tenant))
        if found is None:
            root = hash((tenant, b"tenant")) if tenant else 0
            found = self._keys[block_tokens, tenant] = tuple(block_keys(self._ids, block_tokens, root))
        return found


class HeldBlocks:
    """Told by one thread and asked by another: each step leaves something that can be asked.

    `tenant` in what follows: whose prompts alone are to count, 0: everybody's. An engine's cache is one for all, and
    who asks for a tenant is told no more of it than that tenant has sent there itself.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self.most = most
        # Of a block; 0: nothing was told yet.
        self.block_tokens = 0
        # Whether all has been told since the engine held nothing: what is not known here is then not there.
        self.complete = False
        # By the engine's name of a block its key here, and by that how many names there are for it.
        self._names: dict[Hashable, int] = {}
        self._held: dict[int, int] = {}
        # Whether its blocks may be of another size than before.
        self._unsized = True
        # Of requests that are there and may not have been told of yet.
        self._coming: dict[int, int] = {}
        # What tenants have sent there.
        self._sent = Prefixes(most)

    def __len__(self) -> int:
        return len(self._held)

    def forget(self, *, complete: bool) -> None:
        """`complete`: the engine holds nothing now."""
        self._names, self._held = {}, {}
        self.complete, self._unsized = complete, True

    def store(self, names: Sequence[Hashable], after: Hashable | None, ids: Sequence[int], block_tokens: int) -> None:
        """Blocks in a row; `after`: the one before them, None at the beginning of a prompt."""
        if block_tokens > self.block_tokens or (self._unsized and block_tokens != self.block_tokens):
            self._names, self._held, self._coming = {}, {}, {}
            self.block_tokens = block_tokens
        elif block_tokens < self.block_tokens:
            # A part of one, which some engines tell as well.
            return
        self._unsized = False
        before = 0
        if after is not None:
            known = self._names.get(after)
            if known is None:
                # What came before was never told, so that nobody knows what this is the end of.
                return
            before = known
        all_names, held = self._names, self._held
        for name, key in zip(names, block_keys(array("I", ids).tobytes(), block_tokens, before), strict=False):
            # Engines tell blocks again that they use again, and those of which they have a copy. One that drops the
            # first of two copies is believed to have none until it tells of the other: rather that than the reverse.
            if name not in all_names and len(all_names) < self.most:
                all_names[name] = key
                held[key] = held.get(key, 0) + 1

    def drop(self, names: Sequence[Hashable]) -> None:
        all_names, held = self._names, self._held
        for name in names:
            key = all_names.pop(name, None)
            if key is not None:
                left = held.get(key, 0) - 1
                if left > 0:
                    held[key] = left
                else:
                    held.pop(key, None)

    def expect(self, tokens: PromptTokens, tenant: int) -> None:
        """A request with this prompt was sent there; until `settle`, its blocks count as held."""
        if not self.block_tokens:
            return
        coming = self._coming
        for key in tokens.keys(self.block_tokens):
            coming[key] = coming.get(key, 0) + 1
        if tenant:
            self._sent.add(tokens.keys(self.block_tokens, tenant))

    def settle(self, tokens: PromptTokens) -> None:
        coming = self._coming
        if not coming or not self.block_tokens:
            return
        for key in tokens.keys(self.block_tokens):
            left = coming.get(key, 0) - 1
            if left > 0:
                coming[key] = left
            else:
                coming.pop(key, None)

    def match(self, tokens: PromptTokens, tenant: int) -> int:
        """Tokens of the prompt's beginning that are held, or will be when it gets there.

        Engines drop the end of a prompt before its beginning, so that whatever is held has all before it held as well.
        """
        if not self.block_tokens:
            return 0
        keys, held, coming = tokens.keys(self.block_tokens), self._held, self._coming
        # Its last token is computed in any case, and with it the rest of its block.
        low, high = 0, (tokens.count - 1) // self.block_tokens
        if tenant:
            high = min(high, self._sent.match(tokens.keys(self.block_tokens, tenant)))
        while low < high:
            middle = (low + high + 1) // 2
            key = keys[middle - 1]
            if key in held or key in coming:
                low = middle
            else:
                high = middle - 1
        return low * self.block_tokens
