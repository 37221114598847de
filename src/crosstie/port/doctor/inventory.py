"""What a machine has, as accelerators of the catalog: with the memory that its driver tells, and so many of each."""

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact
from crosstie.port.doctor.machine import Machine


class Stock(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: Accelerator
    count: int


def stock(machine: Machine, catalog: Catalog) -> list[Stock]:
    """A partition is an accelerator with less memory; its rates would be wrong, so only memory may be asked of it."""
    stocks = [
        Stock(accelerator=_as_here(catalog.accelerator(name), gpus[0].memory_bytes, len(gpus), machine.taken),
              count=len(gpus))
        for name, gpus in machine.kinds.items()
        if gpus[0].accelerator
    ]  # fmt: skip
    if not stocks:
        seen = ", ".join(f"{gpus[0].name or label} ({gpus[0].pci})" for label, gpus in machine.kinds.items())
        told = f"none of its GPUs is in the catalog: {seen}" if seen else "no GPU is seen"
        raise BadInput(f"this machine: {told}; `crosstie doctor` tells more")
    return stocks


def whole_stock(machine: Machine, catalog: Catalog) -> list[Stock]:
    """The same where rates count as well."""
    split = [gpu.label for gpu in machine.usable if gpu.is_partition]
    if split:
        raise BadInput(
            f"this machine: {split[0]} is split into partitions, and a plan reckons with whole GPUs; "
            "`crosstie doctor` says how to join them"
        )
    return stock(machine, catalog)


def _as_here(accelerator: Accelerator, memory_bytes: int | None, count: int, day: str) -> Accelerator:
    def seen_here(value: float, unit: str) -> Fact:
        return Fact(value=value, unit=unit, basis="measured", source="the driver of this machine", date=day)

    memory, scale_up = accelerator.memory, accelerator.scale_up
    if memory_bytes:
        memory = msgspec.structs.replace(memory, usable=seen_here(float(memory_bytes), "B"))
    if count < scale_up.domain.value:
        scale_up = msgspec.structs.replace(scale_up, domain=seen_here(float(count), "count"), node=None)
    return msgspec.structs.replace(accelerator, memory=memory, scale_up=scale_up)
