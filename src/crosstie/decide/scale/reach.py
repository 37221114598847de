"""Whether replicas take what the plan says of them, learnt from targets that were kept and missed.

Estimates are off by tens of percent, either way. Where nearly all requests keep their targets although the replicas are
near what they should take, they take more; where too many miss them although they are below it, less.
"""

import msgspec

# A verdict takes so many requests and so long: misses come in clusters, and each verdict may move replicas.
_ENOUGH, _LONG_S = 1000, 900.0
# Of what replicas should take, how much they must have for a verdict on it; above the second they are simply too few.
_BUSY, _FULL = 0.75, 1.02
# How far from what is promised to all of it the share must be to move: up above the first, down below the second.
_MORE, _LESS = 0.6, 0.2
_UP, _DOWN = 1.02, 0.97
_LEAST, _MOST = 0.5, 1.3


class Reach(msgspec.Struct, kw_only=True):
    """Of one class."""

    # What replicas take over what the plan says.
    factor: float = 1.0
    # Since the last verdict.
    kept: float = 0.0
    ended: float = 0.0
    over_s: float = 0.0

    def see(self, ended: float, within: float, over_s: float, load: float, promised: float) -> None:
        """So many requests ended in such a time, this share of them within targets, with replicas at such a load of
        what they should take; `promised`: the share that is to keep them."""
        if not _BUSY <= load <= _FULL:
            return
        self.ended += ended
        self.kept += ended * within
        self.over_s += over_s
        if self.ended < _ENOUGH or self.over_s < _LONG_S:
            return
        share, room = self.kept / self.ended, 1.0 - promised
        self.kept = self.ended = self.over_s = 0.0
        if share > promised + _MORE * room:
            self.factor = min(self.factor * _UP, _MOST)
        elif share < promised + _LESS * room:
            self.factor = max(self.factor * _DOWN, _LEAST)
