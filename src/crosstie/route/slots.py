"""Places for LoRA adapters on one replica: what is loaded there as far as is known, and by how many each is used."""


class AdapterSlots:
    def __init__(self, most: int):
        self.most = most
        # Those that are loaded, the least recently used first.
        self._loaded: dict[str, None] = {}
        # Requests on the replica by the adapter that they need; some may be loaded only now.
        self._in_use: dict[str, int] = {}
        # Those that could not be loaded, and until when that is believed.
        self._failed: dict[str, float] = {}

    @property
    def loaded(self) -> list[str]:
        return list(self._loaded)

    def has(self, adapter: str) -> bool:
        return adapter in self._loaded

    def ready(self, adapter: str) -> bool:
        """Whether it is there, and stays: one that nobody uses makes room where every place is wanted by others."""
        return adapter in self._loaded and self._has_place(adapter)

    def _has_place(self, adapter: str) -> bool:
        """Each adapter that requests are on the replica for needs a place, loaded or coming; the others can go."""
        return adapter in self._in_use or len(self._in_use) < self.most

    def begin(self, adapter: str) -> None:
        self._in_use[adapter] = self._in_use.get(adapter, 0) + 1
        if adapter in self._loaded:
            del self._loaded[adapter]
            self._loaded[adapter] = None

    def end(self, adapter: str) -> None:
        left = self._in_use[adapter] - 1
        if left:
            self._in_use[adapter] = left
        else:
            del self._in_use[adapter]

    def refuses(self, adapter: str, now: float) -> bool:
        """Whether it could not be loaded a moment ago."""
        return self._failed.get(adapter, float("-inf")) > now

    def may_take(self, adapter: str, now: float) -> bool:
        """Whether it is there, or could be loaded: there is a place, or one that nobody uses."""
        known = adapter in self._loaded or adapter in self._in_use
        return self._has_place(adapter) and (known or not self.refuses(adapter, now))

    @property
    def full(self) -> bool:
        return len(self._loaded) >= self.most

    def idle(self) -> str | None:
        """The least recently used that nobody uses."""
        return next((one for one in self._loaded if one not in self._in_use), None)

    def came(self, adapter: str) -> None:
        self._loaded[adapter] = None
        self._failed.pop(adapter, None)

    def went(self, adapter: str) -> None:
        self._loaded.pop(adapter, None)

    def failed(self, adapter: str, until: float) -> None:
        self._loaded.pop(adapter, None)
        self._failed[adapter] = until

    def found(self, adapters: list[str]) -> None:
        """What the engine says that it has: what it has no more is forgotten, and what others have loaded there was
        used by nobody here."""
        new = [adapter for adapter in adapters if adapter not in self._loaded]
        known = [one for one in self._loaded if one in adapters]
        first, last = [one for one in new if one not in self._in_use], [one for one in new if one in self._in_use]
        self._loaded = dict.fromkeys([*first, *known, *last])

    def clear(self) -> None:
        """Its engine may be another one."""
        self._loaded.clear()
        self._failed.clear()
