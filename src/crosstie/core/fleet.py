"""A fleet: pools of equal replicas, which class of requests goes where, and what was promised to it.

`plan` writes it to a file, `serve` keeps to that file.
"""

from typing import Literal

import msgspec

from crosstie.core.deployment import Parallelism
from crosstie.core.workload import Target

Policy = Literal["cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "weighted", "prefix"]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Equal replicas of one deployment; names are the catalog's.

    Without an accelerator nothing is known of its speed but what it delivers: any OpenAI-compatible server will do,
    with a model by any name.
    """

    name: str
    model: str
    accelerator: str | None
    parallelism: Parallelism
    precision: str | None
    kv_format: str
    stack: str | None
    replicas: int
    usd_per_gpu_hour: float
    # Requests that a replica may have in flight and still keep what the pool promises.
    max_in_flight: int
    # The longest request that a replica holds.
    max_context: int
    # Where its replicas answer, one OpenAI-compatible base URL each; empty until they are deployed.
    backends: tuple[str, ...] = ()
    # The name by which the backends know the model, where it is another than the catalog's; clients may use both.
    served_as: str | None = None
    # The environment variable that holds the backends' own API key; without one, the client's is passed on.
    api_key_env: str | None = None
    # Its part of the traffic under the `weighted` policy; None: in proportion to what it can carry.
    weight: float | None = None
    # What it accepts besides text, such as "image" and "audio"; None: nobody said, so anything is sent there.
    modalities: tuple[str, ...] | None = None

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


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateway treats clients and backends: its patience, its limits, and how often it looks."""

    connect_timeout_s: float = 2.0
    # From the request sent to the first byte of the answer, between two pieces of it, and for all of it.
    first_byte_timeout_s: float = 120.0
    idle_timeout_s: float = 60.0
    total_timeout_s: float = 3600.0
    # Further backends that are tried while the client has not been sent anything.
    retries: int = 2
    # How long a request may wait for room where no target says so, and how many may.
    queue_s: float = 10.0
    max_queued: int = 1000
    health_every_s: float = 2.0
    metrics_every_s: float = 1.0
    # Over how long a backend that has just come (back) is brought up to its full share.
    slow_start_s: float = 10.0
    # How long requests in flight are waited for after SIGTERM.
    drain_s: float = 60.0
    max_body_mib: float = 64.0
    # Of electricity, where the price of a GPU-hour does not include it: it is added to what a request costs.
    usd_per_kwh: float = 0.0
    # The class of requests that name none; None: the one of the model whose prompts are nearest in length.
    default_class: str | None = None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # The day of the plan, ISO.
    planned: str
    policy: Policy
    pools: tuple[Pool, ...]
    classes: tuple[ServedClass, ...]
    serving: Serving = Serving()

    @property
    def usd_per_hour(self) -> float:
        return sum(pool.gpus * pool.usd_per_gpu_hour for pool in self.pools)
