"""What preflight lets into a plan: replicas that will not run are not offered, and those that nobody knows to run only
as long as the workload does not exclude them.
"""

from dataclasses import dataclass
from functools import lru_cache

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.workload import Workload
from crosstie.port.preflight.readiness import Readiness, ReadinessCheck


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Replicas of a model that are not offered, and why."""

    model: str
    accelerators: tuple[str, ...]
    # Engine and release.
    engine: str
    precision: str
    verdict: str
    why: str
    # Layouts, where others of the same accelerators are offered.
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A stack that is not compared for a model on some accelerators, for want of measurements."""

    model: str
    stack: str
    accelerators: tuple[str, ...]


@lru_cache(maxsize=8)
def _check(catalog: Catalog, releases: tuple[tuple[str, str, str], ...]) -> ReadinessCheck:
    """Questions about one catalog repeat: within a plan, and from plan to plan."""
    by_model: dict[str, dict[str, str]] = {}
    for model, stack, release in releases:
        by_model.setdefault(model, {})[stack] = release
    return ReadinessCheck(catalog, by_model)


class Gate:
    """Asked of every candidate; remembers whom it has turned away."""

    def __init__(self, catalog: Catalog, workload: Workload):
        named = [(name, *pair) for name, choice in workload.models.items() for pair in choice.releases.items()]
        self._check = _check(catalog, tuple(sorted(named)))
        self._only_known = workload.constraints.only_known
        self._refused: dict[tuple[str, ...], list[Deployment]] = {}
        self._offered: set[tuple[str, ...]] = set()
        # By model and stack: the accelerators where another stack was measured with it, and this one was not.
        self.passed_over: dict[tuple[str, str], list[str]] = {}

    def passes(self, deployment: Deployment) -> bool:
        key = deployment.model.id, deployment.stack.id, deployment.precision.id, deployment.accelerator.id
        if self._check.runs(deployment) and (not self._only_known or self._check.is_known(deployment)):
            self._offered.add(key)
            return True
        self._refused.setdefault(key, []).append(deployment)
        return False

    def pass_over(self, deployment: Deployment) -> None:
        """Notes a stack that is not compared, because another was measured there and this one was not."""
        names = self.passed_over.setdefault((deployment.model.id, deployment.stack.name), [])
        if deployment.accelerator.id not in names:
            names.append(deployment.accelerator.id)

    def readiness(self, deployment: Deployment) -> Readiness:
        return self._check.readiness(deployment)

    def left_out(self) -> list[LeftOut]:
        """Accelerators that are turned away for the same reason stand together."""
        together: dict[tuple[str, ...], list[tuple[str, list[Deployment]]]] = {}
        for key, refused in self._refused.items():
            found = self._check.readiness(refused[0])
            layouts = tuple(dict.fromkeys(str(one.parallelism) for one in refused)) if key in self._offered else ()
            same = (key[0], found.label, key[2], found.verdict, found.why, *layouts)
            together.setdefault(same, []).append((key[3], refused))
        return [
            LeftOut(model, tuple(name for name, _ in whom), engine, precision, verdict, why, tuple(layouts))
            for (model, engine, precision, verdict, why, *layouts), whom in together.items()
        ]
