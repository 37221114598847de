"""Hashes of prefixes, and what a replica is believed to hold of them."""

from hypothesis import given, strategies as some

from crosstie.route.prefix import BLOCK_BYTES, MOST_BLOCKS, Prefixes, prefix_hashes

TEXT = bytes(range(256)) * 8 * 10


def test_prompts_share_hashes_as_far_as_they_agree() -> None:
    one = prefix_hashes(TEXT)
    assert len(one) == 10
    assert prefix_hashes(TEXT[:-1]) == one[:9], "only whole blocks count"
    changed = bytearray(TEXT)
    changed[5 * BLOCK_BYTES] ^= 1
    other = prefix_hashes(bytes(changed))
    assert other[:5] == one[:5]
    assert not set(other[5:]) & set(one)
    assert prefix_hashes(b"short") == ()
    assert len(prefix_hashes(b"x" * BLOCK_BYTES * 2000)) == MOST_BLOCKS
    assert len(set(prefix_hashes(b"x" * BLOCK_BYTES * 64))) == 64, "equal blocks at different places differ"


def test_what_was_not_used_for_longest_is_dropped_end_first() -> None:
    held = Prefixes(6)
    held.add((1, 2, 3))
    held.add((7, 8, 9))
    assert held.match((1, 2, 3)) == 3
    held.add((20,))
    assert held.match((1, 2, 3)) == 2
    held.add((1, 2, 3))
    assert held.match((7, 8, 9)) == 2
    assert len(held) == 6
    assert held.match(()) == 0
    assert held.match((99, 1)) == 0


chains = some.lists(some.lists(some.integers(0, 2), min_size=1, max_size=8), max_size=30)


@given(prompts=chains, most=some.integers(1, 20), asked=some.lists(some.integers(0, 2), max_size=8))
def test_a_match_is_the_longest_run_of_held_blocks(prompts: list[list[int]], most: int, asked: list[int]) -> None:
    def chained(prompt: list[int]) -> tuple[int, ...]:
        return prefix_hashes(b"".join(bytes([one]) * BLOCK_BYTES for one in prompt))

    held = Prefixes(most)
    for prompt in prompts:
        held.add(chained(prompt))
        assert len(held) <= most
    wanted = chained(asked)
    run = 0
    while run < len(wanted) and wanted[run] in held._held:
        run += 1
    assert held.match(wanted) == run
