"""Whether a file has changed since it was last looked at."""

from pathlib import Path


def stamp(file: Path | None) -> tuple[int, int, int] | None:
    try:
        found = file.stat() if file is not None else None
    except OSError:
        # Being replaced just now, perhaps; reading it will tell.
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
