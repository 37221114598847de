"""Fleets as the text of their files, and one to start from."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.classes import PERCENTILES
from crosstie.catalog.engine_knowledge import known_lines
from crosstie.catalog.fleets import FORMAT
from crosstie.catalog.pools import SPLIT, UNLIMITED_CONTEXT, USUAL_KV
from crosstie.catalog.writing import toml_key, toml_value
from crosstie.core.fleet import (
    BackendAccess,
    Fleet,
    HostedModel,
    JwtIdentity,
    Pool,
    PoolApart,
    PoolSide,
    Route,
    ServedClass,
    Serving,
    SharedState,
)
from crosstie.core.workload import Target

_EXAMPLE = Path(__file__).parent / "data" / "fleets" / "two-vendors.toml"


def example_fleet_text() -> str:
    """A fleet file as a person would write it."""
    return _EXAMPLE.read_text(encoding="utf-8")


def fleet_text(fleet: Fleet) -> str:
    """TOML that `read_fleet` reads back to the same fleet, its numbers to six digits."""
    ready = all(one.backends for pool in fleet.pools for one in pool.by_model())
    lines = [
        "# Written by Crosstie; docs/fleet.md says what each key means."
        if ready
        else "# Written by `crosstie plan`. Add to every pool the addresses of its replicas before serving it.",
        f"format = {FORMAT}",
        f"name = {toml_value(fleet.name)}",
        *([f"planned = {toml_value(fleet.planned)}"] if fleet.planned else []),
        f"policy = {toml_value(fleet.policy)}",
        *_names("aliases", fleet.aliases),
        *_names("fallbacks", fleet.fallbacks),
        *_serve(fleet.serving),
        *_state(fleet.state),
        *_jwt(fleet.jwt),
    ]
    for pool in fleet.pools:
        lines += ["", "[[pool]]", *_pool(pool)]
    for one in fleet.classes:
        lines += ["", "[[class]]", *_class(one)]
    return "\n".join(lines) + "\n"


def _names(title: str, names: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    given = [f"{toml_key(name)} = {toml_value(meant)}" for name, meant in names.items()]
    return ["", f"[{title}]", *given] if given else []


def _serve(serving: Serving) -> list[str]:
    changed = _changed(serving, Serving())
    return ["", "[serve]", *changed] if changed else []


def _changed(given: msgspec.Struct, usual: msgspec.Struct) -> list[str]:
    """What differs from the defaults, which may become better ones."""
    values = {field.name: getattr(given, field.name) for field in msgspec.structs.fields(given)}
    return [f"{key} = {_value(value)}" for key, value in values.items() if value != getattr(usual, key)]


def _jwt(jwt: JwtIdentity | None) -> list[str]:
    if jwt is None:
        return []
    usual = JwtIdentity(issuer="", audience=(), teams=jwt.teams)
    return ["", "[jwt]", *_changed(jwt, usual), *_names("jwt.teams", jwt.teams)]


def _state(state: SharedState) -> list[str]:
    given = [*(['keys = "required"'] if state.keys else []), *_given({"store": state.store, "redis": state.redis})]
    return ["", "[state]", *given] if given else []


def _pool(pool: Pool) -> list[str]:
    known = pool.accelerator is not None
    split = {part: getattr(pool.parallelism, part) for part in SPLIT}
    plural = "" if pool.replicas == 1 else "s"
    hint = f'  # {pool.replicas} base URL{plural}, such as "http://host:8000/v1"'
    ready = all(one.backends for one in pool.by_model())
    # A vLLM server has one model, so that the addresses are each model's.
    own = pool.loading == "vllm-sleep" or any(one.backends for one in pool.hosts)
    led = pool.apart is not None and pool.apart.is_led
    optional = {"served_as": pool.served_as, "api_key_env": pool.api_key_env, "weight": pool.weight}
    if pool.network_s:
        optional["network_s"] = pool.network_s
    return [
        f"name = {toml_value(pool.name)}",
        *([] if pool.hosts else [f"model = {toml_value(pool.model)}"]),
        *_given({"accelerator": pool.accelerator}),
        *(_apart(pool.apart) if pool.apart else [f"{part} = {n}" for part, n in split.items() if known or n > 1]),
        *_given({"precision": pool.precision}),
        *([f"kv = {toml_value(pool.kv_format)}"] if known or pool.kv_format != USUAL_KV else []),
        *_given({"stack": pool.stack, "release": pool.release, "speculation": pool.speculation}),
        *([f"text = {toml_value(pool.text)}"] if pool.speculation and pool.text != "chat" else []),
        *([f"acceptance = {_value(pool.acceptance)}"] if pool.acceptance is not None else []),
        *([f"settings = {toml_value(pool.settings)}"] if pool.settings else []),
        f"replicas = {pool.replicas}",
        *([f"usd_per_gpu_hour = {_number(pool.usd_per_gpu_hour)}"] if known or pool.usd_per_gpu_hour else []),
        *_adapters(pool),
        *([] if pool.paid_anyway else ["paid_anyway = false"]),
        *([f"sunk_usd_per_gpu_hour = {_number(pool.sunk_usd_per_gpu_hour)}"] if pool.sunk_usd_per_gpu_hour else []),
        *(["drained = true"] if pool.drained else []),
        *(_given(msgspec.structs.asdict(pool.token_price)) if pool.token_price else []),
        f"max_in_flight = {pool.max_in_flight}",
        *([] if pool.hosts and pool.max_context >= UNLIMITED_CONTEXT else [f"max_context = {pool.max_context}"]),
        *_given(optional),
        *_reach(pool.reach),
        *known_lines(pool),
        *([] if pool.modalities is None else [f"modalities = {toml_value(pool.modalities)}"]),
        *_given({"loading": pool.loading, "load_hook": pool.load_hook, "host_memory_gib": pool.host_memory_gib}),
        *([] if own or led else [f"backends = {toml_value(_written(pool.backends))}{'' if ready else hint}"]),
        *(
            ["hosts = [", *(f"  {_host(one, own)},{'' if ready or not own else hint}" for one in pool.hosts), "]"]
            if pool.hosts
            else []
        ),
    ]


def _written(backends: tuple[str, ...]) -> tuple[str, ...]:
    """A name that is looked up stands for the addresses that were found."""
    return tuple(dict.fromkeys(one.partition("#")[0] for one in backends))


def _reach(reach: BackendAccess) -> list[str]:
    usual = msgspec.structs.asdict(BackendAccess())
    return _given({key: value for key, value in msgspec.structs.asdict(reach).items() if value != usual[key]})


def _adapters(pool: Pool) -> list[str]:
    if not pool.adapters:
        return []
    listed = [f"  {{ name = {toml_value(one.name)}, path = {toml_value(one.path)} }}," for one in pool.adapters]
    return [*_given({"max_adapters": pool.max_adapters}), "adapters = [", *listed, "]"]


def _apart(apart: PoolApart) -> list[str]:
    def side(one: PoolSide) -> str:
        split = {part: getattr(one.parallelism, part) for part in SPLIT}
        given = [f"replicas = {one.replicas}", *(f"{part} = {n}" for part, n in split.items() if n > 1)]
        if one.backends:
            given.append(f"backends = {toml_value(one.backends)}")
        if one.bootstrap_ports:
            same = len(set(one.bootstrap_ports)) == 1
            ports = one.bootstrap_ports[0] if same else [*one.bootstrap_ports]
            given.append(f"bootstrap_port = {ports}")
        return f"{{ {', '.join(given)} }}"

    return [
        f"prefill = {side(apart.prefill)}",
        f"decode = {side(apart.decode)}",
        f"connector = {toml_value(apart.connector)}",
    ]


def _host(one: HostedModel, own: bool) -> str:
    given: dict[str, str | float | None] = {
        "model": one.model, "served_as": one.served_as, "precision": one.precision, "weight_gib": one.weight_gib,
        "memory_gib": one.memory_gib, "load_s": one.load_s, "max_context": one.max_context,
    }  # fmt: skip
    said = [*_given(given), *(["pinned = true"] if one.pinned else [])]
    return f"{{ {', '.join([*said, f'backends = {toml_value(one.backends)}'] if own else said)} }}"


def _class(one: ServedClass) -> list[str]:
    return [
        f"name = {toml_value(one.name)}",
        f"model = {toml_value(one.model)}",
        f"requests_per_s = {_number(one.requests_per_s)}",
        f"input_tokens = {_number(one.input_tokens)}",
        f"output_tokens = {_number(one.output_tokens)}",
        *_target_line("ttft_ms", one.ttft),
        *_target_line("tpot_ms", one.tpot),
        "routes = [",
        *(f"  {_route(route)}," for route in one.routes),
        "]",
    ]


def _route(route: Route) -> str:
    upto = "" if route.up_to_input is None else f", up_to_input = {route.up_to_input}"
    why = f", why = {toml_value(route.why)}" if route.why else ""
    return f"{{ pool = {toml_value(route.pool)}, share = {_number(route.share)}{upto}{why} }}"


def _target_line(key: str, target: Target | None) -> list[str]:
    if target is None:
        return []
    percentile = next(name for name, share in PERCENTILES.items() if share == target.percentile)
    return [f"{key} = {{ {percentile} = {_number(target.seconds * 1e3)} }}"]


def _given(values: dict[str, str | float | None]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]


def _value(value: str | float) -> str:
    return _number(value) if isinstance(value, float) else toml_value(value)


def _number(value: float) -> str:
    return f"{value:.6g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.6f}"
