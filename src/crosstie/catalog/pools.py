"""One [[pool]] of a fleet file: what its replicas are, where they answer, and which models share them."""

import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from crosstie.catalog.acceptance import parse_speculation
from crosstie.catalog.addresses import BY_NAME, base_urls, is_found
from crosstie.catalog.classes import look_up
from crosstie.catalog.engine_knowledge import read_known
from crosstie.catalog.library import Catalog
from crosstie.catalog.reach import read_reach
from crosstie.catalog.reading import (
    check_rules,
    check_unique,
    number,
    one_of,
    only_keys,
    read_record,
    read_values,
    table,
    text,
    texts,
    whole,
)
from crosstie.catalog.workloads import release_text
from crosstie.core.deployment import Parallelism, kv_bytes_per_element
from crosstie.core.disaggregated import check_joined
from crosstie.core.errors import BadData
from crosstie.core.fleet import (
    BOOTSTRAP_PORT,
    HANDING,
    SIDE_KEYS,
    SPLIT,
    TOKEN_KEYS,
    Adapter,
    BackendAccess,
    HostedModel,
    Loading,
    Pool,
    PoolApart,
    PoolSide,
    TokenPrice,
)

# Keys of the file that make up one of a pool's fields, or are its name there; the others are called as in the file.
_OF_FIELD: dict[str, Iterable[str]] = {
    "parallelism": SPLIT, "apart": SIDE_KEYS, "kv_format": ("kv",), "reach": BackendAccess.__struct_fields__,
    "token_price": TOKEN_KEYS,
}  # fmt: skip
MODALITIES = ("text", "image", "audio", "video")
USUAL_KV = "bf16"
# Where neither the file nor the model's own config says how long a request may be.
UNLIMITED_CONTEXT = 10**8
_NAME = re.compile(r"^[^\W_][\w.-]{0,99}$")
# A GPU-hour of a known accelerator costs something, or routing by cost would take it for any work.
_LEAST_USD, _MOST_USD = 1e-6, 1000
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
# Letters and digits in one run of this length are a key's, not a name's.
_KEY_RUN = 16

Found = TypeVar("Found")
# What is known of a replica with the model of an entry, and how far that model reaches.
Deployed = Callable[[str, dict[str, Any]], tuple[dict[str, Any], int | None]]


def read_pool(catalog: Catalog, file: Path, where: str, raw: dict[str, Any]) -> Pool:
    only_keys(file, where, raw, {key for name in Pool.__struct_fields__ for key in _OF_FIELD.get(name, (name,))})
    name = text(file, f"{where}.name", raw.get("name"))
    if not _NAME.match(name) or name != name.lower():
        raise BadData(file, f"{where}.name", f"'{name}' must be lower case: letters, digits, dots and dashes")
    check_rules(file, where, raw, Pool.rules)
    bought = {key: raw[key] for key in TOKEN_KEYS if key in raw}
    split = read_split(file, where, raw)
    sides = _sides(file, where, raw) if "prefill" in raw else None
    if sides:
        split = sides[1].parallelism
    backends = base_urls(file, f"{where}.backends", raw.get("backends", []))
    if sides and sides[0].backends and backends:
        reason = "is the address of a service's own proxy, and prefill and decode have addresses already"
        raise BadData(file, f"{where}.backends", reason)
    kv = text(file, f"{where}.kv", raw.get("kv", USUAL_KV))
    look_up(file, f"{where}.kv", lambda: kv_bytes_per_element(kv))

    def deployed(at: str, entry: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """Of the pool's own model, or of one that it hosts, at that place of the file."""
        if "accelerator" in raw:
            return _deployed(catalog, file, where, raw, split, at, entry)
        return _unknown(catalog, file, where, raw, at, entry), None

    hosting: dict[str, Any] = {}
    if "hosts" in raw:
        hosting = _hosts(file, where, raw, backends, deployed)
        of_pool, context = deployed(f"{where}.hosts[0]", {"precision": raw.get("precision"), **raw["hosts"][0]})
        of_pool["precision"] = text(file, f"{where}.precision", raw["precision"]) if "precision" in raw else None
    else:
        of_pool, context = deployed(where, raw)
    addresses = len(backends) or max((len(host.backends) for host in hosting.get("hosts", ())), default=0)
    longest = UNLIMITED_CONTEXT if hosting else context or UNLIMITED_CONTEXT
    apart = _apart(catalog, file, where, raw, of_pool, kv, sides) if sides else None
    replicas = _services(file, where, raw) if apart and apart.is_led else raw.get("replicas")
    owners = (*hosting.get("hosts", ()), *(sides or ()))
    looked_into = {
        **of_pool,
        **hosting,
        "name": name,
        "parallelism": split,
        "kv_format": kv,
        "replicas": _replicas(file, where, name, replicas, addresses, named=_by_name(file, where, raw, backends)),
        "backends": backends,
        "reach": read_reach(file, where, raw, (*backends, *(at for owner in owners for at in owner.backends))),
        "api_key_env": _variable(file, f"{where}.api_key_env", raw.get("api_key_env")),
        "modalities": _modalities(file, f"{where}.modalities", raw.get("modalities")),
        "apart": apart,
        "token_price": read_record(file, where, bought, TokenPrice) if bought else None,
        **read_known(file, where, raw, addresses),
    }
    for key, read in (("served_as", model_name), ("release", release_text)):
        if key in raw:
            looked_into[key] = read(file, f"{where}.{key}", raw[key])
    plain = {"max_in_flight": 256, "max_context": longest, **raw}
    rest = [key for key in Pool.__struct_fields__ if key not in looked_into]
    pool = Pool(**looked_into, **read_values(file, where, plain, Pool, rest))
    if "adapters" in raw:
        _check_adapters(file, f"{where}.adapters", pool.adapters)
    if pool.speculation is not None:
        _check_speculation(catalog, file, where, pool, pool.speculation)
    return pool


def _check_adapters(file: Path, where: str, adapters: tuple[Adapter, ...]) -> None:
    if not adapters:
        raise BadData(file, where, 'is no list such as [{ name = "sql", path = "/adapters/sql" }]')
    for index, adapter in enumerate(adapters):
        model_name(file, f"{where}[{index}].name", adapter.name)
    check_unique(file, where, "name", [adapter.name for adapter in adapters])


def _check_speculation(catalog: Catalog, file: Path, where: str, pool: Pool, asked: str) -> None:
    """How the engines draft, tried on the model that they serve."""

    def tried() -> None:
        parse_speculation(asked)
        if pool.accelerator is not None:
            catalog.speculation(catalog.model(pool.model), asked, text=pool.text, length=pool.acceptance)

    look_up(file, f"{where}.speculation", tried)


def read_split(file: Path, where: str, raw: dict[str, Any]) -> Parallelism:
    return Parallelism(**{part: whole(file, f"{where}.{part}", raw.get(part, 1), 1, 1024) for part in SPLIT})


def _sides(file: Path, where: str, raw: dict[str, Any]) -> tuple[PoolSide, PoolSide]:
    """`prefill` and `decode` of a pool that has them apart."""
    sides = [_side(file, f"{where}.{key}", key, table(file, f"{where}.{key}", raw[key]), raw) for key in SIDE_KEYS[:2]]
    if bool(sides[0].backends) != bool(sides[1].backends):
        lacking = SIDE_KEYS[bool(sides[0].backends)]
        raise BadData(file, f"{where}.{lacking}.backends", "missing: the other side has addresses of its own")
    return sides[0], sides[1]


def _side(file: Path, where: str, key: str, entry: dict[str, Any], raw: dict[str, Any]) -> PoolSide:
    ports = {"bootstrap_port"} if key == "prefill" else set()
    only_keys(file, where, entry, {"replicas", "backends", *ports, *SPLIT})
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
        parallelism=read_split(file, where, entry),
        backends=backends,
        bootstrap_ports=() if given is None else _ports(file, f"{where}.bootstrap_port", given, len(backends)),
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

    def named(at: str, entry: dict[str, Any], key: str, find: Callable[[str], Found]) -> Found:
        given = text(file, f"{at}.{key}", entry.get(key))
        noun: Found = look_up(file, f"{at}.{key}", lambda: find(given))
        return noun

    accelerator = named(where, raw, "accelerator", catalog.accelerator)
    model = named(at, entry, "model", catalog.model)
    precision = named(at, entry, "precision", lambda name: catalog.precision(model, name))
    stack = named(where, raw, "stack", lambda name: catalog.stack_for(accelerator, name, model, precision))
    look_up(file, at, lambda: split.check(model, accelerator))
    if "usd_per_gpu_hour" not in raw:
        raise BadData(file, f"{where}.usd_per_gpu_hour", "missing: what one of its GPUs costs an hour")
    usd = number(file, f"{where}.usd_per_gpu_hour", raw["usd_per_gpu_hour"], _LEAST_USD, _MOST_USD)
    return {
        "model": model.id,
        "accelerator": accelerator.id,
        "precision": entry["precision"],
        "stack": stack.id,
        "usd_per_gpu_hour": usd,
    }, model.max_context


def _unknown(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], at: str, entry: dict[str, Any]
) -> dict[str, Any]:
    """A pool on nobody knows what: the model keeps the name that the file gives it."""
    precision, stack = entry.get("precision"), raw.get("stack")
    if stack is not None:
        given = text(file, f"{where}.stack", stack)
        stack = look_up(file, f"{where}.stack", lambda: catalog.stack(given)).id
    return {
        "model": model_name(file, f"{at}.model", entry.get("model")),
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


def _variable(file: Path, where: str, raw: object) -> str | None:
    if raw is None:
        return None
    name = text(file, where, raw)
    secret = any(len(run) >= _KEY_RUN and not run.isalpha() for run in name.split("_"))
    if secret or not _VARIABLE.match(name):
        # Not repeated: it may be a key.
        reason = "takes the name of an environment variable that holds the key, such as BACKEND_API_KEY, not the key"
        raise BadData(file, where, reason)
    return name


def _modalities(file: Path, where: str, raw: object) -> tuple[str, ...] | None:
    if raw is None:
        return None
    given = texts(file, where, raw)
    for index, name in enumerate(given):
        one_of(file, f"{where}[{index}]", name, MODALITIES)
        if name in given[:index]:
            raise BadData(file, f"{where}[{index}]", f"'{name}' is there twice")
    return given


def _hosts(
    file: Path, where: str, raw: dict[str, Any], backends: tuple[str, ...], deployed: Deployed
) -> dict[str, Any]:
    """`hosts`, `loading` and `load_hook` of a pool that has them."""
    entries = raw["hosts"]
    if not isinstance(entries, list) or not entries:
        raise BadData(file, f"{where}.hosts", 'is no list of models, such as [{ model = "llama-3.1-8b" }]')
    loading = _loading(file, where, raw)
    if "host_memory_gib" not in raw and "accelerator" not in raw:
        reason = "missing: how much of a replica's memory models may take, since there is no accelerator that says so"
        raise BadData(file, f"{where}.host_memory_gib", reason)
    hosts = tuple(
        _host(file, f"{where}.hosts[{i}]", table(file, f"{where}.hosts[{i}]", entry), raw, deployed)
        for i, entry in enumerate(entries)
    )
    _check_models(file, where, hosts)
    _check_backends(file, where, hosts, loading, backends)
    return {"hosts": hosts, "loading": loading, "load_hook": raw.get("load_hook")}


def model_name(file: Path, where: str, raw: object) -> str:
    name = text(file, where, raw)
    if name != name.strip():
        raise BadData(file, where, f"'{name}' begins or ends with a space, and names are compared exactly")
    return name


def _loading(file: Path, where: str, raw: dict[str, Any]) -> Loading:
    known = ", ".join(get_args(Loading))
    if "loading" not in raw:
        raise BadData(file, f"{where}.loading", f"missing: how its models are loaded and put away, one of {known}")
    one_of(file, f"{where}.loading", raw["loading"], get_args(Loading))
    loading: Loading = raw["loading"]
    hook = raw.get("load_hook")
    if (hook is None) != (loading != "hook"):
        reason = 'missing: the command that loads and unloads, for loading = "hook"'
        raise BadData(file, f"{where}.load_hook", reason if hook is None else 'has no meaning without loading = "hook"')
    if hook is not None:
        try:
            words = shlex.split(text(file, f"{where}.load_hook", hook))
        except ValueError as error:
            raise BadData(file, f"{where}.load_hook", f"is no command: {error}") from None
        if not words[0]:
            raise BadData(file, f"{where}.load_hook", "is no command: its first word is empty")
    return loading


def _host(file: Path, where: str, entry: dict[str, Any], pool: dict[str, Any], deployed: Deployed) -> HostedModel:
    only_keys(file, where, entry, set(HostedModel.__struct_fields__))
    known, context = deployed(where, {"precision": pool.get("precision"), **entry})
    if known["accelerator"] is None and "weight_gib" not in entry and "memory_gib" not in entry:
        reason = "missing: what it takes of a replica's memory, since there is no accelerator that says so"
        raise BadData(file, f"{where}.memory_gib", reason)
    limit = {} if (limit := pool.get("max_context", context)) is None else {"max_context": limit}
    read = {"served_as": model_name(file, f"{where}.served_as", entry["served_as"])} if "served_as" in entry else {}
    return read_record(
        file, where, {**limit, **entry}, HostedModel,
        model=known["model"], precision=known["precision"],
        backends=base_urls(file, f"{where}.backends", entry.get("backends", [])), **read,
    )  # fmt: skip


def _check_models(file: Path, where: str, hosts: tuple[HostedModel, ...]) -> None:
    for index, model in enumerate(hosts):
        first = next(i for i, other in enumerate(hosts) if other.model == model.model)
        if first != index:
            raise BadData(file, f"{where}.hosts[{index}].model", f"{model.model} is hosts[{first}] already")


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
