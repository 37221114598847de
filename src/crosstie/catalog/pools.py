"""One [[pool]] of a fleet file: what its replicas are, where they answer, and which models share them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.acceptance import parse_speculation
from crosstie.catalog.addresses import BY_NAME, ON_SOCKET, base_urls, is_found, read_endpoints
from crosstie.catalog.classes import look_up
from crosstie.catalog.kube import KUBE
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import (
    check_keys,
    check_unique,
    in_form,
    keys_of,
    number,
    only_keys,
    read_record,
    read_values,
    table,
    text,
    whole,
)
from crosstie.core.deployment import Parallelism
from crosstie.core.disaggregated import check_joined
from crosstie.core.errors import BadData
from crosstie.core.fleet import (
    BOOTSTRAP_PORT,
    HANDING,
    REACH_FILES,
    SIDE_KEYS,
    BackendAccess,
    HostedModel,
    Loading,
    Pool,
    PoolApart,
    PoolSide,
)
from crosstie.core.forms import model_name

USUAL_KV = "bf16"
# Where neither the file nor the model's own config says how long a request may be.
UNLIMITED_CONTEXT = 10**8
# A GPU-hour of a known accelerator costs something, or routing by cost would take it for any work.
_LEAST_USD, _MOST_USD = 1e-6, 1000
# The user of a proxy, and a variable that holds the password or both.
_USER = re.compile(r"[^:@/]*(:\$\{\w+\})?")
_PROXY = re.compile(r"http://([^@/]*@)?([a-z0-9_.-]+|\[[0-9a-f:.]+\]):[0-9]{1,5}/?", re.IGNORECASE)
# What follows from the catalog, or from other keys of the pool.
_RESOLVED = {
    "model", "accelerator", "precision", "stack", "usd_per_gpu_hour", "apart", "replicas", "max_context", "backends",
    "hosts", "kv_events", "kv_replay",
}  # fmt: skip

# What is known of a replica with the model of an entry, and how far that model reaches.
Deployed = Callable[[str, dict[str, Any]], tuple[dict[str, Any], int | None]]


def read_pool(catalog: Catalog, file: Path, where: str, raw: dict[str, Any]) -> Pool:
    check_keys(file, where, raw, Pool)
    rest = [name for name in Pool.__struct_fields__ if name not in _RESOLVED]
    plain = read_values(file, where, {"max_in_flight": 256, "kv": USUAL_KV, **raw}, Pool, rest)
    sides = _sides(file, where, raw) if "prefill" in raw else None
    split = sides[1].parallelism if sides else plain["parallelism"]
    backends = base_urls(file, f"{where}.backends", raw.get("backends", []))
    if sides and sides[0].backends and backends:
        reason = "is the address of a service's own proxy, and prefill and decode have addresses already"
        raise BadData(file, f"{where}.backends", reason)

    def deployed(at: str, entry: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Of the pool's own model, or of one that it hosts, at that place of the file."""
        if "accelerator" in raw:
            return _deployed(catalog, file, where, raw, split, at, entry)
        return _unknown(catalog, file, where, raw, at, entry), None

    hosts: tuple[HostedModel, ...] = ()
    if "hosts" in raw:
        hosts = _hosts(file, where, raw, plain, backends, deployed)
        of_pool, context = deployed(f"{where}.hosts[0]", {"precision": raw.get("precision"), **raw["hosts"][0]})
        of_pool["precision"] = text(file, f"{where}.precision", raw["precision"]) if "precision" in raw else None
    else:
        of_pool, context = deployed(where, raw)
    addresses = len(backends) or max((len(host.backends) for host in hosts), default=0)
    longest = UNLIMITED_CONTEXT if hosts else context or UNLIMITED_CONTEXT
    apart = _apart(catalog, file, where, raw, of_pool, plain["kv_format"], sides) if sides else None
    replicas = _services(file, where, raw) if apart and apart.is_led else raw.get("replicas")
    named = _by_name(file, where, raw, backends)
    pool = Pool(
        **{**plain, "parallelism": split},
        **of_pool,
        **read_values(file, where, {"max_context": longest, **raw}, Pool, ["max_context"]),
        **read_endpoints(file, where, raw, addresses),
        replicas=_replicas(file, where, plain["name"], replicas, addresses, named=named),
        backends=backends,
        apart=apart,
        hosts=hosts,
    )
    every = [*backends, *pool.led_backends, *(address for host in hosts for address in host.backends)]
    _check_reach(file, where, pool.reach, every)
    accepts = pool.modalities or ()
    for index, modality in enumerate(accepts):
        if modality in accepts[:index]:
            raise BadData(file, f"{where}.modalities[{index}]", f"'{modality}' is there twice")
    if "adapters" in raw and not pool.adapters:
        raise BadData(file, f"{where}.adapters", 'is no list such as [{ name = "sql", path = "/adapters/sql" }]')
    check_unique(file, f"{where}.adapters", "name", [adapter.name for adapter in pool.adapters])
    if pool.speculation is not None:
        _check_speculation(catalog, file, where, pool, pool.speculation)
    return pool


def _check_reach(file: Path, where: str, reach: BackendAccess, backends: Sequence[str]) -> None:
    """What is in files and variables is the gateway's to look at, when it begins to serve."""
    tls = next((key for key in (*REACH_FILES, "tls_server_name") if getattr(reach, key)), None)
    if tls and backends and not any(backend.removeprefix(BY_NAME).startswith("https:") for backend in backends):
        raise BadData(file, f"{where}.{tls}", "has no meaning: no backend of the pool is https")
    if reach.proxy is not None:
        _check_proxy(file, f"{where}.proxy", reach.proxy, backends)


def _check_proxy(file: Path, where: str, proxy: str, backends: Sequence[str]) -> None:
    user, at, _ = proxy.removeprefix("http://").rpartition("@")
    if at and not _USER.fullmatch(user):
        # Not repeated: it would be in logs.
        raise BadData(file, where, "has a password in it: put it into a variable, as http://${PROXY_USER}@proxy:3128")
    if proxy != "environment" and not proxy.startswith("${") and not _PROXY.fullmatch(proxy):
        raise BadData(file, where, "is no proxy such as http://proxy:3128, nor ${VARIABLE}, nor 'environment'")
    if any(backend.startswith(ON_SOCKET) for backend in backends):
        raise BadData(file, where, f"does not go with {ON_SOCKET}, which is on this machine")
    if any(map(is_found, backends)):
        raise BadData(file, where, f"does not go with {BY_NAME} and {KUBE}: a proxy looks names up itself")


def _check_speculation(catalog: Catalog, file: Path, where: str, pool: Pool, asked: str) -> None:
    """How the engines draft, tried on the model that they serve."""

    def tried() -> None:
        parse_speculation(asked)
        if pool.accelerator is not None:
            catalog.speculation(catalog.model(pool.model), asked, text=pool.text, length=pool.acceptance)

    look_up(file, f"{where}.speculation", tried)


def _sides(file: Path, where: str, raw: dict[str, Any]) -> tuple[PoolSide, PoolSide]:
    """`prefill` and `decode` of a pool that has them apart."""
    sides = [_side(file, f"{where}.{key}", key, table(file, f"{where}.{key}", raw[key]), raw) for key in SIDE_KEYS[:2]]
    if bool(sides[0].backends) != bool(sides[1].backends):
        lacking = SIDE_KEYS[bool(sides[0].backends)]
        raise BadData(file, f"{where}.{lacking}.backends", "missing: the other side has addresses of its own")
    return sides[0], sides[1]


def _side(file: Path, where: str, key: str, entry: dict[str, Any], raw: dict[str, Any]) -> PoolSide:
    only_keys(file, where, entry, keys_of(PoolSide) - ({"bootstrap_port"} if key == "decode" else set()))
    backends = base_urls(file, f"{where}.backends", entry.get("backends", []))
    for index, backend in enumerate(backends):
        if is_found(backend):
            raise BadData(file, f"{where}.backends[{index}]", "engines of a side are not found by name: give addresses")
    services = _services(file, where.rpartition(".")[0], raw) if backends else 1
    replicas = whole(file, f"{where}.replicas", entry.get("replicas", len(backends) // services or 1), 1, 10**4)
    if backends and len(backends) != replicas * services:
        each = f"replicas = {replicas}" if services == 1 else f"replicas = {replicas} in each of {services} services"
        raise BadData(file, f"{where}.backends", f"{len(backends)} addresses for {each}: one an engine")
    given = entry.get("bootstrap_port")
    return PoolSide(
        replicas=replicas,
        backends=backends,
        bootstrap_ports=() if given is None else _ports(file, f"{where}.bootstrap_port", given, len(backends)),
        **read_values(file, where, entry, PoolSide, ["parallelism"]),
    )


def _services(file: Path, where: str, raw: dict[str, Any]) -> int:
    """How many times the sides make up a replica of a pool whose engines have addresses of their own."""
    return whole(file, f"{where}.replicas", raw.get("replicas", 1), 1, 10**6)


def _ports(file: Path, where: str, raw: object, backends: int) -> tuple[int, ...]:
    """One for all, or one for each."""
    if not backends:
        raise BadData(file, where, "has no meaning without backends")
    if not isinstance(raw, list):
        return (whole(file, where, raw, 1, 65535),) * backends
    if len(raw) != backends:
        raise BadData(file, where, f"{len(raw)} ports for {backends} backends: one for each, or one number for all")
    return tuple(whole(file, f"{where}[{i}]", port, 1, 65535) for i, port in enumerate(raw))


def _apart(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], of_pool: dict[str, Any], kv: str,
    sides: tuple[PoolSide, PoolSide],
) -> PoolApart:  # fmt: skip
    """What joins both sides, and whether it can."""
    model, accelerator = catalog.model(of_pool["model"]), catalog.accelerator(of_pool["accelerator"])

    def joined() -> str:
        both = [
            catalog.deployment(model, accelerator, side.parallelism, of_pool["precision"], kv, of_pool["stack"])
            for side in sides
        ]
        given = text(file, f"{where}.connector", raw["connector"]) if "connector" in raw else None
        connector = catalog.connector(given) if given else catalog.connector_for(both[0].stack, accelerator)
        check_joined(connector, both[0], both[1])
        return connector.id

    at = f"{where}.connector"
    connector = look_up(file, at if "connector" in raw else where, joined)
    prefill, ports = sides[0], sides[0].bootstrap_ports
    if prefill.backends and connector not in HANDING:
        known = ", ".join(HANDING)
        reason = f"the gateway leads no engines over {connector}, only over {known}; give the address of their proxy"
        raise BadData(file, at, reason)
    takes_ports = HANDING.get(connector) == "bootstrap"
    if ports and not takes_ports:
        raise BadData(file, f"{where}.prefill.bootstrap_port", f"is SGLang's, and {connector} has none")
    if prefill.backends and takes_ports and not ports:
        ports = (BOOTSTRAP_PORT,) * len(prefill.backends)
    return PoolApart(
        prefill=msgspec.structs.replace(prefill, bootstrap_ports=ports), decode=sides[1], connector=connector
    )


def _deployed(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], split: Parallelism, at: str, entry: dict[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """What the catalog knows of a pool's replicas with the model of `entry`, and how far that model reaches."""

    accelerator = in_form(file, f"{where}.accelerator", raw["accelerator"], catalog.accelerator)
    model = in_form(file, f"{at}.model", entry.get("model"), catalog.model)
    precision = in_form(file, f"{at}.precision", entry.get("precision"), lambda name: catalog.precision(model, name))

    def stack_of(name: str) -> str:
        return catalog.stack_for(accelerator, name, model, precision).id

    stack = in_form(file, f"{where}.stack", raw.get("stack"), stack_of)
    look_up(file, at, lambda: split.check(model, accelerator))
    if "usd_per_gpu_hour" not in raw:
        raise BadData(file, f"{where}.usd_per_gpu_hour", "missing: what one of its GPUs costs an hour")
    usd = number(file, f"{where}.usd_per_gpu_hour", raw["usd_per_gpu_hour"], _LEAST_USD, _MOST_USD)
    return {
        "model": model.id,
        "accelerator": accelerator.id,
        "precision": entry["precision"],
        "stack": stack,
        "usd_per_gpu_hour": usd,
    }, model.max_context


def _unknown(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], at: str, entry: dict[str, Any]
) -> dict[str, Any]:
    """A pool on nobody knows what: the model keeps the name that the file gives it."""
    precision, stack = entry.get("precision"), raw.get("stack")
    if stack is not None:
        stack = in_form(file, f"{where}.stack", stack, lambda name: catalog.stack(name).id)
    return {
        "model": in_form(file, f"{at}.model", entry.get("model"), model_name),
        "accelerator": None,
        "precision": None if precision is None else text(file, f"{at}.precision", precision),
        "stack": stack,
        "usd_per_gpu_hour": number(file, f"{where}.usd_per_gpu_hour", raw.get("usd_per_gpu_hour", 0), 0, _MOST_USD),
    }


def _by_name(file: Path, where: str, raw: dict[str, Any], backends: tuple[str, ...]) -> bool:
    """Whether some of a pool's replicas are found by name, so that nobody knows yet how many there are."""
    named = [index for index, backend in enumerate(backends) if is_found(backend)]
    if "discover_every_s" in raw and not any(backend.startswith(BY_NAME) for backend in backends):
        raise BadData(
            file, f"{where}.discover_every_s", f"has no meaning: no backend of the pool begins with {BY_NAME}"
        )
    if named and "hosts" in raw:
        reason = "models that share replicas need to know which is which: give addresses"
        raise BadData(file, f"{where}.backends[{named[0]}]", reason)
    return bool(named)


def _replicas(file: Path, where: str, name: str, raw: object, backends: int, *, named: bool) -> int:
    if raw is None and backends:
        return backends
    if raw is None:
        raise BadData(file, f"{where}.replicas", "missing: give the number of replicas, or their backends")
    replicas = whole(file, f"{where}.replicas", raw, 1, 10**6)
    if backends and backends != replicas and not named:
        reason = f"pool '{name}' has replicas = {replicas} and {backends} backends: one address a replica"
        raise BadData(file, f"{where}.backends", reason)
    return replicas


def _hosts(
    file: Path, where: str, raw: dict[str, Any], plain: dict[str, Any], backends: tuple[str, ...], deployed: Deployed
) -> tuple[HostedModel, ...]:
    entries = raw["hosts"]
    if not isinstance(entries, list) or not entries:
        raise BadData(file, f"{where}.hosts", 'is no list of models, such as [{ model = "llama-3.1-8b" }]')
    hook, loading = plain.get("load_hook"), plain["loading"]
    if (hook is None) != (loading != "hook"):
        reason = 'missing: the command that loads and unloads, for loading = "hook"'
        raise BadData(file, f"{where}.load_hook", reason if hook is None else 'has no meaning without loading = "hook"')
    if "host_memory_gib" not in raw and "accelerator" not in raw:
        reason = "missing: how much of a replica's memory models may take, since there is no accelerator that says so"
        raise BadData(file, f"{where}.host_memory_gib", reason)
    hosts = tuple(
        _host(file, f"{where}.hosts[{i}]", table(file, f"{where}.hosts[{i}]", entry), raw, deployed)
        for i, entry in enumerate(entries)
    )
    check_unique(file, f"{where}.hosts", "model", [host.model for host in hosts])
    _check_backends(file, where, hosts, loading, backends)
    return hosts


def _host(file: Path, where: str, entry: dict[str, Any], pool: dict[str, Any], deployed: Deployed) -> HostedModel:
    only_keys(file, where, entry, keys_of(HostedModel))
    known, context = deployed(where, {"precision": pool.get("precision"), **entry})
    if known["accelerator"] is None and "weight_gib" not in entry and "memory_gib" not in entry:
        reason = "missing: what it takes of a replica's memory, since there is no accelerator that says so"
        raise BadData(file, f"{where}.memory_gib", reason)
    limit = {} if (limit := pool.get("max_context", context)) is None else {"max_context": limit}
    return read_record(
        file, where, {**limit, **entry}, HostedModel,
        model=known["model"], precision=known["precision"],
        backends=base_urls(file, f"{where}.backends", entry.get("backends", [])),
    )  # fmt: skip


def _check_backends(
    file: Path, where: str, hosts: tuple[HostedModel, ...], loading: Loading, backends: tuple[str, ...]
) -> None:
    """One address for all models of a replica, or one for each model."""
    having = [index for index, hosted_model in enumerate(hosts) if hosted_model.backends]
    if loading == "vllm-sleep" and backends:
        reason = "a vLLM server has one model: give each entry of hosts the backends that serve it"
        raise BadData(file, f"{where}.backends", reason)
    if not having:
        return
    at = f"{where}.hosts[{having[0]}].backends"
    if loading == "llamacpp-router":
        raise BadData(file, at, "a router of llama.cpp has one address for all its models: give the pool its backends")
    if backends:
        raise BadData(file, at, "the pool has backends already: addresses are the pool's, or each model's")
    for index, model in enumerate(hosts):
        if len(model.backends) != len(hosts[having[0]].backends):
            reason = f"{len(model.backends)} addresses, and hosts[{having[0]}] has {len(hosts[having[0]].backends)}: "
            raise BadData(file, f"{where}.hosts[{index}].backends", reason + "one for each replica of the pool")
