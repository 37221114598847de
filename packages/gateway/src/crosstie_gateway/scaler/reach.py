"""Whether replicas take what the plan says of them, learnt from targets that were kept and missed.

Estimates are off by tens of percent. Nearly full replicas that keep nearly all targets take more; emptier ones that
miss too many take less.
"""

import msgspec

# A verdict takes so many requests and so long: misses come in clusters, and each verdict may move replicas.
_ENOUGH, _LONG_S = 1000, 900.0
# The load from which there is a verdict, from which replicas may be found to take more (latencies rise late and
# steeply), and above which they are simply too few.
_BUSY, _NEARLY, _FULL = 0.75, 0.92, 1.02
# How far the share must be from the promise, over what is left to all: up above the first, down below the second.
# Policies that go for the cheapest use up what targets allow and stay near the promise.
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
        """So many requests ended, this share within targets, with replicas at such a load of what they should take;
        `promised`: the share to be kept."""
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
