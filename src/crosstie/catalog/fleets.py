"""Fleet files: what `plan` writes and `serve` keeps to. A person may write one too.

A slip fails here, with the file and the key, and not when the first request meets it.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.catalog.kube import KUBE
from crosstie.catalog.library import Catalog
from crosstie.catalog.pools import read_pool
from crosstie.catalog.reading import (
    check_keys,
    check_unique,
    date,
    in_form,
    only_keys,
    optional_text,
    path_beside,
    read_record,
    read_toml,
    read_value,
    table,
    text,
)
from crosstie.core.errors import BadData, CrosstieError, UnknownName
from crosstie.core.fleet import ASYMMETRIC, Fleet, JwtIdentity, Policy, Pool, Route, ServedClass, Serving, SharedState
from crosstie.core.forms import https_url

FORMAT = 1
_KEYS = {"format", "name", "planned", "policy", "aliases", "fallbacks", "serve", "state", "jwt", "pool", "class"}
# A password written out, as user:password@ or as ?password=; ${VARIABLE} in its place is fine.
_PASSWORD = re.compile(r"://[^/@]*:(?!\$\{)[^/@]+@|[?&]password=(?!\$\{)")
# Shares are written to six digits, and people write 0.33 three times.
_SHARES_MISS = 0.01


def read_fleet(catalog: Catalog, file: Path) -> Fleet:
    raw = read_toml(file)
    _check_kind(file, raw)
    policy: Policy = read_value(file, "policy", raw.get("policy", "cheapest-meeting-target"), Policy)
    entries = _many(file, "pool", raw.get("pool"))
    if not entries:
        raise BadData(file, "pool", "missing: write [[pool]]")
    pools = tuple(read_pool(catalog, file, f"pool[{i}]", entry) for i, entry in enumerate(entries))
    models = check_pools(file, pools, policy)
    classes = tuple(
        _class(catalog, file, f"class[{i}]", entry, pools, models)
        for i, entry in enumerate(_many(file, "class", raw.get("class", [])))
    )
    check_unique(file, "class", "name", [served_class.name for served_class in classes])
    for i, pool in enumerate(pools):
        if pool.trial_class is not None and pool.trial_class not in {served_class.name for served_class in classes}:
            names = ", ".join(served_class.name for served_class in classes) or "none"
            raise BadData(file, f"pool[{i}].trial_class", f"'{pool.trial_class}' is no class; there are {names}")
    planned, state = raw.get("planned", ""), _state(file, raw.get("state", {}))
    return Fleet(
        name=text(file, "name", raw.get("name", file.stem)),
        planned="" if planned == "" else date(file, "planned", planned),
        policy=policy,
        pools=pools,
        classes=classes,
        aliases=_aliases(catalog, file, table(file, "aliases", raw.get("aliases", {})), models),
        fallbacks=_fallbacks(catalog, file, table(file, "fallbacks", raw.get("fallbacks", {})), models),
        serving=_serving(file, raw.get("serve", {}), [served_class.name for served_class in classes]),
        state=state,
        jwt=read_jwt(file, raw.get("jwt"), keys=state.keys),
    )


def check_pools(file: Path, pools: Iterable[Pool], policy: Policy) -> dict[str, str]:
    """Whether pools go together; the model that clients mean by each name. Raises BadData."""
    pools = tuple(pools)
    check_unique(file, "pool", "name", [pool.name for pool in pools])
    _check_addresses(file, pools)
    if policy == "weighted":
        _check_weights(file, pools)
    return _models_by_name(file, pools)


def _check_kind(file: Path, raw: dict[str, Any]) -> None:
    if "traffic" in raw:
        hint = "`crosstie plan WORKLOAD --fleet FLEET` makes a fleet file of it"
        raise BadData(file, "traffic", f"belongs to a workload file: {hint}")
    only_keys(file, "", raw, _KEYS)
    if "format" not in raw:
        raise BadData(file, "format", f"missing: write format = {FORMAT}")
    # 1.0 and true equal 1 in Python.
    if type(raw["format"]) is not int or raw["format"] != FORMAT:
        raise BadData(file, "format", f"is {raw['format']!r}; this version reads {FORMAT}")


def _many(file: Path, key: str, raw: object) -> list[dict[str, Any]]:
    if not isinstance(raw, list):
        raise BadData(file, key, f"{'missing' if raw is None else 'is no list of tables'}: write [[{key}]]")
    return [table(file, f"{key}[{i}]", entry) for i, entry in enumerate(raw)]


def _check_addresses(file: Path, pools: Iterable[Pool]) -> None:
    places: dict[str, str] = {}
    for index, pool in enumerate(pools):
        lists = [(f"pool[{index}]", pool.backends)]
        lists += [(f"pool[{index}].hosts[{i}]", model.backends) for i, model in enumerate(pool.hosts)]
        if pool.apart is not None:
            sides = (("prefill", pool.apart.prefill), ("decode", pool.apart.decode))
            lists += [(f"pool[{index}].{name}", side.backends) for name, side in sides]
        for owner, backends in lists:
            for position, backend in enumerate(backends):
                where = f"{owner}.backends[{position}]"
                # Of pods in one place, each pool takes those that its model and accelerator are written on.
                told = f" {pool.model} {pool.accelerator}" if backend.startswith(KUBE) else ""
                first = places.setdefault(backend + told, where)
                if first != where:
                    raise BadData(file, where, f"{backend} is {first} already; it would get twice its share")


def _models_by_name(file: Path, pools: Iterable[Pool]) -> dict[str, str]:
    """The model that a client means by each name it may use: the model's own, and the backends' for it."""
    owners: dict[str, tuple[str, str]] = {}
    for index, pool in enumerate(pools):
        for position, served in enumerate(pool.by_model()):
            at = f"pool[{index}].hosts[{position}]" if pool.hosts else f"pool[{index}]"
            for key, name in (("model", served.model), ("served_as", served.served_as)):
                if name is None:
                    continue
                where = f"{at}.{key}"
                model, first = owners.setdefault(name, (served.model, where))
                if model != served.model:
                    raise BadData(file, where, f"'{name}' would name {served.model} here and {model} by {first}")
    _check_adapters(file, pools, owners)
    return {name: model for name, (model, _) in owners.items()}


def _check_adapters(file: Path, pools: Iterable[Pool], owners: dict[str, tuple[str, str]]) -> None:
    """A name is a model's or an adapter's, and an adapter is one model's."""
    of: dict[str, str] = {}
    for index, pool in enumerate(pools):
        for position, adapter in enumerate(pool.adapters):
            where = f"pool[{index}].adapters[{position}].name"
            if adapter.name in owners:
                raise BadData(file, where, f"'{adapter.name}' is the name of a model by {owners[adapter.name][1]}")
            if of.setdefault(adapter.name, pool.model) != pool.model:
                raise BadData(file, where, f"'{adapter.name}' is an adapter of {of[adapter.name]} already")


def _check_weights(file: Path, pools: Iterable[Pool]) -> None:
    """Under `weighted` the weights of a model's pools are compared, so they must be comparable."""
    by_model: dict[str, list[tuple[int, float | None]]] = {}
    for index, pool in enumerate(pools):
        # What is bought by the token has no share.
        for served in pool.by_model() if pool.token_price is None else ():
            by_model.setdefault(served.model, []).append((index, pool.weight))
    for model, weights in by_model.items():
        missing = [index for index, weight in weights if weight is None]
        if missing and len(missing) < len(weights):
            reason = f"missing: other pools of {model} have one; give all of them a weight, or none"
            raise BadData(file, f"pool[{missing[0]}].weight", reason)
        if not any(weight is None or weight > 0 for _, weight in weights):
            raise BadData(file, f"pool[{weights[0][0]}].weight", f"no pool of {model} has a weight above 0")


def _class(
    catalog: Catalog, file: Path, where: str, raw: dict[str, Any], pools: tuple[Pool, ...], models: dict[str, str]
) -> ServedClass:
    check_keys(file, where, raw, ServedClass)
    name = text(file, f"{where}.name", raw.get("name"))
    model = _served_model(catalog, file, f"{where}.model", text(file, f"{where}.model", raw.get("model")), models)
    named = {pool.name: pool for pool in pools}
    routes = tuple(
        _route(file, f"{where}.routes[{i}]", entry, model, named)
        for i, entry in enumerate(_many(file, f"{where}.routes", raw.get("routes", [])))
    )
    _check_shares(file, f"{where}.routes", name, routes)
    return read_record(file, where, raw, ServedClass, model=model, routes=routes)


def _served_model(catalog: Catalog, file: Path, where: str, asked: str, models: dict[str, str]) -> str:
    """The model of this file's pools that a class means; pools have names that the catalog may not know."""
    if asked in models:
        return models[asked]
    try:
        model: str = catalog.model(asked).id
    except UnknownName:
        model = asked
    except CrosstieError as error:
        raise BadData(file, where, str(error)) from None
    if model not in models:
        served = ", ".join(dict.fromkeys(models.values()))
        raise BadData(file, where, f"no pool of this file serves '{asked}'; they serve {served}")
    return models[model]


def _aliases(catalog: Catalog, file: Path, raw: dict[str, Any], models: dict[str, str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for name, meant in raw.items():
        where = f"aliases.{name}"
        if not name or name in models:
            raise BadData(file, where, "is the name of a model already" if name else "is no name")
        aliases[name] = _served_model(catalog, file, where, text(file, where, meant), models)
    return aliases


def _fallbacks(catalog: Catalog, file: Path, raw: dict[str, Any], models: dict[str, str]) -> dict[str, tuple[str, ...]]:
    chains: dict[str, tuple[str, ...]] = {}
    for name, others in raw.items():
        where = f"fallbacks.{name}"
        model = _served_model(catalog, file, where, name, models)
        named = read_value(file, where, others, tuple[str, ...])
        chains[model] = tuple(
            _served_model(catalog, file, f"{where}[{i}]", other, models) for i, other in enumerate(named)
        )
        if model in chains[model]:
            raise BadData(file, where, f"{model} cannot stand in for itself")
    return chains


def _route(file: Path, where: str, raw: dict[str, Any], model: str, pools: dict[str, Pool]) -> Route:
    route = read_record(file, where, raw, Route, why=optional_text(file, f"{where}.why", raw.get("why")))
    name = route.pool
    if name not in pools:
        raise BadData(file, f"{where}.pool", f"'{name}' is no pool of this file; there are {', '.join(pools)}")
    served = [pool.model for pool in pools[name].by_model()]
    if model not in served:
        raise BadData(file, f"{where}.pool", f"'{name}' serves {', '.join(served)}, and the class asks for {model}")
    return route


def _check_shares(file: Path, where: str, name: str, routes: tuple[Route, ...]) -> None:
    """Requests of one length are all of them sent somewhere, once."""
    for bound in dict.fromkeys(route.up_to_input for route in routes):
        group = [(i, route) for i, route in enumerate(routes) if route.up_to_input == bound]
        prompts = "without up_to_input" if bound is None else f"up to {bound:,} tokens"
        seen: dict[str, int] = {}
        for index, route in group:
            first = seen.setdefault(route.pool, index)
            if first != index:
                reason = f"'{route.pool}' is there twice for the routes {prompts}, here and in routes[{first}]"
                raise BadData(file, f"{where}[{index}].pool", reason)
        total = math.fsum(route.share for _, route in group)
        if abs(total - 1) > _SHARES_MISS:
            reason = f"the shares of class '{name}' {prompts} add up to {total:g}, not to 1"
            raise BadData(file, where, reason)


def _serving(file: Path, raw: object, classes: list[str]) -> Serving:
    serving = read_record(file, "serve", raw, Serving)
    if serving.default_class is not None and serving.default_class not in classes:
        known = f"there are {', '.join(classes)}" if classes else "there are none"
        raise BadData(file, "serve.default_class", f"'{serving.default_class}' is no class of this file; {known}")
    return serving


def _state(file: Path, raw: object) -> SharedState:
    entry = dict(table(file, "state", raw))
    keys = read_value(file, "state.keys", entry.pop("keys", "off"), Literal["off", "required"]) == "required"
    state = read_record(file, "state", entry, SharedState, keys=keys)
    store = state.store
    if store is None and keys:
        raise BadData(file, "state.store", 'missing: where keys are kept, such as store = "crosstie.db"')
    if state.redis is not None and not state.redis.startswith(("redis://", "rediss://", "unix://", "${")):
        raise BadData(file, "state.redis", "is no address such as redis://127.0.0.1:6379/0, or ${VARIABLE}")
    if store is not None:
        if "://" in store and not store.startswith(("postgresql://", "postgres://", "sqlite://")):
            raise BadData(file, "state.store", "is neither a file's name nor postgresql://..., nor ${VARIABLE}")
        if "://" not in store and not store.startswith("${"):
            store = path_beside(file, store)
    for key in ("store", "redis"):
        if _PASSWORD.search(getattr(state, key) or ""):
            # Not repeated: it would be in logs.
            raise BadData(file, f"state.{key}", "has a password in it: put the address into a variable, as ${DATABASE}")
    return msgspec.structs.replace(state, store=store)


def read_jwt(file: Path, raw: object, *, keys: bool) -> JwtIdentity | None:
    """Whose signed tokens are taken beside keys, and what they say of who sends them. `keys`: whether the file has them
    required."""
    if raw is None:
        return None
    entry: dict[str, Any] = dict(table(file, "jwt", raw))
    if not keys:
        raise BadData(file, "jwt", 'goes with keys = "required" in [state]: usage and teams are kept in its store')
    if isinstance(entry.get("audience"), str):
        entry["audience"] = [entry["audience"]]
    identity = read_record(file, "jwt", entry, JwtIdentity)
    if not identity.audience:
        raise BadData(file, "jwt.audience", "is empty: tokens for anybody would be taken")
    if not identity.algorithms:
        raise BadData(file, "jwt.algorithms", f"is empty; known: {', '.join(ASYMMETRIC)}")
    if identity.teams and identity.team_claim is None:
        raise BadData(file, "jwt.teams", "goes with team_claim, which is missing")
    if identity.jwks is not None:
        is_url = "://" in identity.jwks
        place = in_form(file, "jwt.jwks", identity.jwks, https_url) if is_url else path_beside(file, identity.jwks)
        identity = msgspec.structs.replace(identity, jwks=place)
    return identity
