"""Inline assembly: what of it is PTX, which instructions it has, and what stands in for them."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import Sources, only_keys, read_toml, table, text, texts
from crosstie.core.errors import BadData
from crosstie.port.source.code import Code
from crosstie.port.source.expressions import closing
from crosstie.port.source.hazard import Hazard

FILE = Path(__file__).parent / "data" / "ptx.toml"
_WORDS = ("asm", "__asm__", "__asm")
_BETWEEN = ("volatile", "__volatile__", "__volatile", "goto", "inline")
_OPCODE = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[a-z0-9_]+)*)", re.IGNORECASE)
_AMD = re.compile(r"^(?:v|s|ds|buffer|global|flat|scratch|image|tbuffer|exp)_[a-z0-9_]+$|^(?:exec|vcc)", re.IGNORECASE)
# An instruction of PTX has a type or a state behind a dot; a register of it is named %laneid, %0 or p.
_PTX = re.compile(
    r"\.(?:[busf](?:8|16|32|64|128)|bf16|f16x2|b1|pred|reg|sync|global|shared|aligned|e4m3\w*|cta|gpu|sys)\b"
)
_SPECIAL = re.compile(r"%(laneid|warpid|smid|nsmid|globaltimer\w*|clock\w*|lanemask_\w+|gridid|ctaid|tid|ntid|nctaid"
                      r"|cluster\w*|dynamic_smem_size|total_smem_size|envreg\d+|is_explicit_cluster)")  # fmt: skip
# `void f() asm("symbol")` names a symbol.
_LABEL = re.compile(r"^(?:llvm\.[\w.]+|[A-Za-z_$][\w$@]*)$")
_LANGUAGES = (".cu", ".cuh")
_DEVICE = re.compile(r"__device__|__global__|cuda_runtime|<cuda")
_MOST_NAMED = 4


class Class(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    opcodes: tuple[str, ...]
    says: str
    remedy: str
    source: str


@cache
def classes(file: Path = FILE) -> tuple[Class, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "class"})
    sources = Sources(file, raw.get("sources"))
    found: list[Class] = []
    for position, entry in enumerate(raw.get("class") or [], 1):
        row = table(file, f"class {position}", entry)
        name = text(file, f"class {position}.id", row.get("id"))
        only_keys(file, name, row, {"id", "opcodes", "says", "remedy", "source"})
        if any(name == other.id for other in found):
            raise BadData(file, name, "this id stands here twice")
        found.append(
            Class(
                id=name,
                opcodes=texts(file, f"{name}.opcodes", row.get("opcodes")),
                says=text(file, f"{name}.says", row.get("says")),
                remedy=text(file, f"{name}.remedy", row.get("remedy")),
                source=sources.cite(name, row.get("source"))[0],
            )
        )
    return tuple(found)


@cache
def class_of(opcode: str) -> Class | None:
    """By the longest prefix that ends where a part of the opcode ends."""
    best: tuple[int, Class | None] = (0, None)
    plain = opcode.replace("::", ".")
    for one in classes():
        for prefix in one.opcodes:
            if (plain == prefix or plain.startswith(prefix + ".")) and len(prefix) > best[0]:
                best = (len(prefix), one)
    return best[1]


def opcodes(assembly: str) -> list[str]:
    found: list[str] = []
    for statement in re.split(r"[;\n{}]", re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly)):
        plain = re.sub(r"^[\w$%]+\s*:(?!:)", "", statement.strip()).strip()
        if plain.startswith("."):
            continue
        opcode = _OPCODE.match(plain)
        if opcode is not None:
            found.append(opcode[1].lower())
    return found


def assembly_hazards(code: Code) -> Iterator[Hazard]:
    for word in _WORDS:
        for at in code.names.get(word, ()):
            open_at = at + 1
            while open_at < len(code.tokens) and code.tokens[open_at].text in _BETWEEN:
                open_at += 1
            if open_at < len(code.tokens) and code.tokens[open_at].text == "(":
                found = _statement(code, at, open_at)
                if found is not None:
                    yield found


def _statement(code: Code, at: int, open_at: int) -> Hazard | None:
    parts: list[str] = []
    pasted = False
    for token in code.tokens[open_at + 1 : closing(code.tokens, open_at)]:
        if token.text in (":", "::") and token.kind == "sign":
            break
        if token.kind == "string":
            parts.append(token.text)
        elif token.kind == "name":
            pasted = True
    body = "".join(parts)
    if not body.strip() and not pasted:
        # An empty statement orders the compiler's own memory accesses, on every target.
        return None
    names = opcodes(body)
    if _LABEL.match(body) and class_of(body.lower()) is None:
        return None
    if names and all(_AMD.match(name) for name in names):
        return None
    known = [found for name in names if (found := class_of(name)) is not None]
    is_ptx = bool(_PTX.search(body) or _SPECIAL.search(body) or any("." in name for name in names))
    on_device = code.path.endswith(_LANGUAGES) or _DEVICE.search(code.project.units[code.path].text)
    if not is_ptx and not (on_device and (known or pasted or names)):
        return None
    shown = ", ".join(dict.fromkeys(names[:40])) if len(set(names)) <= _MOST_NAMED else _few(names)
    special = _SPECIAL.search(body)
    if special is not None and special[0] not in shown:
        shown += f" {special[0]}"
    if not known:
        what = f"inline assembly ({shown or 'made by macros'}) that is not AMD's does not build for this target"
        return code.hazard("inline-ptx", "error", what, at, "write it in C++ or guard it with #ifndef USE_ROCM")
    first = next((one for one in known if one.id != "arithmetic" and one.id != "special-register"), known[0])
    what = f"inline PTX, {first.says}: {shown}"
    return code.hazard("inline-ptx", "error", what, at, first.remedy)


def _few(names: list[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:_MOST_NAMED]) + f" and {len(distinct) - _MOST_NAMED} more"
