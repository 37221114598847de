"""LoRA adapters of an emulated replica, loaded and unloaded by vLLM's and SGLang's calls. Beyond a moment for the load,
an adapter takes no time."""

from collections.abc import Callable

import msgspec

from crosstie_gateway.emulate.requests import EngineError
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
# Of the emulated engine's time; on real ones it depends on the disk.
_LOAD_S = 0.2


class _Asked(msgspec.Struct):
    lora_name: str = ""
    lora_path: str = ""


class EmulatedAdapters:
    """`later` calls something after so many seconds of the engine's time."""

    def __init__(self, later: Callable[[float, Callable[[], None]], object]):
        self._later = later
        # By name, where it was loaded from.
        self.loaded: dict[str, str] = {}
        self.loads = self.unloads = 0
        # Adapters that cannot be loaded here.
        self.broken: set[str] = set()

    def load(self, request: Request, reply: Reply, *, as_json: bool = False) -> None:
        asked = _decoded(request)
        if not asked.lora_name or not asked.lora_path:
            raise EngineError(400, "InvalidUserInput", "Both 'lora_name' and 'lora_path' must be provided.")
        if asked.lora_name in self.loaded:
            why = f"The lora adapter '{asked.lora_name}' has already been loaded."
            raise EngineError(400, "InvalidUserInput", why)
        if asked.lora_name in self.broken:
            raise EngineError(404, "NotFoundError", f"No adapter found for '{asked.lora_path}'.")

        def answer() -> None:
            if reply.gone:
                return
            self.loads += 1
            self.loaded[asked.lora_name] = asked.lora_path
            self._done(reply, f"Success: LoRA adapter '{asked.lora_name}' added successfully.", as_json)

        self._later(_LOAD_S, answer)

    def unload(self, request: Request, reply: Reply, *, as_json: bool = False) -> None:
        asked = _decoded(request)
        if self.loaded.pop(asked.lora_name, None) is None:
            why = f"The lora adapter '{asked.lora_name}' cannot be found."
            raise EngineError(404, "NotFoundError", why)
        self.unloads += 1
        self._done(reply, f"Success: LoRA adapter '{asked.lora_name}' removed successfully.", as_json)

    def _done(self, reply: Reply, said: str, as_json: bool) -> None:
        if as_json:
            body = msgspec.json.encode({"success": True, "error_message": "", "loaded_adapters": self.loaded})
            reply.send(200, body)
        else:
            reply.send(200, said.encode(), content_type=b"text/plain")

    def named(self, model: str, base: str) -> str | None:
        """The adapter that a request means, if it is loaded: by its name, or as SGLang has it after its model's."""
        name = model.removeprefix(f"{base}:")
        return name if name in self.loaded else None


def _decoded(request: Request) -> _Asked:
    try:
        return msgspec.json.decode(request.body, type=_Asked)
    except msgspec.DecodeError as error:
        raise EngineError(400, "BadRequestError", str(error)) from None
