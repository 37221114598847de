"""SkyPilot, Ray Serve and Slurm: schedulers that are told what a replica needs and what to run."""

from functools import cache
from pathlib import Path
from typing import Any

from crosstie.catalog.reading import Sources, read_toml, table
from crosstie.core.errors import BadInput
from crosstie.port.recipe.flags import typed
from crosstie.port.recipe.forms.shell import ADDRESS, unboxed
from crosstie.port.recipe.forms.text import comments, filled, pairs, quoted, shell_line, yaml_text
from crosstie.port.recipe.recipe import Recipe

_NAMES = Path(__file__).parents[1] / "data" / "names.toml"
# Flags of vLLM's server, which Ray has one of its own for.
_OF_SERVER = ("--served-model-name", "--host", "--port")


@cache
def accelerator_names(scheduler: str) -> dict[str, str]:
    raw = read_toml(_NAMES)
    names = dict(table(_NAMES, scheduler, raw.get(scheduler)))
    Sources(_NAMES, raw.get("sources")).cite(scheduler, names.pop("source", None))
    return names


def _called(recipe: Recipe, scheduler: str) -> tuple[str, list[str]]:
    """The scheduler's name of the accelerator, and a warning where it is a guess."""
    known = accelerator_names(scheduler).get(recipe.accelerator)
    if known:
        return known, []
    guess = recipe.accelerator.upper()
    return guess, [f"# {scheduler} was not seen to know {recipe.accelerator}: {guess} is a guess, change it"]


def _told(recipe: Recipe, rank: str, head: str, *, bare: bool = False) -> str:
    """The engine's command for a shell; vLLM's workers are told that they are."""
    words = [word for word in recipe.command(rank=rank, head=head) if word != "--headless"]
    line = shell_line(pairs(unboxed(recipe, words) if bare else words))
    if recipe.nodes > 1 and recipe.engine == "vllm":
        line += f' \\\n  $([ "{rank}" = 0 ] || echo --headless)'
    return line


def _exported(recipe: Recipe) -> list[str]:
    return [f"export {name}={quoted(filled(value, ADDRESS))}" for name, value in recipe.variables.items()]


def skypilot(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    called, warning = _called(recipe, "skypilot")
    if recipe.numbered:
        warning.append("# engines that are reached one by one: `sky launch` this file once for each of them, and give")
        warning.append("# the fleet file their addresses; SkyServe's balancer would hide them")
    task: dict[str, Any] = {
        "name": recipe.name,
        "num_nodes": recipe.nodes,
        "resources": {
            "accelerators": f"{called}:{recipe.gpus_on_node}",
            "image_id": f"docker:{recipe.image}",
            "ports": recipe.port,
            "disk_size": 1024,
        },
        "envs": {"HF_TOKEN": ""} if "HF_HOME" in recipe.variables else {},
        "file_mounts": {mount.target: mount.source for mount in recipe.mounts if not mount.is_volume},
        "service": {} if recipe.numbered else {
            "readiness_probe": {"path": recipe.health, "initial_delay_seconds": recipe.start_s},
            "replicas": recipe.replicas,
        },
        "run": "\n".join([
            *_exported(recipe),
            *(['HEAD="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'] if recipe.nodes > 1 else []),
            "exec " + _told(recipe, "$SKYPILOT_NODE_RANK", "$HEAD"),
        ]) + "\n",
    }  # fmt: skip
    kept = {key: value for key, value in task.items() if value not in ({}, None)}
    return {f"{recipe.name}.sky.yaml": _file(recipe, warning, kept)}


def _file(recipe: Recipe, more: list[str], content: dict[str, Any]) -> str:
    return "\n".join([*comments(recipe, by="scheduler"), *more]) + "\n" + yaml_text(content)


def ray_application(recipe: Recipe) -> tuple[dict[str, Any], list[str]]:
    """Ray Serve's configuration, and what is to be said of it."""
    if recipe.engine != "vllm":
        raise BadInput(f"{recipe.name}: Ray Serve's own application runs vLLM alone, not {recipe.engine}")
    if recipe.role:
        raise BadInput(f"{recipe.name}: Ray Serve leads prefill and decode itself; as the gateway does, another form")
    called, warning = _called(recipe, "ray")
    served = next(str(flag.value) for flag in recipe.flags if flag.name == "--served-model-name")
    config = {
        "model_loading_config": {"model_id": served, "model_source": recipe.program[-1]},
        "accelerator_type": called,
        "engine_kwargs": engine_arguments(recipe),
        "deployment_config": {"num_replicas": recipe.replicas},
        # Nodes have a cache of their own.
        "runtime_env": {"env_vars": {name: value for name, value in recipe.variables.items() if name != "HF_HOME"}},
    }
    return {
        "http_options": {"host": "0.0.0.0", "port": recipe.port},
        "applications": [
            {
                "name": recipe.name,
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {"llm_configs": [config]},
            }
        ],
    }, warning


def ray_serve(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    whole, warning = ray_application(recipe)
    note = "# `serve deploy` on a cluster whose nodes run the image; one address for all replicas: Ray balances them"
    return {f"{recipe.name}.serve.yaml": _file(recipe, [*warning, note], whole)}


def engine_arguments(recipe: Recipe) -> dict[str, Any]:
    """vLLM's flags as its Python arguments."""
    found: dict[str, Any] = {}
    for flag in recipe.flags:
        if flag.name in _OF_SERVER:
            continue
        *outer, last = flag.name.removeprefix("--").split(".")
        inner = found
        for key in outer:
            inner = inner.setdefault(key.replace("-", "_"), {})
        name = last if outer else last.replace("-", "_")
        inner[name] = True if flag.value is None else typed(str(flag.value))
    return found


def slurm(recipe: Recipe, bare: bool = False) -> dict[str, str]:
    """A job array with an element a replica. Containers by Pyxis; without it, the engine's own installation."""
    binds = ",".join(f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in recipe.mounts)
    binds = binds.replace("hf-cache:", "${HF_HOME:-$HOME/.cache/huggingface}:")
    inside = [] if bare else [("--container-image", recipe.image.replace("/", "#", 1) if _registry(recipe) else
                               recipe.image), *([("--container-mounts", binds)] if binds else [])]  # fmt: skip
    step = shell_line([("srun", "--ntasks-per-node=1"), *inside, ("bash", "-c")])
    several, shared = recipe.replicas > 1, recipe.slots > 1
    # Elements of an array may come to the same machine.
    port = f"$(({recipe.port} + SLURM_ARRAY_TASK_ID))" if several and shared else str(recipe.port)
    line = _told(recipe, "$SLURM_NODEID", "$HEAD", bare=bare)
    if several and shared:
        line = line.replace(f"--port {recipe.port}", '--port "$PORT"')
    exported = _exported(recipe) if not bare else [one for one in _exported(recipe) if "HF_HOME" not in one]
    run = "\n".join([*exported, f"exec {line}"])
    in_single_quotes = "'" + run.replace("'", "'\\''") + "'"
    return {
        f"{recipe.name}.sbatch": "\n".join(
            [
                "#!/bin/bash",
                f"#SBATCH --job-name={recipe.name}",
                f"#SBATCH --nodes={recipe.nodes}",
                "#SBATCH --ntasks-per-node=1",
                f"#SBATCH --gpus-per-node={recipe.gpus_on_node}",
                *([f"#SBATCH --array=0-{recipe.replicas - 1}"] if several else []),
                "#SBATCH --signal=TERM@120",
                *comments(recipe, by="nobody" if bare else "scheduler"),
                "set -eu",
                'HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)"',
                f"PORT={port}",
                "export HEAD PORT",
                f'echo "{recipe.name}: http://$HEAD:$PORT/v1"',
                f"{step} \\",
                f"  {in_single_quotes}",
                "",
            ]
        )
    }


def _registry(recipe: Recipe) -> bool:
    """Enroot writes REGISTRY#IMAGE where the image is not Docker Hub's."""
    return "." in recipe.image.split("/")[0]
