"""The first module whose outputs differ between two machines.

    from crosstie_port.divergence import compare, record

    with record(model, "a.npz"):     # on machine A, and with another name on machine B
        model(input_ids)
    print(compare("a.npz", "b.npz"))

Recording needs PyTorch, NumPy and msgspec, which engines have: a source tree on the path is enough in their images.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosstie_port.divergence.comparison import Comparison as Comparison, compare as compare
    from crosstie_port.divergence.recording import record as record

_HOMES = {"record": "recording", "compare": "comparison", "Comparison": "comparison"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
