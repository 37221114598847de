"""A live fleet from a fleet file; on a reload, what is known of replicas that stay is kept."""

from collections.abc import Iterable
from statistics import NormalDist

import msgspec

from crosstie.catalog.costs import watts
from crosstie.catalog.library import Catalog
from crosstie.catalog.vision import image_rule
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import DoesNotFit
from crosstie.core.fleet import BackendAccess, Fleet, HostedModel, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.perf.memory import memory_plan, sequences_that_fit
from crosstie.perf.tabulated import StepTimes
from crosstie.route.disaggregated import ApartSpeed
from crosstie.route.learnt import LearntSpeed
from crosstie.route.lengths import Lengths
from crosstie.route.live import LiveFleet, LivePool, Promise, Replica
from crosstie.route.load import AdapterSlots, Presence
from crosstie.route.modelled import ModelledSpeed
from crosstie.route.overflow import PricedPool
from crosstie.route.speed import Speed

# Requests of a pool that no class is about.
_TYPICAL_INPUT, _TYPICAL_OUTPUT = 1000.0, 250.0
# The least share of the cache that is reckoned with: an engine that runs has one, whatever the file says.
_LEAST_CACHE = 0.01


class Tables:
    """Step times of pools that several fleets have in common, one after the other: simulations of one search."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[object, ...], Speed] = {}
        self._times: dict[tuple[object, ...], StepTimes] = {}

    def speed(self, catalog: Catalog, pool: Pool, inputs: float, outputs: float, memory_gib: float | None) -> Speed:
        if pool.accelerator is None or (pool.apart is not None and pool.apart.is_led):
            # What a pool is learnt to be is its own, and so are the engines beside it.
            return speed_of(catalog, pool, inputs, outputs, memory_gib)
        key = _alike(pool), inputs, outputs, memory_gib
        if key not in self._speeds:
            self._speeds[key] = speed_of(catalog, pool, inputs, outputs, memory_gib)
        return self._speeds[key]

    def times(self, pool: Pool, deployment: Deployment, context: float) -> StepTimes:
        key = _alike(pool), context
        if key not in self._times:
            self._times[key] = StepTimes(deployment, context)
        return self._times[key]


def _alike(pool: Pool) -> Pool:
    """Without its name and its replicas."""
    return msgspec.structs.replace(pool, name="", replicas=0, backends=(), reach=BackendAccess())


def live_fleet(
    catalog: Catalog, fleet: Fleet, now: float, previous: LiveFleet | None = None, tables: Tables | None = None
) -> LiveFleet:
    """Replicas of the same address in a pool of the same name and deployment keep their state and what was learnt.

    Those that are gone are marked as draining and listed as leaving, so that what they serve is still accounted for.
    `tables`: what fleets before this one have tabulated.
    """
    tables = tables or Tables()
    lengths = Lengths(fleet.classes)
    if previous is not None:
        lengths.keep(previous.lengths)
    there = [*previous.replicas(), *previous.leaving] if previous is not None else []
    before = {(pool.name, pool.pool.model): pool for pool in previous.pools} if previous is not None else {}
    served = [(one, host) for pool in fleet.pools for one, host in _served(pool)]
    lengths_of = [typical(fleet, pool) for pool, _ in served]
    # All that can fail comes before anything is changed, so that a bad file leaves the old fleet as it was.
    speeds = [
        tables.speed(catalog, pool, inputs, outputs, None if host is None else host.memory_gib)
        for (pool, host), (inputs, outputs) in zip(served, lengths_of, strict=True)
    ]
    rules = {pool.model: image_rule(pool.model) for pool, _ in served}
    lengths.images = {model: rule for model, rule in rules.items() if rule is not None}
    pools = []
    for (pool, _), speed, mostly in zip(served, speeds, lengths_of, strict=True):
        live = before.get((pool.name, pool.model))
        if live is None or not _same_deployment(live.pool, pool):
            live = (PricedPool if pool.token_price is not None else LivePool)(pool, speed, lengths)
        live.adopt(pool, live.speed if isinstance(speed, LearntSpeed) else speed, lengths, *mostly)
        live.price(_watts(catalog, pool), fleet.serving.usd_per_kwh)
        since = float("-inf") if previous is None else now
        _staff(live, fleet, lengths, since)
        _pair(live, fleet, lengths, since)
        pools.append(live)
    _introduce(pools)
    found = LiveFleet(fleet, pools, lengths, None if previous is None else previous.sessions)
    for served_class in fleet.classes:
        found.deviations[served_class.name] = (_deviations(served_class.ttft), _deviations(served_class.tpot))
    for live in pools:
        _promise(live, fleet)
    kept = {id(replica) for replica in found.replicas()}
    for replica in there:
        if id(replica) not in kept:
            replica.drain(True)
            if replica.in_flight:
                found.leaving.append(replica)
    return found


def _served(pool: Pool) -> "list[tuple[Pool, HostedModel | None]]":
    """The pool, or one for each model that it hosts."""
    return [(pool.by_model()[0], None)] if not pool.hosts else list(zip(pool.by_model(), pool.hosts, strict=True))


def _introduce(pools: list[LivePool]) -> None:
    """Models that share a machine get to know each other: a pool's n-th replicas are on its n-th machine."""
    machines: dict[tuple[str, int], list[Replica]] = {}
    for live in pools:
        for index, replica in enumerate(live.replicas):
            if live.pool.loading is None:
                if replica.presence is not None:
                    # The file gives it the machine to itself now.
                    replica.presence, replica.busy_until = None, float("-inf")
                continue
            if replica.presence is None:
                replica.presence, replica.busy_until = Presence(), float("inf")
            machines.setdefault((live.name, index), []).append(replica)
    for beside in machines.values():
        for replica in beside:
            if replica.presence is not None:
                replica.presence.beside = [other for other in beside if other is not replica]


def _watts(catalog: Catalog, pool: Pool) -> float:
    """Of a replica, rated, with its share of server and network; 0 where nobody said what it is."""
    if pool.accelerator is None:
        return 0.0
    return pool.replica_gpus * watts(catalog.accelerator(pool.accelerator), catalog.costs)


def _promise(live: LivePool, fleet: Fleet) -> None:
    of_model = [served_class for served_class in fleet.classes if served_class.model == live.pool.model]
    routed = [one for one in of_model if any(route.pool == live.name for route in one.routes)]
    live.promised_ttft = _tightest(served_class.ttft for served_class in routed)
    live.promised_tpot = _tightest(served_class.tpot for served_class in routed)


def _tightest(targets: Iterable[Target | None]) -> Promise:
    promises = [Promise(target.seconds, _deviations(target)) for target in targets if target is not None]
    return min(promises, default=Promise(float("inf"), 0.0), key=lambda promise: (promise.seconds, -promise.deviations))


def _deviations(target: Target | None) -> float:
    return max(NormalDist().inv_cdf(target.percentile), 0.0) if target is not None else 0.0


def _staff(live: LivePool, fleet: Fleet, lengths: Lengths, since: float) -> None:
    """A replica for every backend, the known ones as they are.

    A gateway that starts finds its backends warm; one that is added to a running fleet is brought up slowly.
    """
    known = {replica.key: replica for replica in live.replicas}
    slow_s, block = fleet.serving.slow_start_s, lengths.block_tokens(live.pool.model)
    live.staff([known.get(key) or Replica(key, live, since, slow_s, block) for key in live.pool.backends])
    for replica in live.replicas:
        replica.slow_start_s = slow_s
        if not live.pool.adapters:
            replica.adapters = None
        elif replica.adapters is None:
            replica.adapters = AdapterSlots(live.pool.max_adapters or len(live.pool.adapters))
        else:
            replica.adapters.most = live.pool.max_adapters or len(live.pool.adapters)
        replica.drain(False)
        replica.touch()


def _pair(live: LivePool, fleet: Fleet, lengths: Lengths, since: float) -> None:
    """The prefill side of a pool whose engines the gateway leads."""
    apart, speed = live.pool.apart, live.speed
    if apart is None or not apart.is_led or not isinstance(speed, ApartSpeed):
        live.prefill, live.side = None, ""
        return
    pool = msgspec.structs.replace(live.pool, backends=apart.prefill.backends)
    if live.prefill is None:
        live.prefill = LivePool(pool, speed.prefill, lengths)
    live.prefill.adopt(pool, speed.prefill, lengths, speed.typical_input, speed.typical_output)
    live.side, live.prefill.side = "decode", "prefill"
    _staff(live.prefill, fleet, lengths, since)
    speed.beside = live.prefill.replicas


def _same_deployment(before: Pool, after: Pool) -> bool:
    def deployed(pool: Pool) -> tuple[object, ...]:
        split = pool.parallelism, pool.apart and pool.apart.arrangement
        drafts, bought = (pool.speculation, pool.text, pool.acceptance), pool.token_price is not None
        return pool.model, pool.accelerator, split, pool.precision, pool.kv_format, pool.stack, drafts, bought

    return deployed(before) == deployed(after)


def service_of(catalog: Catalog, pool: Pool) -> Disaggregated | None:
    """Of a pool whose replicas are disaggregated."""
    decode, apart = deployment_of(catalog, pool), pool.apart
    if decode is None or apart is None:
        return None
    split = msgspec.structs.replace(decode, parallelism=apart.prefill.parallelism)
    gpus = apart.prefill.gpus + apart.decode.gpus
    return Disaggregated(
        prefill=catalog.calibrated(split),
        prefill_replicas=apart.prefill.replicas,
        decode=decode,
        decode_replicas=apart.decode.replicas,
        connector=catalog.connector(apart.connector),
        link="fabric" if gpus <= decode.accelerator.domain else "network",
    )


def deployment_of(catalog: Catalog, pool: Pool) -> Deployment | None:
    """None: nothing is known of the pool but its address."""
    if pool.accelerator is None:
        return None
    model, accelerator = catalog.model(pool.model), catalog.accelerator(pool.accelerator)
    drafts = None
    if pool.speculation is not None:
        drafts = catalog.speculation(model, pool.speculation, text=pool.text, length=pool.acceptance)
    return catalog.deployment(
        model, accelerator, pool.parallelism, pool.precision or "native", pool.kv_format, pool.stack, drafts
    )


def speed_of(catalog: Catalog, pool: Pool, inputs: float, outputs: float, memory_gib: float | None = None) -> Speed:
    """`inputs` and `outputs`: tokens of the requests that the pool mostly gets. `memory_gib`: all that the model has
    of a replica, where it does not have the rest to itself."""
    deployment = deployment_of(catalog, pool)
    if deployment is None:
        return LearntSpeed(pool)
    if not sequences_that_fit(deployment, 1):
        raise DoesNotFit(f"pool {pool.name}: {deployment.model.id} does not fit on {deployment.label}")
    service = service_of(catalog, pool)
    if service is not None:
        if not sequences_that_fit(service.prefill, 1):
            raise DoesNotFit(f"pool {pool.name}: {deployment.model.id} does not fit on {service.prefill.label}")
        return ApartSpeed(service, pool, min(inputs + 0.5 * outputs, float(pool.max_context)), inputs)
    context, fraction = min(inputs + 0.5 * outputs, float(pool.max_context)), 1.0
    if memory_gib is not None:
        plan = memory_plan(deployment)
        own = memory_gib * 2.0**30 / pool.parallelism.gpus - plan.weight_bytes - plan.engine_bytes
        fraction = min(max(own / plan.cache_bytes, _LEAST_CACHE), 1.0)
    return ModelledSpeed(deployment, pool, context, inputs, fraction)


def typical(fleet: Fleet, pool: Pool) -> tuple[float, float]:
    """Mean lengths of what a pool mostly gets: of the classes that are routed there, or else of its model's."""
    of_model = [served_class for served_class in fleet.classes if served_class.model == pool.model]
    routed = [(served_class, share) for served_class in of_model if (share := _share(served_class, pool)) > 0]
    weighted = routed or [(served_class, served_class.requests_per_s or 1.0) for served_class in of_model]
    total = sum(weight for _, weight in weighted)
    if not total:
        return min(_TYPICAL_INPUT, 0.7 * pool.max_context), min(_TYPICAL_OUTPUT, 0.3 * pool.max_context)
    inputs = sum(weight * served_class.input_tokens for served_class, weight in weighted) / total
    outputs = sum(weight * served_class.output_tokens for served_class, weight in weighted) / total
    return max(inputs, 1.0), max(outputs, 1.0)


def _share(one: ServedClass, pool: Pool) -> float:
    """Requests a second of a class that are meant for a pool; however many routes take them there."""
    even = 1.0 / max(len({route.up_to_input for route in one.routes}), 1)
    mine = [route for route in one.routes if route.pool == pool.name]
    share = sum(route.share * (even if route.traffic is None else route.traffic) for route in mine)
    return (one.requests_per_s or 1.0) * share
