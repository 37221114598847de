"""Prefixes of prompts: hashes that two prompts share as far as they agree, and what a replica holds of them."""

from typing import Final
from zlib import crc32

BLOCK_BYTES: Final = 2048
# Prompts are compared over their first 2 MiB, some 500,000 tokens; what they share beyond that is not seen.
MOST_BLOCKS: Final = 1024
# Of a hash: 32 bits of checksum, 10 of the block's number, and above them whose it is.
WHOSE_AT: Final = 42


def prefix_hashes(body: bytes, start: int = 0, tenant: int = 0) -> tuple[int, ...]:
    """One for every whole block from `start` on, each of all the bytes up to its end.

    A checksum will do: two prefixes taken for the same cost a wrong prediction, not a wrong answer. The number of the
    block keeps prefixes of different lengths apart. Those of different tenants are never the same, since a checksum
    can be forged: whoever gets one right would see what another has sent.
    """
    blocks = (len(body) - start) // BLOCK_BYTES
    if blocks < 1:
        return ()
    found = []
    running, own = 0, tenant << WHOSE_AT
    view = memoryview(body)[start:]
    for index in range(min(blocks, MOST_BLOCKS)):
        running = crc32(view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES], running)
        found.append(own | index << 32 | running)
    return tuple(found)


class Holders:
    """Which replicas of a pool hold a block: by block, a bit for the number of each."""

    def __init__(self) -> None:
        self._bits: dict[int, int] = {}

    def add(self, block: int, bit: int) -> None:
        self._bits[block] = self._bits.get(block, 0) | bit

    def drop(self, block: int, bit: int) -> None:
        left = self._bits.get(block, 0) & ~bit
        if left:
            self._bits[block] = left
        else:
            self._bits.pop(block, None)

    def depth(self, prefix: tuple[int, ...]) -> int:
        """Blocks from the beginning that one replica at least holds."""
        return _deepest(self._bits, prefix)

    def most(self, prefix: tuple[int, ...], wanted: int, common: int) -> list[int]:
        """The numbers of those who hold most of it, up to so many, whoever holds more coming first; nobody because of
        what more than `common` hold."""
        bits, seen = self._bits, 0
        found: list[int] = []
        for index in range(self.depth(prefix) - 1, -1, -1):
            now = bits.get(prefix[index], 0)
            if now.bit_count() > common:
                break
            new = now & ~seen
            seen |= new
            while new:
                lowest = new & -new
                found.append(lowest.bit_length() - 1)
                if len(found) == wanted:
                    return found
                new ^= lowest
        return found


class Prefixes:
    """What a replica is believed to hold: the blocks that came last, as many as its cache has room for."""

    def __init__(self, most: int):
        self.most = max(most, 1)
        self._held: dict[int, int] = {}
        # Where those of a large pool are told, and as whom.
        self._holders: Holders | None = None
        self._bit = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, prefix: tuple[int, ...]) -> None:
        held, holders = self._held, self._holders
        # The beginning of a prompt last, so that its end is dropped first, as engines do.
        for block in reversed(prefix):
            if held.pop(block, 0) == 0 and holders is not None:
                holders.add(block, self._bit)
            held[block] = 1
        while len(held) > self.most:
            oldest = next(iter(held))
            del held[oldest]
            if holders is not None:
                holders.drop(oldest, self._bit)

    def clear(self) -> None:
        if self._holders is not None:
            for block in self._held:
                self._holders.drop(block, self._bit)
        self._held = {}

    def tell(self, holders: Holders | None, number: int) -> None:
        """Tells what is held, now and from now on, as the replica of this number; None: nobody wants to know."""
        self._holders, self._bit = holders, 1 << number
        if holders is not None:
            for block in self._held:
                holders.add(block, self._bit)

    def match(self, prefix: tuple[int, ...]) -> int:
        """Blocks from the beginning that are held."""
        return _deepest(self._held, prefix)


def _deepest(held: dict[int, int], prefix: tuple[int, ...]) -> int:
    """A block is never used later than those before it, so whoever is held has all before it held as well."""
    if not prefix or prefix[0] not in held:
        return 0
    low, high = 1, len(prefix)
    while low < high:
        middle = (low + high + 1) // 2
        if prefix[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
