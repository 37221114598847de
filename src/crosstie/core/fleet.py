"""A fleet: pools of equal replicas, which class of requests goes where, and what was promised to it.

`plan` writes it to a file, `serve` keeps to that file.
"""

from typing import Literal

import msgspec

from crosstie.core.deployment import Parallelism
from crosstie.core.workload import Target

Policy = Literal["cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "weighted", "prefix"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas of one deployment; names are the catalog's."""

    name: str
    model: str
    accelerator: str
    parallelism: Parallelism
    precision: str
    kv_format: str
    stack: str
    replicas: int
    usd_per_gpu_hour: float
    # Requests that a replica may have in flight and still keep what the pool promises.
    max_in_flight: int
    # The longest request that a replica holds.
    max_context: int
    # Where its replicas answer, one OpenAI-compatible base URL each; empty until they are deployed.
    backends: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.replicas * self.parallelism.gpus


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a class with prompts up to `up_to_input` tokens: this share of them goes to that pool."""

    pool: str
    share: float
    up_to_input: int | None = None
    why: str = ""


class ServedClass(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    # Requests/s at the peak, and the mean lengths that the plan counted with.
    requests_per_s: float
    input_tokens: float
    output_tokens: float
    ttft: Target | None
    tpot: Target | None
    routes: tuple[Route, ...]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # The day of the plan, ISO.
    planned: str
    policy: Policy
    pools: tuple[Pool, ...]
    classes: tuple[ServedClass, ...]

    @property
    def usd_per_hour(self) -> float:
        return sum(pool.gpus * pool.usd_per_gpu_hour for pool in self.pools)
