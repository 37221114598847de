"""How fast models come into a GPU's memory: links, disks, engines that wake or start, each with its source."""

from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from crosstie.catalog.reading import read_facts, read_record, sourced_file
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact, Quantity
from crosstie.core.fleet import Pool
from crosstie.core.units import UNITS
from crosstie.core.workload import PrefixReuse

_FILE = Path(__file__).parent / "data" / "loading.toml"
_USUAL = "usual"


class CacheTier(NamedTuple):
    """Memory beside the GPU's that keeps prefixes."""

    name: str
    # For each GPU; of a shared one in all, and of all replicas.
    size_bytes: float
    shared: bool
    # To each GPU, and what every load waits for before that.
    bytes_per_s: float
    latency_s: float


class LoadingFacts(msgspec.Struct, frozen=True, kw_only=True):
    host_link: Annotated[dict[str, Fact], Quantity("bytes_per_s", 1e8, 1e13, "from the host's memory to one GPU")]
    disk: Annotated[Fact, Quantity("bytes_per_s", 1e6, 1e13, "weights read from a disk, for the whole replica")]
    wake: Annotated[Fact, Quantity("seconds", 0.0, 600.0, "waking an engine, beside the copy of its weights")]
    start: Annotated[Fact, Quantity("seconds", 0.0, 3600.0, "starting an engine, beside reading its weights")]
    cold_start: Annotated[
        Fact, Quantity("seconds", 0.0, 3600.0, "starting an engine that keeps no compiled kernels, beside its weights")
    ]
    peer_check: Annotated[
        Fact,
        Quantity("seconds", 0.0, 3600.0, "what several GPUs add to look at how they reach each other"),
    ]
    first_graphs: Annotated[
        Fact, Quantity("seconds", 0.0, 3600.0, "what the first capture on AMD adds, where AITER's kernels are built")
    ]
    remote: Annotated[Fact, Quantity("bytes_per_s", 1e6, 1e13, "from memory that all replicas share to one GPU")]
    nvme: Annotated[Fact, Quantity("bytes_per_s", 1e6, 1e13, "cached prefixes from a drive of the host to one GPU")]
    host_latency: Annotated[Fact, Quantity("seconds", 0.0, 10.0, "of a load of prefixes from the host's memory")]
    nvme_latency: Annotated[Fact, Quantity("seconds", 0.0, 10.0, "of a load of prefixes from a drive of the host")]
    remote_latency: Annotated[Fact, Quantity("seconds", 0.0, 10.0, "of a load of prefixes from shared memory")]
    asleep: Annotated[Fact, Quantity("bytes", 0.0, 1e12, "what a sleeping engine keeps on each GPU")]

    def link_of(self, accelerator: str) -> Fact:
        return self.host_link.get(accelerator, self.host_link[_USUAL])

    def cache_tiers(self, of: PrefixReuse | Pool, accelerator: str) -> list[CacheTier]:
        """Those that there are, the quickest first; rates are the catalog's where nobody gives others."""
        known = (
            ("host", of.host_gib_per_gpu, of.host_gb_per_s, self.link_of(accelerator), self.host_latency),
            ("nvme", of.nvme_gib_per_gpu, of.nvme_gb_per_s, self.nvme, self.nvme_latency),
            ("remote", of.remote_gib, of.remote_gb_per_s, self.remote, self.remote_latency),
        )
        return [
            CacheTier(name, gib * UNITS["GiB"].si, name == "remote", rate * 1e9 if rate else usual.si, latency.si)
            for name, gib, rate, usual, latency in known
            if gib
        ]


@cache
def shipped_loading() -> LoadingFacts:
    return read_loading(_FILE)


def read_loading(file: Path) -> LoadingFacts:
    with sourced_file(file) as (raw, sources):
        facts = read_facts(file, "loading", raw.pop("loading", None), LoadingFacts, sources)
        loading_facts = read_record(file, "", raw, LoadingFacts, sources, **facts)
    if _USUAL not in loading_facts.host_link:
        raise BadData(file, f"host_link.{_USUAL}", "missing: the link of accelerators that have no entry")
    return loading_facts
