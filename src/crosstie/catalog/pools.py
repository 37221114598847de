"""One [[pool]] of a fleet file: what its replicas are, where they answer, and how they are addressed."""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import number, only_keys, text, texts, whole
from crosstie.catalog.workloads import look_up
from crosstie.core.deployment import Parallelism, kv_bytes_per_element
from crosstie.core.errors import BadData
from crosstie.core.fleet import Pool

SPLIT = ("tp", "pp", "ep", "dp")
MODALITIES = ("text", "image", "audio", "video")
USUAL_KV = "bf16"
# Where neither the file nor the model's own config says how long a request may be.
UNLIMITED_CONTEXT = 10**8
_KEYS = {
    "name", "model", "accelerator", *SPLIT, "precision", "kv", "stack", "replicas", "usd_per_gpu_hour",
    "max_in_flight", "max_context", "backends", "served_as", "api_key_env", "weight", "modalities",
}  # fmt: skip
_NAME = re.compile(r"^[^\W_][\w.-]{0,99}$")
# A GPU-hour of a known accelerator costs something, or routing by cost would take it for any work.
_LEAST_USD, _MOST_USD = 1e-6, 1000
_HOST = re.compile(r"^[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?\.?$")
_PATH = re.compile(r"^[A-Za-z0-9._~!$&'()*+,;=:%/-]*$")
_USUAL_PORTS = {"http": 80, "https": 443}
_ENDPOINTS = ("/completions", "/embeddings", "/responses")
_VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
# Letters and digits in one run of this length are a key's, not a name's.
_KEY_RUN = 16

Found = TypeVar("Found")


def read_pool(catalog: Catalog, file: Path, where: str, raw: dict[str, Any]) -> Pool:
    only_keys(file, where, raw, _KEYS)
    name = text(file, f"{where}.name", raw.get("name"))
    if not _NAME.match(name) or name != name.lower():
        raise BadData(file, f"{where}.name", f"'{name}' must be lower case: letters, digits, dots and dashes")
    split = Parallelism(**{part: whole(file, f"{where}.{part}", raw.get(part, 1), 1, 1024) for part in SPLIT})
    backends = _backends(file, f"{where}.backends", raw.get("backends", []))
    kv = text(file, f"{where}.kv", raw.get("kv", USUAL_KV))
    look_up(file, f"{where}.kv", lambda: kv_bytes_per_element(kv))
    if "accelerator" in raw:
        deployed, context = _deployed(catalog, file, where, raw, split)
    else:
        deployed, context = _unknown(catalog, file, where, raw), None
    served_as, weight = raw.get("served_as"), raw.get("weight")
    limit = raw.get("max_context", context or UNLIMITED_CONTEXT)
    return Pool(
        name=name,
        parallelism=split,
        kv_format=kv,
        replicas=_replicas(file, where, name, raw.get("replicas"), len(backends)),
        max_in_flight=whole(file, f"{where}.max_in_flight", raw.get("max_in_flight", 256), 1, 10**6),
        max_context=whole(file, f"{where}.max_context", limit, 1, 10**9),
        backends=backends,
        served_as=None if served_as is None else _model_name(file, f"{where}.served_as", served_as),
        api_key_env=_variable(file, f"{where}.api_key_env", raw.get("api_key_env")),
        weight=None if weight is None else number(file, f"{where}.weight", weight, 0, 1e6),
        modalities=_modalities(file, f"{where}.modalities", raw.get("modalities")),
        **deployed,
    )


def _deployed(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], split: Parallelism
) -> tuple[dict[str, Any], int | None]:
    """What the catalog knows of a pool's replicas, and how far their model reaches."""

    def named(key: str, find: Callable[[str], Found]) -> Found:
        given = text(file, f"{where}.{key}", raw.get(key))
        found: Found = look_up(file, f"{where}.{key}", lambda: find(given))
        return found

    model, accelerator = named("model", catalog.model), named("accelerator", catalog.accelerator)
    precision = named("precision", lambda name: catalog.precision(model, name))
    stack = named("stack", lambda name: catalog.stack_for(accelerator, name, model, precision))
    look_up(file, where, lambda: split.check(model, accelerator))
    if "usd_per_gpu_hour" not in raw:
        raise BadData(file, f"{where}.usd_per_gpu_hour", "missing: what one of its GPUs costs an hour")
    usd = number(file, f"{where}.usd_per_gpu_hour", raw["usd_per_gpu_hour"], _LEAST_USD, _MOST_USD)
    return {
        "model": model.id,
        "accelerator": accelerator.id,
        "precision": raw["precision"],
        "stack": stack.id,
        "usd_per_gpu_hour": usd,
    }, model.max_context


def _unknown(catalog: Catalog, file: Path, where: str, raw: dict[str, Any]) -> dict[str, Any]:
    """A pool on nobody knows what: the model keeps the name that the file gives it."""
    precision, stack = raw.get("precision"), raw.get("stack")
    if stack is not None:
        given = text(file, f"{where}.stack", stack)
        stack = look_up(file, f"{where}.stack", lambda: catalog.stack(given)).id
    return {
        "model": _model_name(file, f"{where}.model", raw.get("model")),
        "accelerator": None,
        "precision": None if precision is None else text(file, f"{where}.precision", precision),
        "stack": stack,
        "usd_per_gpu_hour": number(file, f"{where}.usd_per_gpu_hour", raw.get("usd_per_gpu_hour", 0), 0, _MOST_USD),
    }


def _model_name(file: Path, where: str, raw: object) -> str:
    name = text(file, where, raw)
    if name != name.strip():
        raise BadData(file, where, f"'{name}' begins or ends with a space, and names are compared exactly")
    return name


def _replicas(file: Path, where: str, name: str, raw: object, backends: int) -> int:
    if raw is None and backends:
        return backends
    if raw is None:
        raise BadData(file, f"{where}.replicas", "missing: give the number of replicas, or their backends")
    replicas = whole(file, f"{where}.replicas", raw, 1, 10**6)
    if backends and backends != replicas:
        reason = f"pool '{name}' has replicas = {replicas} and {backends} backends: one address a replica"
        raise BadData(file, f"{where}.backends", reason)
    return replicas


def _backends(file: Path, where: str, raw: object) -> tuple[str, ...]:
    return tuple(_address(file, f"{where}[{i}]", given) for i, given in enumerate(texts(file, where, raw)))


def _address(file: Path, where: str, given: str) -> str:
    """A base URL in its one normal form, so that two that mean the same are equal."""
    if not given.isprintable() or " " in given:
        raise BadData(file, where, "has spaces, control characters or line breaks")
    # These two first, and not repeated: passwords and keys would be in logs.
    if "@" in given:
        raise BadData(file, where, "has a user or a password before '@'; name the key's variable with api_key_env")
    if "?" in given or "#" in given:
        raise BadData(file, where, "has a query or a fragment, and paths are put after it")
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError as error:
        raise BadData(file, where, f"'{given}' is no address: {error}") from None
    if parts.scheme not in _USUAL_PORTS or not parts.hostname:
        raise BadData(file, where, f"'{given}' is no http or https address, such as http://host:8000/v1")
    if port == 0 or parts.netloc.endswith(":"):
        raise BadData(file, where, f"'{given}' has no port from 1 to 65535 after the ':'")
    path = parts.path.rstrip("/")
    if not _PATH.match(path):
        raise BadData(file, where, f"the path '{path}' has characters that an address must percent-encode")
    if path.endswith(_ENDPOINTS):
        raise BadData(file, where, f"'{given}' is an endpoint: give the base URL before it, which usually ends in /v1")
    usual = port is None or port == _USUAL_PORTS[parts.scheme]
    return f"{parts.scheme}://{_host(file, where, parts.hostname)}{'' if usual else f':{port}'}{path}"


def _host(file: Path, where: str, host: str) -> str:
    """`host` in lower case and, if it is IPv6, in brackets and its short form."""
    numeric = ":" in host or not host.strip("0123456789.")
    if numeric and "%" not in host:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            raise BadData(file, where, f"'{host}' is no IP address") from None
        return f"[{address}]" if address.version == 6 else str(address)
    if numeric or not _HOST.match(host):
        raise BadData(file, where, f"'{host}' is no host: letters, digits, dots and dashes, or an IP address")
    return host


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
        if name not in MODALITIES:
            raise BadData(file, f"{where}[{index}]", f"'{name}' is not one of {', '.join(MODALITIES)}")
        if name in given[:index]:
            raise BadData(file, f"{where}[{index}]", f"'{name}' is there twice")
    return given
