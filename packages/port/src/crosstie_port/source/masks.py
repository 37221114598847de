"""Masks and ballots of 32 bits. HIP's are 64 bits wide on every target, and all 64 count on gfx9."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from crosstie.core.finding import Severity
from crosstie_port.source.code import NARROW, WIDE, Code, bits_of
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, arguments, closing, number, opening

_MASKED = (
    "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync", "__ballot_sync", "__any_sync",
    "__all_sync", "__syncwarp", "__match_any_sync", "__match_all_sync", "__reduce_add_sync", "__reduce_min_sync",
    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync",
)  # fmt: skip
_BALLOTS = ("__ballot_sync", "__ballot", "__activemask", "__match_any_sync", "__match_all_sync", "__vote_ballot")
_COUNTS = {"__popc": "__popcll", "__ffs": "__ffsll", "__clz": "__clzll", "__brev": "__brevll", "__fns": "__fns64"}
_ALL_32 = 0xFFFFFFFF
_LANE = re.compile(r"(?i)^(?:lane|lane_?id|laneid|lane_?idx|lid|my_?lane|warp_?lane|lane_?index)$")
_MASK_FIX = (
    "give a 64-bit mask, 0xffffffffffffffffULL (HIP ignores its upper half on 32-lane targets), or drop the "
    "mask: __shfl, __ballot, __any, __all; before ROCm 7.0 the masked forms also need -DHIP_ENABLE_WARP_SYNC_BUILTINS"
)
_BALLOT_FIX = "keep it in unsigned long long, and count with __popcll, __ffsll, __clzll"


def _masks(code: Code) -> Iterator[SourceHazard]:
    for name, at, given in code.foreign_calls(_MASKED):
        if not given or _declares(code, at):
            continue
        bits = _bits(code, given[0], at)
        shown = " ".join(token.text for token in given[0])
        if bits == 32:
            what = f"{name} gets a 32-bit mask ({shown}): HIP takes 64-bit masks only and refuses to compile it"
            yield code.hazard("mask-32-bit", "error", what, at, _MASK_FIX)
        elif bits == 64 and code.value(given[0], at) == _ALL_32:
            what = f"the mask of {name} names lanes 0 to 31, a wavefront of this target has 64"
            severity: Severity = "unknown" if code.spans_32(name, at) else "error"
            yield code.hazard("mask-32-lanes", severity, what, at, _MASK_FIX, "wave64")
        elif bits is None and not any(token.text in code.parameters for token in given[0]):
            what = f"the width of the mask of {name} ({shown}) is not seen here; HIP takes 64-bit masks only"
            yield code.hazard("mask-unknown", "unknown", what, at, _MASK_FIX)


def _declares(code: Code, at: int) -> bool:
    """A project's own function of that name, not a call: a type stands before it."""
    before = code.tokens[at - 1] if at else None
    return before is not None and before.kind == "name" and before.text not in ("return", "else", "do", "case")


def _bits(code: Code, tokens: Sequence[CppToken], at: int, depth: int = 0) -> int | None:
    """64 where anything in it is that wide, 32 where all of it is known to be narrower, else None."""
    widths: list[int | None] = []
    for index, token in enumerate(tokens):
        if token.kind == "number":
            suffix = token.text.lower().lstrip("0123456789abcdefx'")
            wide = "l" in suffix or (number(token.text) or 0) > _ALL_32
            widths.append(64 if wide else 32)
        elif token.kind == "name":
            widths.append(_name_bits(code, token.text, at, depth, tokens[index + 1 : index + 2]))
    if 64 in widths:
        return 64
    known = [width for width in widths if width != 0]
    return None if None in known or not known else 32


def _name_bits(code: Code, name: str, at: int, depth: int, following: Sequence[CppToken]) -> int | None:
    """0 for what says nothing about the width, such as static_cast."""
    if name in _BALLOTS or name in WIDE or name in ("__lanemask_lt", "__lanemask_eq"):
        return 64
    if name in NARROW:
        return 32
    if name in ("static_cast", "const", "sizeof", "std"):
        return 0
    if depth > 6 or (following and following[0].text == "("):
        return None
    declaration = code.declared(name, at)
    if declaration is not None:
        if declaration.bits is None and declaration.value:
            return _bits(code, declaration.value, declaration.at, depth + 1)
        return declaration.bits
    for definition in code.project.definitions(name, code.path):
        if definition.body and not definition.directive.function_like:
            return _bits(code, definition.body, 0, depth + 1)
    value = code.project.constant(name, code.path)
    return None if value is None else 64 if value > _ALL_32 else 32


def _ballots(code: Code) -> Iterator[SourceHazard]:
    """A ballot that is kept or returned in 32 bits."""
    for name, at, _ in code.foreign_calls(_BALLOTS):
        if _declares(code, at):
            continue
        if _kept_bits(code, at) == 32:
            what = f"the 64 bits of {name} are kept in 32, so lanes 32 to 63 are lost"
            yield code.hazard("ballot-truncated", "error", what, at, _BALLOT_FIX, "wave64")


def _kept_bits(code: Code, at: int) -> int | None:
    """How wide the variable, cast or return type is that a call's result goes into."""
    tokens = code.tokens
    if code.text(at + 1) == "(" and code.text(closing(tokens, at + 1) + 1) == ">>":
        # The lanes of one part are moved down first.
        return None
    index = at - 1
    while index >= 0 and tokens[index].text in ("(", "~", "!", "::", "&", "|", "std"):
        if tokens[index].text == "!":
            return None
        index -= 1
    if index < 0:
        return None
    before = tokens[index]
    if before.text == ")" and index >= 2 and tokens[index - 1].text in NARROW:
        return 32
    if before.kind == "name" and tokens[index + 1].text == "(" and index + 2 == at:
        return _first_parameter_bits(code, before.text)
    if before.text == "return":
        function = code.function(at)
        return bits_of(function.returns) if function else None
    if before.text in ("=", "&=", "|=") and index:
        # Of `votes[w] = ` the name is votes.
        named = max(opening(tokens, index - 1) - 1, 0) if tokens[index - 1].text == "]" else index - 1
        declaration = code.declared(tokens[named].text, index)
        if declaration is not None:
            return declaration.bits
        return bits_of((code.points_to(tokens[named].text, index),)) if named < index - 1 else None
    if before.text == ">" and index >= 2 and tokens[index - 1].text in NARROW:
        return 32
    return None


def _first_parameter_bits(code: Code, name: str) -> int | None:
    """The width of the first parameter of a function of the same file."""
    for function in code.functions:
        if function.name == name:
            given = arguments(code.tokens[function.head + 2 : closing(code.tokens, function.head + 1)])
            words = {token.text for token in given[0]} if given else set()
            return None if "*" in words else bits_of(words)
    return None


def _counts(code: Code) -> Iterator[SourceHazard]:
    for name, wide in _COUNTS.items():
        for at, given in code.calls(name):
            if not given or _declares(code, at) or not _is_ballot(code, given[0], at):
                continue
            what = f"{name} reads 32 bits of a 64-bit ballot, so lanes 32 to 63 are lost"
            yield code.hazard("ballot-truncated", "error", what, at, f"use {wide}", "wave64")


def _is_ballot(code: Code, tokens: Sequence[CppToken], at: int) -> bool:
    names = [token.text for token in tokens if token.kind == "name"]
    declared = (declaration for name in names if (declaration := code.declared(name, at)) is not None)
    return any(name in _BALLOTS for name in [*names, *(token.text for one in declared for token in one.value)])


def _lane_bits(code: Code) -> Iterator[SourceHazard]:
    """`1 << lane`: a 32-bit one has no bit for lane 40."""
    for at, token in enumerate(code.tokens):
        one = code.text(at - 1)
        if token.text != "<<" or one.lower() not in ("1", "1u", "0xffffffff", "0xffffffffu"):
            continue
        bracket = code.text(at + 1) == "("
        lane = code.text(at + 2 if bracket else at + 1)
        shift = code.tokens[at + 2 : closing(code.tokens, at + 1)] if bracket else []
        # One of 32 by its own remainder: (lane & 31).
        within = any(sign.text in ("&", "%") and code.value([by], at) in (31, 32) for sign, by in pairwise(shift))
        if (_LANE.match(lane) or lane == "threadIdx") and not within:
            what = f"{one} << {lane} has 32 bits, a lane number of this target goes up to 63"
            yield code.hazard("lane-bit", "error", what, at, f"write 1ull << {lane}", "wave64")


MASK_RULES = (_masks, _ballots, _counts, _lane_bits)
