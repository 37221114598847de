"""A patch for findings that one line's change cures on both platforms; the tree itself is not written to.

64-bit masks by platform, a macro of the warp's size by target, a lane's bit, pointers to kernels,
typename; caps of grids whose kernel loops over them (grids.py). What needs more than its own line (ballots, a kernel
with a block for each part of its work) is left to whoever knows the kernel.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from crosstie.core.finding import Finding
from crosstie_port.source.grids import CAP, CAP_LINES, capped

MASK = "ROCM_FULL_LANE_MASK"
_GRID = "grid-limit"
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
_DEPENDENT = re.compile(r"(?<![\w:])(?<!typename )([A-Za-z_]\w*::[A-Za-z_]\w*\s*\()")
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
    "clang-strictness": lambda line: _DEPENDENT.sub(r"typename \1", line, count=1),
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
        if any(one.check == _GRID for one in found):
            cured += _capped(file, after, before)
        place = _place(after)
        for name, lines in ((MASK, _MASK_LINES), (CAP, CAP_LINES)):
            if name not in text and any(name in line for line in after):
                after[place:place] = lines
        parts += _diff(file, before, "\n".join(after).split("\n"))
    return "".join(parts), cured


def _capped(file: str, lines: list[str], before: Sequence[str]) -> bool:
    """Caps the grids that may be; whether that was all of them. Lines that another fix has changed stay as they are."""
    made, whole = capped(file, "\n".join(before) + "\n")
    for number, line in made.items():
        if lines[number - 1] != before[number - 1]:
            whole = False
        else:
            lines[number - 1] = line
    return whole and bool(made)


def _read(file: Path) -> str | None:
    try:
        text = file.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\r" in text or not text.endswith("\n") else text


def _fixed(lines: list[str], finding: Finding) -> bool:
    """Changes the finding's line, or that of the macro that it names; whether it is cured."""
    at = (finding.where.line or 1) - 1
    if at >= len(lines) or (finding.check == "clang-strictness" and "::" not in finding.what):
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
