"""`docker run`, or the engine's own command where it is installed, and what systemd makes of either."""

import re
from collections.abc import Sequence

from crosstie.port.recipe.forms.text import comments, filled, pairs, shell_line
from crosstie.port.recipe.recipe import Recipe

# The first address of this machine.
ADDRESS = "$(hostname -I | cut -d' ' -f1)"
_RENDER = "$(getent group render | cut -d: -f3)"


def shell(recipe: Recipe, bare: bool = False) -> dict[str, str]:
    lines = ["#!/bin/sh", *comments(recipe, recipe.ports_note, by="nobody" if bare else "docker")]
    if recipe.machines > 1:
        each = "the same on each" if recipe.nodes == 1 else f"{recipe.nodes} of them a replica: RANK from 0, HEAD"
        lines.append(f"# {recipe.replicas} replicas on {recipe.machines} machines, {each}")
    if recipe.nodes > 1:
        lines += [
            "set -eu",
            ': "${RANK:?which machine of the replica this is, from 0}" "${HEAD:?address of the first}"',
        ]
        for rank in ("0", "$RANK"):
            test = '[ "$RANK" = 0 ]' if rank == "0" else '[ "$RANK" != 0 ]'
            line = shell_line(_words(recipe, 0, bare, rank, "$HEAD"), indent="    ")
            lines += [f"if {test}; then", f"  exec {line}", "fi"]
    else:
        several = recipe.slots > 1
        behind = " &" if bare and several else ""
        lines += [shell_line(_words(recipe, slot, bare)) + behind for slot in range(recipe.slots)]
        lines += ["wait"] if behind else []
    return {f"{recipe.name}.sh": "\n".join(lines) + "\n"}


def _words(
    recipe: Recipe, slot: int, bare: bool, rank: str = "", head: str = "", address: str = ADDRESS, render: str = _RENDER
) -> list[tuple[str, ...]]:
    """The command of the replica that has this place on its machine."""
    seen = recipe.seen(slot)
    own = recipe.port + slot
    if bare:
        chosen = {visible(recipe.vendor): seen} if seen else {}
        variables = {k: filled(v, address) for k, v in (recipe.variables | chosen).items() if k != "HF_HOME"}
        environment = [("env", *(f"{name}={value}" for name, value in variables.items()))] if variables else []
        return [*environment, *pairs(unboxed(recipe, recipe.command(port=own, rank=rank, head=head)))]
    words = docker_words(recipe, slot, address=address, render=render)
    host = any(name == "network" for name, _ in recipe.container.host)
    first, *rest = recipe.command(port=own if host else None, rank=rank, head=head)
    published = [] if host else [("-p", f"{own}:{recipe.port}")]
    return [*words, *published, ("--entrypoint", first, recipe.image), *pairs(rest)]


def unboxed(recipe: Recipe, words: Sequence[str]) -> list[str]:
    """A command with the machine's own paths in the place of the container's."""
    behind = {mount.target: mount.source for mount in recipe.mounts if not mount.is_volume}
    # At the beginning of a word, or of a text within a word that is JSON.
    paths = "|".join(map(re.escape, sorted(behind, reverse=True)))
    inside = re.compile(f'(^|")({paths})(?=[/"]|$)') if paths else None

    def outside(word: str) -> str:
        return inside.sub(lambda match: match[1] + behind[match[2]], word) if inside else word

    return [outside(word).removeprefix("/app/") for word in words]


def visible(vendor: str) -> str:
    return "HIP_VISIBLE_DEVICES" if vendor == "AMD" else "CUDA_VISIBLE_DEVICES"


def docker_words(recipe: Recipe, slot: int, *, address: str, render: str) -> list[tuple[str, ...]]:
    """`docker run` up to the image: devices, groups, namespaces, volumes, variables."""
    box, seen = recipe.container, recipe.seen(slot)
    name = recipe.name if recipe.slots == 1 else f"{recipe.name}-{slot}"
    apart = ("--detach",) if recipe.slots > 1 and render.startswith("$(") else ()
    words: list[tuple[str, ...]] = [("docker", "run", "--rm", *apart, "--name", name)]
    if box.nvidia:
        words.append(("--runtime", "nvidia", "--gpus", f'"device={seen}"' if seen else "all"))
    words += [("--device", one) for one, _ in box.devices]
    words += [("--group-add", render if one == "render" else one) for one, _ in box.groups]
    words += [("--cap-add", one) for one, _ in box.capabilities]
    words += [(f"--{one}", "host") for one, _ in box.host]
    if box.unconfined:
        words.append(("--security-opt", "seccomp=unconfined"))
    if box.memlock:
        words.append(("--ulimit", "memlock=-1"))
    words += [("-v", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}") for mount in recipe.mounts]
    variables = recipe.variables | ({visible(recipe.vendor): seen} if seen and recipe.vendor == "AMD" else {})
    words += [("-e", f"{name}={filled(value, address)}") for name, value in variables.items()]
    if "HF_HOME" in variables:
        words.append(("-e", "HF_TOKEN"))
    return words


def systemd(recipe: Recipe, bare: bool = False) -> dict[str, str]:
    """A unit for each replica that a machine has room for."""
    return {_unit_name(recipe, slot): _unit(recipe, slot, bare) for slot in range(recipe.slots)}


def _unit_name(recipe: Recipe, slot: int) -> str:
    return f"{recipe.name}.service" if recipe.slots == 1 else f"{recipe.name}-{slot}.service"


def _unit(recipe: Recipe, slot: int, bare: bool) -> str:
    # %H is the machine's name; the number of the group stands in a file, since units run no shell.
    rank, head = ("${RANK}", "${HEAD}") if recipe.nodes > 1 else ("", "")
    words = _words(recipe, slot, bare, rank, head, address="%H", render="${RENDER_GID}")
    if recipe.nodes > 1:
        # The first machine's unit is the same without it.
        words = [some for some in words if some != ("--headless",)]
        words += [("$WORKER",)] if recipe.engine == "vllm" else []
    asks = [name for name, needed in (
        ("RENDER_GID, the number of the group render", recipe.vendor == "AMD" and not bare),
        ("RANK, HEAD and, of vLLM's workers, WORKER=--headless", recipe.nodes > 1),
        ("HF_TOKEN where the model is gated", "HF_HOME" in recipe.variables),
    ) if needed]  # fmt: skip
    name = _unit_name(recipe, slot).removesuffix(".service")
    stop = [] if bare else [f"ExecStop=/usr/bin/docker stop --time 60 {name}"]
    network = "network-online.target" + ("" if bare else " docker.service")
    return "\n".join([
        *comments(recipe, recipe.ports_note, by="nobody" if bare else "docker"),
        f"# /etc/crosstie/{recipe.name}.env has {'; '.join(asks)}" if asks else "# it asks for no more variables",
        "[Unit]",
        f"Description={recipe.engine} {recipe.release}: {recipe.model} on {recipe.accelerator}, replica {slot}",
        f"After={network}",
        f"Wants={network}",
        "",
        "[Service]",
        f"EnvironmentFile=-/etc/crosstie/{recipe.name}.env",
        f"ExecStart={_unit_line(words)}",
        *stop,
        "Restart=on-failure",
        "RestartSec=10",
        "TimeoutStopSec=90",
        "LimitMEMLOCK=infinity",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ])  # fmt: skip


def _unit_line(words: Sequence[Sequence[str]]) -> str:
    """As systemd splits it: quotes of its own, a percent sign doubled unless it is ours, the program by its path."""
    (program, *first), *rest = words
    where = {"docker": "/usr/bin/docker", "env": "/usr/bin/env"}.get(program)
    begun = [where] if where else ["/usr/bin/env", program]
    lines = [" ".join([*begun, *map(_unit_word, first)]), *(" ".join(map(_unit_word, some)) for some in rest)]
    return " \\\n  ".join(lines)


def _unit_word(word: str) -> str:
    safe = word.replace("%", "%%").replace("%%H", "%H").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{safe}"' if any(sign in word for sign in " \"'{}") and not word.startswith("${") else safe
