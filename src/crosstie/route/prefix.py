"""Prefixes of prompts: hashes that two prompts share as far as they agree, and what a replica holds of them."""

from zlib import crc32

BLOCK_BYTES = 2048
# Prompts are compared over their first 128 KiB; what they share beyond that is not seen.
MOST_BLOCKS = 64
# Of a hash: 32 bits of checksum, 6 of the block's number, and above them whose it is.
_TENANT_AT = 38


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
    running, own = 0, tenant << _TENANT_AT
    view = memoryview(body)[start:]
    for index in range(min(blocks, MOST_BLOCKS)):
        running = crc32(view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES], running)
        found.append(own | index << 32 | running)
    return tuple(found)


class Prefixes:
    """What a replica is believed to hold: the blocks that came last, as many as its cache has room for."""

    def __init__(self, most: int):
        self.most = max(most, 1)
        self._held: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, prefix: tuple[int, ...]) -> None:
        held = self._held
        # The beginning of a prompt last, so that its end is dropped first, as engines do.
        for block in reversed(prefix):
            held.pop(block, None)
            held[block] = None
        while len(held) > self.most:
            del held[next(iter(held))]

    def match(self, prefix: tuple[int, ...]) -> int:
        """Blocks from the beginning that are held.

        A block is never used later than those before it, so whoever is held has all before it held as well.
        """
        held = self._held
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
