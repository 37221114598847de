"""A thread beside the event loop that does one thing again and again, and once more at the end."""

import threading
from collections.abc import Callable


class BackgroundThread:
    """Calls `step` every `every_s` and whenever it is woken; `first` and `last` before and after all of that."""

    def __init__(
        self, name: str, step: Callable[[], object], every_s: float, *, first: Callable[[], object] = lambda: None,
        last: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        self._step, self._every_s, self._first, self._last = step, every_s, first, last
        self._name = name
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # What is under way need not be tried again.
        self.stopping = False

    def start(self) -> None:
        """To be called after the fork: a thread from before it would be dead in a worker."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        self._wake.set()

    def stop(self, patience_s: float) -> None:
        """Waits for its end so long at most; as a daemon it keeps no process from ending."""
        self.stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        self._first()
        while not self.stopping:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._step()
        self._step()
        self._last()
