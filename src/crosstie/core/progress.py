"""How far a long call is: `on_progress(done, total, what)` in, nothing out."""

import threading
from collections.abc import Callable

# So many of so many (bytes, files, compilations), and a few words on what is being done now. The total is 0 as long
# as it is not known, and may grow. Calls may come from other threads, one at a time.
OnProgress = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """For callers who do not want to know."""


class Progress:
    """Counts what several threads have done, and reports it."""

    def __init__(self, on_progress: OnProgress, what: str, total: int = 0):
        self._on_progress, self._what = on_progress, what
        self._lock = threading.Lock()
        self._done, self._total = 0, total

    def say(self, what: str) -> None:
        """What is being done now, before anything can be counted."""
        with self._lock:
            self._on_progress(self._done, self._total, what)

    def add(self, done: int = 0, *, total: int = 0) -> None:
        with self._lock:
            self._done += done
            self._total += total
            self._on_progress(self._done, self._total, self._what)
