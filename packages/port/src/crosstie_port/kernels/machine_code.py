"""What compiled code says of itself: dots, inline assembly, registers, spills and matrix instructions, read from text.

Only the standard library: this runs in the interpreter that compiles, which may lack all that Crosstie installs.
"""

import re
from collections import Counter
from typing import Any

_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.MULTILINE)
_FILE_LINE = re.compile(r'"([^"]+)":(\d+):(\d+)')
_REFERENCE = re.compile(r"#loc\d*")
_AT = re.compile(r"loc\((.*)\)\s*$")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)([^,<>]+)")
_DOT = re.compile(r"= tt\.(dot_scaled|dot) .* : (tensor<.*) -> (tensor<[^>]*>)")
_INLINE = re.compile(r'tt\.elementwise_inline_asm "((?:[^"\\]|\\.)*)".*?constraints = "([^"]*)"')
_CONVERSION = re.compile(r"= tt\.fp_to_fp [^:]*: (\S.*) -> (\S+)")
_FP8 = re.compile(r"f8E\w+")
_AMD_MATRIX = re.compile(r"^\s+(v_(?:mfma|smfmac|wmma|swmmac)_\w+)")
_NVIDIA_MATRIX = re.compile(r"\b(wgmma\.mma_async|mma(?:\.sp)?\.sync|tcgen05\.mma)(?!\.commit)([\w.:]*)")
_LINE_COMMENT = re.compile(r"[;/]\s*([^\s:]+):(\d+):\d+")
_REGISTERS = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_OCCUPANCY = re.compile(r"^; Occupancy: (\d+)", re.MULTILINE)
_DECLARED = re.compile(r"^declare .*?@([\w.$]+)\(", re.MULTILINE)
_AMD_COUNTS = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "sgprs": "sgpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "scratch_bytes": "private_segment_fixed_size",
    "static_lds_bytes": "group_segment_fixed_size",
}

Facts = dict[str, Any]


class Locations:
    """MLIR names its places apart from the operations; a place inside an inlined function is that function's."""

    def __init__(self, text: str):
        self._named = dict(_LOCATION.findall(text))

    def of(self, line: str) -> tuple[str, int, int] | None:
        match = _AT.search(line)
        return self._resolve(match.group(1)) if match else None

    def _resolve(self, place: str, depth: int = 0) -> tuple[str, int, int] | None:
        direct = _FILE_LINE.search(place)
        if direct and '"(' not in place[: direct.start()]:
            return direct.group(1), int(direct.group(2)), int(direct.group(3))
        for name in _REFERENCE.findall(place):
            # A name may refer to itself in a malformed file.
            if name in self._named and depth < 20 and (found := self._resolve(self._named[name], depth + 1)):
                return found
        return None


def _placed(fact: Facts, at: tuple[str, int, int] | None) -> Facts:
    return {**fact, "file": at[0] if at else "", "line": at[1] if at else 0}


def read_ttir(text: str) -> Facts:
    """The program as the front end left it, without branches that the target does not take."""
    places = Locations(text)
    dots: list[Facts] = []
    inline: list[Facts] = []
    upcast_at: dict[tuple[str, int, int], str] = {}
    for line in text.splitlines():
        if conversion := _CONVERSION.search(line):
            before, after = map(_FP8.findall, conversion.groups())
            at = places.of(line)
            if before and at and not after:
                upcast_at[at] = before[0]
        elif dot := _DOT.search(line):
            dots.append(_dot(dot, places.of(line), upcast_at))
        elif assembly := _INLINE.search(line):
            text_of = assembly.group(1).replace("\\0A", "\n").replace("\\09", " ").replace("\\22", '"')
            inline.append(_placed({"text": text_of, "constraints": assembly.group(2)}, places.of(line)))
    return {"dots": dots, "inline_assembly": inline}


def _dot(match: "re.Match[str]", at: tuple[str, int, int] | None, upcast_at: dict[tuple[str, int, int], str]) -> Facts:
    kind, operands, result = match.groups()
    sides = [_TENSOR.findall(side)[0] for side in operands.split(" * ")]
    shapes = [[int(size) for size in shape.split("x") if size] for shape, _ in sides]
    return _placed(
        {
            "kind": kind,
            "types": [element for _, element in sides],
            "shapes": shapes,
            "result": _TENSOR.findall(result)[0][1],
            # The front end casts what the target lacks at the very place of the dot; a cast that the author wrote
            # has a place of its own.
            "upcast_from": upcast_at.get(at, "") if at else "",
        },
        at,
    )


def read_amdgcn(text: str, llir: str) -> Facts:
    """`llir`: the program before code generation, with AMD's libraries linked in; what it still lacks stays lacking."""
    facts: Facts = {"unresolved": [name for name in _DECLARED.findall(llir) if not name.startswith("llvm.")]}
    for name, key in _AMD_COUNTS.items():
        match = re.search(rf"^\s+-?\s*\.{key}:\s+(\d+)", text, re.MULTILINE)
        facts[name] = int(match.group(1)) if match else 0
    occupancies = [int(waves) for waves in _OCCUPANCY.findall(text)]
    # Waves a SIMD may hold at once by registers alone; Triton's LDS is dynamic, so the compiler cannot count it.
    facts["waves_by_registers"] = min(occupancies, default=None)
    return {**facts, **_matrix(text, _AMD_MATRIX)}


def read_ptx(text: str, ptxas_log: str) -> Facts:
    registers = [int(count) for count in _REGISTERS.findall(ptxas_log)]
    frames = [tuple(map(int, frame)) for frame in _FRAME.findall(ptxas_log)]
    return {
        "registers": max(registers, default=None),
        "spill_bytes": max((stores + loads for _, stores, loads in frames), default=None),
        "scratch_bytes": max((stack for stack, _, _ in frames), default=None),
        **_matrix(text, _NVIDIA_MATRIX),
    }


def _matrix(text: str, pattern: "re.Pattern[str]") -> Facts:
    """Matrix instructions, and how many of them stand at each source line ("" for a line that was lost)."""
    counts: Counter[str] = Counter()
    at: dict[str, Counter[str]] = {}
    place = ""
    for line in text.splitlines():
        if line.lstrip().startswith(".loc"):
            comment = _LINE_COMMENT.search(line)
            place = f"{comment.group(1)}:{comment.group(2)}" if comment and comment.group(2) != "0" else ""
        elif match := pattern.search(line):
            name = "".join(match.groups()).rstrip(".:")
            counts[name] += 1
            at.setdefault(place, Counter())[name] += 1
    return {"matrix": counts, "matrix_at": at}
