"""Where in the author's source a compilation failed, and in whose words."""

import gc
import re
import traceback
from pathlib import Path
from typing import Any

from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from crosstie.port.kernels.jobs import def_line


def explain(error: BaseException, function: Any) -> dict[str, Any]:
    """The innermost error that has a place; a kernel that calls a helper has one at the call and one in the helper."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        # Not __context__: of a failed ptxas that is the failed process, which says less.
        following = following.__cause__
    placed = [one for one in chain if isinstance(one, CompilationError) and hasattr(one.node, "lineno")]
    said = _said(chain[-1] if not placed else placed[-1])
    deepest = _said(chain[-1])
    message = said if deepest in said or not deepest else f"{said}: {deepest}"
    file, line = function.fn.__code__.co_filename, 0
    if placed:
        source = placed[-1].src or ""
        owner = _owner(source, function)
        file = owner.fn.__code__.co_filename
        line = def_line(owner) + placed[-1].node.lineno - 1
    return {"type": type(chain[-1]).__name__, "message": message, "file": file, "line": line}


def _said(error: BaseException) -> str:
    """The message without the excerpt of the source that Triton puts before it."""
    text = str(getattr(error, "error_message", None) or error) or type(error).__name__
    text = re.sub(r"^at \d+:\d+:\n(?:.*\n)*?\s*\^\n?", "", text)
    return " ".join(text.split())[:600] or type(error).__name__


def _owner(source: str, function: Any) -> Any:
    if function.src == source:
        return function
    candidates = (one for one in gc.get_objects() if isinstance(one, JITFunction))
    return next((one for one in candidates if one.src == source), function)


def import_error(error: BaseException, file: str) -> dict[str, Any]:
    """The last line of the author's own file on the way to an error, and the statement that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if Path(frame.filename) == Path(file)), None)
    message = " ".join(str(error).split())[:600]
    if frames and frames[-1].line:
        said = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}"
        message = f"{message} ({said})" if message else said
    return {"type": type(error).__name__, "message": message, "file": file, "line": line or 0}
