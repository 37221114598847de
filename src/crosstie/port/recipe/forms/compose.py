"""A machine's replicas as services of docker compose, under the pool's name on its network."""

from typing import Any

from crosstie.port.recipe.forms.shell import visible
from crosstie.port.recipe.forms.text import comments, filled, quoted, yaml_text
from crosstie.port.recipe.recipe import Recipe, numbered_host

_RENDER = "${RENDER_GID:?set it to the number of the group: getent group render | cut -d: -f3}"
_ADDRESS = "${ADDRESS:?set it to the address of this machine}"


def compose(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    """A file a machine; of replicas on several machines one that says by RANK which it is on."""
    services = {
        recipe.name if recipe.slots == 1 else f"{recipe.name}-{slot}": _service(recipe, slot)
        for slot in range(recipe.slots)
    }
    volumes: dict[str, Any] = {mount.source: {} for mount in recipe.mounts if mount.is_volume}
    whole: dict[str, Any] = {"services": services} | ({"volumes": volumes} if volumes else {})
    return {f"{recipe.name}.compose.yaml": "\n".join(comments(recipe)) + "\n" + yaml_text(whole)}


def _service(recipe: Recipe, slot: int) -> dict[str, Any]:
    box, seen = recipe.container, recipe.seen(slot)
    host = any(name == "network" for name, _ in box.host)
    first, *rest = recipe.command(
        port=recipe.port + slot if host else None,
        rank="${RANK:?which machine of the replica this is, from 0}",
        head="${HEAD:?the address of the first machine}",
    )
    variables = {name: filled(_plain(value), _ADDRESS) for name, value in recipe.variables.items()}
    if seen and recipe.vendor == "AMD":
        variables[visible(recipe.vendor)] = seen
    if "HF_HOME" in variables:
        variables["HF_TOKEN"] = "${HF_TOKEN:-}"
    port = recipe.port + slot if host else recipe.port
    service: dict[str, Any] = {
        "image": recipe.image,
        "entrypoint": [first],
        "command": [word if "${" in word else _plain(word) for word in rest if word != "--headless"],
        "restart": "unless-stopped",
        "stop_grace_period": "60s",
        "healthcheck": {
            "test": health_test(recipe, port), "interval": "10s", "timeout": "10s", "retries": 3,
            "start_period": f"{recipe.start_s}s",
        },
    }  # fmt: skip
    if recipe.nodes > 1 and recipe.engine == "vllm":
        # A variable that is empty would be a word of its own: workers are told otherwise.
        service["command"] = ["-c", _either(first, service["command"])]
        service["entrypoint"] = ["/bin/sh"]
        variables["RANK"] = "${RANK}"
    more: dict[str, Any] = {
        "environment": variables,
        "devices": [f"{one}:{one}" for one, _ in box.devices],
        "group_add": [_RENDER if one == "render" else one for one, _ in box.groups],
        "cap_add": [one for one, _ in box.capabilities],
        "security_opt": ["seccomp=unconfined"] if box.unconfined else [],
        "ulimits": {"memlock": -1} if box.memlock else {},
        "volumes": [f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in recipe.mounts],
    }
    if any(name == "ipc" for name, _ in box.host):
        more["ipc"] = "host"
    if host:
        more["network_mode"] = "host"
    else:
        own = [numbered_host(recipe.name, slot)] if recipe.numbered else []
        more["ports"] = [f"{recipe.port + slot}:{recipe.port}"]
        more["networks"] = {"default": {"aliases": [recipe.name, *own]}}
    if box.nvidia:
        which: dict[str, Any] = {"device_ids": seen.split(",")} if seen else {"count": "all"}
        more["runtime"] = "nvidia"
        more["deploy"] = {
            "resources": {"reservations": {"devices": [{"driver": "nvidia", **which, "capabilities": ["gpu"]}]}}
        }
    return service | {key: value for key, value in more.items() if value}


def _plain(word: str) -> str:
    """Compose fills in what follows a $."""
    return word.replace("$", "$$")


def _either(first: str, words: list[str]) -> str:
    line = " ".join((first, *(word if "${" in word else quoted(word) for word in words)))
    return f'exec {line} $$([ "$$RANK" = 0 ] || echo --headless)'


def health_test(recipe: Recipe, port: int) -> list[str]:
    """Asked inside the container, with what its image surely has."""
    url = f"http://127.0.0.1:{port}{recipe.health}"
    if recipe.engine == "llama.cpp":
        return ["CMD", "curl", "-fsS", url]
    return ["CMD", "python3", "-c", f"import urllib.request as r; r.urlopen('{url}', timeout=5)"]
