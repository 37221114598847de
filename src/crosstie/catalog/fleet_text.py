"""Fleets as the text of their files, and one to start from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.fleets import FORMAT
from crosstie.catalog.pools import UNLIMITED_CONTEXT, USUAL_KV
from crosstie.catalog.reading import PERCENTILES, file_key
from crosstie.catalog.writing import toml_key, toml_value
from crosstie.core.fleet import SPLIT, Fleet, JwtIdentity, Pool, PoolApart, PoolSide, ServedClass
from crosstie.core.workload import Target

_EXAMPLE = Path(__file__).parent / "data" / "fleets" / "two-vendors.toml"


def example_fleet_text() -> str:
    """A fleet file as a person would write it."""
    return _EXAMPLE.read_text(encoding="utf-8")


def fleet_text(fleet: Fleet) -> str:
    """TOML that `read_fleet` reads back to the same fleet, its numbers to six digits."""
    ready = all(served.backends for pool in fleet.pools for served in pool.by_model())
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
        *_table("serve", table_lines(fleet.serving)),
        *_table("state", table_lines(fleet.state, {"keys": ['keys = "required"'] if fleet.state.keys else []})),
        *_jwt(fleet.jwt),
    ]
    for pool in fleet.pools:
        lines += ["", "[[pool]]", *_pool(pool, fleet.folders)]
    for served_class in fleet.classes:
        lines += ["", "[[class]]", *_class(served_class)]
    return "\n".join(lines) + "\n"


def table_lines(given: msgspec.Struct, own: Mapping[str, Sequence[str]] = {}) -> list[str]:
    """A line a field, in their order: what is required, and what differs from its default, which may become a better
    one. `own`: the lines of fields that a file has in another form."""
    lines: list[str] = []
    for field in msgspec.structs.fields(given):
        value = getattr(given, field.name)
        if field.name in own:
            lines += own[field.name]
        elif isinstance(value, msgspec.Struct) and not isinstance(value, Target):
            # Its keys stand in the same table.
            lines += table_lines(value)
        elif value is not None and (field.required or value != _default(field)):
            lines.append(f"{file_key(field)} = {_value(value)}")
    return lines


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _table(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"[{title}]", *lines] if lines else []


def _inline(given: msgspec.Struct, own: Mapping[str, Sequence[str]] = {}) -> str:
    return f"{{ {', '.join(table_lines(given, own))} }}"


def _names(title: str, names: Mapping[str, str | tuple[str, ...]]) -> list[str]:
    return _table(title, [f"{toml_key(name)} = {toml_value(meant)}" for name, meant in names.items()])


def _jwt(jwt: JwtIdentity | None) -> list[str]:
    if jwt is None:
        return []
    return [*_table("jwt", table_lines(jwt, {"teams": []})), *_names("jwt.teams", jwt.teams)]


def _pool(pool: Pool, folders: Mapping[str, str]) -> list[str]:
    known = pool.accelerator is not None
    plural = "" if pool.replicas == 1 else "s"
    hint = f'  # {pool.replicas} base URL{plural}, such as "http://host:8000/v1"'
    ready = all(model.backends for model in pool.by_model())
    # A vLLM server has one model, so that the addresses are each model's.
    of_models = pool.loading == "vllm-sleep" or any(host.backends for host in pool.hosts)
    led = pool.apart is not None and pool.apart.is_led
    own: dict[str, Sequence[str]] = {
        "adapters": _list("adapters", [_inline(adapter) for adapter in pool.adapters]),
        "backends": []
        if of_models or led
        else [f"backends = {toml_value(_written(pool.backends))}{'' if ready else hint}"],
        "hosts": _list(
            "hosts",
            [
                _inline(host, {"backends": [f"backends = {toml_value(host.backends)}"] if of_models else []})
                for host in pool.hosts
            ],
            "" if ready or not of_models else hint,
        ),
    }
    for key in ("kv_events", "kv_replay"):
        if len(addresses := getattr(pool, key)) == 1:
            own[key] = [f"{key} = {toml_value(addresses[0])}"]
    if pool.model in folders:
        own["model"] = [f"model = {toml_value(folders[pool.model])}"]
    if pool.hosts:
        own["model"] = []
        if pool.max_context >= UNLIMITED_CONTEXT:
            own["max_context"] = []
    if pool.apart:
        own |= {"parallelism": [], "apart": _apart(pool.apart)}
    elif known:
        own["parallelism"] = [f"{part} = {getattr(pool.parallelism, part)}" for part in SPLIT]
    if not known and not pool.usd_per_gpu_hour:
        own["usd_per_gpu_hour"] = []
    if not known and pool.kv_format == USUAL_KV:
        own["kv_format"] = []
    return table_lines(pool, own)


def _list(key: str, entries: Sequence[str], hint: str = "") -> list[str]:
    return [f"{key} = [", *(f"  {entry},{hint}" for entry in entries), "]"] if entries else []


def _written(backends: tuple[str, ...]) -> tuple[str, ...]:
    """A name that is looked up stands for the addresses that were found."""
    return tuple(dict.fromkeys(address.partition("#")[0] for address in backends))


def _apart(apart: PoolApart) -> list[str]:
    def side(engines: PoolSide) -> str:
        ports = engines.bootstrap_ports
        said = [*ports] if len(set(ports)) > 1 else ports[0] if ports else None
        return _inline(engines, {"bootstrap_ports": [] if said is None else [f"bootstrap_port = {said}"]})

    return table_lines(apart, {key: [f"{key} = {side(getattr(apart, key))}"] for key in ("prefill", "decode")})


def _class(served: ServedClass) -> list[str]:
    own: dict[str, Sequence[str]] = {
        # A plan's own figures, said even where they are the defaults.
        **{
            key: [f"{key} = {_number(getattr(served, key))}"]
            for key in ("requests_per_s", "input_tokens", "output_tokens")
        },
        "routes": [
            "routes = [",
            *(f"  {_inline(route, {'share': [f'share = {_number(route.share)}']})}," for route in served.routes),
            "]",
        ],
    }
    return table_lines(served, own)


def _value(value: object) -> str:
    if isinstance(value, Target):
        percentile = next(name for name, share in PERCENTILES.items() if share == value.percentile)
        return f"{{ {percentile} = {_number(value.seconds * 1e3)} }}"
    return _number(value) if isinstance(value, float) else toml_value(value)


def _number(value: float) -> str:
    return f"{value:.6g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.6f}"
