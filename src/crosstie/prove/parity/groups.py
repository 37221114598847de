"""Where two endpoints differ: by position, by the length of prompts and by language, and where answers part."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

import msgspec

from crosstie.prove.parity.samples import ComparedToken, Pair

# First positions, and first lengths in tokens, of each group.
_POSITIONS = (0, 64, 256, 1024, 4096, 16384, 65536)
_TOKENS = (0, 8, 32, 128, 512)
_LENGTHS = (0, 128, 512, 2048, 8192, 32768)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """`kl` and `agreement` are of all places, forced and of chats; `floor_kl` of A against itself. `parted`: the share
    of answers that part, and `parted_at` their median token. Not a number: nothing to say."""

    name: str
    prompts: int
    places: int
    kl: float
    floor_kl: float
    agreement: float
    parted: float
    parted_at: float


class Parted(msgspec.Struct, frozen=True):
    """How many answers part first at these tokens."""

    name: str
    floor: int
    answers: int


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """First divergence of greedy answers: equal ones, the median place where others part, and how many of those were
    no near tie: A found its own token more than twice as likely as B's."""

    prompts: int
    equal: int
    floor_equal: int
    median_token: float
    floor_median_token: float
    clear: int
    floor_clear: int
    by_token: tuple[Parted, ...]


def by_prompt(noise: list[Pair], pairs: list[Pair], name_of: Callable[[Pair], str]) -> tuple[Group, ...]:
    def own(name: str, of: list[Pair]) -> list[Pair]:
        return [pair for pair in of if name_of(pair) == name]

    def places(of: list[Pair]) -> list[ComparedToken]:
        return [place for pair in of for place in (*pair.forced, *pair.greedy)]

    return tuple(
        _group(name, len(same), places(own(name, noise)), places(same), _parted(same))
        for name in _in_order({name_of(pair) for pair in pairs})
        for same in (own(name, pairs),)
    )


def length_of(pair: Pair) -> str:
    """Of the prompt, in tokens."""
    return _range(pair.a.prompt_tokens or len(pair.a.prompt.text) // 4, _LENGTHS)


def by_position(noise: list[Pair], pairs: list[Pair]) -> tuple[Group, ...]:
    """Of forced texts alone: there a position is one of the text."""

    def within(own: list[Pair], name: str) -> list[ComparedToken]:
        return [place for pair in own for place in pair.forced if _range(place.position, _POSITIONS) == name]

    names = {_range(place.position, _POSITIONS) for pair in pairs for place in pair.forced}
    return tuple(
        _group(name, sum(bool(within([pair], name)) for pair in pairs), within(noise, name), within(pairs, name))
        for name in _in_order(names)
    )


def first_divergence(noise: list[Pair], pairs: list[Pair]) -> Groups:
    floor, parted = _parted(noise), _parted(pairs)
    floor_names, names = ([_range(at, _TOKENS) for at in places] for places in (floor, parted))
    return Groups(
        prompts=len(pairs), equal=len(pairs) - len(parted), floor_equal=len(noise) - len(floor),
        median_token=_median(parted), floor_median_token=_median(floor),
        clear=sum(pair.is_clear for pair in pairs), floor_clear=sum(pair.is_clear for pair in noise),
        by_token=tuple(
            Parted(name, floor_names.count(name), names.count(name)) for name in _in_order({*floor_names, *names})
        ),
    )  # fmt: skip


def _group(
    name: str, prompts: int, floor: Sequence[ComparedToken], places: Sequence[ComparedToken],
    parted: list[int] | None = None,
) -> Group:  # fmt: skip
    """`parted`: where answers part; None where places are of no answers."""
    return Group(
        name=name, prompts=prompts, places=len(places), kl=_mean(place.kl for place in places),
        floor_kl=_mean(place.kl for place in floor), agreement=_mean(place.agrees for place in places),
        parted=math.nan if parted is None else len(parted) / prompts, parted_at=_median(parted or []),
    )  # fmt: skip


def _range(value: int, firsts: tuple[int, ...]) -> str:
    last = max(first for first in firsts if first <= value)
    after = firsts[firsts.index(last) + 1 :]
    return f"{last:,}-{after[0] - 1:,}" if after else f"{last:,} and more"


def _in_order(names: Iterable[str]) -> list[str]:
    """Ranges by their first number, before them other names."""

    def first_number(name: str) -> tuple[int, str]:
        digits = name.split("-")[0].split(" ")[0].replace(",", "")
        return (int(digits), name) if digits.isdigit() else (-1, name)

    return sorted(names, key=first_number)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else math.nan


def _parted(pairs: list[Pair]) -> list[int]:
    return [pair.parts_at for pair in pairs if pair.parts_at is not None]


def _median(places: list[int]) -> float:
    return float(median(places)) if places else math.nan
