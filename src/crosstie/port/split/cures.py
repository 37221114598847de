"""What keeps a module's own Python out of graphs, with the statement and what would mend it."""

import linecache
import re
from dataclasses import dataclass

_PLACE = re.compile(r"\(([^()\s]+\.py):(\d+)\)\s*$")
_MARK = (
    "put this statement, with the loop or branch that it belongs to, into a function marked "
    "@crosstie.port.split.dynamic, which takes tensors and returns tensors of a fixed shape: what stands before and "
    "after it goes into graphs then"
)
# What a reason says, and what would mend it; the first that fits.
_CURES = (
    (r"unique\(|\.tolist\(\)",
     "loop over all of them, each with its mask (`for e in range(n): out += weight[:, e, None] * expert(h)`), or, "
     f"where that computes too much, {_MARK}"),
    (r"data-dependent|guard on|unbacked|specialized|symbolically|is_nonzero|\.item\(\)",
     f"torch.where in place of the branch; or {_MARK}"),
    (r"state kept in Python|changes during the call",
     "keep it in a buffer (register_buffer) and write it in place: self.step.add_(1)"),
    (r"number of Python's|same operations in each call",
     "give it as a tensor, or keep it in a buffer that is written in place"),
    (r"has hooks", "take the hooks off before the split, or do their work in forward"),
    (r"neither tensor nor plain value", "take and return tensors, numbers, and tuples and dictionaries of them"),
    (r"no attribute of a module", "make it a buffer of the module (register_buffer)"),
    (r"shape of a tensor in place", "the operation without the underscore, which gives a new view"),
)  # fmt: skip


@dataclass(frozen=True)
class EagerReason:
    """Why a module runs as Python in every call."""

    # The module's name in the whole; "module" for the whole itself.
    name: str
    why: str
    # file:line and the statement there; "" where the reason names no line.
    place: str
    statement: str
    cure: str


def obstacle(name: str, why: str) -> EagerReason:
    found = _PLACE.search(why)
    file, line = (found.group(1), int(found.group(2))) if found else ("", 0)
    statement = linecache.getline(file, line).strip() if file else ""
    # The statement says what is done there in the author's words, the reason in the tracer's.
    told = f"{statement} {why}"
    cure = next((cure for pattern, cure in _CURES if re.search(pattern, told)), _MARK)
    return EagerReason(name, why, f"{file}:{line}" if file else "", statement, cure)
