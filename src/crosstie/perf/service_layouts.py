"""Layouts of disaggregated services, as they are written, and those whose sides match."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.disaggregated import Connector, Disaggregated
from crosstie.core.errors import BadInput
from crosstie.perf.disaggregated import Sides, without_queues

_SIDE = re.compile(
    r"(?P<replicas>\d{1,4})x(?P<split>(?:(?:TP|DP|EP)\d{1,4})+)(?:@(?P<accelerator>[\w.-]{1,60}))?", re.IGNORECASE
)
# Share of the time that prefill replicas are meant to work.
_BUSY = 0.8
_PART = re.compile(r"(TP|DP|EP)(\d{1,4})", re.IGNORECASE)


class SideLayout(NamedTuple):
    """Replicas of one kind and their split; the accelerator where it is another than the service's."""

    replicas: int
    parallelism: Parallelism
    accelerator: str | None = None

    @property
    def gpus(self) -> int:
        return self.replicas * self.parallelism.gpus


def parse_layout(text: str) -> tuple[SideLayout, SideLayout]:
    """Prefill, then decode: "1xTP4:2xTP8EP8", or on two accelerators "1xTP8@h100-sxm:1xTP8@h200"."""
    sides = text.replace("·", "").replace(" ", "").split(":")
    expected = "write prefill, a colon, then decode, such as 1xTP4:2xTP8"
    if len(sides) < 2 or not sides[0] or not sides[1]:
        alone = "decode" if sides[0] == "" else "prefill"
        raise BadInput(f"'{text[:60]}': a {alone} pool alone answers nobody; {expected}")
    if len(sides) > 2:
        raise BadInput(f"'{text[:60]}' has {len(sides)} sides; {expected}")
    return _side(text, sides[0], expected), _side(text, sides[1], expected)


def _side(text: str, side: str, expected: str) -> SideLayout:
    match = _SIDE.fullmatch(side)
    if not match:
        raise BadInput(f"'{side[:60]}' of '{text[:60]}' is no number of replicas and their split; {expected}")
    parts: dict[str, int] = {}
    for name, width in _PART.findall(match["split"]):
        if name.lower() in parts:
            raise BadInput(f"'{side[:60]}' has {name.upper()} twice")
        parts[name.lower()] = int(width)
    return SideLayout(int(match["replicas"]), Parallelism(**parts), match["accelerator"])


def matched(
    pairs: Sequence[tuple[Deployment, Deployment]], connector: Connector, *, input_tokens: float, output_tokens: float,
    most_gpus: int, cached_tokens: float = 0.0, sequences: Sequence[float] = (4, 16, 64, 256),
) -> list[Disaggregated]:  # fmt: skip
    """Services of prefill and decode replicas in numbers that match: what the one gives, the other takes, at several
    numbers of sequences on each decode replica.

    Only whole numbers of replicas within so many GPUs, each ratio once and in its smallest numbers.
    """
    ones = []
    for prefill, decode in pairs:
        try:
            ones.append(
                Disaggregated(
                    prefill=prefill, prefill_replicas=1, decode=decode, decode_replicas=1, connector=connector
                )
            )
        except BadInput:
            # States of one width cannot be cut again for another.
            continue
    if not ones:
        return []
    got = without_queues(
        Sides(ones), np.asarray(sequences, np.float64), input_tokens, output_tokens, cached_tokens=cached_tokens
    )
    # Prefill replicas for each that decodes, if they are to be busy that share of the time.
    ratios = got.requests_per_s * got.service_s / _BUSY
    found: list[Disaggregated] = []
    for one, row in zip(ones, ratios, strict=True):
        near = {pair for ratio in row for pair in _near(float(ratio), one.prefill.gpus, one.decode.gpus, most_gpus)}
        found += [
            msgspec.structs.replace(one, prefill_replicas=pair[0], decode_replicas=pair[1]) for pair in sorted(near)
        ]
    return found


def _near(ratio: float, prefill_gpus: int, decode_gpus: int, most_gpus: int) -> set[tuple[int, int]]:
    """The smallest whole numbers whose quotient is within a quarter of the ratio, or one of each side."""
    most = [(p, d) for d in range(1, 9) for p in range(1, 9) if p * prefill_gpus + d * decode_gpus <= most_gpus]
    able = [pair for pair in most if math.gcd(*pair) == 1]
    if not able:
        return set()
    near = [pair for pair in able if 0.8 <= pair[0] / pair[1] / ratio <= 1.25]
    best = min(near or able, key=lambda pair: abs(math.log(pair[0] / pair[1] / ratio)) if not near else sum(pair))
    return {best}
