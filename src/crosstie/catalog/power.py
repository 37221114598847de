"""What accelerators draw while they serve and while they idle, as a share of their rated power."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import only_keys, read_facts, read_record, sourced_file
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.errors import BadData
from crosstie.core.estimate import Estimate
from crosstie.core.fact import Fact, Quantity

_SHARE = Quantity("fraction", 0.01, 2.0, "share of the rated power")


class PowerModel(msgspec.Struct, frozen=True, kw_only=True):
    roofline_exponent: Annotated[Fact, Quantity("fraction", 0.0, 1.0, "how power grows with the share of the roofline")]
    load_exponent: Annotated[Fact, Quantity("fraction", 0.0, 1.0, "how power grows with sequences for each GPU")]
    low: Annotated[Fact, Quantity("fraction", 0.1, 1.0, "measured over predicted, 10th percentile")]
    high: Annotated[Fact, Quantity("fraction", 1.0, 10.0, "measured over predicted, 90th percentile")]
    least: Annotated[Fact, _SHARE]
    # By accelerator, and "other".
    scale: Annotated[dict[str, Fact], _SHARE]
    idle: Annotated[dict[str, Fact], _SHARE]

    def knows(self, accelerator: Accelerator) -> bool:
        """Whether its power was measured while it served; others have the middle of those."""
        return accelerator.id in self.scale

    def fraction(self, accelerator: Accelerator, roofline_fraction: float, sequences_per_gpu: float) -> float:
        """Mean power over the rated, of a GPU that is serving all the while."""
        scale = self.scale.get(accelerator.id) or self.scale["other"]
        reached = max(roofline_fraction, 1e-3) ** self.roofline_exponent.value
        load = max(sequences_per_gpu, 1e-3) ** self.load_exponent.value
        return float(min(max(scale.value * reached * load, self.least.value), 1.0))

    def watts(self, accelerator: Accelerator, roofline_fraction: float, sequences_per_gpu: float) -> float:
        return accelerator.chip.tdp.si * self.fraction(accelerator, roofline_fraction, sequences_per_gpu)

    def idle_watts(self, accelerator: Accelerator) -> float:
        return accelerator.chip.tdp.si * (self.idle.get(accelerator.id) or self.idle["other"]).value

    def serving_watts(self, deployment: Deployment, point: Estimate) -> float:
        """Of one GPU of a replica under the load of an estimate."""
        spent = {
            phase: sum(s for key, s in point.gpu_s_per_token.items() if key.startswith(phase))
            for phase in ("prefill", "decode")
        }
        reached = spent["prefill"] * point.prefill_roofline_fraction + spent["decode"] * point.decode_roofline_fraction
        load = point.concurrency * tokens_verified(deployment) / deployment.parallelism.gpus
        return self.watts(deployment.accelerator, reached / sum(spent.values()), load)


def tokens_verified(deployment: Deployment) -> int:
    """Of each sequence in a step."""
    return deployment.speculation.queries if deployment.speculation else 1


def read_power(file: Path, accelerators: Collection[str]) -> PowerModel:
    """`accelerators`: the ids that there are."""
    with sourced_file(file) as (raw, sources):
        facts = read_facts(file, "power", raw.pop("power", None), PowerModel, sources)
        power = read_record(file, "", raw, PowerModel, sources, **facts)
    for key, shares in (("scale", power.scale), ("idle", power.idle)):
        only_keys(file, key, shares, {"other", *accelerators})
        if "other" not in shares:
            raise BadData(file, f"{key}.other", f"missing: {_SHARE.meaning}")
    return power
