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
        names = sorted({key(one) for one in pairs}, key=_first_number)
        return tuple(
            _group(name, [one for one in noise if key(one) == name], [one for one in pairs if key(one) == name])
            for name in names
        )

    return By(
        first_divergence=_divergence(noise, pairs),
        by_position=_by_position(noise, pairs),
        by_length=grouped(lambda one: _range(one.a.prompt_tokens or len(one.a.prompt.text) // 4, _LENGTHS)),
        by_language=grouped(lambda one: one.a.prompt.language),
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
    points, floor = _points(pairs), _points(noise)
    parted = [one.parts_at for one in pairs if one.parts_at is not None]
    return Group(
        name=name, prompts=len(pairs), places=len(points), kl=_mean(one.kl for one in points),
        floor_kl=_mean(one.kl for one in floor), agreement=_mean(float(one.agrees) for one in points),
        parted=len(parted) / len(pairs), parted_at=median(parted) if parted else math.nan,
    )  # fmt: skip


def _points(pairs: list[Pair]) -> list[ComparedToken]:
    return [point for one in pairs for point in (*one.forced, *one.greedy)]


def _by_position(noise: list[Pair], pairs: list[Pair]) -> tuple[Group, ...]:
    """Of forced texts alone: there a position is one of the text."""
    floor: dict[str, list[ComparedToken]] = {}
    found: dict[str, list[ComparedToken]] = {}
    prompts: dict[str, set[str]] = {}
    for ones, into in ((noise, floor), (pairs, found)):
        for one in ones:
            for point in one.forced:
                name = _range(point.position, _POSITIONS)
                into.setdefault(name, []).append(point)
                prompts.setdefault(name, set()).add(one.a.prompt.id)
    return tuple(
        Group(
            name=name, prompts=len(prompts[name]), places=len(found[name]), kl=_mean(one.kl for one in found[name]),
            floor_kl=_mean(one.kl for one in floor.get(name, ())),
            agreement=_mean(float(one.agrees) for one in found[name]), parted=math.nan, parted_at=math.nan,
        )
        for name in sorted(found, key=_first_number)
    )  # fmt: skip


def _divergence(noise: list[Pair], pairs: list[Pair]) -> Groups:
    def at(ones: list[Pair]) -> float:
        parted = [one.parts_at for one in ones if one.parts_at is not None]
        return float(median(parted)) if parted else math.nan

    def clear(ones: list[Pair]) -> int:
        return sum(one.is_clear for one in ones)

    return Groups(
        prompts=len(pairs), equal=sum(one.parts_at is None for one in pairs),
        floor_equal=sum(one.parts_at is None for one in noise), median_token=at(pairs), floor_median_token=at(noise),
        clear=clear(pairs), floor_clear=clear(noise), by_token=_by_token(noise, pairs),
    )  # fmt: skip


def _by_token(noise: list[Pair], pairs: list[Pair]) -> tuple[Parted, ...]:
    floor, found = (
        [_range(one.parts_at, _TOKENS) for one in ones if one.parts_at is not None] for ones in (noise, pairs)
    )
    names = sorted({*floor, *found}, key=_first_number)
    return tuple(Parted(name, floor.count(name), found.count(name)) for name in names)
