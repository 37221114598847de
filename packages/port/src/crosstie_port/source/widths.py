"""The warp's size where HIP cannot know it: in constants since ROCm 7.0, and on the host, which serves any target."""

from collections.abc import Iterator, Sequence

from crosstie_port.source.code import Code, skip_angles
from crosstie_port.source.hazard import SourceHazard
from crosstie_port.source.lanes import means_size
from crosstie_port.source.lexer import CppToken, closing, opening

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


WIDTH_RULES = (_constants, _on_host)
