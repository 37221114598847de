"""Whether replicas take what the plan says of them, learnt from targets that were kept and missed.

Estimates are off by tens of percent, either way. Where nearly all requests keep their targets although the replicas are
near what they should take, they take more; where too many miss them although they are below it, less.
"""

import msgspec

# A verdict takes so many requests and so long: misses come in clusters, and each verdict may move replicas.
_ENOUGH, _LONG_S = 1000, 900.0
# Of what replicas should take, how much they must have for a verdict on it, and for one that they take more: latencies
# rise late and steeply. Above the last they are simply too few.
_BUSY, _NEARLY, _FULL = 0.75, 0.92, 1.02
# How far from what is promised to all of it the share must be to move: up above the first, down below the second. A
# policy that sends each request where it is cheapest uses up what targets allow, and so stays near what is promised:
# that says nothing against the replicas.
_MORE, _LESS = 0.6, -1.0
_UP, _DOWN = 1.02, 0.97
_LEAST, _MOST = 0.5, 1.3


class LearntReach(msgspec.Struct, kw_only=True):
    """Of one class."""

    # What replicas take over what the plan says.
    factor: float = 1.0
    # Since the last verdict.
    kept: float = 0.0
    ended: float = 0.0
    over_s: float = 0.0
    load_s: float = 0.0

    def see(self, ended: float, within: float, over_s: float, load: float, promised: float) -> None:
        """So many requests ended in such a time, this share of them within targets, with replicas at such a load of
        what they should take; `promised`: the share that is to keep them."""
        if not _BUSY <= load <= _FULL:
            return
        self.ended += ended
        self.kept += ended * within
        self.over_s += over_s
        self.load_s += load * over_s
        if self.ended < _ENOUGH or self.over_s < _LONG_S:
            return
        share, room, usual = self.kept / self.ended, 1.0 - promised, self.load_s / self.over_s
        self.kept = self.ended = self.over_s = self.load_s = 0.0
        if usual >= _NEARLY and share > promised + _MORE * room:
            self.factor = min(self.factor * _UP, _MOST)
        elif share < promised + _LESS * room:
            self.factor = max(self.factor * _DOWN, _LEAST)
        elif share >= promised and self.factor < 1.0:
            # What a shortage taught fades while the promise is kept: such a policy never shows more than that.
            self.factor = min(self.factor * _UP, 1.0)
