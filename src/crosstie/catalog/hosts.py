"""The models that share a pool's replicas, as a fleet file lists them: `hosts`, `loading` and what goes with them."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from crosstie.catalog.addresses import base_urls
from crosstie.catalog.reading import only_keys, read_record, read_values, table, text
from crosstie.core.errors import BadData
from crosstie.core.fleet import HostedModel, Loading, Pool

HOST_KEYS = {"hosts", "loading", "load_hook", "host_memory_gib"}
# What belongs to one model, and so into its entry.
_OF_A_MODEL = ("model", "served_as")

# What is known of a replica with the model of an entry, and how far that model reaches.
Deployed = Callable[[str, dict[str, Any]], tuple[dict[str, Any], int | None]]


def read_hosts(
    file: Path, where: str, raw: dict[str, Any], backends: tuple[str, ...], deployed: Deployed
) -> dict[str, Any]:
    """`hosts`, `loading`, `load_hook` and `host_memory_gib` of a pool that has any of them."""
    for key in sorted(HOST_KEYS - {"hosts"}):
        if key in raw and "hosts" not in raw:
            raise BadData(file, f"{where}.{key}", "goes with hosts = [{ model = ... }, ...], which are missing")
    for key in _OF_A_MODEL:
        if key in raw:
            raise BadData(file, f"{where}.{key}", "belongs into the entries of hosts, each of which is a model")
    entries = raw["hosts"]
    if not isinstance(entries, list) or not entries:
        raise BadData(file, f"{where}.hosts", 'is no list of models, such as [{ model = "llama-3.1-8b" }]')
    loading = _loading(file, where, raw)
    if "host_memory_gib" not in raw and "accelerator" not in raw:
        reason = "missing: how much of a replica's memory models may take, since there is no accelerator that says so"
        raise BadData(file, f"{where}.host_memory_gib", reason)
    hosts = tuple(
        _host(file, f"{where}.hosts[{i}]", table(file, f"{where}.hosts[{i}]", one), raw, deployed)
        for i, one in enumerate(entries)
    )
    _check_models(file, where, hosts)
    _check_backends(file, where, hosts, loading, backends)
    return {
        "hosts": hosts,
        "loading": loading,
        "load_hook": raw.get("load_hook"),
        **read_values(file, where, raw, Pool, ("host_memory_gib",)),
    }


def model_name(file: Path, where: str, raw: object) -> str:
    name = text(file, where, raw)
    if name != name.strip():
        raise BadData(file, where, f"'{name}' begins or ends with a space, and names are compared exactly")
    return name


def _loading(file: Path, where: str, raw: dict[str, Any]) -> Loading:
    known = ", ".join(get_args(Loading))
    if "loading" not in raw:
        raise BadData(file, f"{where}.loading", f"missing: how its models are loaded and put away, one of {known}")
    loading: Loading = raw["loading"]
    if loading not in get_args(Loading):
        raise BadData(file, f"{where}.loading", f"{loading!r} is not one of {known}")
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
    for index, one in enumerate(hosts):
        first = next(i for i, other in enumerate(hosts) if other.model == one.model)
        if first != index:
            raise BadData(file, f"{where}.hosts[{index}].model", f"{one.model} is hosts[{first}] already")


def _check_backends(
    file: Path, where: str, hosts: tuple[HostedModel, ...], loading: Loading, backends: tuple[str, ...]
) -> None:
    """One address for all models of a replica, or one for each model."""
    having = [index for index, one in enumerate(hosts) if one.backends]
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
    for index, one in enumerate(hosts):
        if len(one.backends) != len(hosts[having[0]].backends):
            reason = f"{len(one.backends)} addresses, and hosts[{having[0]}] has {len(hosts[having[0]].backends)}: "
            raise BadData(file, f"{where}.hosts[{index}].backends", reason + "one for each replica of the pool")
