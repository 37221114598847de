"""Fleet files: what `plan` writes and `serve` keeps to. A person may write one too."""

import json
import re
from pathlib import Path
from typing import Any, get_args

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import number, only_keys, optional_text, read_toml, table, text, texts, whole
from crosstie.catalog.workloads import PERCENTILES, look_up, read_target
from crosstie.core.deployment import Parallelism, kv_bytes_per_element
from crosstie.core.errors import BadData
from crosstie.core.fleet import Fleet, Policy, Pool, Route, ServedClass
from crosstie.core.workload import Target

FORMAT = 1
_NAME = re.compile(r"^[^\W_][\w.-]{0,99}$")
_POOL = {
    "name", "model", "accelerator", "tp", "pp", "ep", "dp", "precision", "kv", "stack", "replicas",
    "usd_per_gpu_hour", "max_in_flight", "max_context", "backends",
}  # fmt: skip
_CLASS = {"name", "model", "requests_per_s", "input_tokens", "output_tokens", "ttft_ms", "tpot_ms", "routes"}


def fleet_text(fleet: Fleet) -> str:
    """TOML that `read_fleet` reads back to the same fleet, its numbers to six digits."""
    lines = [
        "# Written by `crosstie plan`. Add to every pool the addresses of its replicas before serving it.",
        f"format = {FORMAT}",
        f"name = {_quoted(fleet.name)}",
        f"planned = {_quoted(fleet.planned)}",
        f"policy = {_quoted(fleet.policy)}",
    ]
    for pool in fleet.pools:
        split = pool.parallelism
        backends = ", ".join(map(_quoted, pool.backends))
        lines += [
            "",
            "[[pool]]",
            f"name = {_quoted(pool.name)}",
            f"model = {_quoted(pool.model)}",
            f"accelerator = {_quoted(pool.accelerator)}",
            *(f"{part} = {getattr(split, part)}" for part in ("tp", "pp", "ep", "dp")),
            f"precision = {_quoted(pool.precision)}",
            f"kv = {_quoted(pool.kv_format)}",
            f"stack = {_quoted(pool.stack)}",
            f"replicas = {pool.replicas}",
            f"usd_per_gpu_hour = {_number(pool.usd_per_gpu_hour)}",
            f"max_in_flight = {pool.max_in_flight}",
            f"max_context = {pool.max_context}",
            f"backends = [{backends}]"
            + ("" if pool.backends else f'  # {pool.replicas} base URLs, such as "http://host:8000/v1"'),
        ]
    for one in fleet.classes:
        lines += [
            "",
            "[[class]]",
            f"name = {_quoted(one.name)}",
            f"model = {_quoted(one.model)}",
            f"requests_per_s = {_number(one.requests_per_s)}",
            f"input_tokens = {_number(one.input_tokens)}",
            f"output_tokens = {_number(one.output_tokens)}",
            *_target_line("ttft_ms", one.ttft),
            *_target_line("tpot_ms", one.tpot),
            "routes = [",
            *(f"  {_route(route)}," for route in one.routes),
            "]",
        ]
    return "\n".join(lines) + "\n"


def _route(route: Route) -> str:
    upto = "" if route.up_to_input is None else f", up_to_input = {route.up_to_input}"
    why = f", why = {_quoted(route.why)}" if route.why else ""
    return f"{{ pool = {_quoted(route.pool)}, share = {_number(route.share)}{upto}{why} }}"


def _target_line(key: str, target: Target | None) -> list[str]:
    if target is None:
        return []
    percentile = next(name for name, share in PERCENTILES.items() if share == target.percentile)
    return [f"{key} = {{ {percentile} = {_number(target.seconds * 1e3)} }}"]


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _number(value: float) -> str:
    return f"{value:.6g}" if abs(value) >= 1e-4 else f"{value:.6f}"


def read_fleet(catalog: Catalog, file: Path) -> Fleet:
    raw = read_toml(file)
    only_keys(file, "", raw, {"format", "name", "planned", "policy", "pool", "class"})
    if raw.get("format") != FORMAT:
        raise BadData(file, "format", f"is {raw.get('format')!r}; this version reads {FORMAT}")
    policy = raw.get("policy", "cheapest-meeting-target")
    if policy not in get_args(Policy):
        raise BadData(file, "policy", f"'{policy}' is not one of {', '.join(get_args(Policy))}")
    pools = _many(file, "pool", raw.get("pool"))
    classes = _many(file, "class", raw.get("class", []), may_be_empty=True)
    found = tuple(_pool(catalog, file, f"pool[{i}]", entry) for i, entry in enumerate(pools))
    _unique(file, "pool", [pool.name for pool in found])
    named = {pool.name: pool for pool in found}
    served = tuple(_class(catalog, file, f"class[{i}]", entry, named) for i, entry in enumerate(classes))
    _unique(file, "class", [one.name for one in served])
    return Fleet(
        name=text(file, "name", raw.get("name", file.stem)),
        planned=optional_text(file, "planned", raw.get("planned")),
        policy=policy,
        pools=found,
        classes=served,
    )


def _many(file: Path, key: str, raw: object, *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not (raw or may_be_empty):
        raise BadData(file, key, f"missing: write [[{key}]]")
    return [table(file, f"{key}[{i}]", entry) for i, entry in enumerate(raw)]


def _unique(file: Path, key: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise BadData(file, f"{key}[{index}].name", f"'{name}' is there twice")


def _pool(catalog: Catalog, file: Path, where: str, raw: dict[str, Any]) -> Pool:
    only_keys(file, where, raw, _POOL)
    name = text(file, f"{where}.name", raw.get("name"))
    if not _NAME.match(name) or name != name.lower():
        raise BadData(file, f"{where}.name", f"'{name}' must be lower case: letters, digits, dots and dashes")
    split = Parallelism(
        **{part: whole(file, f"{where}.{part}", raw.get(part, 1), 1, 1024) for part in ("tp", "pp", "ep", "dp")}
    )
    backends = texts(file, f"{where}.backends", raw.get("backends", []))
    for backend in backends:
        if not re.match(r"^https?://[^/\s]+", backend):
            raise BadData(file, f"{where}.backends", f"'{backend}' is no http or https address")

    def named(key: str, find: Any, usual: str | None = None) -> Any:
        given = text(file, f"{where}.{key}", raw.get(key, usual))
        return look_up(file, f"{where}.{key}", lambda: find(given))

    model, accelerator = named("model", catalog.model), named("accelerator", catalog.accelerator)
    precision = named("precision", lambda name: catalog.precision(model, name))
    stack = named("stack", lambda name: catalog.stack_for(accelerator, name, model, precision))
    named("kv", kv_bytes_per_element, "bf16")
    look_up(file, where, lambda: split.check(model, accelerator))
    return Pool(
        name=name,
        model=model.id,
        accelerator=accelerator.id,
        parallelism=split,
        precision=raw["precision"],
        kv_format=raw.get("kv", "bf16"),
        stack=stack.id,
        replicas=whole(file, f"{where}.replicas", raw.get("replicas"), 1, 10**6),
        usd_per_gpu_hour=number(file, f"{where}.usd_per_gpu_hour", raw.get("usd_per_gpu_hour"), 0, 1000),
        max_in_flight=whole(file, f"{where}.max_in_flight", raw.get("max_in_flight", 256), 1, 10**6),
        max_context=whole(file, f"{where}.max_context", raw.get("max_context", model.max_context or 10**8), 1, 10**9),
        backends=backends,
    )


def _class(catalog: Catalog, file: Path, where: str, raw: dict[str, Any], pools: dict[str, Pool]) -> ServedClass:
    only_keys(file, where, raw, _CLASS)
    asked = text(file, f"{where}.model", raw.get("model"))
    model = look_up(file, f"{where}.model", lambda: catalog.model(asked)).id
    routes = tuple(
        _read_route(file, f"{where}.routes[{i}]", entry, model, pools)
        for i, entry in enumerate(_many(file, f"{where}.routes", raw.get("routes", []), may_be_empty=True))
    )
    return ServedClass(
        name=text(file, f"{where}.name", raw.get("name")),
        model=model,
        requests_per_s=number(file, f"{where}.requests_per_s", raw.get("requests_per_s", 0), 0, 1e9),
        input_tokens=number(file, f"{where}.input_tokens", raw.get("input_tokens", 1), 1, 1e9),
        output_tokens=number(file, f"{where}.output_tokens", raw.get("output_tokens", 1), 1, 1e9),
        ttft=read_target(file, f"{where}.ttft_ms", raw.get("ttft_ms")),
        tpot=read_target(file, f"{where}.tpot_ms", raw.get("tpot_ms")),
        routes=routes,
    )


def _read_route(file: Path, where: str, raw: dict[str, Any], model: str, pools: dict[str, Pool]) -> Route:
    only_keys(file, where, raw, {"pool", "share", "up_to_input", "why"})
    name = text(file, f"{where}.pool", raw.get("pool"))
    if name not in pools:
        raise BadData(file, f"{where}.pool", f"'{name}' is no pool of this file; there are {', '.join(pools)}")
    if pools[name].model != model:
        raise BadData(file, f"{where}.pool", f"'{name}' serves {pools[name].model}, and the class asks for {model}")
    limit = raw.get("up_to_input")
    return Route(
        pool=name,
        share=number(file, f"{where}.share", raw.get("share", 1.0), 0, 1),
        up_to_input=None if limit is None else whole(file, f"{where}.up_to_input", limit, 1, 10**9),
        why=optional_text(file, f"{where}.why", raw.get("why")),
    )
