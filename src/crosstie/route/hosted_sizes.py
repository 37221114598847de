"""What the models of a shared pool take of a replica's memory, and how long they load: as the fleet file says, or else
as `host.sizes` has it. Loads that were seen correct the times."""

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.core.errors import BadInput
from crosstie.core.fleet import HostedModel, Pool
from crosstie.core.workload import Sharing
from crosstie.host.hosted import Hosted, Slot
from crosstie.host.residency import Residency
from crosstie.host.sizes import hosted_model, load_path, room_bytes
from crosstie.route.build import deployment_of

_GIB = 2.0**30
# The least cache that a model is worth loading with: so many requests of that length.
_SEQUENCES, _CONTEXT = 4, 4096


def sizes(catalog: Catalog, pool: Pool) -> tuple[list[Hosted], float]:
    """The models, and the bytes of a replica that they may take."""
    given = pool.host_memory_gib
    found, rooms = [], [] if given is None else [given * _GIB]
    sharing = Sharing(
        models=tuple(host.model for host in pool.hosts), load_from="host" if pool.loading == "vllm-sleep" else "start"
    )
    for one, entry in zip(pool.by_model(), pool.hosts, strict=True):
        known = deployment_of(catalog, one)
        weights = None if entry.weight_gib is None else entry.weight_gib * _GIB
        path = load_path(shipped_loading(), None if known is None else known.accelerator, sharing)
        if known is None:
            # All that is said of it; its weights are no more than that.
            said = weights or (entry.memory_gib or 0.0) * _GIB
            size = Hosted(entry.model, said, path.load_s(said, pool.parallelism.gpus))
        else:
            context = min(_CONTEXT, one.max_context)
            size = hosted_model(known, path, context=context, sequences=_SEQUENCES, weight_bytes=weights)
            if given is None:
                rooms.append(room_bytes(known, path, len(pool.hosts)))
        found.append(_as_said(size, entry))
    return found, min(rooms)


def check_room(catalog: Catalog, pool: Pool) -> None:
    """Raises BadInput where a model would fit on no replica, or the pinned ones do not fit together."""
    hosted, capacity = sizes(catalog, pool)
    try:
        Residency(hosted, [Slot(str(index), capacity) for index in range(pool.replicas)], 0.0)
    except BadInput as error:
        raise BadInput(f"pool {pool.name}: {error}") from None


def _as_said(size: Hosted, entry: HostedModel) -> Hosted:
    taken, cache = size.bytes, size.min_kv_bytes
    if entry.memory_gib is not None:
        taken, cache = entry.memory_gib * _GIB, 0.0
    load_s = size.load_s if entry.load_s is None else entry.load_s
    return Hosted(entry.model, taken, load_s, min_kv_bytes=cache, pinned=entry.pinned)
