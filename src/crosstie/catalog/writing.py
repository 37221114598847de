"""Files that are there whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a draft beside the target, which then takes its place in one go; a failure leaves neither."""
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
