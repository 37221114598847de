"""How long a session that pauses is waited for: as long as most of those took that came back, and as long again."""

from collections.abc import Sequence
from typing import Final

# A session is waited for twice as long as this share of pauses takes, since pauses of one class may all be alike.
_WAITED_FOR: Final = 0.95
_TIMES: Final = 2.0
# Until so many pauses have been seen.
_USUAL_PAUSE_S: Final = 60.0
_FEW_PAUSES: Final = 8


def patience_s(pause_s: float) -> float:
    """How long a session is waited for that pauses so long."""
    return _TIMES * pause_s


def comes_back_s(pauses_s: Sequence[float]) -> float:
    """Within which those come back that do; of pauses in order."""
    if len(pauses_s) < _FEW_PAUSES:
        return _USUAL_PAUSE_S
    return patience_s(pauses_s[int(_WAITED_FOR * len(pauses_s))])
