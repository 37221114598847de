"""What accelerators draw while they serve, as a share of their rated power."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import Quantity, read_facts, sourced_file
from crosstie.core.deployment import Accelerator
from crosstie.core.fact import Fact

_SHARE = Quantity("fraction", 0.01, 2.0, "share of the rated power")
_POWER = {
    "roofline_exponent": Quantity("fraction", 0.0, 1.0, "how power grows with the share of the roofline"),
    "load_exponent": Quantity("fraction", 0.0, 1.0, "how power grows with sequences for each GPU"),
    "least": _SHARE,
}


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    roofline_exponent: Fact
    load_exponent: Fact
    least: Fact
    scale: dict[str, Fact]

    def fraction(self, accelerator: Accelerator, roofline_fraction: float, sequences_per_gpu: float) -> float:
        """Mean power over the rated, of a GPU that is serving all the while."""
        scale = self.scale.get(accelerator.id) or self.scale["other"]
        reached = max(roofline_fraction, 1e-3) ** self.roofline_exponent.value
        load = max(sequences_per_gpu, 1e-3) ** self.load_exponent.value
        return float(min(max(scale.value * reached * load, self.least.value), 1.0))

    def watts(self, accelerator: Accelerator, roofline_fraction: float, sequences_per_gpu: float) -> float:
        return accelerator.chip.tdp.si * self.fraction(accelerator, roofline_fraction, sequences_per_gpu)


def read_power(file: Path, accelerators: Mapping[str, Accelerator]) -> PowerModel:
    with sourced_file(file, {"power", "scale"}) as (raw, sources):
        names = dict.fromkeys([*accelerators, "other"], _SHARE)
        scale = raw.get("scale", {})
        known = {name: names[name] for name in scale if name in names} or {"other": _SHARE}
        return PowerModel(
            **read_facts(file, "power", raw.get("power"), _POWER, sources),
            scale=read_facts(file, "scale", scale, known, sources),
        )
