"""Open files: how many there may be, how many connections fit among them, and errors that say that none is left."""

import contextlib
import errno
import os
import socket
from math import inf

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Of a process: its loop, logs, stores, health checks, links to other workers.
_OWN_FILES = 128


def allow_many_connections() -> None:
    """As many open files as the system grants: the usual 1,024 are used up by as many requests in flight."""
    try:
        import resource
    except ImportError:
        # Not on Windows, which has no such limit.
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_files() -> float:
    """What this process may have open now."""
    try:
        import resource
    except ImportError:
        return inf
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if most == resource.RLIM_INFINITY else float(most)


def fitting_connections(files: float, to_backends: int) -> float:
    """Clients that fit beside as many connections to backends as there may be, or are asked for by all of them."""
    left = max(files - _OWN_FILES, 2.0)
    return max(left - to_backends, left // 2)


def is_exhausted(error: OSError) -> bool:
    """Whether it was this machine that had nothing left, and not the other side that refused."""
    if isinstance(error, socket.gaierror):
        # A resolver that can open neither its files nor a socket says that there is no such name.
        return not _can_open()
    return error.errno in EXHAUSTED


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True
