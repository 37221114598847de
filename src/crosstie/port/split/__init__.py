"""A module split into captured graphs and what runs between them.

Names are imported when first used: PyTorch is an extra (`crosstie[preflight]`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crosstie.core.errors import BadInput

if TYPE_CHECKING:
    from crosstie.port.split.cures import EagerReason
    from crosstie.port.split.opaque import dynamic
    from crosstie.port.split.pieces import Piece, Split, split

_HOMES = {"Obstacle": "cures", "Piece": "pieces", "Split": "pieces", "dynamic": "opaque", "split": "pieces"}

__all__ = ["EagerReason", "Piece", "Split", "dynamic", "split"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'crosstie.port.split' has no name '{name}'")
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise BadInput(f"crosstie.port.split.{name} needs torch: pip install 'crosstie[preflight]'") from None
