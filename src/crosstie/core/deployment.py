"""One replica: a model on accelerators, split in some way, stored in some formats, under a stack."""

import msgspec

from crosstie.core.accelerator import Accelerator
from crosstie.core.correction import NONE, Correction
from crosstie.core.errors import BadInput
from crosstie.core.formats import Precision
from crosstie.core.model import Model
from crosstie.core.stack import Efficiency, Stack

KV_FORMATS = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def kv_bytes_per_element(kv_format: str) -> float:
    if kv_format not in KV_FORMATS:
        raise BadInput(f"unknown KV format '{kv_format}'; known: {', '.join(KV_FORMATS)}")
    return KV_FORMATS[kv_format]


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """tp: tensor-parallel ranks of attention. dp: attention replicas that share the experts.
    pp: pipeline stages. ep: groups over which experts are spread (1: experts split like the rest)."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def stage_gpus(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] if self.tp > 1 or self.dp == 1 else []
        parts += [f"{name}{n}" for name, n in (("DP", self.dp), ("PP", self.pp), ("EP", self.ep)) if n > 1]
        return "·".join(parts)

    def check(self, model: Model, accelerator: Accelerator) -> None:
        """Refuses a split that the model or the machine cannot have, and says why."""
        for name, n in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("dp", self.dp)):
            if n < 1:
                raise BadInput(f"{name} {n}: must be at least 1")
        if model.heads % self.tp:
            raise BadInput(f"tp {self.tp} does not divide the {model.heads} attention heads of {model.id}")
        small, large = sorted((model.kv_heads, self.tp))
        if large % small:
            raise BadInput(f"tp {self.tp} and the {model.kv_heads} KV heads of {model.id} do not divide one another")
        if self.pp > model.layer_count:
            raise BadInput(f"pp {self.pp} exceeds the {model.layer_count} layers of {model.id}")
        if self.ep > 1:
            if not model.is_moe:
                raise BadInput(f"ep {self.ep}: {model.id} has no experts to spread")
            if model.experts % self.ep:
                raise BadInput(f"ep {self.ep} does not divide the {model.experts} experts of {model.id}")
            if self.stage_gpus % self.ep:
                raise BadInput(f"ep {self.ep} does not divide the {self.stage_gpus} GPUs of a stage (tp x dp)")
        if self.dp > 1 and not model.is_moe:
            raise BadInput(f"dp {self.dp}: attention replicas share experts, and {model.id} has none")
        if self.stage_gpus > accelerator.domain:
            raise BadInput(
                f"{self.stage_gpus} GPUs in one stage exceed the {accelerator.domain} that fast links join "
                f"on {accelerator.id}; use pipeline stages (pp) beyond that"
            )


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    model: Model
    accelerator: Accelerator
    parallelism: Parallelism
    precision: Precision
    kv_format: str
    stack: Stack
    efficiency: Efficiency
    correction: Correction = NONE

    def __post_init__(self) -> None:
        kv_bytes_per_element(self.kv_format)
        self.parallelism.check(self.model, self.accelerator)

    @property
    def kv_bytes_per_element(self) -> float:
        return kv_bytes_per_element(self.kv_format)

    @property
    def weight_width(self) -> str:
        """Bits of the weights that most of the work goes through: 16, 8 or 4."""
        return self.precision["experts_down" if self.model.is_moe else "mlp_down"].main.width

    @property
    def label(self) -> str:
        return f"{self.parallelism.gpus} x {self.accelerator.id} {self.parallelism} {self.precision.id}"
