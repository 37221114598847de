"""Inline assembly of the other vendor. It is text to Triton, so it passes every stage up to the assembler."""

import re
from collections.abc import Iterator

from crosstie.core.finding import Finding
from crosstie.port.kernels.compilation import Compilation

_AMD_MNEMONIC = re.compile(r"(?:v|s|ds|buffer|tbuffer|global|flat|scratch|image|lds)_\w+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def mnemonics(text: str) -> list[str]:
    """The first word of each statement, without braces, labels and predicates."""
    found = []
    for statement in re.split(r"[;\n]", _COMMENT.sub(" ", text).replace("{", ";").replace("}", ";")):
        words = [word for word in statement.split() if not word.startswith(("@", "$")) and not word.endswith(":")]
        if words:
            found.append(words[0])
    return found


def is_foreign(text: str, backend: str) -> bool:
    """PTX on AMD, or AMD's instructions on NVIDIA."""
    words = mnemonics(text)
    amd = [bool(_AMD_MNEMONIC.fullmatch(word)) for word in words]
    return bool(words) and (not all(amd) if backend == "hip" else any(amd))


def foreign_assembly(one: Compilation) -> Iterator[Finding]:
    backend = one.target.backend
    seen: set[tuple[str, int]] = set()
    for block in one.result.get("inline_assembly", []):
        place = (block["file"], block["line"])
        if not is_foreign(block["text"], backend) or place in seen:
            continue
        seen.add(place)
        language, check = ("PTX", "inline-ptx") if backend == "hip" else ("AMD assembly", "inline-amdgcn")
        said = one.result.get("error", {}).get("message", "") or one.result.get("printed", "")
        if one.result["status"] == "crashed":
            said = f"nothing more: it ended by {one.result['ended']}"
        outcome = f"the compiler says: {' '.join(said.split())[:300]}" if said else "the compiler said nothing"
        first = " ".join(block["text"].split())
        yield Finding(
            check=check,
            severity="error",
            what=f"{one.kernel} has inline {language}, which {one.target.isa} cannot assemble",
            where=one.place(*place),
            evidence=f'inline assembly "{first[:120]}" with constraints "{block["constraints"]}"; {outcome}',
            grounds="compiled",
            remedy="write it with tl operations, or keep it from this backend by a constexpr condition",
            target=one.target.name,
        )
