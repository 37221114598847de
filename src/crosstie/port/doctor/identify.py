"""Which accelerator of the catalog a device is, by its PCI id: tools spell names in many ways, ids in one."""

from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_table
from crosstie.port.doctor.machine import Gpu

FILE = Path(__file__).parent / "data" / "devices.csv"
_COLUMNS = ("pci", "revision", "compute_units", "accelerator", "source")


@cache
def known_devices() -> tuple[dict[str, str], ...]:
    return tuple(row for _, row in read_table(FILE, _COLUMNS))


def identified(gpu: Gpu) -> Gpu:
    found = [row for row in known_devices() if row["pci"] == gpu.pci and _is(gpu, row)]
    return msgspec.structs.replace(gpu, accelerator=found[0]["accelerator"]) if len(found) == 1 else gpu


def _is(gpu: Gpu, row: dict[str, str]) -> bool:
    """Cards of one chip differ by revision, which rocminfo does not print, and by compute units, which it does."""
    if not row["revision"]:
        return True
    if gpu.compute_units is not None:
        return str(gpu.compute_units) == row["compute_units"]
    return gpu.revision == row["revision"]
