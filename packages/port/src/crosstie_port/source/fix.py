"""A patch for findings that one line's change cures on both platforms; the tree itself is not written to.

64-bit masks by platform, a macro of the warp's size by target, a lane's bit, pointers to kernels, caps of grids whose
kernel loops over them. What needs more than its own line (ballots, a kernel with a block for each part of its work) is
left to whoever knows the kernel.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from crosstie.core.finding import Finding

MASK = "ROCM_FULL_LANE_MASK"
CAP = "ROCM_GRID_CAP"
_GRID = "grid-limit"
# Blocks have at most 1024 threads, and 1024 x 4194303 is the last multiple below 2^32.
_CAP_LINES = (
    "#if defined(USE_ROCM) || defined(__HIP_PLATFORM_AMD__)",
    "#include <algorithm>",
    "#include <cstdint>",
    f"#define {CAP}(...) std::min<int64_t>((__VA_ARGS__), 4194303)",
    "#else",
    f"#define {CAP}(...) (__VA_ARGS__)",
    "#endif",
)
_KERNEL = re.compile(r"__global__[^;{}]*?\b(\w+)\s*\([^;{}]*\)\s*\{")
# The head of a loop that begins at the block's first element and steps by the whole grid.
_GRID_LOOP = re.compile(
    r"\bfor\s*\([^;{}]*\bblockIdx\.x\b[^;{}]*;[^;{}]*;[^;{}]*\+=[^;{}()]*\bgridDim\.x\b[^;{}()]*\)"
    r"|\bCUDA_(?:1D_)?KERNEL_LOOP(?:_TYPE)?\b"
)
_OF_GRID = re.compile(r"\b(?:blockIdx|gridDim|this_grid|grid_group|grid_sync)\b")
_LAUNCH = re.compile(r"\b(?P<kernel>\w+)\s*(?:<[^<>;{}]*>)?\s*<<<\s*(?P<blocks>[^,;{}=?]+?)\s*,")
_MORE = re.compile(r"more lines?: ([^)]*)")
_MASK_LINES = (
    "#if defined(USE_ROCM) || defined(__HIP_PLATFORM_AMD__)",
    f"#define {MASK} 0xffffffffffffffffULL",
    "#else",
    f"#define {MASK} 0xffffffffu",
    "#endif",
)
_MASKED = re.compile(r"(\b__\w+_sync\s*\(\s*|\b__syncwarp\s*\(\s*)(0[xX][fF]{8}[uU]?)(?=\s*[,)])")
_DEFINED = re.compile(r"^(\s*#\s*define\s+(\w+)\s+\(?)(0[xX][fF]{8}[uU]?)(\)?\s*(?://.*)?)$")
_NAMED = re.compile(r"32-bit mask \((\w+)\)")
_LANE_BIT = re.compile(r"\b1[uU]?(\s*<<\s*\(?\s*\w*(?:lane|threadIdx)\w*)")
_ATTRIBUTE = re.compile(r"(\b(?:cuda|hip)FuncSet(?:Attribute|CacheConfig)\s*\(\s*)((?:[^,()<>]|<[^<>]*>)+?)\s*(,)")
_NARROW = re.compile(r"\b(?:unsigned|int|uint32_t|int32_t|uint)\b(?!\s+long)")
_SIZE = re.compile(r"^(\s*#\s*define\s+\w+\s+)\(?32\)?(\s*(?://.*)?)$")
_FIRST_CODE = re.compile(r"^\s*(?:#\s*(?:include|pragma|ifndef|define)\b|//|/\*|\*|$)")


def _by_target(line: str) -> str:
    """In device code: on the host no macro of a target is set, which the next run says where it matters."""
    match = _SIZE.match(line)
    if match is None:
        return line
    return f"#if defined(__GFX9__)\n{match[1]}64{match[2]}\n#else\n{line}\n#endif"


_FIXES: Mapping[str, Callable[[str], str]] = {
    "mask-32-bit": lambda line: _MASKED.sub(rf"\1{MASK}", line),
    # A variable of 32 bits would have to be wider as well.
    "lane-bit": lambda line: line if _NARROW.search(line) else _LANE_BIT.sub(r"1ull\1", line),
    "warp-size": _by_target,
    "kernel-attribute": lambda line: _ATTRIBUTE.sub(r"\1reinterpret_cast<const void*>(\2)\3", line),
}


def patch(findings: Sequence[Finding], root: Path) -> tuple[str, int]:
    """A unified diff against the tree, and how many findings it cures. Files that are not plain UTF-8 are left out."""
    by_file: dict[str, list[Finding]] = {}
    for finding in findings:
        mechanical = finding.check in _FIXES and finding.severity == "error"
        if finding.where.line and (mechanical or (finding.check == _GRID and finding.severity == "unknown")):
            by_file.setdefault(str(finding.where.file), []).append(finding)
    parts: list[str] = []
    cured = 0
    for file, found in sorted(by_file.items()):
        text = _read((root if root.is_dir() else root.parent) / file)
        if text is None:
            continue
        before = text.removesuffix("\n").split("\n")
        after = list(before)
        cured += sum(_fixed(after, one) for one in found if one.check != _GRID)
        cured += sum(_capped(after, one) for one in found if one.check == _GRID)
        place = _place(after)
        for name, lines in ((MASK, _MASK_LINES), (CAP, _CAP_LINES)):
            if name not in text and any(name in line for line in after):
                after[place:place] = lines
        parts += _diff(file, before, "\n".join(after).split("\n"))
    return "".join(parts), cured


def _capped(lines: list[str], finding: Finding) -> bool:
    """Caps the launches at the finding's lines whose kernel loops over the grid; whether that was all of them."""
    more = _MORE.search(finding.evidence)
    numbers = [finding.where.line or 1, *(int(one) for one in re.findall(r"\d+", more[1] if more else ""))]
    looped = _looped("\n".join(lines))
    for number in numbers:
        line = lines[number - 1]
        blocks = [match for match in _LAUNCH.finditer(line) if match["kernel"] in looped]
        if len(blocks) == line.count("<<<") == 1 and _is_number(blocks[0]["blocks"]):
            start, end = blocks[0].span("blocks")
            lines[number - 1] = f"{line[:start]}{CAP}({line[start:end]}){line[end:]}"
    # An evidence that ends in "..." has left lines out.
    return all(CAP in lines[number - 1] for number in numbers) and not finding.evidence.endswith("...)")


def _is_number(blocks: str) -> bool:
    return "dim3" not in blocks and blocks.count("(") == blocks.count(")")


def _looped(text: str) -> set[str]:
    """Kernels in which loops over the whole grid alone ask which block it is, so that they do with fewer blocks."""
    found = set()
    for match in _KERNEL.finditer(text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        rest, loops = _GRID_LOOP.subn("", text[match.end() : end])
        if loops and not _OF_GRID.search(rest):
            found.add(match[1])
    return found


def _read(file: Path) -> str | None:
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\r" in text or not text.endswith("\n") else text


def _fixed(lines: list[str], finding: Finding) -> bool:
    """Changes the finding's line, or that of the macro that it names; whether it is cured."""
    at = (finding.where.line or 1) - 1
    if at >= len(lines):
        return False
    made = _FIXES[finding.check](lines[at])
    if made != lines[at]:
        lines[at] = made
        return True
    named = _NAMED.search(finding.what) if finding.check == "mask-32-bit" else None
    for number, line in enumerate(lines) if named else ():
        defined = _DEFINED.match(line)
        if defined and named and defined[2] == named[1]:
            lines[number] = f"{defined[1]}{MASK}{defined[4]}"
            return True
    # Cured by another finding's change: the same line, or the same macro.
    return MASK in lines[at] or any(named and re.search(rf"#\s*define\s+{named[1]}\s+\(?{MASK}", one) for one in lines)


def _place(lines: Sequence[str]) -> int:
    """Behind the includes at the top of a file."""
    last = 0
    for number, line in enumerate(lines):
        if re.match(r"\s*#\s*include\b", line):
            last = number + 1
        elif not _FIRST_CODE.match(line):
            break
    return last


def _diff(file: str, before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    for line in difflib.unified_diff(before, after, f"a/{file}", f"b/{file}", lineterm=""):
        yield line + "\n"
