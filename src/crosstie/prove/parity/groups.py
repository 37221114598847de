"""Where two endpoints differ: by position, by the length of prompts and by language, and where answers part."""

import math
from collections.abc import Callable, Iterable
from statistics import median

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


class By(msgspec.Struct, frozen=True, kw_only=True):
    first_divergence: Groups
    by_position: tuple[Group, ...]
    by_length: tuple[Group, ...]
    by_language: tuple[Group, ...]


def groups_of(noise: list[Pair], pairs: list[Pair]) -> By:
    def grouped(key: Callable[[Pair], str]) -> tuple[Group, ...]:
        names = sorted({key(pair) for pair in pairs}, key=_first_number)
        return tuple(
            _group(name, [pair for pair in noise if key(pair) == name], [pair for pair in pairs if key(pair) == name])
            for name in names
        )

    return By(
        first_divergence=_divergence(noise, pairs),
        by_position=_by_position(noise, pairs),
        by_length=grouped(lambda pair: _range(pair.a.prompt_tokens or len(pair.a.prompt.text) // 4, _LENGTHS)),
        by_language=grouped(lambda pair: pair.a.prompt.language),
    )


def _range(value: int, firsts: tuple[int, ...]) -> str:
    last = max(first for first in firsts if first <= value)
    after = firsts[firsts.index(last) + 1 :]
    return f"{last:,}-{after[0] - 1:,}" if after else f"{last:,} and more"


def _first_number(name: str) -> tuple[int, str]:
    digits = name.split("-")[0].split(" ")[0].replace(",", "")
    return (int(digits), name) if digits.isdigit() else (-1, name)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def _group(name: str, noise: list[Pair], pairs: list[Pair]) -> Group:
    parted = _parted(pairs)
    group = _of_places(
        name, len(pairs), *([p for pair in own for p in (*pair.forced, *pair.greedy)] for own in (noise, pairs))
    )
    return msgspec.structs.replace(group, parted=len(parted) / len(pairs), parted_at=_median(parted))


def _of_places(name: str, prompts: int, floor: list[ComparedToken], places: list[ComparedToken]) -> Group:
    return Group(
        name=name, prompts=prompts, places=len(places), kl=_mean(place.kl for place in places),
        floor_kl=_mean(place.kl for place in floor), agreement=_mean(float(place.agrees) for place in places),
        parted=math.nan, parted_at=math.nan,
    )  # fmt: skip


def _by_position(noise: list[Pair], pairs: list[Pair]) -> tuple[Group, ...]:
    """Of forced texts alone: there a position is one of the text."""

    def within(own: list[Pair], name: str) -> list[ComparedToken]:
        return [place for pair in own for place in pair.forced if _range(place.position, _POSITIONS) == name]

    names = {_range(place.position, _POSITIONS) for pair in pairs for place in pair.forced}
    return tuple(
        _of_places(name, sum(bool(within([pair], name)) for pair in pairs), within(noise, name), within(pairs, name))
        for name in sorted(names, key=_first_number)
    )


def _divergence(noise: list[Pair], pairs: list[Pair]) -> Groups:
    floor, parted = _parted(noise), _parted(pairs)
    early = [_range(at, _TOKENS) for at in floor], [_range(at, _TOKENS) for at in parted]
    return Groups(
        prompts=len(pairs), equal=len(pairs) - len(parted), floor_equal=len(noise) - len(floor),
        median_token=_median(parted), floor_median_token=_median(floor),
        clear=sum(pair.is_clear for pair in pairs), floor_clear=sum(pair.is_clear for pair in noise),
        by_token=tuple(
            Parted(name, *(names.count(name) for names in early))
            for name in sorted({*early[0], *early[1]}, key=_first_number)
        ),
    )  # fmt: skip


def _parted(pairs: list[Pair]) -> list[int]:
    return [pair.parts_at for pair in pairs if pair.parts_at is not None]


def _median(places: list[int]) -> float:
    return float(median(places)) if places else math.nan
