"""Files that are there whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from crosstie.core.errors import BadInput


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a draft beside the target, which then takes its place in one go; a failure leaves neither."""
    if target.exists() and not target.is_file():
        # A device or a folder would be replaced by a file, not written to.
        raise BadInput(f"{target}: cannot be written: no plain file")
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=target.suffix)
    os.close(handle)
    draft = Path(name)
    try:
        write(draft)
        # mkstemp's files are for their owner alone; others' eyes are the umask's business.
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """A whole text file, or a sentence about why not."""
    try:
        write_whole(target, lambda draft: draft.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{target}: cannot be written: {error.strerror}") from None
