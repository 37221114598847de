"""One kind of objects, kept as the API server has them: listed once, then followed by what changes.

What is known stays until somebody says otherwise. A stream that ends is resumed there; after any other end everything
is listed again, and the listing is the truth.
"""

import random
import threading
from collections.abc import Callable, Mapping

import msgspec

from crosstie_gateway.cluster.api import GONE, ApiFault, Asked, ClusterApi, ClusterObject, WatchStream

_FIRST_S, _MOST_S = 0.1, 2.0

# Objects by name, whenever they have changed; or what is wrong. Called in the watcher's thread.
Tell = Callable[[Mapping[str, ClusterObject] | None, ApiFault | None], None]


class Watcher:
    def __init__(self, api: ClusterApi, asked: Asked, tell: Tell):
        self._api, self.asked, self._tell = api, asked, tell
        self._stopping = threading.Event()
        self._stream: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch-{asked.resource}", daemon=True)
        self._objects: dict[str, ClusterObject] = {}
        # From where the next stream begins; "": everything is to be listed first.
        self._version = ""
        self._pause_s = _FIRST_S

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """At once: as a daemon its thread keeps nobody from leaving."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._list()
                self._stream = self._api.watch(self.asked, self._version)
            except ApiFault as fault:
                self._version = ""
                if fault.status != GONE and not self._stopping.is_set():
                    self._tell(None, fault)
                # Not all at the same moment: a server that has just come back has enough to do.
                self._stopping.wait(self._pause_s * random.uniform(0.5, 1.0))
                self._pause_s = min(2 * self._pause_s, _MOST_S)
                continue
            try:
                self._follow(self._stream)
            except ApiFault:
                # Whether something is wrong, the listing will tell.
                self._version = ""
            # A server that ends every stream at once is not asked in a circle.
            self._stopping.wait(_FIRST_S)

    def _list(self) -> None:
        if self._version:
            return
        listed = self._api.list(self.asked)
        self._objects = {item.metadata.name: item for item in listed.items or ()}
        self._version = listed.metadata.resource_version
        self._told()

    def _follow(self, stream: WatchStream) -> None:
        for event in stream:
            if self._stopping.is_set():
                stream.close()
                return
            self._pause_s = _FIRST_S
            meta = event.object.metadata
            self._version = meta.resource_version or self._version
            # A bookmark has a version and nothing else.
            if event.type in ("ADDED", "MODIFIED"):
                self._objects[meta.name] = event.object
            elif event.type == "DELETED":
                self._objects.pop(meta.name, None)
            else:
                continue
            self._told()

    def _told(self) -> None:
        try:
            self._tell(self._objects.copy(), None)
        except msgspec.MsgspecError as error:
            # Of one object that cannot be read its watcher must not end.
            raise ApiFault(0, f"what it answers is not Kubernetes' ({error})") from None
