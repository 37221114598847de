"""What a caller names, as nouns: a name, a path or the noun itself in, the noun out."""

from collections.abc import Iterable
from pathlib import Path

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.core.accelerator import Accelerator
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.model import Model
from crosstie.core.workload import Workload

ModelName = str | Path | Model
AcceleratorNames = str | Accelerator | Iterable[str | Accelerator]


def named_model(catalog: Catalog, given: ModelName) -> Model:
    return given if isinstance(given, Model) else catalog.model(str(given))


def named_accelerators(catalog: Catalog, given: AcceleratorNames | None, stack: str | None = None) -> list[Accelerator]:
    """Each once, in their order; a text may name several, "mi300x,h200". Without any, all that the stack runs on."""
    if given is None:
        known = catalog.accelerators.values()
        return [one for one in known if stack is None or catalog.stack(stack).runs_on(one.vendor)]
    if isinstance(given, str):
        given = [name for part in given.split(",") if (name := part.strip())]
    elif isinstance(given, Accelerator):
        given = [given]
    nouns = [one if isinstance(one, Accelerator) else catalog.accelerator(one) for one in given]
    if not nouns:
        raise BadInput("no accelerator is named")
    return list({one.id: one for one in nouns}.values())


def named_workload(catalog: Catalog, given: str | Path | Workload) -> Workload:
    """A workload file, or the name of a shipped example."""
    return given if isinstance(given, Workload) else read_workload(catalog, find_workload(Path(given)))


def named_fleet(catalog: Catalog, given: str | Path | Fleet) -> Fleet:
    return given if isinstance(given, Fleet) else read_fleet(catalog, Path(given))
