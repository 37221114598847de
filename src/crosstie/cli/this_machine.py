"""`--on this`: the accelerators of this machine, or with `--on this:DIR` of one that `crosstie doctor` recorded."""

from collections.abc import Sequence

from crosstie.catalog.library import Catalog, names_in
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput
from crosstie.port.doctor.doctor import installed, read_machine
from crosstie.port.doctor.inventory import Stock, stock, whole_stock
from crosstie.port.preflight.engine import EngineRelease

THIS = "this"
ON_THIS = "this: those of this machine, this:DIR: of a recorded one"


def folder_in(names: str | None) -> tuple[str | None] | None:
    """The record that is meant, or None for this machine; nothing where other accelerators are named."""
    here = [name for name in names_in(names or "") if name == THIS or name.startswith(f"{THIS}:")]
    if not here:
        return None
    if len(names_in(names or "")) > 1:
        raise BadInput(f"--on {names}: this machine stands alone, so that its own number of GPUs counts")
    return (here[0].partition(":")[2] or None,)


def accelerators_on(
    catalog: Catalog, names: str | None, stack: str | None
) -> tuple[Sequence[Accelerator], dict[str, int]]:
    """Those that are named, and how many there are of each where that is known."""
    where = folder_in(names)
    if where is None:
        return catalog.accelerators_named(names, stack), {}
    stocks = stock(read_machine(*where), catalog)
    return [held.accelerator for held in stocks], {held.accelerator.id: held.count for held in stocks}


def stock_on(catalog: Catalog, names: str | None) -> list[Stock]:
    """Of this machine, whole GPUs; nothing where other accelerators are named."""
    where = folder_in(names)
    return [] if where is None else whole_stock(read_machine(*where), catalog)


def engines_on(names: str | None) -> list[EngineRelease]:
    """Releases that this machine has installed; nothing where other accelerators are named."""
    where = folder_in(names)
    return [] if where is None else installed(read_machine(*where))
