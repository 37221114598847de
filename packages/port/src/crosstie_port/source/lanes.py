"""Code that takes a warp for 32 lanes, or its size for a constant. gfx9 runs 64 lanes at once, gfx10 and later run 32.

Since ROCm 7.0 no constant of HIP has the size, and on the host, which serves any target, none can.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from crosstie.core.finding import Severity
from crosstie_port.source.code import LANE_CALLS, Code, also, gives_width, skip_angles
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lexer import CppToken, arguments, closing, number, opening, statements, until

_SIZE_NAME = re.compile(
    r"(?i)(?:warp|wave(?:front)?)_*(?:max_*)?(?:size|sz|threads|width|len(?:gth)?|lanes)"
    r"|(?:threads?|lanes?|thr)_*(?:per|in)_*(?:a_*)?warp|(?:num|n)_?lanes"
)
_OTHER_SIZE = re.compile(
    r"(?i)tile|bytes|elem|block|max(?!_*threads)|min|sub|group|col|row|iter|frag|vec|quant|pack|head|page|expert|(?:^|_)[mnk](?:_|$)"
    r"|(?:^|_)q[kir]\d*(?:_|$)"
)
_LOG = re.compile(r"(?i)log|shift|bits|exp")
_THREAD = re.compile(
    r"(?i)^(?:tid|tidx|t_?idx|tx|thread_?(?:id|idx|index|rank|num|linear)?(?:_?[xyz]|_?in_?block)?|(?:linear|flat|local)_?"
    r"(?:tid|thread_?(?:id|idx)?)|threadid\w*|lid|g?tid|get_?(?:thread_?id|tid)|\w+_get_(?:num_)?thread(?:s|_?id))$"
)
_BLOCK = re.compile(
    r"(?i)^(?:blockdim\w*|(?:k|n|num_?|n_?|max_?)*(?:threads|block_?size|block_?dim|cta_?size|nthreads)\w*)$"
)
_WARP_OR_LANE = re.compile(r"(?i)warp|lane")
_LANE = re.compile(r"(?i)^(?:[a-z]+_)?lane(?:_?(?:id|idx|index))?$|^(?:k_?)?tid_in_warp$|^t?l?id_in_warp$")
_WARPS = re.compile(r"(?i)^k?(?:num|n)_?(?:of_?)?warps\w*$|^warps_?per_?\w+$")
# What stands for the 32 lanes behind each sign.
_LITERALS = {"%": 32, "/": 32, "&": 31, ">>": 5, "<": 32, ">=": 32, "*": 32, "+": 32}
_FLOATS = ("32.f", "32.0f", "32.0", "32.")
_SHUFFLES = ("__shfl_down_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down", "__shfl_xor", "__shfl_up")
_WHOLE_MASKS = ("0xffffffff", "0xffffffffffffffff")
_SHUFFLE = re.compile(r"(?i)shfl|shuffle")
_FIX = (
    "take the width from the target: warpSize in device code (64 on gfx9; no constant expression since ROCm 7.0), "
    "hipDeviceProp_t.warpSize on the host, or 64 under `#if defined(__GFX9__)` for a constant"
)
_SAYS = "{} says that a warp has {} lanes, a wavefront of this target has {}"
_WHERE_LANES_TALK = (
    " Lanes 32 to 63 belong to the same wavefront, so ballots, shuffles without a width and __syncwarp reach them too."
)
# Known at run time alone: HIP's variable, hipCUB's macro, rocPRIM's function.
_AT_RUN_TIME = ("warpSize", "HIPCUB_WARP_THREADS", "HIPCUB_DEVICE_WARP_THREADS")
_OF_ROCPRIM = ("warp_size", "device_warp_size", "host_warp_size")
_ENDS = (";", "{", "}")
_NO_TEMPLATE = ("&&", "||", "==", "!=", "?", "=")
_NO_TYPE = ("return", "else", "case", "delete", "throw", "goto", "new")
_FAR = 60
_CONSTANT_FIX = "use a constant per target: 64 under `#if defined(__GFX9__)`, else 32; warpSize at run time"
_HOST_FIX = (
    "ask the device: at::cuda::warp_size(), or warpSize of cudaGetDeviceProperties (64 on gfx9, 32 on gfx10 and later)"
)


def macro_sizes(code: Code) -> Iterator[SourceHazard]:
    """`#define WARP_SIZE 32`, also where it stands behind an open condition."""
    unit = code.project.units[code.path]
    for directive in unit.directives:
        if directive.word != "define" or len(directive.tokens) < 2 or directive.function_like:
            continue
        name, body = directive.tokens[0].text, directive.tokens[1:]
        if unit.is_dead(directive.line) or not means_size(name):
            continue
        talk = LANE_CALLS.search(unit.text) is not None or _used_with_lanes(code)
        yield from _size(code, name, code.value(body, 0), 0, directive.line, talk)


def _size(code: Code, name: str, value: int | None, at: int, line: int, talk: bool) -> Iterator[SourceHazard]:
    function = code.function(at) if at else None
    where = function.name if function else ""
    if _means_lanes(name, value, 32):
        severity = _severity(code, at, talk)
        yield code.line_hazard("warp-size", severity, _SAYS.format(name, 32, 64), line, _FIX, "wave64", where)
    elif _means_lanes(name, value, 64) and not code.project.left_out_on(code.path, line, "host"):
        severity = "error" if talk else "unknown"
        yield code.line_hazard("warp-size", severity, _SAYS.format(name, 64, 32), line, _FIX, "wave32", where)


def _severity(code: Code, at: int, talk: bool) -> Severity:
    """Wrong for sure where lanes talk; groups of 32 lanes are meant where the code knows of wavefronts."""
    if code.knows_wavefronts or (code.leaves_lanes_to_headers and not talk):
        return "note"
    sure = talk and not (code.is_for_amd(at) or code.leaves_lanes_to_headers or code.project.is_ported)
    return "error" if sure else "unknown"


def _used_with_lanes(code: Code) -> bool:
    """Whether lanes talk in any file that sees this one."""
    project = code.project
    return any(
        code.path in project.visible[path] and LANE_CALLS.search(unit.text) for path, unit in project.units.items()
    )


def means_size(name: str) -> bool:
    """Whether a name is one for the number of lanes of a warp."""
    return bool(_SIZE_NAME.search(name)) and not _OTHER_SIZE.search(name)


def _means_lanes(name: str, value: int | None, lanes: int) -> bool:
    return means_size(name) and value == (lanes.bit_length() - 1 if _LOG.search(name) else lanes)


def _sizes(code: Code) -> Iterator[SourceHazard]:
    for name, places in code.names.items():
        if not means_size(name):
            continue
        for at in places:
            value = None
            if code.text(at + 1) == "=":
                value = code.value(until(code.tokens, at + 2, (",", ";", ">")), at)
            elif code.text(at + 1) == "(" and code.text(at + 2) == ")":
                value = _returned(code, at)
            if value is not None:
                talk = code.has_lane_calls(at) or (code.function(at) is None and _used_with_lanes(code))
                yield from _size(code, name, value, at, code.tokens[at].line, talk)


def _returned(code: Code, at: int) -> int | None:
    """The constant of `int warp_size() { return 32; }`."""
    for index in range(at + 3, min(at + 8, len(code.tokens))):
        if code.tokens[index].text == "{":
            inside = code.tokens[index + 1 : closing(code.tokens, index)]
            if len(inside) >= 3 and inside[0].text == "return" and inside[-1].text == ";":
                return code.value(inside[1:-1], at)
    return None


def _arithmetic(code: Code) -> Iterator[SourceHazard]:
    """A lane or warp index made of a thread's index and 32, and counts of warps in a block."""
    tokens = code.tokens
    for at, token in enumerate(tokens):
        sign = token.text
        if token.kind != "sign" or sign not in _LITERALS or _right(code, at) != _LITERALS[sign]:
            continue
        left = _operand(tokens, at)
        of_thread = any(_is_thread(code, cpp_token, at) for cpp_token in left)
        named = _assigned(tokens, at)
        if sign in ("<", ">="):
            if not of_thread or len(left) > 3:
                continue
            what = "the first 32 threads are taken for one warp, a wavefront of this target has 64"
        else:
            of_block = sign in ("/", ">>") and any(one.kind == "name" and _BLOCK.match(one.text) for one in left)
            to_warp = _WARP_OR_LANE.search(named) and not _OTHER_SIZE.search(named)
            # `num_warps * 32` threads.
            of_warps = sign != "*" or (len(left) == 1 and _WARPS.match(left[0].text))
            if sign == "+" and not (len(left) == 1 and _LANE.match(left[0].text)):
                continue
            if not of_warps or not (sign == "+" or of_thread or of_block or (to_warp and left) or sign == "*"):
                continue
            what = f"{named or 'this'} is computed for 32 lanes to a warp, a wavefront of this target has 64"
        mixed = [] if sign in ("<", ">=") or code.is_side_for_amd(at) else _beside_warp_size(code, at)
        if mixed:
            what, remedy = f"{what}; the same function takes warpSize, which is 64", "divide by warpSize here too"
            mix = code.hazard("lane-arithmetic", "error", what, at, remedy, "wave64")
            yield replace(mix, evidence=mix.evidence + also(mixed))
            continue
        talk = code.has_lane_calls(at)
        if code.is_side_for_amd(at) or (code.is_for_amd(at) and (code.knows_wavefronts or not talk)):
            # A file of HIP may be HIPIFY's output, which has CUDA's 32 lanes: where they talk, that is no excuse.
            continue
        harmless = not talk and sign != "*" and _OTHER_SIZE.search(named)
        severity = "note" if harmless else _severity(code, at, talk)
        remedy = _FIX + ("." + _WHERE_LANES_TALK if talk else "; harmless where it only cuts work into parts of 32")
        yield code.hazard("lane-arithmetic", severity, what, at, remedy, "wave64")


def _beside_warp_size(code: Code, at: int) -> list[int]:
    """Lines of the same function that take HIP's warpSize."""
    function = code.function(at)
    if function is None or code.is_own("warpSize", function.end):
        return []
    return sorted(
        {
            code.tokens[one].line
            for one in code.names.get("warpSize", ())
            if function.start < one < function.end and code.text(one - 1) not in (".", "->", "::")
        }
    )


def _right(code: Code, at: int) -> int | None:
    """The number behind a sign: a literal, a bracket, or a constant by the name of a warp or lane, but no size of one,
    which is judged where it is set."""
    tokens = code.tokens
    if at + 1 >= len(tokens):
        return None
    following = tokens[at + 1]
    if following.kind == "number":
        return 32 if following.text.lower() in _FLOATS else number(following.text)
    bracketed = following.text == "("
    inside = tokens[at + 2 : closing(tokens, at + 1)] if bracketed else tokens[at + 1 : at + 2]
    named = [token for token in inside if token.kind == "name"]
    of_lanes = all(_WARP_OR_LANE.search(token.text) and not _is_size(token) for token in named)
    # A call, a member or an element is no constant.
    looked_up = following.kind == "name" and code.text(at + 2) in ("(", "::", ".", "->", "[")
    return code.value(inside, at) if of_lanes and len(inside) <= 5 and not looked_up else None


def _is_size(token: CppToken) -> bool:
    """Such names are judged where they are set."""
    return token.kind == "name" and bool(_SIZE_NAME.search(token.text))


def _operand(tokens: Sequence[CppToken], at: int) -> Sequence[CppToken]:
    """What stands left of a sign: a bracket, or names joined by dots."""
    index = at - 1
    if index >= 0 and tokens[index].text in (")", "]"):
        start = max(opening(tokens, index), 0)
        # A call has its name, and arguments of its template, before the bracket.
        while start and index == start + 1 and (tokens[start - 1].kind == "name" or tokens[start - 1].text in "<>"):
            start, index = start - 1, index - 1
        return tokens[start:at]
    while index >= 0 and (tokens[index].kind in ("name", "number") or tokens[index].text in (".", "->", "::")):
        if tokens[index].text in ("return", "case"):
            break
        index -= 1
    return tokens[index + 1 : at]


def _assigned(tokens: Sequence[CppToken], at: int) -> str:
    """The name on the left of the statement's `=`, "" where there is none."""
    for index in range(at - 1, max(-1, at - 40), -1):
        text = tokens[index].text
        if text == "=" and index and tokens[index - 1].kind == "name":
            return tokens[index - 1].text
        if text in (";", "{", "}", "[", "<<<"):
            return ""
    return ""


def _is_thread(code: Code, token: CppToken, at: int) -> bool:
    if token.kind != "name":
        return False
    if token.text in ("threadIdx", "hipThreadIdx_x") or _THREAD.match(token.text):
        return True
    declaration = code.declared(token.text, at)
    return declaration is not None and any(cpp_token.text == "threadIdx" for cpp_token in declaration.value)


def _loops(code: Code) -> Iterator[SourceHazard]:
    """`for (offset = 16; ...; offset >>= 1)` and `for (mask = 1; mask < 32; mask <<= 1)` around a shuffle."""
    tokens = code.tokens
    for at in code.names.get("for", ()):
        if code.text(at + 1) != "(":
            continue
        end = closing(tokens, at + 1)
        parts = statements(tokens[at + 2 : end])
        body_end = closing(tokens, end + 1) if code.text(end + 1) == "{" else end + 40
        if len(parts) == 3 and _covers_32(code, parts, at) and _shuffles_all(code, end, body_end):
            yield _half(code, at)


def _strides(code: Code) -> Iterator[SourceHazard]:
    """`for (i = lane_id; i < n; i += 32)`: each lane takes every 32nd, which is every 64th here. A thread's index is a
    lane's where the function exchanges values between lanes."""
    for at in code.names.get("for", ()):
        end = closing(code.tokens, at + 1) if code.text(at + 1) == "(" else at
        parts = statements(code.tokens[at + 2 : end])
        names = [token for token in parts[0] if token.kind == "name"] if len(parts) == 3 else []
        of_thread = any(_is_thread(code, token, at) for token in names) and code.has_lane_calls(at)
        if of_thread or any(_LANE.search(token.text) for token in names):
            step = [token.text for token in parts[2]]
            behind = step.index("+=") + 1 if "+=" in step else len(step)
            if step[behind : behind + 1] == ["32"] and not code.is_for_amd(at):
                what = "lanes step by 32, the lanes of a warp; a wavefront of this target has 64"
                yield code.hazard("lane-arithmetic", _severity(code, at, talk=False), what, at, _FIX, "wave64")


def _while_loops(code: Code) -> Iterator[SourceHazard]:
    """`int o = 16; while (o > 0) { ... shuffle by o ...; o >>= 1; }`."""
    tokens = code.tokens
    for at in code.names.get("while", ()):
        end = closing(tokens, at + 1) if code.text(at + 1) == "(" else at
        if code.text(end + 1) != "{":
            continue
        body_end = closing(tokens, end + 1)
        body = tokens[end : body_end + 1]
        steps = {cpp_token.text for cpp_token, sign in pairwise(body) if sign.text in (">>=", "/=")}
        asked = {token.text: token for token in tokens[at + 2 : end] if token.kind == "name" and token.text in steps}
        for token in asked.values():
            if code.value([token], at, through_variables=True) == 16 and _shuffles_all(code, end, body_end):
                yield _half(code, at)


def _half(code: Code, at: int) -> SourceHazard:
    what = "this reduction or scan spans 32 lanes, half a wavefront of this target"
    remedy = "start at warpSize / 2 (32 on gfx9), or pass 32 as the width of each shuffle if 32 lanes are meant"
    severity: Severity = "unknown" if code.knows_wavefronts else "error"
    return code.hazard("warp-reduction", severity, what, at, remedy, "wave64")


def _covers_32(code: Code, parts: Sequence[Sequence[CppToken]], at: int) -> bool:
    start, stop, step = ([token.text for token in part] for part in parts)
    halves = any(sign in step for sign in (">>=", "/=", ">>", "/"))
    doubles = any(sign in step for sign in ("<<=", "*=", "<<", "*"))
    if "=" in start and halves:
        value = parts[0][start.index("=") + 1 :]
        return not any(map(_is_size, value)) and code.value(value, at) == 16
    sign = next((index for index, text in enumerate(stop) if text in ("<", "<=")), None)
    if not doubles or sign is None or any(map(_is_size, parts[1])):
        return False
    return code.value(parts[1][sign + 1 :], at) == (32 if stop[sign] == "<" else 16)


def _shuffles_all(code: Code, start: int, end: int) -> bool:
    """Whether there are shuffles between two places, and one of them does not say that it is among 32 lanes."""
    places = [
        at
        for at, token in enumerate(code.tokens[start : end + 1], start)
        if token.kind == "name" and _SHUFFLE.search(token.text)
    ]
    return any(not _gives_width(code, at) for at in places)


def _gives_width(code: Code, at: int) -> bool:
    name = code.text(at)
    if name not in _SHUFFLES:
        return code.spans_32(name, at)
    return code.text(at + 1) == "(" and gives_width(name, arguments(code.tokens[at + 2 : closing(code.tokens, at + 1)]))


def _shuffles(code: Code) -> Iterator[SourceHazard]:
    """Shuffles by 16 written out one by one, and lane 31 as the last."""
    for name, at, given in code.foreign_calls((*_SHUFFLES, "__shfl_sync", "__shfl")):
        synced = name.endswith("_sync")
        if not synced and len(given) > 2 and given[0][0].text.lower().rstrip("u") in _WHOLE_MASKS:
            what = f"{name} takes no mask: this passes the mask for the value, and the value for the lanes to go by"
            yield code.hazard("overload", "error", what, at, f"write {name}({given[1][0].text}, ...), or {name}_sync")
        if len(given) != (3 if synced else 2):
            continue
        by = _literal(given[2 if synced else 1])
        if name in ("__shfl_sync", "__shfl"):
            if by == 31:
                what = "lane 31 is taken for the last lane, which is lane 63 on this target"
                yield code.hazard("warp-reduction", "error", what, at, "read lane warpSize - 1", "wave64")
        elif (
            by == 16
            and all(_shuffles_by(code, name, at, step) for step in (8, 4, 2, 1))
            and not _shuffles_by(code, name, at, 32)
        ):
            what = "shuffles by 16, 8, 4, 2 and 1 span 32 lanes, half a wavefront of this target"
            remedy = "add a step by 32 on gfx9, or pass 32 as the width if 32 lanes are meant"
            severity: Severity = "unknown" if code.knows_wavefronts else "error"
            yield code.hazard("warp-reduction", severity, what, at, remedy, "wave64")


def _literal(tokens: Sequence[CppToken]) -> int | None:
    return number(tokens[0].text) if len(tokens) == 1 and tokens[0].kind == "number" else None


def _shuffles_by(code: Code, name: str, at: int, step: int) -> bool:
    """Whether the function has that step too: a shuffle by 16 alone swaps halves, and is right on 64 lanes."""
    same = (given[1:3] for other, given in code.calls(name) if code.function(other) == code.function(at))
    return any(_literal(tokens) == step for given in same for tokens in given)


def _places(code: Code) -> Iterator[tuple[int, str]]:
    """Where the warp's size stands that only run time knows, itself or behind a macro of the project."""
    for name in _AT_RUN_TIME:
        for at in code.names.get(name, ()):
            if code.text(at - 1) not in (".", "->", "::") and not code.is_own(name, at):
                yield at, name
    for at in code.names.get("rocprim", ()):
        if code.text(at + 1) == "::" and code.text(at + 2) in _OF_ROCPRIM and code.text(at + 3) == "(":
            yield at, f"rocprim::{code.text(at + 2)}()"
    for name, places in code.names.items():
        for made in code.project.definitions(name, code.path):
            if not made.directive.function_like and any(token.text in _AT_RUN_TIME for token in made.body):
                yield from ((at, name) for at in places)
                break


def _constants(code: Code) -> Iterator[SourceHazard]:
    for at, name in _places(code):
        if _needs_constant(code, at):
            subject = name if name in _AT_RUN_TIME or "::" in name else f"{name}, which stands for warpSize,"
            what = f"{subject} is no constant expression in HIP since ROCm 7.0, so this does not compile"
            yield code.hazard("warp-size-constant", "error", what, at, _CONSTANT_FIX)


def _needs_constant(code: Code, at: int) -> bool:
    return in_constant(code.tokens, at) or _in_template(code, at) or _in_bound(code.tokens, at)


def in_constant(tokens: Sequence[CppToken], at: int) -> bool:
    """Behind constexpr or static_assert in the same statement."""
    for index in range(at - 1, max(-1, at - _FAR), -1):
        if tokens[index].text in _ENDS:
            return False
        if tokens[index].text in ("constexpr", "static_assert"):
            return True
    return False


def _in_template(code: Code, at: int) -> bool:
    """Inside of `Name<..., here>`."""
    for index in range(at - 1, max(0, at - _FAR), -1):
        text = code.tokens[index].text
        if text in _ENDS or text in _NO_TEMPLATE:
            return False
        if text == "<" and code.tokens[index - 1].kind == "name":
            end = skip_angles(code.tokens, index)
            inside = code.tokens[index:end]
            return end > at and not any(token.text in _NO_TEMPLATE for token in inside)
    return False


def _in_bound(tokens: Sequence[CppToken], at: int) -> bool:
    """Inside of the bracket of a declaration, `float name[here]`; HIP's arrays have no run-time bounds."""
    depth = 0
    for index in range(at - 1, max(1, at - _FAR), -1):
        text = tokens[index].text
        if text in _ENDS:
            return False
        depth += {")": 1, "]": 1, "(": -1}.get(text, 0)
        if text == "[":
            if depth <= 0:
                return _declares_array(tokens, index)
            depth -= 1
    return False


def _declares_array(tokens: Sequence[CppToken], bracket: int) -> bool:
    name, before = tokens[bracket - 1], tokens[bracket - 2]
    if name.text == "]":
        return _declares_array(tokens, opening(tokens, bracket - 1))
    after = closing(tokens, bracket) + 1
    ends = after < len(tokens) and tokens[after].text in (";", "[", "=", ",")
    return name.kind == "name" and before.kind == "name" and before.text not in _NO_TYPE and ends


def _on_host(code: Code) -> Iterator[SourceHazard]:
    """warpSize in host code, or a constant that only device code has right."""
    seen: set[int] = set()
    for at, name in _places(code):
        if not _needs_constant(code, at) and code.is_on_host(at) and at not in seen:
            seen.add(at)
            what = f"{name} is what the host was compiled with, not what the device in use has"
            yield code.hazard("warp-size-host", "error", what, at, _HOST_FIX)
    for name, places in code.names.items():
        if name != "C10_WARP_SIZE" and not means_size(name):
            continue
        used = [at for at in places if at not in seen and code.is_on_host(at)]
        if used and name == "C10_WARP_SIZE":
            what = "C10_WARP_SIZE is right in device code; what it is on the host depends on the release of PyTorch"
            yield from (code.hazard("warp-size-host", "unknown", what, at, _HOST_FIX) for at in used)
        elif used and code.text(used[0] + 1) != "=":
            by_pass, value = code.project.host_value(name, code.path)
            if by_pass and value in (32, 64):
                what = f"{name} is set by macros that only a pass over device code has: on the host it is {value}"
                on = "wave64" if value == 32 else "wave32"
                yield from (code.hazard("warp-size-host", "error", what, at, _HOST_FIX, on) for at in used)


LANE_RULES = (_sizes, _arithmetic, _strides, _loops, _while_loops, _shuffles, _constants, _on_host)
